"""The origin: the point of a head that fp8 indexes subtract from its keys, in torch and in Triton.

    origin = (max + min) / 2 per channel, over the first keys that leave the ring: a block, or `interval` tokens

Keys of real models have channels that are near 600 at every token. fp8 ends at 448, and its largest numbers are 32
apart. What tells the tokens apart is their difference to the origin. The origin depends on the first tokens of a row
alone. So it does not depend on chunks, on padding or on other rows.

Differences are stored in units of UNIT, so they reach 4 * 448. Rotary embeddings rotate keys: a key of 600 may become
-600, which is 1200 away from the origin.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import tl, triton
from torchsparsekv.ops.index._leaving import load_keys

UNIT = 4.0  # a power of two, so that it rounds nothing


def middle_of(keys: Tensor) -> Tensor:
    """The origin [..., dim] for keys [..., tokens, dim]; 0 in channels with a key that is NaN or infinite."""
    middle = (keys.float().amin(-2) + keys.float().amax(-2)) / 2
    return torch.where(middle.isfinite(), middle, 0.0)


@triton.jit
def middle(x, live):
    """`middle_of` the keys `x` [n, DP] where `live` [n]."""
    x = x.to(tl.float32)
    low, high = tl.where(live[:, None], x, float("inf")), tl.where(live[:, None], x, float("-inf"))
    total = tl.min(low, 0) + tl.max(high, 0)
    return tl.where(tl.abs(total) < float("inf"), total * 0.5, 0.0)


@triton.jit
def origin_of(
    k, pool, origin, first, old, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows, sink, N: tl.constexpr,
    PADDED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """The origin [DP] of a head, from its first N keys. If these leave in this call, every program computes the origin,
    and the program with `first` stores it. `old` is `previous_ring_begin`, PADDED is N rounded up to a power of two."""
    d, at = tl.arange(0, DP), origin + bh * D
    if old == sink:
        i = tl.arange(0, PADDED)
        x = load_keys(k, pool, sink + i, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows, i < N, D, DP)
        o = middle(x, i < N)
        if first:
            tl.store(at + d, o, mask=d < D)
    else:
        o = tl.load(at + d, mask=d < D, other=0.0)
    return o
