"""Bring the listed blocks of all requests into one hot buffer, which has them by their id and kv head.

A block that several requests list is brought once. Missing blocks take slots in the order of the hand, as in fetch.
There must be a slot for every block that is listed at once.
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
PER_WARP = 512  # list entries of a warp; more only where a program has 32 warps
PART = 512  # list entries of a program of `_find`


def check(ids, pool, hot) -> None:
    check_one(pool)
    check_chosen(ids.shape[0] * ids.shape[2])
    check_blocks(pool, hot.rows, hot.slot_of)
    if ids.shape[0] * ids.shape[2] > hot.rows.shape[2]:
        raise ValueError(f"{ids.shape[0]} x {ids.shape[2]} blocks do not fit a hot buffer of {hot.rows.shape[2]}")


def reference(ids: Listed, pool: Pool, hot: Changed[SharedHot]) -> Tensor:
    """Bring the listed blocks of all requests into one hot buffer, which has them by their id and kv head.

    Args:
        ids: ids of blocks [requests, heads, listed], -1 for none.
        pool: [1, heads, rows, 2, dim], may be host memory.
        hot: changed.

    Returns:
        the slot of each listed block [requests, heads, listed], -1 for none.

    Launches:
        Three kernels. If no block is missing, only the first has work.
        _find, heads x listed blocks / PART programs: the slots of the blocks that are there.
        _plan, one program a head: picks a slot for each missing block, and writes the tables of the hot buffer.
        _bring, heads x parts programs: copies the rows of the missing blocks.
    """
    slots = torch.full_like(ids, -1)
    for h, pages in enumerate(pool[0].unflatten(1, (-1, hot.rows.shape[3]))):
        hot_of_head = SharedHot(*(t[0, h] for t in hot))
        bring(list(dict.fromkeys(x for x in ids[:, h].flatten().tolist() if x >= 0)), pages, *hot_of_head)
        slots[:, h] = torch.where(ids[:, h] >= 0, hot_of_head.slot_of[ids[:, h].clamp(min=0).long()], -1)
    return slots


@triton.jit
def _listed(ids, e, h, heads, n, entries):
    """The place of list entries `e` of a head in `ids` [requests, heads, n], and their blocks."""
    place = (e // n * heads + h) * n + e % n
    return place, tl.load(ids + place, mask=e < entries, other=-1)


@triton.jit
def _find(
    ids, out, slot_of, used, missed, heads, n, entries, slots, blocks, CLAIM: tl.constexpr, PART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the slots of a part of a head's list to `out`. A missing block is claimed by its first entry. `missed` gets
    the number of entries whose block is missing."""
    wait_for_previous(PDL)
    h, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = part * PART + tl.arange(0, PART)
    place, block = _listed(ids, e, h, heads, n, entries)
    slot_of += h * blocks
    slot = tl.load(slot_of + block, mask=block >= 0, other=-1)  # below 0 also where another entry has claimed it
    miss = (block >= 0) & (slot < 0)
    tl.atomic_min(slot_of + block, e - CLAIM, mask=miss)
    tl.store(used + h * slots + slot, tl.full((PART,), 1, tl.int32), mask=slot >= 0)
    tl.store(out + place, tl.maximum(slot, -1), mask=e < entries)
    tl.store(missed + h * tl.num_programs(1) + part, tl.sum(miss.to(tl.int32), 0))


