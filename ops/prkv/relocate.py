"""Move the static set to the front of the retrievable rows of the pool, where it fills whole blocks.

Once the set fills whole blocks at the front, no other op needs to know of it: pages are scored, fetched and attended
to as before. The front is the `count` rows after the sinks. Every token has a home: the row of its position.

- A token of the set that lies after the front changes places with a token in the front that is not in the set: they
  swap in.
- When the token leaves the set, or when both tokens are in the set, they swap back.

So only tokens of the set and of the front are ever away from home. `front_home` has, for each row of the front, the
home of the token in it. At most 2 * count pairs change places, in 3 * count rows if the count stays.

Digests of the blocks that were touched are made anew, from the tokens that are at home. A stranger, a token away from
home, says nothing about the other tokens of a block, and would widen the digest for all of them. In a block of
strangers only, all tokens count.

PRKV, algorithm 1 (the page restructuring). The paper moves nearly all rows at each update, the static set to the front
and the other rows after it in their order: `gathered` is that order. docs/develop/lessons.md compares how much
attention both keep.
"""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.grid_barrier import grid_barrier, leave_grid_barrier, parts_of, phases
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.gather._hot_buffer import check_blocks, empty_slot
from torchsparsekv.ops.index.block_bounds import bounds, check_digests, store_digest, volume_of
from torchsparsekv.ops.index.copy_keys import COPY_UNIT, Coarse, copied, key_of, keys_in
from torchsparsekv.ops.prkv.choose_static import ARRIVED, COUNTERS, LEFT
from torchsparsekv.ops.prkv.views import StaticSet
from torchsparsekv.ops.store.rows import row_at, stored_width
from torchsparsekv.ops.store.views import Digests, HotBuffer, Pool

ROWS = 8  # pairs that change places at a time
LOOKED = 256  # homes that are compared at a time
PHASES = 4
PER_SM = 2  # programs on a multiprocessor: all have to fit (tests/tools/compile_kernels.py)
# The plan of a head: lists of `most` numbers each, one after the other.
BACK, BACK_WITH, IN, IN_WITH, TOUCHED, HOME = (tl.constexpr(i) for i in range(6))
LISTS = tl.constexpr(6)


class Moved(NamedTuple):
    """What moves with the set, as kernels take it."""

    pool: Tensor
    hot: HotBuffer
    coarse: Tensor  # the fp8 copy of the keys as bytes, or the pool where there is none
    keys: Tensor  # what the digests are made from: the fp8 copy, or the pool
    centre: Tensor
    spread: Tensor
    origin: Tensor
    plan: Tensor  # [batch * heads, parts, LISTS, most]
    most: int  # tokens of a set
    rows: int  # of the pool
    blocks: int
    slots: int


class Layout(NamedTuple):
    """Sizes and options that the kernel is compiled for."""

    same_type: bool  # rows of the pool and of the hot buffer are of one type
    coarse: bool  # there is an fp8 copy of the keys
    ball: bool
    mean: bool
    limit: float
    unit: float
    block_size: int
    dim: int
    padded: int  # dim, rounded up to a power of two
    width: int  # numbers of a row as the pool stores it
    padded_width: int
    rows: int  # ROWS
    most: int  # tokens of a set, rounded up to a power of two
    bits: int  # of `most`
    looked: int  # LOOKED


def check(static, pool, coarse, hot, digests, sink) -> None:
    if static.front_home is None:
        raise ValueError("a set that moves needs static.front_home")
    check_digests(pool, digests)
    check_blocks(pool, hot.rows, hot.slot_of)
    if sink % hot.rows.shape[3]:
        raise ValueError(f"{sink} sinks are not whole blocks of {hot.rows.shape[3]}")


Pairs = list[tuple[int, int]]  # (row of the front, row after the front)


def moves(ids: Tensor, front_home: Tensor, first: int) -> tuple[Pairs, Pairs, Pairs]:
    """The pairs of one head that swap back, that swap in, and that stay swapped. The set lies in the rows `ids`."""
    pairs = {first + j: p for j, p in enumerate(front_home.tolist()) if p >= 0}
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
    """The rows of [first, end) in the paper's order: the set, then the other rows as they were."""
    every = torch.arange(first, end)
    return torch.cat([ids.long(), every[~torch.isin(every, ids)]])


