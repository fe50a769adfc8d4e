"""fetch for all requests of an engine at once: one hot buffer, in which blocks are by their id and kv head.

Several requests may ask for the same block: it is brought in once. Returned are the slots of what was asked for, -1
where nothing was. What is missing takes the slots that were not asked for longest, as in fetch; there must be a slot
for everything that is asked for at once.

Two kernels: one program a head finds what is missing and commits the plan, then many programs move the rows.
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

CLAIM = 1 << 30  # what is missing has in `slot_of`, until it has a slot, which of those who ask speaks for all
PER_WARP = 512  # slots or ids that a warp has at most, where there are as many warps as a program may have


def check(ids, pool, hot) -> None:
    check_one(pool)
    check_slots(hot.rows.shape[2])
    check_blocks(pool, hot.rows, hot.slot_of)
    if ids.shape[0] * ids.shape[2] > hot.rows.shape[2]:
        raise ValueError(f"{ids.shape[0]} x {ids.shape[2]} blocks do not fit a hot buffer of {hot.rows.shape[2]}")


def reference(ids: Listed, pool: Pool, hot: Changed[SharedHot]) -> Tensor:
    slots = torch.full_like(ids, -1)
    for h, pages in enumerate(pool[0].unflatten(1, (-1, hot.rows.shape[3]))):
        its = SharedHot(*(t[0, h] for t in hot))
        bring(list(dict.fromkeys(x for x in ids[:, h].flatten().tolist() if x >= 0)), pages, *its)
        slots[:, h] = torch.where(ids[:, h] >= 0, its.slot_of[ids[:, h].clamp(min=0).long()], -1)
    return slots


@triton.jit
def _plan(
    ids, out, slot_of, block_of, age, victims, missing, misses, heads, n, asked, slots, blocks, OLDEST: tl.constexpr,
    CLAIM: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of one head: where everything that is asked for will be. `victims` are the slots that are taken, `missing` the
    blocks that take them."""
    h = tl.program_id(0).to(tl.int64)
    e, s = tl.arange(0, N), tl.arange(0, C)
    slot_of, block_of, age = slot_of + h * blocks, block_of + h * slots, age + h * slots
    victims, missing = victims + h * C, missing + h * N
    at = (e // n * heads + h) * n + e % n
    want = tl.load(ids + at, mask=e < asked, other=-1)
    slot = tl.load(slot_of + want, mask=want >= 0, other=-1)
    have = tl.load(block_of + s, mask=s < slots, other=-1)
    old = tl.load(age + s, mask=s < slots, other=0)
    tl.debug_barrier()
    lost = (want >= 0) & (slot < 0)
    tl.atomic_min(slot_of + want, e - CLAIM, mask=lost)  # the first who asks
    tl.store(age + slot, tl.full((N,), -1, tl.int32), mask=slot >= 0)
    tl.debug_barrier()
    mine = lost & (tl.load(slot_of + want, mask=lost, other=0) == e - CLAIM)
    order, count = tl.cumsum(mine.to(tl.int32), 0) - 1, tl.sum(mine.to(tl.int32), 0)
    hit = tl.load(age + s, mask=s < slots, other=0) < 0
    rank = tl.where(have < 0, OLDEST, tl.minimum(old, OLDEST - 2) + 1)
    taken = take_top(tl.where(hit | (s >= slots), 0, rank).to(tl.uint32), count)
    tl.store(victims + tl.cumsum(taken.to(tl.int32), 0) - 1, s, mask=taken)
    tl.store(missing + order, want, mask=mine)
    tl.store(misses + h, count)
    tl.store(slot_of + have, tl.full((C,), -1, tl.int32), mask=taken & (have >= 0))
    tl.store(age + s, tl.where(hit | taken, 0, tl.minimum(old + 1, OLDEST)), mask=s < slots)
    tl.debug_barrier()
    new = tl.load(victims + order, mask=mine, other=0)
    tl.store(slot_of + want, new, mask=mine)
    tl.store(block_of + new, want, mask=mine)
    tl.debug_barrier()
    tl.store(out + at, tl.load(slot_of + want, mask=want >= 0, other=-1), mask=e < asked)


@triton.jit(do_not_specialize=["blocks"])  # a pool of one block would be a constant, which has no type
def _bring(
    pool, hot, victims, missing, misses, slots, blocks, N: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
    D: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0).to(tl.int64)
    pool, hot = row_at(pool, h, 0, blocks.to(tl.int64) * P, D), row_at(hot, h, 0, slots * P, D)
    part, parts = tl.program_id(1), tl.num_programs(1)
    move(pool, hot, victims + h * C, missing + h * N, tl.load(misses + h), part, parts, P, D, ROW, ROWS)


def launch(ids, pool, hot) -> Tensor:
    (count, heads, n), (slots, p, _, d), blocks = ids.shape, hot.rows.shape[2:], hot.slot_of.shape[2]
    wide_n, wide_c = max(16, next_power_of_2(count * n)), max(16, next_power_of_2(slots))
    out = torch.empty_like(ids)
    victims, missing, misses = (ids.new_empty((heads, size)) for size in (wide_c, wide_n, 1))
    _plan[(heads,)](
        ids, out, hot.slot_of, hot.block_of, hot.age, victims, missing, misses, heads, n, count * n, slots, blocks,
        OLDEST=OLDEST, CLAIM=CLAIM, N=wide_n, C=wide_c, num_warps=min(32, max(4, max(wide_n, wide_c) // PER_WARP)),
    )  # fmt: skip
    _bring[(heads, cdiv(2 * sm_count(ids.device), heads))](
        pool, hot.rows, victims, missing, misses, slots, blocks, N=wide_n, C=wide_c, P=p, D=d,
        ROW=next_power_of_2(row_width(d)), ROWS=ROWS,
    )  # fmt: skip
    return out


def fake(ids, *_) -> Tensor:
    return torch.empty_like(ids)


fetch_shared = register("fetch_shared", reference, impls=(by_triton(launch),), fake=fake, check=check)
