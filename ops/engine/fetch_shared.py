"""Copy the listed units of all requests from the pool to one hot buffer. A unit is a block, or one token.

The hot buffer holds a unit once for each kv head, however many requests list it. A missing unit takes the slot of one
that was not listed lately (the clock algorithm of ops/gather/fetch.py). The hot buffer needs a slot for each listed
unit of a step.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import (
    cdiv,
    launch_early,
    next_power_of_2,
    sm_count,
    tl,
    triton,
    wait_for_previous,
)
from torchsparsekv.ops.engine.tables import check_one
from torchsparsekv.ops.engine.views import Listed, SharedHot
from torchsparsekv.ops.gather._hot_buffer import HIT, advance_hand, check_blocks, check_chosen, find_victims
from torchsparsekv.ops.gather.fetch import ROWS, WINDOW, bring, move
from torchsparsekv.ops.store.rows import row_at, row_width
from torchsparsekv.ops.store.views import Pool

CLAIM = 1 << 30  # until a missing block gets a slot, its `slot_of` is the list entry that claims the block, less CLAIM
PART = 512  # list entries of a program of `_find`
MISSES = 512  # misses that `_plan` takes at a time
ABSENT = -2  # the slot of a missing block until `_bring` writes it


def check(ids, pool, hot) -> None:
    check_one(pool)
    check_chosen(ids.shape[0] * ids.shape[2])
    check_blocks(pool, hot.rows, hot.slot_of)
    if ids.shape[0] * ids.shape[2] > hot.rows.shape[2]:
        raise ValueError(f"{ids.shape[0]} x {ids.shape[2]} blocks do not fit a hot buffer of {hot.rows.shape[2]}")


def reference(ids: Listed, pool: Pool, hot: Changed[SharedHot]) -> Tensor:
    """Copy the listed units of all requests from the pool to one hot buffer. A unit is a block, or one token.

    Args:
        ids: ids of units [requests, heads, listed], -1 for none.
        pool: [1, heads, rows, 2, dim], may be host memory.
        hot: changed.

    Returns:
        the slot of each listed unit [requests, heads, listed], -1 for none.

    Launches:
        Three kernels.
        _find, heads x parts of PART list entries: writes the slots of units that hit, and lists the misses.
        _plan, one program a head: picks a slot for each missing unit, and updates the tables of the hot buffer.
        _bring, two programs a multiprocessor: copies the missing units, writes their slots, and marks the slots of hits
        as used.
    """
    slots = torch.full_like(ids, -1)
    for h, pages in enumerate(pool[0].unflatten(1, (-1, hot.rows.shape[3]))):
        hot_of_head = SharedHot(*(t[0, h] for t in hot))
        bring(list(dict.fromkeys(x for x in ids[:, h].flatten().tolist() if x >= 0)), pages, *hot_of_head)
        slots[:, h] = torch.where(ids[:, h] >= 0, hot_of_head.slot_of[ids[:, h].clamp(min=0).long()], -1)
    return slots


@triton.jit
def _place(e, h, heads, n):
    """The place of list entries `e` of a head in `ids` [requests, heads, n]."""
    return (e // n * heads + h) * n + e % n


@triton.jit
def _find(
    ids, out, slot_of, used, misses, missed, heads, n, entries, slots, blocks, CLAIM: tl.constexpr, HIT: tl.constexpr,
    ABSENT: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the slots of a part of a head's list to `out`, ABSENT for missing blocks. `misses` [PART] gets the entries
    whose block is missing, `missed` their number. The first entry with a missing block claims it."""
    wait_for_previous(PDL)
    h, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = h * tl.num_programs(1) + part
    e = part * PART + tl.arange(0, PART)
    place = _place(e, h, heads, n)
    block = tl.load(ids + place, mask=e < entries, other=-1)
    slot_of += h * blocks
    slot = tl.load(slot_of + block, mask=block >= 0, other=-1)  # below 0 also where another entry has claimed it
    miss = (block >= 0) & (slot < 0)
    tl.atomic_min(slot_of + block, e - CLAIM, mask=miss)
    tl.store(used + h * slots + slot, tl.full((PART,), HIT, tl.int32), mask=slot >= 0)
    tl.store(out + place, tl.where(miss, ABSENT, slot), mask=e < entries)
    tl.store(misses + at * PART + tl.cumsum(miss.to(tl.int32), 0) - 1, e, mask=miss)
    tl.store(missed + at, tl.sum(miss.to(tl.int32), 0))


@triton.jit
def _part_of(i, upto, PARTS: tl.constexpr, BITS: tl.constexpr):
    """The parts of the `i`-th misses: binary search for the first part p, of PARTS = 2^BITS, with upto[p] > i."""
    part = tl.zeros_like(i)
    for bit in tl.static_range(1, BITS + 1):
        part += tl.where(tl.gather(upto, part + ((PARTS >> bit) - 1), 0) <= i, PARTS >> bit, 0)
    return part