def reference(
    static: Changed[StaticSet], pool: Changed[Pool], coarse: Changed[Coarse | None], hot: Changed[HotBuffer],
    digests: Changed[Digests], sink: int,
) -> None:  # fmt: skip
    """Move the static set to the front of the retrievable rows of the pool, where it fills whole blocks.

    Args:
        static: the sets. Heads with `updated` move theirs; `front_home` becomes what the move leaves.
        pool: [batch, heads, rows, 2, dim], may be host memory: it is rewritten in stream order, and nothing waits.
        coarse: the fp8 copy of the keys [batch, heads, rows, dim]: it moves along. Digests are made from it,
            so their origin must be the origin of the copy. None: digests are made from the pool.
        hot: pool rows of which the hot buffer has a copy are read from there, and rewritten in both places, so that
            less crosses the link. Where the pool is packed and the hot buffer is not, the touched blocks lose their
            slots.
        digests: made anew for the touched blocks.
        sink: tokens at the start of the pool that stay; whole blocks.

    Launches:
        One kernel of batch * heads x parts programs, all on the GPU at once, which meet at a grid barrier between its
        phases. Each program plans all moves of its head. 1: its share of the pairs swaps back. 2: its share swaps in.
        3: it makes its share of the digests. 4: one program of a head stores `front_home`. A head whose set is not new
        returns after reading `updated`.
    """
    front_home, block_size = static.front_home, hot.rows.shape[3]
    assert front_home is not None  # `check`
    for b, h in static.updated.nonzero().tolist():
        rows = pool[b, h]
        back, swap_in, stay = moves(static.ids[b, h, : int(static.count[b, h])], front_home[b, h], sink)
        for pairs in (back, swap_in):
            to = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
            rows[to] = rows[to.flip(1)]
            if coarse is not None:
                coarse[b, h][to] = coarse[b, h][to.flip(1)]
        front_home[b, h] = -1
        for r, p in (*swap_in, *stay):
            front_home[b, h, r - sink] = p
        strangers = {x for pair in (*swap_in, *stay) for x in pair}
        for block in sorted({x // block_size for pair in (*back, *swap_in) for x in pair}):
            every = range(block * block_size, (block + 1) * block_size)
            native = [x for x in every if x not in strangers] or list(every)
            keys = keys_in(pool, coarse, b, h, native)
            origin = digests.origin[b, h] if coarse is None else 0.0
            digest = bounds(keys, origin, digests.volume, digests.centre.dtype)
            digests.centre[b, h, block], digests.spread[b, h, block] = digest
            slot = int(hot.slot_of[b, h, block])
            if slot >= 0 and rows.dtype is hot.rows.dtype:
                hot.rows[b, h, slot] = rows[every]
            elif slot >= 0:
                hot.slot_of[b, h, block], hot.block_of[b, h, slot], hot.used[b, h, slot] = -1, -1, 0


@triton.jit
def _find(ids, x, n, C: tl.constexpr):
    """The places of `x` [most] among the n ascending ids, and whether each is there."""
    place = tl.full((C.most,), 0, tl.int32)
    BITS: tl.constexpr = C.bits  # Triton 3.6 takes no field of a view here
    for i in tl.static_range(BITS):
        probe = place + (C.most >> (i + 1))
        below = (probe <= n) & (tl.load(ids + probe - 1, mask=probe <= n, other=0) < x)
        place = tl.where(below, probe, place)
    return place, (place < n) & (tl.load(ids + place, mask=place < n, other=-1) == x)


@triton.jit
def _homes(ids, front_home, plan, first, count, most, C: tl.constexpr):
    """Find where the tokens of the set are at home, into the first three lists of `plan`.

    List 0: the homes. List 1: whether the token whose home is this row of the front is in the set. List 2: whether the
    token that lies in this row of the front is in the set.

    Returns, all [most]: the rows of the set, `front_home`, the homes, and which rows of the set lie in the front.
    """
    j = tl.arange(0, C.most)
    chosen = tl.load(ids + j, mask=j < count, other=-1)
    partner = tl.load(front_home + j, mask=j < most, other=-1)
    in_front = (j < count) & (chosen - first < most)
    home = tl.load(front_home + chosen - first, mask=in_front, other=-1)
    tl.store(plan + j, tl.where(home >= 0, home, chosen))
    tl.store(plan + C.most + j, tl.full((C.most,), 0, tl.int32))
    tl.store(plan + 2 * C.most + j, tl.full((C.most,), 0, tl.int32))
    tl.debug_barrier()
    place, found = _find(ids, partner, count, C)
    tl.store(plan + place, first + j, mask=found & (partner >= 0))
    tl.store(plan + 2 * C.most + chosen - first, tl.full((C.most,), 1, tl.int32), mask=in_front)
    tl.debug_barrier()
    home = tl.load(plan + j)
    own = (j < count) & (home < first + count)
    tl.store(plan + C.most + home - first, tl.full((C.most,), 1, tl.int32), mask=own)
    tl.debug_barrier()
    return chosen, partner, home, in_front


@triton.jit
def _plan(ids, front_home, plan, first, count, most, C: tl.constexpr):
    """`moves` of one head, into the lists of `plan`; returns how many pairs swap back, and how many swap in.

    BACK, BACK_WITH: pairs that swap back. IN, IN_WITH: pairs that swap in. TOUCHED: which rows of the front are in a
    pair. HOME: the new `front_home`.
    """
    j = tl.arange(0, C.most)
    chosen, partner, home, in_front = _homes(ids, front_home, plan, first, count, most, C)
    own, held = tl.load(plan + C.most + j) != 0, tl.load(plan + 2 * C.most + j) != 0
    stay = (j < count) & (partner >= first + count) & held & ~own
    back = (partner >= 0) & ~stay
    hole = (j < count) & ~own & ~stay
    tl.debug_barrier()
    tl.store(plan + 2 * C.most + j, stay.to(tl.int32))
    tl.debug_barrier()
    stays = tl.load(plan + 2 * C.most + chosen - first, mask=in_front, other=0) != 0
    outside = (j < count) & (home >= first + count) & ~stays
    tl.debug_barrier()
    place = tl.cumsum(back.to(tl.int32), 0) - 1
    tl.store(plan + BACK * C.most + place, first + j, mask=back)
    tl.store(plan + BACK_WITH * C.most + place, partner, mask=back)
    tl.store(plan + IN_WITH * C.most + tl.cumsum(outside.to(tl.int32), 0) - 1, home, mask=outside)
    place = tl.cumsum(hole.to(tl.int32), 0) - 1
    tl.store(plan + IN * C.most + place, first + j, mask=hole)
    tl.store(plan + TOUCHED * C.most + j, (back | hole).to(tl.int32))
    tl.debug_barrier()
    brought = tl.load(plan + IN_WITH * C.most + place, mask=hole, other=-1)
    tl.store(plan + HOME * C.most + j, tl.where(stay, partner, brought))
    tl.debug_barrier()
    return tl.sum(back.to(tl.int32), 0), tl.sum(hole.to(tl.int32), 0)


@triton.jit
def _exchange(one, two, mask):
    x, y = tl.load(one, mask=mask, other=0), tl.load(two, mask=mask, other=0)
    tl.store(one, y, mask=mask)
    tl.store(two, x, mask=mask)


@triton.jit
def _read(moved, bh, row, c, mask, C: tl.constexpr):
    """Rows [ROWS, padded_width], from the hot buffer if it holds them, else from the pool.

    Returns the rows, pointers to them in the pool and in the hot buffer, and whether the hot buffer holds them.
    """
    hot, rows, slots = moved.hot, moved.rows, moved.slots
    slot = tl.load(hot.slot_of + bh * (rows // C.block_size) + row // C.block_size)
    held = slot >= 0
    in_pool = row_at(moved.pool, bh, row, rows, C.dim) + c
    in_hot = row_at(hot.rows, bh, slot * C.block_size + row % C.block_size, slots * C.block_size, C.dim) + c
    from_hot, from_pool = mask & held, mask & (slot < 0)
    x = tl.where(held, tl.load(in_hot, mask=from_hot, other=0), tl.load(in_pool, mask=from_pool, other=0))
    return x, in_pool, in_hot, held


@triton.jit
def _swap(moved, pairs, count, bh, part, parts, first, home, AGAIN: tl.constexpr, C: tl.constexpr):
    """Swap this program's share of `count` pairs: one row of each is listed at `pairs`, the other `most` further.

    AGAIN: these pairs swap back, and pairs that swap in follow. A row of the front that `home` gives to another token
    then need not be written to the pool yet, if the hot buffer holds it.
    """
    r, c = tl.arange(0, C.rows), tl.arange(0, C.padded_width)[None, :]
    for tile in range(part, tl.cdiv(count, C.rows), parts):
        i = tile * C.rows + r
        live = (i < count)[:, None]
        m = live & (c < C.width)
        one = tl.load(pairs + i, mask=i < count, other=0)[:, None]
        two = tl.load(pairs + C.most + i, mask=i < count, other=0)[:, None]
        if C.same_type:
            x, pool_one, hot_one, held_one = _read(moved, bh, one, c, m, C)
            y, pool_two, hot_two, held_two = _read(moved, bh, two, c, m, C)
            now = live
            if AGAIN:
                now = live & ((held_one == 0) | (tl.load(home + one - first, mask=live, other=-1) < 0))
            tl.store(pool_one, y, mask=m & now)
            tl.store(pool_two, x, mask=m)
            tl.store(hot_one, y, mask=m & held_one)
            tl.store(hot_two, x, mask=m & held_two)
        else:
            pool, rows = moved.pool, moved.rows
            _exchange(row_at(pool, bh, one, rows, C.dim) + c, row_at(pool, bh, two, rows, C.dim) + c, m)
        if C.coarse:
            keys = moved.coarse + bh * moved.rows * C.dim + c
            _exchange(keys + one * C.dim, keys + two * C.dim, live & (c < C.dim))


@triton.jit
def _at_home(home, pos, first, most, C: tl.constexpr):
    """Which of the rows `pos` [block_size] hold their own tokens; all of them, where none does."""
    here = pos - first
    home_here = tl.load(home + here, mask=(here >= 0) & (here < most), other=-1)
    stranger = (home_here >= 0).to(tl.int32)
    for start in range(0, C.most, C.looked):
        i = start + tl.arange(0, C.looked)
        away = tl.load(home + i, mask=i < C.most, other=-1)
        stranger = tl.maximum(stranger, tl.max((away[None, :] == pos[:, None]).to(tl.int32), 1))
    return (stranger == 0) | (tl.min(stranger, 0) == 1)


@triton.jit
def _renew_digests(moved, plan, bh, back, swap_in, first, part, parts, C: tl.constexpr):
    """Make the digests of the touched blocks of the front, and of the blocks after it that a pair reaches.

    Slots of these blocks are emptied where the hot buffer has another type. Pairs that follow one another mostly reach
    the same block, which is done once.
    """
    most, hot = moved.most, moved.hot
    front = tl.cdiv(most, C.block_size)
    r, d = tl.arange(0, C.block_size), tl.arange(0, C.padded)
    for i in range(part, front + back + swap_in, parts):
        block, touched = first // C.block_size + i, i >= 0
        if i < front:
            place = i * C.block_size + r
            changed = tl.load(plan + TOUCHED * C.most + place, mask=place < most, other=0)
            touched = tl.max(changed, 0) != 0
        else:
            behind = tl.where(i < front + back, i - front + BACK_WITH * C.most, i - front - back + IN_WITH * C.most)
            row = plan + behind
            block = tl.load(row) // C.block_size
            touched = (i == front) | (i == front + back) | (tl.load(row - 1) // C.block_size != block)
        if touched:
            pos = block * C.block_size + r
            native = _at_home(plan + HOME * C.most, pos, first, most, C)
            x = key_of(moved.keys, bh, pos[:, None], d[None, :], (r >= 0)[:, None], moved.rows, C.dim, C.coarse)
            x, o = x.to(tl.float32), tl.full((C.padded,), 0.0, tl.float32)
            if C.coarse:
                x *= COPY_UNIT
            else:
                o = tl.load(moved.origin + bh * C.dim + d, mask=d < C.dim, other=0.0)
            store_digest(
                x, o, native, moved.centre, moved.spread, bh * moved.blocks + block, C.ball, C.mean, C.limit, C.unit,
                C.dim, C.padded,
            )  # fmt: skip
            if not C.same_type:
                slot = tl.load(hot.slot_of + bh * moved.blocks + block)
                if slot >= 0:
                    block_of, used = hot.block_of + bh * moved.slots, hot.used + bh * moved.slots
                    empty_slot(hot.slot_of + bh * moved.blocks, block_of, used, block, slot)


@triton.jit
def move_set(static, moved, first, FIRST: tl.constexpr, LAST: tl.constexpr, C: tl.constexpr):
    """Phases FIRST to LAST of moving the new set of one head to the rows from `first` on. A FIRST below 0 says that the
    launch does other work before, which all programs of a head have to finish."""
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    barrier, front_home, most = static.barrier + bh * COUNTERS, static.front_home + bh * moved.most, moved.most
    if FIRST < 0:
        grid_barrier(barrier + ARRIVED, parts)
    plan = moved.plan + (bh * parts + part) * LISTS * C.most  # private to this program
    back, swap_in = _plan(static.ids + bh * most, front_home, plan, first, tl.load(static.count + bh), most, C)
    home = plan + HOME * C.most
    if FIRST <= 0:
        _swap(moved, plan + BACK * C.most, back, bh, part, parts, first, home, True, C)
    if (FIRST <= 1) & (LAST > 1):
        if FIRST < 1:
            grid_barrier(barrier + ARRIVED, parts)
        _swap(moved, plan + IN * C.most, swap_in, bh, part, parts, first, home, False, C)
    if (FIRST <= 2) & (LAST > 2):
        if FIRST < 2:
            grid_barrier(barrier + ARRIVED, parts)
            leave_grid_barrier(barrier + ARRIVED, barrier + LEFT, parts)
        _renew_digests(moved, plan, bh, back, swap_in, first, part, parts, C)
    if (LAST > 3) & (part == 0):  # all programs have planned by now
        j = tl.arange(0, C.most)
        tl.store(front_home + j, tl.load(home + j), mask=j < most)


@triton.jit
def _relocate(static, moved, first, FIRST: tl.constexpr, LAST: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    if tl.load(static.updated + tl.program_id(0)) != 0:
        move_set(static, moved, first, FIRST, LAST, C)


def arguments(parts: int, static, pool, coarse, hot, digests) -> tuple[Moved, Layout]:
    """What `move_set` takes beside the set."""
    (batch, heads, rows), d, width, most = pool.shape[:3], hot.rows.shape[5], stored_width(pool), static.ids.shape[2]
    padded_most = max(16, next_power_of_2(most))
    plan = torch.empty((batch * heads, parts, int(LISTS), padded_most), dtype=torch.int32, device=pool.device)
    volume: dict[str, Any] = volume_of(digests)
    return Moved(
        pool, hot, pool if coarse is None else coarse, copied(pool, coarse), digests.centre, digests.spread,
        digests.origin, plan, most, rows, blocks=digests.centre.shape[2], slots=hot.block_of.shape[2],
    ), Layout(
        same_type=pool.dtype is hot.rows.dtype, coarse=coarse is not None, ball=volume["BALL"], mean=volume["MEAN"],
        limit=volume["LIMIT"], unit=volume["UNIT"], block_size=hot.rows.shape[3], dim=d, padded=next_power_of_2(d),
        width=width, padded_width=next_power_of_2(width), rows=ROWS, most=padded_most,
        bits=padded_most.bit_length() - 1, looked=LOOKED,
    )  # fmt: skip


def launch(static, pool, coarse, hot, digests, sink) -> None:
    device, heads = pool.device, static.count.numel()
    parts = parts_of(device, heads, cdiv(static.ids.shape[2], ROWS), PER_SM)
    moved, layout = arguments(parts, static, pool, coarse, hot, digests)
    for phase in phases(device, parts, PHASES):
        _relocate[(heads, parts)](static, moved, sink, **phase, C=layout, **launch_early(device, heads * parts))


relocate = register("relocate", reference, impls=(by_triton(launch),), check=check)
