"""Bring the listed blocks of all requests into one hot buffer, where blocks are by their id and kv head.

A block that several requests list is brought once. Missing blocks take empty slots first, then the slots that were not
listed for the longest time, as in fetch; there must be a slot for every block that is listed at once.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, sm_count, tl, triton
from torchsparsekv.ops.engine.tables import check_one
from torchsparsekv.ops.engine.views import Listed, SharedHot
from torchsparsekv.ops.gather._hot_buffer import check_blocks
from torchsparsekv.ops.gather.fetch import OLDEST, ROWS, bring, check_slots, move
from torchsparsekv.ops.select._top import take_top
from torchsparsekv.ops.store.rows import row_at, row_width
from torchsparsekv.ops.store.views import Pool

CLAIM = 1 << 30  # a missing block has in `slot_of`, until it gets a slot, the list entry that claims it less CLAIM
PER_WARP = 512  # slots or list entries of a warp at most, while a program may have more warps


def check(ids, pool, hot) -> None:
    check_one(pool)
    check_slots(hot.rows.shape[2])
    check_blocks(pool, hot.rows, hot.slot_of)
    if ids.shape[0] * ids.shape[2] > hot.rows.shape[2]:
        raise ValueError(f"{ids.shape[0]} x {ids.shape[2]} blocks do not fit a hot buffer of {hot.rows.shape[2]}")


def reference(ids: Listed, pool: Pool, hot: Changed[SharedHot]) -> Tensor:
    """Bring the listed blocks of all requests into one hot buffer, where blocks are by their id and kv head.

    Args:
        ids: ids of blocks [requests, heads, listed], -1 for none.
        pool: [1, heads, rows, 2, dim], may be host memory.
        hot: the hot buffer; slots, ages and rows change.

    Returns:
        the slot of each listed block [requests, heads, listed], -1 for none.

    Launches:
        Two kernels. _plan, one program a head: finds the missing blocks, picks a slot for each, and writes the tables
        of the hot buffer. _bring, heads x parts programs: copies the rows of the missing blocks, if there are any.
    """
    slots = torch.full_like(ids, -1)
    for h, pages in enumerate(pool[0].unflatten(1, (-1, hot.rows.shape[3]))):
        hot_of_head = SharedHot(*(t[0, h] for t in hot))
        bring(list(dict.fromkeys(x for x in ids[:, h].flatten().tolist() if x >= 0)), pages, *hot_of_head)
        slots[:, h] = torch.where(ids[:, h] >= 0, hot_of_head.slot_of[ids[:, h].clamp(min=0).long()], -1)
    return slots


@triton.jit
def _plan(
    ids, out, hot, victims, missing, misses, heads, n, entries, slots, blocks, OLDEST: tl.constexpr,
    CLAIM: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Where every listed block of a head will be, into `out`. `victims` [C] are the slots that change their block,
    `missing` [N] the blocks that take them, `misses` how many."""
    h = tl.program_id(0).to(tl.int64)
    e, s = tl.arange(0, N), tl.arange(0, C)  # entries of the lists, slots
    slot_of, block_of, age = hot.slot_of + h * blocks, hot.block_of + h * slots, hot.age + h * slots
    victims, missing = victims + h * C, missing + h * N
    place = (e // n * heads + h) * n + e % n
    block = tl.load(ids + place, mask=e < entries, other=-1)  # [N]
    slot = tl.load(slot_of + block, mask=block >= 0, other=-1)
    held = tl.load(block_of + s, mask=s < slots, other=-1)  # [C]
    old = tl.load(age + s, mask=s < slots, other=0)
    tl.debug_barrier()
    miss = (block >= 0) & (slot < 0)
    tl.atomic_min(slot_of + block, e - CLAIM, mask=miss)  # the first entry with this block claims it
    tl.store(age + slot, tl.full((N,), -1, tl.int32), mask=slot >= 0)
    tl.debug_barrier()
    claimed = miss & (tl.load(slot_of + block, mask=miss, other=0) == e - CLAIM)
    order, count = tl.cumsum(claimed.to(tl.int32), 0) - 1, tl.sum(claimed.to(tl.int32), 0)
    hit = tl.load(age + s, mask=s < slots, other=0) < 0
    rank = tl.where(held < 0, OLDEST, tl.minimum(old, OLDEST - 2) + 1)
    taken = take_top(tl.where(hit | (s >= slots), 0, rank).to(tl.uint32), count)
    tl.store(victims + tl.cumsum(taken.to(tl.int32), 0) - 1, s, mask=taken)
    tl.store(missing + order, block, mask=claimed)
    tl.store(misses + h, count)
    tl.store(slot_of + held, tl.full((C,), -1, tl.int32), mask=taken & (held >= 0))
    tl.store(age + s, tl.where(hit | taken, 0, tl.minimum(old + 1, OLDEST)), mask=s < slots)
    tl.debug_barrier()
    new = tl.load(victims + order, mask=claimed, other=0)
    tl.store(slot_of + block, new, mask=claimed)
    tl.store(block_of + new, block, mask=claimed)
    tl.debug_barrier()
    tl.store(out + place, tl.load(slot_of + block, mask=block >= 0, other=-1), mask=e < entries)


@triton.jit(do_not_specialize=["blocks"])  # with a pool of one block, `blocks` would be a constant without a type
def _bring(
    pool, hot, victims, missing, misses, slots, blocks, N: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
    D: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The share of one program of the rows of the missing blocks of a head."""
    h = tl.program_id(0).to(tl.int64)
    pool, hot = row_at(pool, h, 0, blocks.to(tl.int64) * P, D), row_at(hot, h, 0, slots * P, D)
    part, parts = tl.program_id(1), tl.num_programs(1)
    move(pool, hot, victims + h * C, missing + h * N, tl.load(misses + h), part, parts, P, D, ROW, ROWS)


def launch(ids, pool, hot) -> Tensor:
    (requests, heads, n), (slots, p, _, d), blocks = ids.shape, hot.rows.shape[2:], hot.slot_of.shape[2]
    padded_n, padded_slots = max(16, next_power_of_2(requests * n)), max(16, next_power_of_2(slots))
    out = torch.empty_like(ids)
    victims, missing, misses = (ids.new_empty((heads, size)) for size in (padded_slots, padded_n, 1))
    _plan[(heads,)](
        ids, out, hot, victims, missing, misses, heads, n, requests * n, slots, blocks, OLDEST=OLDEST, CLAIM=CLAIM,
        N=padded_n, C=padded_slots, num_warps=min(32, max(4, max(padded_n, padded_slots) // PER_WARP)),
    )  # fmt: skip
    _bring[(heads, cdiv(2 * sm_count(ids.device), heads))](
        pool, hot.rows, victims, missing, misses, slots, blocks, N=padded_n, C=padded_slots, P=p, D=d,
        ROW=next_power_of_2(row_width(d)), ROWS=ROWS,
    )  # fmt: skip
    return out


def fake(ids, *_) -> Tensor:
    return torch.empty_like(ids)


fetch_shared = register("fetch_shared", reference, impls=(by_triton(launch),), fake=fake, check=check)
