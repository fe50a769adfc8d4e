"""The keys that leave the ring in this call: what every index takes in."""
from collections.abc import Iterator

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import tl, triton
from torchsparsekv.ops.store.rows import keys_of, load_key, row_at
from torchsparsekv.ops.store.views import Leaving, Lengths


def leaving_keys(leaving: Leaving, lengths: Lengths) -> Iterator[tuple[int, int, int, Tensor]]:
    """(row, first position, end, keys [kv_heads, tokens, head_dim]) of every row where some leave.

    Positions from `start` on are new: their keys come from the last columns of `leaving.new`, the others from the pool. Without
    columns none do: a single token is not among those that leave.
    """
    k, pool = leaving
    for b, (n0, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= 0 or new <= old:
            continue
        fresh = min(max(old, n0), new) if k.shape[2] else new
        column = k.shape[2] - n
        before = keys_of(pool[b, :, old:fresh]).to(k.dtype)
        yield b, old, new, torch.cat([before, k[b, :, column + fresh : column + new]], 1)


@triton.jit
def load_keys(
    k, pool, pos, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows, live, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """The keys of these positions where `live`, else 0: new ones from `k`, the others from the pool."""
    col = (tokens - n + pos).to(tl.int64)[:, None]
    stored = row_at(pool, bh, pos[:, None], pool_rows, D)
    return load_fresh(k + b * k_b + h * k_h + col * k_s, stored, (pos >= n0)[:, None], live[:, None], D, DP)


@triton.jit
def load_fresh(new, stored, fresh, live, D: tl.constexpr, DP: tl.constexpr):
    """Keys [n, DP] where `live`, else 0: from `new` where they are `fresh`, else as they are `stored` in the pool. All
    four are [n, 1]."""
    d = tl.arange(0, DP)[None, :]
    there = d < D
    x = tl.load(new + d, mask=fresh & live & there, other=0.0)
    old = load_key(stored, d, ~fresh & live, there, D)
    return tl.where(fresh, x, old.to(x.dtype))
