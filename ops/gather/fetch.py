"""Bring the selected blocks into the hot buffer: find those that are there, and copy the missing ones from the pool.

    hits    selected blocks that are in a slot: nothing is copied
    misses  each missing block takes the slot of a block that was not selected lately. A hand goes round the slots of
            the head. It skips the slots of hits and those that misses have taken. It spares a slot with `used` 1 and
            sets `used` to 0; it takes a slot with `used` 0. The misses take the slots in the order of the hand.
    used    1 for hits. A block that has just come has 0: the hand spares it once it is selected again.

This is the clock algorithm ("second chance"). Its cost follows the misses, whatever the number of slots. Without misses
the hand does not move.

A head with `retrieve_now` 0 keeps its previous selection: its slots do not change, and its blocks count as selected.
The pool may be in host memory: the kernel reads it in place.

Args:
    selection: ids [batch, heads, n], distinct within a head, -1 for none; retrieve_now [batch, heads] or None.
    pool [batch, heads, rows, 2, dim], or packed rows, which are unpacked on the way.
    hot: changed. `hot.chosen` becomes the slots of `ids`, -1 where an id is -1.
    stats: adds to the counters selected and missed.
    q, sums: not read. A compiler must compute both before this op, so that attention may read them early
        (ops/rest/views.py, `Rest.settled`).

Launches: one kernel, csrc/fetch.cu or Triton. Several programs share the misses of a head: each derives the same plan
from the state, copies its part, and the last one to finish (`hot.done_count` counts them) writes the new state. Triton
passes the plan through global memory, csrc/fetch.cu through shared memory. Without misses nothing is copied.
"""
import math

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
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
from torchsparsekv.ops.gather._hot_buffer import HIT, advance_hand, check_blocks, check_chosen, find_victims
from torchsparsekv.ops.rest.views import Sums
from torchsparsekv.ops.store.rows import (
    MISSED,
    PACKED,
    SELECTED,
    add_count,
    as_numbers,
    copy_rows,
    count,
    row_at,
    row_width,
)  # fmt: skip
from torchsparsekv.ops.store.views import HotBuffer, Pool, Query, Selection, Stats

ROWS = 16  # pool rows that a program copies at once: 8 KiB at head_dim 128
WINDOW = 512  # slots that the Triton kernel looks at together
# The shapes of csrc/fetch.cu; Triton takes the others. A program keeps its ids in registers (at most 8 per thread), and
# the plan in shared memory: 8 bytes an id and a bit a slot. On Hopper such a plan fits the share of L1 memory that all
# kernels have as shared memory (ops/_machinery/cuda.py). It moves 16 bytes at a time.
NATIVE_THREADS, NATIVE_IDS, NATIVE_PLAN, NATIVE_BYTES = (128, 512), 4096, 80 << 10, 16
HALVES = (torch.float16, torch.bfloat16)  # the types into which csrc/fetch.cu unpacks packed rows


def check(selection, pool, hot, stats, q=None, sums=None) -> None:
    ids = selection.ids
    if ids is None:
        raise ValueError("a selection without ids selects nothing to fetch")
    if ids.shape[-1] > hot.rows.shape[2]:
        raise ValueError(f"{ids.shape[-1]} blocks do not fit a hot buffer of {hot.rows.shape[2]}")
    check_chosen(ids.shape[-1])
    check_blocks(pool, hot.rows, hot.slot_of)


def reference(
    selection: Selection, pool: Pool, hot: Changed[HotBuffer], stats: Changed[Stats], q: Query | None = None,
    sums: Sums | None = None,
) -> None:  # fmt: skip
    ids, retrieve_now = selection[:2]
    assert ids is not None
    pages = pool.unflatten(2, (-1, hot.rows.shape[3]))
    for b in range(ids.shape[0]):
        for h in range(ids.shape[1]):
            if retrieve_now is not None and not retrieve_now[b, h]:
                count(stats.counts[b, h], selected=int((hot.chosen[b, h] >= 0).sum()))
                continue
            wanted = [int(x) for x in ids[b, h] if x >= 0]
            missing = bring(wanted, pages[b, h], *(t[b, h] for t in hot[:5]))
            count(stats.counts[b, h], selected=len(wanted), missed=missing)
            hot.chosen[b, h] = torch.where(ids[b, h] >= 0, hot.slot_of[b, h][ids[b, h].clamp(min=0).long()], -1)


