"""Blocks of the pool were changed after they may have been fetched: the hot buffer must not serve the old copy.

`ids` [batch, kv_heads, n] names the blocks that were changed, -1 for none. With `write_through` the slots that hold one
of them are filled from the pool again and stay; without, they are emptied, and the block is fetched when it is chosen
again. Until then it is not attended to either: it is taken out of what was chosen last.
"""
from typing import Annotated

from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops._machinery.triton import chain, chained, next_power_of_2, tl, triton
from torchsparsekv.ops.store.rows import as_numbers, copy_rows, row_at, row_width
from torchsparsekv.ops.store.views import I32, Far, Hot, SharedHot

Blocks = Annotated[Tensor, Of("batch heads changed", I32)]
ROWS = 16  # of a block, copied at a time


def check(ids, far, hot, write_through) -> None:
    check_blocks(far.rows, hot)


def check_blocks(pool: Tensor, hot: Hot | SharedHot) -> None:
    """The pool is made of the blocks that the hot buffer knows."""
    blocks, block_size = hot.slot_of.shape[2], hot.rows.shape[3]
    if pool.shape[2] != blocks * block_size:
        raise ValueError(f"{pool.shape[2]} pool rows are not {blocks} blocks of {block_size}")


def reference(ids: Blocks, far: Far, hot: Changed[Hot], write_through: bool) -> None:
    pages = far.rows.unflatten(2, (-1, hot.rows.shape[3]))
    for b, h, i in (ids >= 0).nonzero().tolist():
        block = int(ids[b, h, i])
        slot = int(hot.slot_of[b, h, block])
        if slot < 0:
            continue
        if write_through:
            hot.rows[b, h, slot] = as_numbers(pages[b, h, block], hot.rows.dtype)
        else:
            hot.slot_of[b, h, block], hot.block_of[b, h, slot] = -1, -1
            hot.chosen[b, h].masked_fill_(hot.chosen[b, h] == slot, -1)


@triton.jit
def empty_slot(slot_of, block_of, block, slot):
    """Of one head: the slot no longer holds the block."""
    tl.store(slot_of + block, -1)
    tl.store(block_of + slot, -1)


@triton.jit
def _forget(
    ids, pool, hot, slot_of, block_of, chosen, n, slots, blocks, candidates, WRITE_THROUGH: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One id of a head. A block that is named twice is treated twice alike."""
    chain(PDL)
    bh, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tl.load(ids + bh * n + i)
    slot = tl.load(slot_of + bh * blocks + tl.maximum(block, 0))
    if (block >= 0) & (slot >= 0):
        if WRITE_THROUGH:
            r = tl.arange(0, ROWS)
            for first in range(0, P, ROWS):
                source = row_at(pool, bh, block.to(tl.int64) * P + first + r, blocks * P, D)
                target = row_at(hot, bh, slot.to(tl.int64) * P + first + r, slots * P, D)
                copy_rows(source, target, first + r < P, D, ROW)
        else:
            empty_slot(slot_of + bh * blocks, block_of + bh * slots, block, slot)
            j = tl.arange(0, N)
            held = tl.load(chosen + bh * candidates + j, mask=j < candidates, other=-1)
            tl.store(chosen + bh * candidates + j, tl.full((N,), -1, tl.int32), mask=held == slot)


def launch(ids, far, hot, write_through) -> None:
    batch, heads, n = ids.shape
    p, d = hot.rows.shape[3], hot.rows.shape[5]
    _forget[(batch * heads, n)](
        ids, far.rows, hot.rows, hot.slot_of, hot.block_of, hot.chosen, n, hot.rows.shape[2], hot.slot_of.shape[2],
        hot.chosen.shape[2], WRITE_THROUGH=write_through, P=p, D=d, ROW=next_power_of_2(row_width(d)),
        ROWS=min(ROWS, p), N=next_power_of_2(hot.chosen.shape[2]),
        **chained(ids.device, batch * heads * n),
    )  # fmt: skip


forget = register("forget", reference, impls=(by_triton(launch),), check=check)