@triton.jit
def _plan(
    ids, out, hot, victims, missing, misses, missed, parts, heads, n, entries, slots, blocks, CLAIM: tl.constexpr,
    N: tl.constexpr, WINDOW: tl.constexpr, HIT: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the slots of missing blocks to `out`. `victims` [N] gets the slots that change their block, `missing` [N]
    the blocks that take these slots, `misses` their number."""
    wait_for_previous(PDL)
    h, p = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    if tl.sum(tl.load(missed + h * parts + p, mask=p < parts, other=0), 0) == 0:
        tl.store(misses + h, 0)
    else:
        e = tl.arange(0, N)
        slot_of, block_of, used = hot.slot_of + h * blocks, hot.block_of + h * slots, hot.used + h * slots
        victims, missing = victims + h * N, missing + h * N
        place, block = _listed(ids, e, h, heads, n, entries)  # [N]
        slot = tl.load(slot_of + block, mask=block >= 0, other=-1)
        claimed = (block >= 0) & (slot == e - CLAIM)
        order, count = tl.cumsum(claimed.to(tl.int32), 0) - 1, tl.sum(claimed.to(tl.int32), 0)
        tl.store(used + slot, tl.full((N,), HIT, tl.int32), mask=slot >= 0)
        tl.store(missing + order, block, mask=claimed)
        tl.store(misses + h, count)
        tl.debug_barrier()
        passed = find_victims(used, hot.hand + h, slots, count, victims, WINDOW, HIT)
        tl.debug_barrier()
        new = tl.load(victims + order, mask=claimed, other=0)
        old = tl.load(block_of + new, mask=claimed, other=-1)  # [N], the blocks that leave
        tl.store(slot_of + old, tl.full((N,), -1, tl.int32), mask=old >= 0)
        advance_hand(used, hot.hand + h, slots, passed, WINDOW)
        tl.debug_barrier()
        tl.store(used + slot, tl.full((N,), 1, tl.int32), mask=slot >= 0)
        tl.store(slot_of + block, new, mask=claimed)
        tl.store(block_of + new, block, mask=claimed)
        tl.debug_barrier()
        tl.store(out + place, tl.load(slot_of + block, mask=block >= 0, other=-1), mask=e < entries)


@triton.jit(do_not_specialize=["blocks"])  # with a pool of one block, `blocks` would be a constant without a type
def _bring(
    pool, hot, victims, missing, misses, slots, blocks, N: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    ROW: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy this program's share of the rows of the missing blocks of a head."""
    wait_for_previous(PDL)
    h = tl.program_id(0).to(tl.int64)
    pool, hot = row_at(pool, h, 0, blocks.to(tl.int64) * P, D), row_at(hot, h, 0, slots * P, D)
    part, parts = tl.program_id(1), tl.num_programs(1)
    move(pool, hot, victims + h * N, missing + h * N, tl.load(misses + h), part, parts, P, D, ROW, ROWS)


def launch(ids, pool, hot) -> Tensor:
    (requests, heads, n), (slots, p, _, d), blocks = ids.shape, hot.rows.shape[2:], hot.slot_of.shape[2]
    entries = requests * n
    padded, parts = max(16, next_power_of_2(entries)), cdiv(entries, PART)
    out = torch.empty_like(ids)
    victims, missing, misses, missed = (ids.new_empty((heads, size)) for size in (padded, padded, 1, parts))
    _find[(heads, parts)](
        ids, out, hot.slot_of, hot.used, missed, heads, n, entries, slots, blocks, CLAIM=CLAIM, PART=PART, num_warps=4,
        **launch_early(ids.device, heads * parts),
    )  # fmt: skip
    _plan[(heads,)](
        ids, out, hot, victims, missing, misses, missed, parts, heads, n, entries, slots, blocks, CLAIM=CLAIM,
        N=padded, WINDOW=WINDOW, HIT=HIT, PARTS=next_power_of_2(parts), num_warps=min(32, max(4, padded // PER_WARP)),
        **launch_early(ids.device, heads),
    )  # fmt: skip
    parts = cdiv(2 * sm_count(ids.device), heads)
    _bring[(heads, parts)](
        pool, hot.rows, victims, missing, misses, slots, blocks, N=padded, P=p, D=d,
        ROW=next_power_of_2(row_width(d)), ROWS=ROWS, **launch_early(ids.device, heads * parts),
    )  # fmt: skip
    return out


def fake(ids, *_) -> Tensor:
    return torch.empty_like(ids)


fetch_shared = register("fetch_shared", reference, impls=(by_triton(launch),), fake=fake, check=check)
