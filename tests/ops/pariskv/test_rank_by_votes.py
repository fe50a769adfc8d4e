"""rank_by_votes over many chunks of keys equals the reference."""
import contextlib
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import NATIVE, in_blocks, on, until
from world import DEVICE

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.store.views import BlockTable

RANK = importlib.import_module("torchsparsekv.ops.pariskv.rank_by_votes")
ENTRY = load_all()["rank_by_votes"]


def ids_alone(ids: torch.Tensor) -> Codes:
    """Of keys of which the centroids are known; the rest is not looked at."""
    none = torch.empty(*ids.shape[:3], 0)
    return Codes(ids, none.to(torch.uint8), none.half(), none.int())


def arguments(rows: int, ends: list[int], packs: int, alike: bool, seed: int, spaces: int = 4) -> tuple:
    """`alike`: few kinds of keys, so that most scores are ties."""
    g = torch.Generator().manual_seed(seed)
    heads, sink = 2, 3
    votes = torch.randint(0, 7, (len(ends), heads, packs, 256, spaces, 4), generator=g, dtype=torch.uint8)
    ids = torch.randint(0, 256, (len(ends), heads, rows, spaces), generator=g, dtype=torch.uint8)
    if alike:
        ids = ids[:, :, torch.randint(0, 3, (rows,), generator=g)].contiguous()
    ratios = [50, 500_000, 500_000, 200, 250_000, 300_000, 300, 200_000, 250_000, 100_000, 700_000]
    least, dense = 7, 20
    capacity = RANK.candidate_capacity(rows, ratios, least, dense)
    return votes, ids_alone(ids), until(ends, sink), ratios, least, dense, capacity


@contextlib.contextmanager
def patched(**values):
    """The module with other sizes, and with buffers that held something before."""
    empty = RANK._buffers
    with pytest.MonkeyPatch.context() as m:
        m.setattr(RANK, "_buffers", lambda *args: tuple(t.fill_(90) for t in empty(*args)))
        for name, value in values.items():
            m.setattr(RANK, name, value)
        yield