@triton.jit
def _plan(
    ids, hot, victims, missing, count, misses, missed, parts, heads, n, slots, blocks, CLAIM: tl.constexpr,
    N: tl.constexpr, WINDOW: tl.constexpr, HIT: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BITS: tl.constexpr, MISSES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Give slots to the missing blocks of a head. `victims` [N] gets the slots that change their block, `missing` [N]
    the blocks that take these slots, `count` their number."""
    wait_for_previous(PDL)
    h, p, j = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, MISSES)
    slot_of, block_of, used = hot.slot_of + h * blocks, hot.block_of + h * slots, hot.used + h * slots
    victims, missing = victims + h * N, missing + h * N
    upto = tl.cumsum(tl.load(missed + h * parts + p, mask=p < parts, other=0), 0)  # misses of the parts up to p
    all_misses, found = tl.max(upto, 0), 0
    for first in range(0, all_misses, MISSES):
        i = first + j
        part = _part_of(i, upto, PARTS, BITS)
        before = tl.where(part > 0, tl.gather(upto, tl.maximum(part - 1, 0), 0), 0)
        e = tl.load(misses + (h * parts + part) * PART + i - before, mask=i < all_misses, other=0)
        block = tl.load(ids + _place(e, h, heads, n), mask=i < all_misses, other=-1)
        claimed = (block >= 0) & (tl.load(slot_of + block, mask=block >= 0, other=0) == e - CLAIM)
        tl.store(missing + found + tl.cumsum(claimed.to(tl.int32), 0) - 1, block, mask=claimed)
        found += tl.sum(claimed.to(tl.int32), 0)
    tl.store(count + h, found)
    if found > 0:
        tl.debug_barrier()
        passed = find_victims(used, hot.hand + h, slots, found, victims, WINDOW, HIT)
        tl.debug_barrier()
        for first in range(0, found, MISSES):
            here = first + j < found
            new = tl.load(victims + first + j, mask=here, other=0)
            block = tl.load(missing + first + j, mask=here, other=0)
            old = tl.load(block_of + new, mask=here, other=-1)  # the blocks that leave
            tl.store(slot_of + old, tl.full((MISSES,), -1, tl.int32), mask=old >= 0)
            tl.store(slot_of + block, new, mask=here)
            tl.store(block_of + new, block, mask=here)
        advance_hand(used, hot.hand + h, slots, passed, WINDOW)


@triton.jit(do_not_specialize=["blocks"])  # with a pool of one block, `blocks` would be a constant without a type
def _bring(
    pool, ids, out, hot, victims, missing, count, heads, n, entries, slots, blocks, N: tl.constexpr, P: tl.constexpr,
    D: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, ABSENT: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy this program's share of the rows of the missing blocks of a head. Of its share of the list, write the slots
    of missing blocks to `out`, and mark the slots of the others as used."""
    wait_for_previous(PDL)
    h = tl.program_id(0).to(tl.int64)
    pool, rows = row_at(pool, h, 0, blocks.to(tl.int64) * P, D), row_at(hot.rows, h, 0, slots * P, D)
    part, parts = tl.program_id(1), tl.num_programs(1)
    move(pool, rows, victims + h * N, missing + h * N, tl.load(count + h), part, parts, P, D, ROW, ROWS)
    for first in range(part * PART, entries, parts * PART):
        e = first + tl.arange(0, PART)
        place = _place(e, h, heads, n)
        slot = tl.load(out + place, mask=e < entries, other=-1)
        tl.store(hot.used + h * slots + slot, tl.full((PART,), 1, tl.int32), mask=slot >= 0)
        absent = slot == ABSENT
        block = tl.load(ids + place, mask=absent, other=0)
        tl.store(out + place, tl.load(hot.slot_of + h * blocks + block, mask=absent, other=-1), mask=absent)


def launch(ids, pool, hot) -> Tensor:
    (requests, heads, n), (slots, p, _, d), blocks = ids.shape, hot.rows.shape[2:], hot.slot_of.shape[2]
    entries = requests * n
    size, parts = max(16, next_power_of_2(entries)), cdiv(entries, PART)
    padded = next_power_of_2(parts)
    out = torch.empty_like(ids)
    victims, missing, misses, missed, count = (ids.new_empty(heads * x) for x in (size, size, parts * PART, parts, 1))
    _find[(heads, parts)](
        ids, out, hot.slot_of, hot.used, misses, missed, heads, n, entries, slots, blocks, CLAIM=CLAIM, HIT=HIT,
        ABSENT=ABSENT, PART=PART, num_warps=4, **launch_early(ids.device, heads * parts),
    )  # fmt: skip
    _plan[(heads,)](
        ids, hot, victims, missing, count, misses, missed, parts, heads, n, slots, blocks, CLAIM=CLAIM, N=size,
        WINDOW=WINDOW, HIT=HIT, PART=PART, PARTS=padded, BITS=padded.bit_length() - 1, MISSES=min(MISSES, size),
        num_warps=8, **launch_early(ids.device, heads),
    )  # fmt: skip
    shares = max(1, 2 * sm_count(ids.device) // heads)
    _bring[(heads, shares)](
        pool, ids, out, hot, victims, missing, count, heads, n, entries, slots, blocks, N=size, P=p, D=d,
        ROW=next_power_of_2(row_width(d)), ROWS=ROWS, ABSENT=ABSENT, PART=PART,
        **launch_early(ids.device, heads * shares),
    )  # fmt: skip
    return out


def fake(ids, *_) -> Tensor:
    return torch.empty_like(ids)


fetch_shared = register("fetch_shared", reference, impls=(by_triton(launch),), fake=fake, check=check)
