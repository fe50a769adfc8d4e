"""Tokens that leave the ring into a page of the hot buffer are written there too, whichever slot holds the page."""

import pytest
import torch
from cases import OPS
from cases_packed import packed
from kernels import ENTRIES, on
from world import DEVICE, World

from torchsparsekv.ops.store.rows import as_numbers
from torchsparsekv.ops.store.views import HotBuffer


def all_pages_hot(w: World, hot: HotBuffer, pages: torch.Tensor, shift: int) -> HotBuffer:
    """A hot buffer that holds every page; page x is in slot (x + shift) % blocks."""
    lead, at = (w.batch, w.heads, w.blocks), torch.arange(w.blocks)
    slot_of, block_of = ((at + by) % w.blocks for by in (shift, -shift))
    return hot._replace(
        rows=pages[:, :, block_of].clone(), slot_of=slot_of.int().expand(lead).clone(),
        block_of=block_of.int().expand(lead).clone(), used=torch.zeros(lead, dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("name", ["insert_page", "share_step"])
def test_copy_in_every_slot_takes_the_tokens(name, kind, in_8_bits):
    """Of a pool in 8 bits it takes them as they were rounded."""
    written = 0
    for shift in range(World().blocks):  # every page is in slot 0 once
        w = World(lengths=[37])
        things, entry = OPS[name](w), ENTRIES[name]
        store, hot, *rest = packed(name, things) if in_8_bits else things
        before = store.pool.clone()
        hot = all_pages_hot(w, hot, as_numbers(before, hot.rows.dtype).unflatten(2, (-1, w.block)), shift)
        store, hot, *rest = on(DEVICE, (store, hot, *rest))
        if kind == "reference":
            entry.reference(store, hot, *rest)
        else:
            entry.run(kind, store, hot, *rest)
        pages = as_numbers(store.pool, hot.rows.dtype).unflatten(2, (-1, w.block))
        written += int((store.pool.cpu() != before).any(-1).any(-1).any())
        for page in range(w.blocks):
            slot = (page + shift) % w.blocks
            assert torch.equal(hot.rows[:, :, slot], pages[:, :, page]), f"page {page} in slot {slot} is stale"
    assert written == World().blocks  # else the test would say nothing