@pytest.mark.parametrize(("resident", "chunk"), [(1, 64), (64, 64), (64, 16)])
@given(
    rows=st.sampled_from([64, 65, 200, 333, 640]), share=st.tuples(*[st.floats(0, 1)] * 2),
    packs=st.integers(1, 2), alike=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_kernel_equals_reference_over_many_chunks(resident, chunk, rows, share, packs, alike, seed):
    """A program with all chunks of a head, and one for each, up to forty: more than are added up at a time."""
    things = arguments(rows, [round(x * rows) for x in share], packs, alike, seed)
    with patched(CHUNK=chunk, RESIDENT=resident):
        got = ENTRY.run("triton", *on(DEVICE, things))
    assert torch.equal(got.cpu(), ENTRY.reference(*things))


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [1, 64])
@pytest.mark.parametrize("spaces", [8, 16, 32])
@given(
    rows=st.sampled_from([64, 65, 511, 2049, 9001, 20_000]), share=st.tuples(*[st.floats(0, 1)] * 2),
    packs=st.integers(1, 4), alike=st.booleans(), seed=st.integers(0, 99), block_size=st.sampled_from([0, 16, 48]),
)  # fmt: skip
def test_cuda_kernel_equals_reference(resident, spaces, rows, share, packs, alike, seed, block_size):
    """csrc/rank_by_votes.cu, and Triton's kernels at the same shapes."""
    things = arguments(rows, [round(x * rows) for x in share], packs, alike, seed, spaces)
    alone = ENTRY.reference(*things)
    codes, table = in_blocks(things[1], block_size, torch.Generator().manual_seed(seed))
    rows = rows if table.ids is None else table.ids.shape[1] * block_size
    capacity = RANK.candidate_capacity(rows, *things[3:6])
    things = (things[0], codes, *things[2:6], capacity, table)
    there = on(DEVICE, things)
    kind, reasons = ENTRY.chain.chosen(*there)
    assert (kind, list(reasons)) == (("cuda", []) if packs <= RANK.NATIVE_PACKS else ("triton", ["cuda"]))
    expected = ENTRY.reference(*things)
    assert torch.equal(expected[..., : alone.shape[2]], alone)
    for step, one in {(RANK.NATIVE_STEP, kind), (RANK.NATIVE_HALF_STEP, kind), (RANK.NATIVE_STEP, "triton")}:
        parts = min(resident, -(-rows // step))
        always = dict(native_parts=lambda *_, x=parts: x, native_step=lambda *_, x=step: x)
        with patched(RESIDENT=resident, **always):
            assert torch.equal(ENTRY.run(one, *there).cpu(), expected), (one, step)


def test_cuda_kernels_of_half_the_threads_equal_the_reference_on_a_cpu(emulated):
    things = arguments(2049, [2049, 700], 1, False, 0, 16)
    with patched(native_step=lambda *_: RANK.NATIVE_HALF_STEP):
        assert torch.equal(ENTRY.run("cuda", *things), ENTRY.reference(*things))


@pytest.mark.parametrize(("spaces", "packs"), [(4, 1), (16, 4)])
def test_triton_runs_what_the_cuda_kernel_does_not_support(spaces, packs):
    reason = f"{spaces} subspaces of 256 centroids, {packs} entries of query heads"
    shape = lambda packs, spaces: on(DEVICE, arguments(64, [64, 9], packs, False, 0, spaces))  # noqa: E731
    assert ENTRY.chain.chosen(*shape(packs, spaces)) == ("triton", {"cuda": reason})
    assert ENTRY.chain.chosen(*shape(RANK.NATIVE_PACKS, 16)) == NATIVE


@pytest.mark.parametrize("multiprocessors", [16, 60, 132])
@pytest.mark.parametrize("heads", [1, 2, 8, 24, 40, 72, 128, 136, 1000])
@pytest.mark.parametrize("rows", [1000, 8192, 131_072, 524_288])
def test_cuda_programs_fill_the_multiprocessors(heads, rows, multiprocessors):
    step = RANK.native_step(heads, multiprocessors, 16, 1)
    parts = RANK.native_parts(heads, rows, multiprocessors, step)
    at_once = multiprocessors * RANK.NATIVE_STEP // step
    rounds = -(-heads * parts // at_once)
    assert 1 <= parts <= max(1, min(-(-rows // step), multiprocessors))
    if rows >= 131_072:
        assert heads * parts > 0.85 * at_once * rounds


def test_number_of_cuda_programs_at_the_usual_shape():
    assert [RANK.native_parts(8, rows, 132) for rows in (1000, 4096, 131_072, 524_288)] == [1, 4, 16, 16]
    assert [RANK.native_step(*shape) for shape in ((132, 132, 16, 1), (133, 132, 16, 1))] == [1024, 512]
    assert [RANK.native_step(456, 132, *shape) for shape in ((32, 1), (16, 2))] == [1024, 1024]


@pytest.mark.parametrize("kind", [pytest.param("cuda", marks=pytest.mark.gpu), "triton"])
def test_rows_without_retrievable_keys_do_not_read_their_blocks(kind):
    """An engine pads a batch with such rows, and their blocks may be any numbers."""
    votes, codes, _, *numbers, _ = arguments(64, [0, 3], 1, False, 0, 16)
    codes, _ = in_blocks(codes, 16, torch.Generator().manual_seed(0))
    table = BlockTable(torch.full((2, 1), -(2**20), dtype=torch.int32), 16)
    capacity = RANK.candidate_capacity(16, *numbers)
    got = ENTRY.run(kind, *on(DEVICE, (votes, codes, until([3, 3], 3), *numbers, capacity, table)))
    assert bool((got == -1).all())
