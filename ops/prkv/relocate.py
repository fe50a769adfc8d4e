"""The static set moves to the front of what can be retrieved, where it is whole blocks: nothing else has to know of it.

Of the heads whose set is new (`static.updated`): the `count` rows behind the sinks become theirs. Every token has a
home, the row of its position. A token of the set that lives elsewhere changes places with one of the front that is not
in the set; when it leaves the set, or both of them are in it, they change back (`moves`). So only tokens of the set and
of the front are ever away: `away` has, of each row of the front, the home of the token in it. At most 2 * count pairs
change places, of 3 * count rows if the count stays.

The digests of the blocks that were touched are made anew, by their tokens that are at home: a stranger says nothing of
the others, and would widen the digest for all of them. Of a block of strangers alone all count. Keys are read in their
`coarse` copy (ops/index/copy_keys.py), if there is one. The pool may be host memory: it is rewritten in stream order,
and nothing waits. What the hot buffer holds of it is read and rewritten there too, so that less crosses the link; where
the pool's rows are packed and the hot buffer's are not, it forgets the blocks that were touched.

`gathered` is what the paper does (PRKV, algorithm 1), which moves nearly all rows at every update: the static set in
front, and behind it the others in their order. How much attention either keeps: docs/develop/lessons.md.
"""
from typing import Any

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.grid_barrier import grid_barrier, leave_grid_barrier, parts_of, phases
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.gather._hot_buffer import check_blocks, empty_slot
from torchsparsekv.ops.index.block_bounds import bounds, check_digests, store_digest, volume_of
from torchsparsekv.ops.index.copy_keys import Coarse, copied, key_of, keys_in
from torchsparsekv.ops.prkv.views import Static
from torchsparsekv.ops.store.rows import row_at, stored_width
from torchsparsekv.ops.store.views import Digests, Hot, Pool

ROWS = 8  # pairs that change places at a time
LOOKED = 256  # rows of tokens away that are compared at a time
PHASES = 4
BESIDE = 2  # programs on a multiprocessor: all have to fit (tests/tools/compile_kernels.py)


def check(static, pool, coarse, hot, digests, sink) -> None:
    if static.away is None:
        raise ValueError("a set that moves needs static.away")
    check_digests(pool, digests)
    check_blocks(pool, hot.rows, hot.slot_of)
    if sink % hot.rows.shape[3]:
        raise ValueError(f"{sink} sinks are not whole blocks of {hot.rows.shape[3]}")


Pairs = list[tuple[int, int]]  # (row of the front, row behind it)


def moves(ids: Tensor, away: Tensor, first: int) -> tuple[Pairs, Pairs, Pairs]:
    """Of one head, whose set is in the rows `ids`: pairs that change back, then pairs that change; pairs that stay."""
    pairs = {first + j: p for j, p in enumerate(away.tolist()) if p >= 0}
    home = pairs | {p: r for r, p in pairs.items()}
    rows = ids.tolist()
    chosen = [home.get(r, r) for r in rows]
    front = range(first, first + len(rows))
    stay = {r: p for r, p in pairs.items() if r in front and p not in front and r in rows and r not in chosen}
    back = [(r, p) for r, p in pairs.items() if r not in stay]
    holes = [r for r in front if r not in chosen and r not in stay]
    outside = [p for p in chosen if p not in front and p not in stay.values()]
    return back, list(zip(holes, outside)), list(stay.items())


def gathered(ids: Tensor, first: int, end: int) -> Tensor:
    """The rows of [first, end) in the order in which the paper puts them: the set, then the others as they were."""
    every = torch.arange(first, end)
    return torch.cat([ids.long(), every[~torch.isin(every, ids)]])


