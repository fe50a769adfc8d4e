"""Sum the keys and the values of every block that new tokens fill, for the estimate of the rest (ops/rest/__init__.py).

    sums[i] = (sum of the rows of block i) / block size    for every block i whose last row a new token takes

Keys and values of new tokens come from `k` and `v`, earlier ones from the pool. So a sum keeps nothing of the earlier
contents of the block, which may be of another request.
"""
import torch

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.engine.tables import check_one
from torchsparsekv.ops.engine.views import FlatTokens, RowOfToken
from torchsparsekv.ops.rest.views import Rest, check_groups
from torchsparsekv.ops.store.rows import as_numbers, load_key, load_value, row_at, rows_of, value_at
from torchsparsekv.ops.store.views import Pool

TILE = 16  # tokens of a block that a program adds at once


def check(k, v, to, pool, rest) -> None:
    check_one(pool)
    check_groups(rest, pool.shape[2])


def reference(k: FlatTokens, v: FlatTokens, to: RowOfToken, pool: Pool, rest: Changed[Rest]) -> None:
    """Sum the keys and the values of every block that new tokens fill, for the estimate of the rest.

    Args:
        k, v: the new tokens [tokens, heads, dim], any strides.
        to: the row of the pool for each token [tokens], -1 for none, as in write_tokens. New tokens of one block follow
            one another.
        pool: [1, heads, rows, 2, dim].
        rest: sums [1, heads, blocks, 2, dim], and `group`, the tokens of a block.

    Launches:
        One kernel of tokens x heads programs of 2 warps. A program whose token does not fill a block returns.
    """
    (sums, size), token_of = rest[:2], {row: token for token, row in enumerate(to.tolist())}
    assert sums is not None
    new = rows_of(k, v)  # [tokens, heads, 2, dim]
    for last in (row for row in token_of if row >= 0 and row % size == size - 1):
        rows = range(last + 1 - size, last + 1)
        tokens = as_numbers(pool[0, :, rows.start : rows.stop], torch.float32).clone()
        for i, row in enumerate(rows):
            if row in token_of:
                tokens[:, i] = new[token_of[row]].float()
        sums[0, :, last // size] = tokens.sum(1) / size


@triton.jit
def _sum(
    k, v, to, pool, sums, k_t, k_h, v_t, v_h, pool_rows, blocks, P: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    last = tl.load(to + t)
    if (last >= 0) & (last % P == P - 1):
        d = tl.arange(0, DP)
        there = (d < D)[None, :]
        key, value = tl.zeros((DP,), tl.float32), tl.zeros((DP,), tl.float32)
        for first in range(0, P, TILE):
            offset = first + tl.arange(0, TILE) - (P - 1)
            # Tokens of one request follow one another, in `k` and in a block.
            token, row = t + offset, last + offset
            fresh = ((tl.load(to + tl.maximum(token, 0)) == row) & (token >= 0))[:, None]
            stored, at = row_at(pool, h, row, pool_rows, D)[:, None], tl.maximum(token, 0)[:, None]
            x = load_key(stored, d[None, :], ~fresh, there, D).to(tl.float32)  # [TILE, DP]
            x += tl.load(k + at * k_t + h * k_h + d[None, :], mask=fresh & there, other=0.0).to(tl.float32)
            y = load_value(stored, d[None, :], ~fresh, there, D).to(tl.float32)  # [TILE, DP]
            y += tl.load(v + at * v_t + h * v_h + d[None, :], mask=fresh & there, other=0.0).to(tl.float32)
            key += tl.sum(x, 0)
            value += tl.sum(y, 0)
        to_row = row_at(sums, h, last // P, blocks, D)
        tl.store(to_row + d, (key / P).to(sums.dtype.element_ty), mask=d < D)
        tl.store(value_at(to_row, D) + d, (value / P).to(sums.dtype.element_ty), mask=d < D)


def launch(k, v, to, pool, rest) -> None:
    (tokens, heads, d), (sums, size) = k.shape, rest[:2]
    _sum[(tokens, heads)](
        k, v, to, pool, sums, *k.stride()[:2], *v.stride()[:2], pool.shape[2], sums.shape[2], P=size,
        TILE=min(size, TILE), D=d, DP=next_power_of_2(d), num_warps=2, **launch_early(k.device, tokens * heads),
    )  # fmt: skip


filled_sums = register("filled_sums", reference, impls=(by_triton(launch),), check=check)
