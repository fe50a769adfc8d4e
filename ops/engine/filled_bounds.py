"""Summarise the keys of every block whose last row a new token takes: the volumes of block_bounds, by block id.

`to` is the row of the pool of each new token, -1 for none, as in write_tokens. Keys of new tokens come from `k`, those
before them from the pool. A digest is made anew from all keys of its block: nothing is left in it of what was there
before an engine gave the block to another request.
"""
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import next_power_of_2, tl, triton
from torchsparsekv.ops.engine.tables import check_one
from torchsparsekv.ops.engine.views import FlatTokens, RowOfToken
from torchsparsekv.ops.index._leaving import load_fresh
from torchsparsekv.ops.index.block_bounds import bounds, check_digests, store_digest, volume_of
from torchsparsekv.ops.store.rows import as_numbers, keys_of, row_at
from torchsparsekv.ops.store.views import Digests, Pool


def check(k, to, pool, digests) -> None:
    check_one(pool)
    check_digests(pool, digests)


def reference(k: FlatTokens, to: RowOfToken, pool: Pool, digests: Changed[Digests]) -> None:
    block_size, token_of = digests.block_size, {row: token for token, row in enumerate(to.tolist())}
    for last in (row for row in token_of if row >= 0 and row % block_size == block_size - 1):
        rows = slice(last + 1 - block_size, last + 1)
        keys = keys_of(as_numbers(pool[0, :, rows], k.dtype)).clone()
        for i, row in enumerate(range(rows.start, rows.stop)):
            if row in token_of:
                keys[:, i] = k[token_of[row]]
        centre, spread = bounds(keys, digests.volume, digests.centre.dtype)
        digests.centre[0, :, last // block_size], digests.spread[0, :, last // block_size] = centre, spread


@triton.jit
def _bounds(
    k, to, pool, centre, spread, k_t, k_h, pool_rows, blocks, BALL: tl.constexpr, MEAN: tl.constexpr,
    LIMIT: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    last = tl.load(to + t)
    if (last >= 0) & (last % P == P - 1):
        back, every = tl.arange(0, P) - (P - 1), tl.full((P,), True, tl.int1)
        token, row = t + back, last + back
        # Tokens of a request follow one another, here and in a block.
        fresh = (tl.load(to + tl.maximum(token, 0)) == row) & (token >= 0)
        new, stored = k + token[:, None] * k_t + h * k_h, row_at(pool, h, row, pool_rows, D)[:, None]
        x = load_fresh(new, stored, fresh[:, None], every[:, None], D, DP)
        store_digest(x.to(tl.float32), every, centre, spread, h * blocks + last // P, BALL, MEAN, LIMIT, D, DP)


def launch(k, to, pool, digests) -> None:
    (tokens, heads, d), (centre, spread, block_size, _) = k.shape, digests
    _bounds[(tokens, heads)](
        k, to, pool, centre, spread, *k.stride()[:2], pool.shape[2], centre.shape[2], **volume_of(digests),
        P=block_size, D=d, DP=next_power_of_2(d), num_warps=2,
    )  # fmt: skip


filled_bounds = register("filled_bounds", reference, impls=(by_triton(launch),), check=check)
