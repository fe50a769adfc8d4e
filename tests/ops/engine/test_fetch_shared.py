"""fetch_shared over lists of many parts, and where no block is missing."""
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import on
from world import DEVICE

from torchsparsekv.ops._machinery.chain import mapped
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.engine.views import SharedHot

FETCH = importlib.import_module("torchsparsekv.ops.engine.fetch_shared")
ENTRY = load_all()["fetch_shared"]
HEADS, DIM, I32 = 2, 4, torch.int32


def arguments(requests: int, listed: int, blocks: int, held: int, seed: int) -> tuple:
    """A hot buffer that has the first `held` blocks, and room for all."""
    g = torch.Generator().manual_seed(seed)
    pool = torch.randn(1, HEADS, 2 * blocks, 2, DIM, generator=g)
    ids = torch.randint(-1, blocks, (requests, HEADS, listed), generator=g, dtype=I32)
    slots = blocks + requests * listed
    rows = torch.zeros(1, HEADS, slots, 2, 2, DIM)
    block_of, slot_of = torch.full((1, HEADS, slots), -1, dtype=I32), torch.full((1, HEADS, blocks), -1, dtype=I32)
    rows[:, :, :held] = pool.unflatten(2, (blocks, 2))[:, :, :held]
    block_of[..., :held] = slot_of[..., :held] = torch.arange(held, dtype=I32)
    used = torch.zeros(1, HEADS, slots, dtype=I32)
    return ids, pool, SharedHot(rows, slot_of, block_of, used, torch.zeros(1, HEADS, dtype=I32))


def both(things: tuple) -> tuple[SharedHot, SharedHot]:
    """The hot buffer after the reference, and after the kernels, which chose the same slots."""
    there = on(DEVICE, mapped(things, torch.clone))
    want, got = ENTRY.reference(*things), ENTRY.run("triton", *there)
    assert torch.equal(got.cpu(), want)
    return things[2], there[2]


@pytest.mark.parametrize("part", [16, 64])
@given(
    requests=st.integers(1, 4), listed=st.integers(1, 60), held=st.integers(0, 40), seed=st.integers(0, 99),
)  # fmt: skip
def test_lists_of_several_parts_equal_the_reference(part, requests, listed, held, seed):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(FETCH, "PART", part)
        m.setattr(FETCH, "MISSES", 16)
        want, got = both(arguments(requests, listed, 40, held, seed))
    for name, x, y in zip(SharedHot._fields, want, got, strict=True):
        assert torch.equal(y.cpu(), x), name


def test_more_misses_than_a_pass_takes_all_get_slots():
    want, got = both(arguments(4, 400, 1300, 10, 0))
    assert int((want.block_of >= 0).sum()) > 2 * FETCH.MISSES
    for name, x, y in zip(SharedHot._fields, want, got, strict=True):
        assert torch.equal(y.cpu(), x), name


def test_blocks_that_are_all_there_are_marked_as_used():
    want, got = both(things := arguments(2, 30, 40, 40, 0))
    assert torch.equal(got.used.cpu(), want.used)
    named = things[0][things[0] >= 0].numel()
    assert 0 < int(want.used.sum()) <= named