def reference(
    static: Changed[Static], pool: Changed[Pool], coarse: Changed[Coarse | None], hot: Changed[Hot],
    digests: Changed[Digests], sink: int,
) -> None:  # fmt: skip
    away, block_size = static.away, hot.rows.shape[3]
    assert away is not None  # `check`
    for b, h in static.updated.nonzero().tolist():
        rows = pool[b, h]
        back, forth, stay = moves(static.ids[b, h, : int(static.count[b, h])], away[b, h], sink)
        for pairs in (back, forth):
            to = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
            rows[to] = rows[to.flip(1)]
            if coarse is not None:
                coarse[b, h][to] = coarse[b, h][to.flip(1)]
        away[b, h] = -1
        for r, p in (*forth, *stay):
            away[b, h, r - sink] = p
        strangers = {x for pair in (*forth, *stay) for x in pair}
        for block in sorted({x // block_size for pair in (*back, *forth) for x in pair}):
            every = range(block * block_size, (block + 1) * block_size)
            native = [x for x in every if x not in strangers] or list(every)
            keys = keys_in(pool, coarse, b, h, native)
            digest = bounds(keys, digests.volume, digests.centre.dtype)
            digests.centre[b, h, block], digests.spread[b, h, block] = digest
            slot = int(hot.slot_of[b, h, block])
            if slot >= 0 and rows.dtype is hot.rows.dtype:
                hot.rows[b, h, slot] = rows[every]
            elif slot >= 0:
                hot.slot_of[b, h, block], hot.block_of[b, h, slot] = -1, -1


@triton.jit
def _place(ids, x, n, K: tl.constexpr, BITS: tl.constexpr):
    """Where `x` stands among the n ascending ids, and whether it does."""
    at = tl.zeros((K,), tl.int32)
    for i in tl.static_range(BITS):
        probe = at + (K >> (i + 1))
        below = (probe <= n) & (tl.load(ids + probe - 1, mask=probe <= n, other=0) < x)
        at = tl.where(below, probe, at)
    return at, (at < n) & (tl.load(ids + at, mask=at < n, other=-1) == x)


@triton.jit
def _homes(ids, away, scratch, first, count, most, K: tl.constexpr, BITS: tl.constexpr):
    """The homes of the set at `scratch`; behind them, of each row of the front, whether its own token is in the set;
    behind these, whether the token in it is."""
    j = tl.arange(0, K)
    chosen = tl.load(ids + j, mask=j < count, other=-1)
    partner = tl.load(away + j, mask=j < most, other=-1)
    in_front = (j < count) & (chosen - first < most)
    home = tl.load(away + chosen - first, mask=in_front, other=-1)
    tl.store(scratch + j, tl.where(home >= 0, home, chosen))
    tl.store(scratch + K + j, tl.zeros((K,), tl.int32))
    tl.store(scratch + 2 * K + j, tl.zeros((K,), tl.int32))
    tl.debug_barrier()
    at, found = _place(ids, partner, count, K, BITS)
    tl.store(scratch + at, first + j, mask=found & (partner >= 0))
    tl.store(scratch + 2 * K + chosen - first, tl.full((K,), 1, tl.int32), mask=in_front)
    tl.debug_barrier()
    home = tl.load(scratch + j)
    tl.store(scratch + K + home - first, tl.full((K,), 1, tl.int32), mask=(j < count) & (home < first + count))
    tl.debug_barrier()
    return chosen, partner, home, in_front


@triton.jit
def _plan(ids, away, scratch, first, count, most, K: tl.constexpr, BITS: tl.constexpr):
    """`moves`, into `scratch`, K places each: rows of the front that change back, with what; those that change, with
    what; which rows of the front these are; `away` as it becomes. How many pairs change back, and how many change."""
    j = tl.arange(0, K)
    chosen, partner, home, in_front = _homes(ids, away, scratch, first, count, most, K, BITS)
    own, held = tl.load(scratch + K + j) != 0, tl.load(scratch + 2 * K + j) != 0
    stay = (j < count) & (partner >= first + count) & held & ~own
    back = (partner >= 0) & ~stay
    hole = (j < count) & ~own & ~stay
    tl.debug_barrier()
    tl.store(scratch + 2 * K + j, stay.to(tl.int32))
    tl.debug_barrier()
    stays = tl.load(scratch + 2 * K + chosen - first, mask=in_front, other=0) != 0
    outside = (j < count) & (home >= first + count) & ~stays
    tl.debug_barrier()
    place = tl.cumsum(back.to(tl.int32), 0) - 1
    tl.store(scratch + place, first + j, mask=back)
    tl.store(scratch + K + place, partner, mask=back)
    tl.store(scratch + 3 * K + tl.cumsum(outside.to(tl.int32), 0) - 1, home, mask=outside)
    place = tl.cumsum(hole.to(tl.int32), 0) - 1
    tl.store(scratch + 2 * K + place, first + j, mask=hole)
    tl.store(scratch + 4 * K + j, (back | hole).to(tl.int32))
    tl.debug_barrier()
    brought = tl.load(scratch + 3 * K + place, mask=hole, other=-1)
    tl.store(scratch + 5 * K + j, tl.where(stay, partner, brought))
    tl.debug_barrier()
    return tl.sum(back.to(tl.int32), 0), tl.sum(hole.to(tl.int32), 0)


@triton.jit
def _exchange(one, two, mask):
    x, y = tl.load(one, mask=mask, other=0), tl.load(two, mask=mask, other=0)
    tl.store(one, y, mask=mask)
    tl.store(two, x, mask=mask)


@triton.jit
def _read(pool, hot, slot_of, bh, row, c, mask, rows, slots, P: tl.constexpr, D: tl.constexpr):
    """Rows from the hot buffer where it has them, else from the pool; pointers to both, and whether it has them."""
    slot = tl.load(slot_of + bh * (rows // P) + row // P)
    held = slot >= 0
    home, copy = row_at(pool, bh, row, rows, D) + c, row_at(hot, bh, slot * P + row % P, slots * P, D) + c
    x = tl.where(held, tl.load(copy, mask=mask & held, other=0), tl.load(home, mask=mask & (slot < 0), other=0))
    return x, home, copy, held


@triton.jit
def _swap(
    pool, hot, slot_of, coarse, scratch, later, bh, pairs, part, parts, first, rows, slots, AGAIN: tl.constexpr,
    SAME: tl.constexpr, COARSE: tl.constexpr, P: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr,
    ROWS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """With AGAIN, a row of the front that `later` another token comes to need not be in the pool until then, if it is
    read from the hot buffer."""
    r, c = tl.arange(0, ROWS), tl.arange(0, ROW)[None, :]
    for tile in range(part, tl.cdiv(pairs, ROWS), parts):
        i = tile * ROWS + r
        live = (i < pairs)[:, None]
        m = live & (c < WIDTH)
        one = tl.load(scratch + i, mask=i < pairs, other=0)[:, None]
        two = tl.load(scratch + K + i, mask=i < pairs, other=0)[:, None]
        if SAME:
            x, home, copy, held = _read(pool, hot, slot_of, bh, one, c, m, rows, slots, P, D)
            y, far2, near2, held2 = _read(pool, hot, slot_of, bh, two, c, m, rows, slots, P, D)
            now = live
            if AGAIN:
                now = live & ((held == 0) | (tl.load(later + one - first, mask=live, other=-1) < 0))
            tl.store(home, y, mask=m & now)
            tl.store(far2, x, mask=m)
            tl.store(copy, y, mask=m & held)
            tl.store(near2, x, mask=m & held2)
        else:
            _exchange(row_at(pool, bh, one, rows, D) + c, row_at(pool, bh, two, rows, D) + c, m)
        if COARSE:
            keys = coarse + bh * rows * D + c
            _exchange(keys + one * D, keys + two * D, live & (c < D))


@triton.jit
def _native(away, pos, first, most, K: tl.constexpr, LOOKED: tl.constexpr):
    """Which of these rows hold their own tokens; all, where none does."""
    here = pos - first
    away_from = tl.load(away + here, mask=(here >= 0) & (here < most), other=-1)
    stranger = (away_from >= 0).to(tl.int32)
    for start in range(0, K, LOOKED):
        home = tl.load(away + start + tl.arange(0, LOOKED), mask=start + tl.arange(0, LOOKED) < K, other=-1)
        stranger = tl.maximum(stranger, tl.max((home[None, :] == pos[:, None]).to(tl.int32), 1))
    return (stranger == 0) | (tl.min(stranger, 0) == 1)


@triton.jit
def _anew(
    keys, centre, spread, slot_of, block_of, scratch, bh, back, forth, first, most, part, parts, rows, blocks, slots,
    SAME: tl.constexpr, COARSE: tl.constexpr, BALL: tl.constexpr, MEAN: tl.constexpr, LIMIT: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, LOOKED: tl.constexpr,
):  # fmt: skip
    """Digests of the blocks of the front where something changed, and of those behind it; slots that are not the SAME
    lose these. Rows behind it that follow one another mostly lie in one block, which is done once."""
    front = tl.cdiv(most, P)
    r, d = tl.arange(0, P), tl.arange(0, DP)
    for i in range(part, front + back + forth, parts):
        block, touched = first // P + i, i >= 0
        if i < front:
            changed = tl.load(scratch + 4 * K + i * P + r, mask=i * P + r < most, other=0)
            touched = tl.max(changed, 0) != 0
        else:
            at = scratch + tl.where(i < front + back, K + i - front, 3 * K + i - front - back)
            block = tl.load(at) // P
            touched = (i == front) | (i == front + back) | (tl.load(at - 1) // P != block)
        if touched:
            pos = block * P + r
            native = _native(scratch + 5 * K, pos, first, most, K, LOOKED)
            x = key_of(keys, bh, pos[:, None], d[None, :], (r >= 0)[:, None], rows, D, COARSE).to(tl.float32)
            store_digest(x, native, centre, spread, bh * blocks + block, BALL, MEAN, LIMIT, D, DP)
            if not SAME:
                slot = tl.load(slot_of + bh * blocks + block)
                if slot >= 0:
                    empty_slot(slot_of + bh * blocks, block_of + bh * slots, block, slot)


@triton.jit
def move(
    ids, count, arrived, gone, away, pool, hot, coarse, keys, centre, spread, slot_of, block_of, plan, most, sink, rows,
    blocks, slots, FIRST: tl.constexpr, LAST: tl.constexpr, SAME: tl.constexpr, COARSE: tl.constexpr,
    BALL: tl.constexpr, MEAN: tl.constexpr, LIMIT: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    WIDTH: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
    LOOKED: tl.constexpr,
):  # fmt: skip
    """All phases of a head whose set is new. Phases before the first are what else the launch does."""
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if FIRST < 0:
        grid_barrier(arrived + bh, parts)
    plan += (bh * parts + part) * 6 * K  # private to this program
    back, forth = _plan(ids + bh * most, away + bh * most, plan, sink, tl.load(count + bh), most, K, BITS)
    later = plan + 5 * K
    if FIRST <= 0:
        _swap(
            pool, hot, slot_of, coarse, plan, later, bh, back, part, parts, sink, rows, slots, True, SAME, COARSE, P, D,
            WIDTH, ROW, ROWS, K,
        )  # fmt: skip
    if (FIRST <= 1) & (LAST > 1):
        if FIRST < 1:
            grid_barrier(arrived + bh, parts)
        _swap(
            pool, hot, slot_of, coarse, plan + 2 * K, later, bh, forth, part, parts, sink, rows, slots, False, SAME,
            COARSE, P, D, WIDTH, ROW, ROWS, K,
        )  # fmt: skip
    if (FIRST <= 2) & (LAST > 2):
        if FIRST < 2:
            grid_barrier(arrived + bh, parts)
            leave_grid_barrier(arrived + bh, gone + bh, parts)
        _anew(
            keys, centre, spread, slot_of, block_of, plan, bh, back, forth, sink, most, part, parts, rows, blocks,
            slots, SAME, COARSE, BALL, MEAN, LIMIT, P, D, DP, K, LOOKED,
        )  # fmt: skip
    if (LAST > 3) & (part == 0):  # all programs have planned by now
        j = tl.arange(0, K)
        tl.store(away + bh * most + j, tl.load(later + j), mask=j < most)


@triton.jit
def _relocate(
    ids, count, updated, arrived, gone, away, pool, hot, coarse, keys, centre, spread, slot_of, block_of, plan, most,
    sink, rows, blocks, slots, FIRST: tl.constexpr, LAST: tl.constexpr, SAME: tl.constexpr, COARSE: tl.constexpr,
    BALL: tl.constexpr, MEAN: tl.constexpr, LIMIT: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    WIDTH: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
    LOOKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    if tl.load(updated + tl.program_id(0)) != 0:
        move(
            ids, count, arrived, gone, away, pool, hot, coarse, keys, centre, spread, slot_of, block_of, plan, most,
            sink, rows, blocks, slots, FIRST, LAST, SAME, COARSE, BALL, MEAN, LIMIT, P, D, DP, WIDTH, ROW, ROWS, K,
            BITS, LOOKED,
        )  # fmt: skip


def arguments(parts: int, static, pool, coarse, hot, digests, sink) -> dict[str, Any]:
    """What `move` takes by name, but for its phases; and `updated`."""
    centre, spread = digests[:2]
    (batch, heads, rows), d, width = pool.shape[:3], hot.rows.shape[5], stored_width(pool)
    most = static.ids.shape[2]
    k = max(16, next_power_of_2(most))
    return dict(
        ids=static.ids, count=static.count, updated=static.updated, arrived=static.arrived, gone=static.gone,
        away=static.away, pool=pool, hot=hot.rows, coarse=pool if coarse is None else coarse,
        keys=copied(pool, coarse), centre=centre, spread=spread, slot_of=hot.slot_of, block_of=hot.block_of,
        plan=torch.empty((batch * heads, parts, 6, k), dtype=torch.int32, device=pool.device), most=most, sink=sink,
        rows=rows, blocks=centre.shape[2], slots=hot.block_of.shape[2], SAME=pool.dtype is hot.rows.dtype,
        COARSE=coarse is not None, **volume_of(digests), P=hot.rows.shape[3], D=d, DP=next_power_of_2(d), WIDTH=width,
        ROW=next_power_of_2(width), ROWS=ROWS, K=k, BITS=k.bit_length() - 1, LOOKED=LOOKED,
    )  # fmt: skip


def launch(static, pool, coarse, hot, digests, sink) -> None:
    device, heads = pool.device, static.count.numel()
    parts = parts_of(device, heads, cdiv(static.ids.shape[2], ROWS), BESIDE)
    given = arguments(parts, static, pool, coarse, hot, digests, sink)
    for phase in phases(device, parts, PHASES):
        _relocate[(heads, parts)](**given, **phase, **launch_early(device, heads * parts))


relocate = register("relocate", reference, impls=(by_triton(launch),), check=check)
