"""The static set moves to the front of what can be retrieved, where it is whole blocks: nothing else has to know of it.

Of the heads whose set is new (`static.updated`): the `count` rows behind the sinks become theirs. Those of the set that
stand elsewhere change places with those of the front that are not in the set, the first with the first and so on. So at
most 2 * count rows of a head move, and which block a displaced row is in is all that changes; attention does not depend
on the order. But a displaced row is a stranger in its block, and widens its digest: where much of a row is static, or
sets change often, the dynamic choice is worse for it than in the paper's order (tests/test_static_literal.py).

The digests of the blocks that were touched are made anew, and the hot buffer forgets these blocks. The pool may be host
memory: it is rewritten in stream order, and nothing waits.

`gathered` is what the paper does (PRKV, algorithm 1), which moves nearly all rows at every update: the static set in
front, and behind it the others in their order.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._impl import triton as by_triton
from torchsparsekv.ops._meet import leave, meet, parts_of, phases
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._signature import Changed
from torchsparsekv.ops._triton import cdiv, chain, chained, next_power_of_2, tl, triton
from torchsparsekv.ops.index.block_bounds import bounds, store_digest, volume_of
from torchsparsekv.ops.index.block_bounds import check as check_digests
from torchsparsekv.ops.index.copy_keys import Coarse
from torchsparsekv.ops.store.forget import check_blocks, empty_slot
from torchsparsekv.ops.store.rows import in_row, keys_of, row_at, row_width
from torchsparsekv.ops.store.views import Digests, Far, Hot, Static

ROWS = 16  # pairs that change places at a time
PHASES = 2


def check(static, far, coarse, hot, digests, sink) -> None:
    check_digests(None, far, digests, None)
    check_blocks(far, hot)
    if sink % hot.rows.shape[3]:
        raise ValueError(f"{sink} sinks are not whole blocks of {hot.rows.shape[3]}")


def swaps(ids: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Of one head: the rows of the set that stand behind its front, and the rows of the front that are not in it."""
    front = torch.arange(first, first + len(ids))
    return ids[ids >= first + len(ids)].long(), front[~torch.isin(front, ids)]


def gathered(ids: Tensor, first: int, end: int) -> Tensor:
    """The rows of [first, end) in the order in which the paper puts them: the set, then the others as they were."""
    every = torch.arange(first, end)
    return torch.cat([ids.long(), every[~torch.isin(every, ids)]])