def bring(
    wanted: list[int], pages: Tensor, rows: Tensor, slot_of: Tensor, block_of: Tensor, used: Tensor, hand: Tensor
) -> int:
    """Bring the wanted blocks of one head into its hot buffer. Returns the number of misses."""
    missing = [x for x in wanted if slot_of[x] < 0]
    hits = [int(slot_of[x]) for x in wanted if slot_of[x] >= 0]
    taken: list[int] = []
    skipped, at = set(hits), int(hand)
    while len(taken) < len(missing):
        if at not in skipped and not used[at]:
            taken.append(at)
            skipped.add(at)
        elif at not in skipped:
            used[at] = 0
        at = (at + 1) % len(used)
    used[hits] = 1
    hand.fill_(at)
    for x, i in zip(missing, taken):
        if block_of[i] >= 0:
            slot_of[block_of[i]] = -1
        block_of[i], slot_of[x] = x, i
    rows[taken] = as_numbers(pages[missing], rows.dtype)
    return len(missing)


@triton.jit
def _plan(ids, slot_of, used, hand, plan, n, slots, N: tl.constexpr, WINDOW: tl.constexpr, HIT: tl.constexpr):
    """Plan the fetch of a head: hits mark their slots, and misses take the next slots of the hand. All programs plan
    alike.

    Returns, per id [N]: the id, its slot, whether it is a miss; then the number of misses, and how many slots the hand
    passes. `plan` [2 N] is scratch of this program: the slots that are taken, and the blocks that take them.
    """
    j = tl.arange(0, N)
    want = tl.load(ids + j, mask=j < n, other=-1)  # [N]
    slot = tl.load(slot_of + want, mask=want >= 0, other=-1)
    miss = (want >= 0) & (slot < 0)
    order = tl.cumsum(miss.to(tl.int32), 0) - 1
    misses = tl.sum(miss.to(tl.int32), 0)
    if misses > 0:
        tl.store(used + slot, tl.full((N,), HIT, tl.int32), mask=slot >= 0)
    tl.store(plan + N + order, want, mask=miss)
    tl.debug_barrier()
    passed = find_victims(used, hand, slots, misses, plan, WINDOW, HIT)
    tl.debug_barrier()
    slot = tl.where(miss, tl.load(plan + order, mask=miss, other=-1), slot)
    return want, slot, miss, misses, passed


