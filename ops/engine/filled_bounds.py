"""Summarise the keys of every block that new tokens fill: the volumes of block_bounds, by block id.

A block is full when a new token takes its last row. Its digest is made from all of its keys: those of new tokens come
from `k`, earlier ones from the pool. So a digest keeps nothing of the earlier contents of the block, which may be of
another request.

An engine shares blocks between requests, so a digest cannot depend on the request. All digests of a head have one
origin, computed from the first block that is ever filled (ops/index/_origin.py). Until then it is NaN.
"""
import torch

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.engine.tables import check_one
from torchsparsekv.ops.engine.views import FlatTokens, RowOfToken
from torchsparsekv.ops.index._leaving import load_fresh
from torchsparsekv.ops.index._origin import middle, middle_of
from torchsparsekv.ops.index.block_bounds import bounds, check_digests, store_digest, volume_of
from torchsparsekv.ops.store.rows import as_numbers, keys_of, row_at
from torchsparsekv.ops.store.views import Digests, Pool

SCANNED = 256  # tokens that the search for the first full block looks at together


def check(k, to, pool, digests) -> None:
    check_one(pool)
    check_digests(pool, digests)


def reference(k: FlatTokens, to: RowOfToken, pool: Pool, digests: Changed[Digests]) -> None:
    """Summarise the keys of every block that new tokens fill: the volumes of block_bounds, by block id.

    Args:
        k: keys of the new tokens [tokens, heads, dim], any strides.
        to: the row of the pool for each token [tokens], -1 for none, as in write_tokens.
        pool: [1, heads, rows, 2, dim].
        digests: centre and spread [1, heads, blocks, ...], origin [1, heads, dim].

    Launches:
        One kernel of tokens x heads programs of 2 warps. A program whose token does not fill a block returns. If there
        is no origin yet, all remaining programs compute it, and the program of the first token that fills a block
        stores it.
    """
    block_size, token_of = digests.block_size, {row: token for token, row in enumerate(to.tolist())}
    for last in (row for row in token_of if row >= 0 and row % block_size == block_size - 1):
        rows = slice(last + 1 - block_size, last + 1)
        keys = keys_of(as_numbers(pool[0, :, rows], k.dtype)).clone()
        for i, row in enumerate(range(rows.start, rows.stop)):
            if row in token_of:
                keys[:, i] = k[token_of[row]]
        digests.origin[0] = torch.where(digests.origin[0].isnan(), middle_of(keys), digests.origin[0])
        centre, spread = bounds(keys, digests.origin[0, :, None], digests.volume, digests.centre.dtype)
        digests.centre[0, :, last // block_size], digests.spread[0, :, last // block_size] = centre, spread


@triton.jit
def _keys_of_block(k, to, pool, t, last, h, k_t, k_h, pool_rows, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Keys [P, DP] of the block whose last row is `last`, which token `t` fills."""
    offset, every = tl.arange(0, P) - (P - 1), tl.full((P,), True, tl.int1)
    # Tokens of one request follow one another, in `k` and in a block.
    token, row = t + offset, last + offset
    fresh = (tl.load(to + tl.maximum(token, 0)) == row) & (token >= 0)
    new, stored = k + token[:, None] * k_t + h * k_h, row_at(pool, h, row, pool_rows, D)[:, None]
    return load_fresh(new, stored, fresh[:, None], every[:, None], D, DP)


@triton.jit
def _first_filling(to, t, P: tl.constexpr, SCANNED: tl.constexpr):
    """The first token that fills a block; `t` fills one."""
    first = t
    for start in range(0, t, SCANNED):
        i = start + tl.arange(0, SCANNED)
        row = tl.load(to + i, mask=i < t, other=-1)
        first = tl.minimum(first, tl.min(tl.where((row >= 0) & (row % P == P - 1), i, t), 0))
    return first


@triton.jit
def _bounds(
    k, to, pool, centre, spread, origin, k_t, k_h, pool_rows, blocks, BALL: tl.constexpr, MEAN: tl.constexpr,
    LIMIT: tl.constexpr, UNIT: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SCANNED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    last = tl.load(to + t)
    if (last >= 0) & (last % P == P - 1):
        x = _keys_of_block(k, to, pool, t, last, h, k_t, k_h, pool_rows, P, D, DP)
        d, every = tl.arange(0, DP), tl.full((P,), True, tl.int1)
        at = origin + h * D + d
        o = tl.load(at, mask=d < D, other=0.0)
        if tl.max((o != o).to(tl.int32), 0) != 0:
            first = _first_filling(to, t, P, SCANNED)
            keys = _keys_of_block(k, to, pool, first, tl.load(to + first), h, k_t, k_h, pool_rows, P, D, DP)
            o = tl.where(o != o, middle(keys, every), o)  # channels that another program has stored already are equal
            if first == t:
                tl.store(at, o, mask=d < D)
        store_digest(x, o, every, centre, spread, h * blocks + last // P, BALL, MEAN, LIMIT, UNIT, D, DP)


def launch(k, to, pool, digests) -> None:
    (tokens, heads, d), (centre, spread, block_size, _, origin) = k.shape, digests
    _bounds[(tokens, heads)](
        k, to, pool, centre, spread, origin, *k.stride()[:2], pool.shape[2], centre.shape[2], **volume_of(digests),
        P=block_size, D=d, DP=next_power_of_2(d), SCANNED=SCANNED, num_warps=2,
        **launch_early(k.device, tokens * heads),
    )  # fmt: skip


filled_bounds = register("filled_bounds", reference, impls=(by_triton(launch),), check=check)
