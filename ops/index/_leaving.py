"""The keys that leave the ring in a call, read from the new tokens and from the pool, in torch and in Triton."""
from collections.abc import Iterator

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import tl, triton
from torchsparsekv.ops.store.rows import keys_of, load_key, row_at
from torchsparsekv.ops.store.views import Leaving, Lengths


def leaving_keys(leaving: Leaving, lengths: Lengths) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yield (row, first position, end, keys [kv_heads, tokens, head_dim]) for every row from which tokens leave.

    Keys of positions from `start` on come from the last columns of `leaving.new`, all others from the pool; all of them
    from the pool if `new` has no columns.
    """
    for b, (n0, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n > 0 and new > old:
            yield b, old, new, row_keys(leaving, b, n0, n, old, new)


def row_keys(leaving: Leaving, b: int, n0: int, n: int, first: int, end: int) -> Tensor:
    """The keys [kv_heads, tokens, head_dim] of the positions from `first` up to `end` of row `b`, which has `n` tokens,
    `n0` of them before this forward."""
    k, pool = leaving
    fresh = min(max(first, n0), end) if k.shape[2] else end
    column = k.shape[2] - n
    before = keys_of(pool[b, :, first:fresh]).to(k.dtype)
    return torch.cat([before, k[b, :, column + fresh : column + end]], 1)


@triton.jit
def load_keys(
    k, pool, pos, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows, live, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Keys [n, DP] of the positions `pos` [n] where `live`, else 0: new positions from `k`, others from the pool."""
    d = tl.arange(0, DP)[None, :]
    return load_channels(k, pool, pos, d, d < D, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows, live, D)


@triton.jit
def load_channels(
    k, pool, pos, d, there, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows, live, D: tl.constexpr,
):  # fmt: skip
    """`load_keys` of the channels `d` [1, channels] that are `there`."""
    col = (tokens - n + pos).to(tl.int64)[:, None]
    stored = row_at(pool, bh, pos[:, None], pool_rows, D)
    return _load_fresh(k + b * k_b + h * k_h + col * k_s, stored, (pos >= n0)[:, None], live[:, None], d, there, D)


@triton.jit
def load_fresh(new, stored, fresh, live, D: tl.constexpr, DP: tl.constexpr):
    """Keys [n, DP] where `live`, else 0: from the pointers `new` where `fresh`, else from the pool rows at the pointers
    `stored`. All four arguments are [n, 1]."""
    d = tl.arange(0, DP)[None, :]
    return _load_fresh(new, stored, fresh, live, d, d < D, D)


@triton.jit
def _load_fresh(new, stored, fresh, live, d, there, D: tl.constexpr):
    x = tl.load(new + d, mask=fresh & live & there, other=0.0)
    old = load_key(stored, d, ~fresh & live, there, D)
    return tl.where(fresh, x, old.to(x.dtype))