@triton.jit
def move(
    pool, hot, victims, missing, misses, part, parts, P: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Copy this program's share of the missing rows, ROWS at a time. `pool` and `hot` point to the rows of the head."""
    r = tl.arange(0, ROWS)
    for tile in range(part, tl.cdiv(misses * P, ROWS), parts):
        flat = tile * ROWS + r
        live = flat < misses * P
        source = tl.load(missing + flat // P, mask=live, other=0).to(tl.int64) * P + flat % P
        target = tl.load(victims + flat // P, mask=live, other=0).to(tl.int64) * P + flat % P
        copy_rows(row_at(pool, 0, source, 0, D), row_at(hot, 0, target, 0, D), live, D, ROW)


@triton.jit
def _commit(
    slot_of, block_of, used, hand, done_count, counts, bh, chosen, n, slots, want, slot, miss, misses, passed,
    N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Write the new state of the head, and its counters."""
    j = tl.arange(0, N)
    tl.store(chosen + j, slot, mask=j < n)
    old = tl.load(block_of + slot, mask=miss, other=-1)  # [N], the blocks that leave
    tl.store(slot_of + old, tl.full((N,), -1, tl.int32), mask=old >= 0)
    advance_hand(used, hand + bh, slots, passed, WINDOW)
    tl.debug_barrier()
    tl.store(used + slot, tl.full((N,), 1, tl.int32), mask=(slot >= 0) & (miss == 0))
    tl.store(slot_of + want, slot, mask=miss)
    tl.store(block_of + slot, want, mask=miss)
    add_count(counts, bh, SELECTED, tl.sum((want >= 0).to(tl.int32), 0))
    add_count(counts, bh, MISSED, misses)
    tl.store(done_count + bh, 0)


@triton.jit
def _fetch(
    retrieve_now, ids, pool, hot, slot_of, block_of, used, hand, done_count, counts, scratch, chosen, n, slots, blocks,
    ALL: tl.constexpr, N: tl.constexpr, P: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, HIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    now = True
    if not ALL:
        now = tl.load(retrieve_now + bh) != 0
    chosen += bh * n
    if now:
        ids, slot_of, block_of, used = ids + bh * n, slot_of + bh * blocks, block_of + bh * slots, used + bh * slots
        plan = scratch + (bh * parts + part) * 2 * N  # of this program alone
        want, slot, miss, misses, passed = _plan(ids, slot_of, used, hand + bh, plan, n, slots, N, WINDOW, HIT)
        pool, hot = row_at(pool, bh, 0, blocks * P, D), row_at(hot, bh, 0, slots * P, D)
        move(pool, hot, plan, plan + N, misses, part, parts, P, D, ROW, ROWS)
        tl.debug_barrier()
        if tl.atomic_add(done_count + bh, 1) == parts - 1:  # every program of this head has read the state
            _commit(
                slot_of, block_of, used, hand, done_count, counts, bh, chosen, n, slots, want, slot, miss, misses,
                passed, N, WINDOW,
            )  # fmt: skip
    elif part == 0:
        j = tl.arange(0, N)
        held = tl.load(chosen + j, mask=j < n, other=-1)
        add_count(counts, bh, SELECTED, tl.sum((held >= 0).to(tl.int32), 0))


def fits(selection, pool, hot, stats, q=None, sums=None) -> tuple[_cuda.Module, dict[str, int]] | str:
    ids = selection.ids
    shape = native(ids.shape[2], hot.rows, pool)
    if isinstance(shape, str):
        return shape
    if not _cuda.aligned(pool, hot.rows):
        return "rows are not aligned to 16 bytes"
    kernels = _cuda.load("fetch", ids.device, **shape)
    return kernels if isinstance(kernels, str) else (kernels, shape)


def native(n: int, rows: Tensor, pool: Tensor) -> dict[str, int] | str:
    """The constants with which csrc/fetch.cu is compiled for `n` ids, the slots of `rows` and this pool, or the reason
    why it cannot take them."""
    packed = pool.dtype is PACKED
    if packed and (rows.dtype not in HALVES or rows.shape[5] % NATIVE_BYTES):
        return f"packed rows become halves of multiples of {NATIVE_BYTES} channels, not {rows.shape[5]} of {rows.dtype}"
    slots, block = rows.shape[2], math.prod(rows.shape[3:]) * rows.element_size()
    if n > NATIVE_IDS:
        return f"{n} ids are more than {NATIVE_IDS}"
    if block % NATIVE_BYTES:
        return f"blocks of {block} bytes are not multiples of {NATIVE_BYTES}"
    least, most = NATIVE_THREADS
    threads = min(most, max(least, next_power_of_2(cdiv(n, 2))))  # 2 ids per thread before more warps
    each = cdiv(n, threads)
    if (plan := each * threads * 8 + _bit_bytes(slots)) > NATIVE_PLAN:
        return f"{n} ids and {slots} slots need {plan} bytes of shared memory, more than {NATIVE_PLAN}"
    return dict(
        THREADS=threads, IDS=each, QUADS=block // NATIVE_BYTES, UNPACK=rows.shape[5] * packed,
        BF16=int(packed and rows.dtype is torch.bfloat16),
    )


def _bit_bytes(slots: int) -> int:
    """Bytes of shared memory with a bit per slot, in whole 16 bytes."""
    return cdiv(slots, 128) * 16


def _grid(ids: Tensor, hot: HotBuffer, programs: int | None) -> tuple[int, int, int]:
    """The grid: programs per head, at most one per tile of misses. `programs` bounds their sum; None: one per SM."""
    batch, heads, n = ids.shape
    tiles = cdiv(n * hot.rows.shape[3], ROWS)
    return batch * heads, max(1, min(tiles, (programs or sm_count(ids.device)) // (batch * heads))), 1


def launch_cuda(fitting, selection, pool, hot, stats, q=None, sums=None, programs=None) -> None:
    """csrc/fetch.cu"""
    (kernels, shape), (ids, retrieve_now) = fitting, selection[:2]
    kernels.launch(
        "fetch", _grid(ids, hot, programs), shape["THREADS"], retrieve_now, ids, pool, *hot[:6], stats.counts,
        hot.chosen, ids.shape[2], hot.rows.shape[2], hot.slot_of.shape[2], shared=_bit_bytes(hot.rows.shape[2]),
    )  # fmt: skip


def launch_triton(selection, pool, hot, stats, q=None, sums=None, programs=None) -> None:
    ids, retrieve_now = selection[:2]
    slots, p, _, d = hot.rows.shape[2:]
    n, grid = ids.shape[2], _grid(ids, hot, programs)
    wide, programs = max(16, next_power_of_2(n)), grid[0] * grid[1]
    scratch = torch.empty(programs * 2 * wide, dtype=torch.int32, device=ids.device)
    _fetch[grid](
        ids if retrieve_now is None else retrieve_now, ids, pool, *hot[:6], stats.counts, scratch, hot.chosen, n,
        slots, hot.slot_of.shape[2], ALL=retrieve_now is None, N=wide, P=p, D=d, ROW=next_power_of_2(row_width(d)),
        ROWS=ROWS, WINDOW=WINDOW, HIT=HIT, num_warps=4 if wide <= 512 else 8,
        **launch_early(ids.device, programs),
    )  # fmt: skip


fetch = register(
    "fetch", reference, impls=(by_cuda(fits, launch_cuda), by_triton(launch_triton)), check=check
)
