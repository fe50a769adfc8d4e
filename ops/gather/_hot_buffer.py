"""Helpers of the ops that read or change the hot buffer."""
from torch import Tensor

from torchsparsekv.ops._machinery.triton import LANES, tl, triton

HIT = 2  # `used` of a slot that this call selects, while a kernel looks for slots


def check_blocks(pool: Tensor, rows: Tensor, slot_of: Tensor) -> None:
    """Refuse a hot buffer that does not cover exactly the blocks of this pool."""
    blocks, block_size = slot_of.shape[2], rows.shape[3]
    if pool.shape[2] != blocks * block_size:
        raise ValueError(f"{pool.shape[2]} pool rows are not {blocks} blocks of {block_size}")


def check_chosen(chosen: int) -> None:
    if chosen > LANES:  # a program plans for all selected blocks of a head
        raise ValueError(f"a step selects at most {LANES} blocks a kv head, got {chosen}")


@triton.jit
def find_victims(used, hand, slots, misses, victims, WINDOW: tl.constexpr, HIT: tl.constexpr):
    """Write to `victims` the slots that `misses` misses take, in the order of the hand (ops/gather/fetch.py). Returns
    how many slots the hand passes. `used` and `hand` are the pointers of one head.

    The hand goes round twice at most: in its first round it takes slots with `used` 0, in its second the slots that it
    spared in the first.
    """
    w = tl.arange(0, WINDOW)
    first, found, passed = 0, 0, 0
    start = tl.load(hand)
    while found < misses:
        step = first + w  # [WINDOW]
        slot = (start + step) % slots
        mark = tl.load(used + slot, mask=step < 2 * slots, other=HIT)
        taken = mark == (step >= slots).to(tl.int32)
        order = found + tl.cumsum(taken.to(tl.int32), 0) - 1
        taken = taken & (order < misses)
        tl.store(victims + order, slot, mask=taken)
        passed = tl.maximum(passed, tl.max(tl.where(taken, step + 1, 0), 0))
        found += tl.sum(taken.to(tl.int32), 0)
        first += WINDOW
    return passed


@triton.jit
def advance_hand(used, hand, slots, passed, WINDOW: tl.constexpr):
    """Move the hand past `passed` slots, whose `used` becomes 0; the caller sets `used` of hits afterwards."""
    w = tl.arange(0, WINDOW)
    start = tl.load(hand)
    end = tl.minimum(passed, slots)
    for first in range(0, end, WINDOW):
        step = first + w  # [WINDOW]
        tl.store(used + (start + step) % slots, tl.zeros((WINDOW,), tl.int32), mask=step < end)
    tl.debug_barrier()
    tl.store(hand, (start + passed) % slots)


@triton.jit
def empty_slot(slot_of, block_of, used, block, slot):
    """Take a block out of its slot. The pointers are those of one head."""
    tl.store(slot_of + block, -1)
    tl.store(block_of + slot, -1)
    tl.store(used + slot, 0)