def reference(
    static: Changed[Static], far: Changed[Far], coarse: Changed[Coarse | None], hot: Changed[Hot],
    digests: Changed[Digests], sink: int,
) -> None:  # fmt: skip
    block_size = hot.rows.shape[3]
    for b, h in static.updated.nonzero().tolist():
        ids = static.ids[b, h, : int(static.count[b, h])]
        rows = far.rows[b, h]
        outside, holes = swaps(ids, sink)
        to, fro = torch.cat([outside, holes]), torch.cat([holes, outside])
        rows[to] = rows[fro]
        if coarse is not None:
            coarse[b, h, to] = coarse[b, h, fro]
        front = torch.arange(sink // block_size, (sink + len(ids)) // block_size)
        touched = torch.cat([front, outside // block_size]).unique()
        keys = keys_of(rows).unflatten(0, (-1, block_size))[touched]
        new = bounds(keys, digests.volume, digests.centre.dtype)
        digests.centre[b, h, touched], digests.spread[b, h, touched] = new
        slots = hot.slot_of[b, h, touched].long()
        hot.slot_of[b, h, touched] = -1
        hot.block_of[b, h, slots[slots >= 0]] = -1


@triton.jit
def _pairs(ids, scratch, first, count, most, K: tl.constexpr):
    """`swaps`: the rows behind the front at `scratch`, those of the front behind them; how many pairs they are."""
    j = tl.arange(0, K)
    chosen = tl.load(ids + j, mask=j < most, other=-1)
    inside = (chosen >= 0) & (chosen < first + count)
    outside = chosen >= first + count
    tl.store(scratch + j, tl.zeros((K,), tl.int32))
    tl.debug_barrier()
    tl.store(scratch + chosen - first, tl.full((K,), 1, tl.int32), mask=inside)
    tl.debug_barrier()
    hole = (j < count) & (tl.load(scratch + j) == 0)
    tl.debug_barrier()
    tl.store(scratch + tl.cumsum(outside.to(tl.int32), 0) - 1, chosen, mask=outside)
    tl.store(scratch + K + tl.cumsum(hole.to(tl.int32), 0) - 1, first + j, mask=hole)
    tl.debug_barrier()
    return tl.sum(outside.to(tl.int32), 0)


@triton.jit
def _exchange(one, two, mask):
    x, y = tl.load(one, mask=mask, other=0), tl.load(two, mask=mask, other=0)
    tl.store(one, y, mask=mask)
    tl.store(two, x, mask=mask)


@triton.jit
def _swap(
    pool, coarse, scratch, bh, pairs, part, parts, rows, COARSE: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr,
    ROWS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    r, c = tl.arange(0, ROWS), tl.arange(0, ROW)
    for tile in range(part, tl.cdiv(pairs, ROWS), parts):
        i = tile * ROWS + r
        m = (i < pairs)[:, None] & in_row(c, D)[None, :]
        first = tl.load(scratch + i, mask=i < pairs, other=0)[:, None]
        second = tl.load(scratch + K + i, mask=i < pairs, other=0)[:, None]
        _exchange(row_at(pool, bh, first, rows, D) + c[None, :], row_at(pool, bh, second, rows, D) + c[None, :], m)
        if COARSE:
            keys, m = coarse + bh * rows * D + c[None, :], (i < pairs)[:, None] & (c < D)[None, :]
            _exchange(keys + first * D, keys + second * D, m)


@triton.jit
def _anew(
    pool, centre, spread, slot_of, block_of, scratch, bh, pairs, first, count, part, parts, rows, blocks, slots,
    BALL: tl.constexpr, MEAN: tl.constexpr, LIMIT: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Digests of the blocks of the front and of those where rows of the front went; none of them is in a slot."""
    front = count // P
    r, d = tl.arange(0, P), tl.arange(0, DP)
    for i in range(part, front + pairs, parts):
        block, again = first // P + i, False
        if i >= front:
            block = tl.load(scratch + i - front) // P
            again = (i > front) & (tl.load(scratch + tl.maximum(i - front - 1, 0)) // P == block)
        if not again:
            at = row_at(pool, bh, (block * P + r)[:, None], rows, D) + d[None, :]
            x = tl.load(at, mask=(d < D)[None, :] & (r >= 0)[:, None], other=0.0).to(tl.float32)
            store_digest(x, centre, spread, bh * blocks + block, BALL, MEAN, LIMIT, P, D, DP)
            slot = tl.load(slot_of + bh * blocks + block)
            if slot >= 0:
                empty_slot(slot_of + bh * blocks, block_of + bh * slots, block, slot)


@triton.jit
def _relocate(
    ids, counts, updated, arrived, gone, pool, coarse, centre, spread, slot_of, block_of, scratch, most, sink, rows,
    blocks, slots, FIRST: tl.constexpr, LAST: tl.constexpr, COARSE: tl.constexpr, BALL: tl.constexpr,
    MEAN: tl.constexpr, LIMIT: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROW: tl.constexpr,
    ROWS: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(updated + bh) != 0:
        count = tl.load(counts + bh)
        scratch += (bh * parts + part) * 2 * K  # private to this program
        pairs = _pairs(ids + bh * most, scratch, sink, count, most, K)
        if FIRST == 0:
            _swap(pool, coarse, scratch, bh, pairs, part, parts, rows, COARSE, D, ROW, ROWS, K)
        if LAST == 2:
            if FIRST == 0:
                meet(arrived + bh, parts)
                leave(arrived + bh, gone + bh, parts)
            _anew(
                pool, centre, spread, slot_of, block_of, scratch, bh, pairs, sink, count, part, parts, rows, blocks,
                slots, BALL, MEAN, LIMIT, P, D, DP,
            )  # fmt: skip


def launch(static, far, coarse, hot, digests, sink) -> None:
    (pool,), (centre, spread) = far, digests[:2]
    batch, heads, rows, _, d = pool.shape
    most, p = static.ids.shape[2], hot.rows.shape[3]
    parts, k = parts_of(pool.device, batch * heads, cdiv(most, ROWS)), max(16, next_power_of_2(most))
    scratch = torch.empty((batch * heads, parts, 2, k), dtype=torch.int32, device=pool.device)
    for phase in phases(pool.device, parts, PHASES):
        _relocate[(batch * heads, parts)](
            static.ids, static.count, static.updated, static.arrived, static.gone, pool,
            pool if coarse is None else coarse, centre, spread, hot.slot_of, hot.block_of, scratch,
            most, sink, rows, centre.shape[2], hot.block_of.shape[2], **phase, COARSE=coarse is not None,
            **volume_of(digests), P=p, D=d, DP=next_power_of_2(d), ROW=next_power_of_2(row_width(d)),
            ROWS=ROWS, K=k, **chained(pool.device, batch * heads * parts),
        )  # fmt: skip


relocate = register("relocate", reference, impls=(by_triton(launch),), check=check)
