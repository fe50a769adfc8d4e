"""Ops work at 2M tokens: offsets above 2^31, and the limits of CUDA and Triton on grids."""
import importlib
import os

import pytest
import torch
from cases import OPS
from layer import Layer
from world import DEVICE, World

from torchsparsekv._methods import icecache
from torchsparsekv.method import make_method
from torchsparsekv.ops._machinery.chain import mapped
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.clusters._kmeans import Kmeans
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.icecache._tree import levels_of
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.store.views import HotBuffer, KVStore, Leaving, Lengths, Observed, Selection, Stats, Token
from torchsparsekv.state import Geometry

ENTRIES = load_all()
WRAP = 1 << 32  # an offset of 32 bits that overflows is less by this: there is room for it, so that a test can fail


@pytest.fixture
def huge(tmp_path):
    """Zeros of any shape, on the CPU, that take memory only where something is written."""
    if DEVICE.type != "cpu":
        pytest.skip("a file is mapped for the interpreter")

    def zeros(*shape: int) -> torch.Tensor:
        count, file = WRAP + torch.Size(shape).numel(), tmp_path / "zeros"
        try:
            file.touch()
            os.truncate(file, 2 * count)
            if file.stat().st_blocks:
                pytest.skip("this file system has no sparse files")
            return torch.from_file(str(file), shared=True, size=count, dtype=torch.float16)[WRAP:].view(shape)
        except (OSError, RuntimeError) as e:
            pytest.skip(f"no room for a sparse file: {e}")

    return zeros


@pytest.mark.parametrize("heads_last", [True, False])
def test_observe_of_a_huge_prompt(huge, heads_last):
    tokens, heads, dim, window = (1 << 19) + (1 << 15), 32, 128, 2
    q = huge(1, tokens, heads, dim).transpose(1, 2) if heads_last else huge(1, heads, tokens, dim)
    q[:, :, -window:] = torch.randn(1, heads, window, dim)
    times = (torch.tensor([n], dtype=torch.int32) for n in (0, tokens, 0, tokens - window))
    observed, at = Observed(torch.zeros(1, window, heads, dim).half()), torch.zeros(1, heads, dtype=torch.int32)
    ENTRIES["observe"].run("triton", q, observed, at, Lengths(*times, 0, 1))
    kept = observed.queries.roll(-(tokens % window), 1)
    torch.testing.assert_close(kept.transpose(1, 2), q[:, :, -window:], rtol=0, atol=0)


def test_append_and_fetch_of_a_huge_pool(huge):
    """Tokens leave the ring for the last rows of a pool, and come back to the hot buffer."""
    heads, rows, dim, block = 16, (1 << 18) + 64, 256, 16
    k, ring, i32 = torch.randn(1, heads, 1, dim).half(), torch.randn(1, heads, 64, 2, dim).half(), torch.int32
    store, stats = KVStore(ring, huge(1, heads, rows, 2, dim)), Stats(torch.zeros(1, heads, 5, dtype=torch.int64))
    times = (torch.tensor([n], dtype=i32) for n in (rows - 1, rows, rows - 2 * block, rows - block))
    ENTRIES["append"].run("triton", Token(k, k), store, stats, Lengths(*times, 0, block))
    last = torch.full((1, heads, 1), rows // block - 2, dtype=i32)
    places, slots = torch.full((1, heads, rows // block), -1, dtype=i32), torch.full((1, heads, 2), -1, dtype=i32)
    hot = torch.zeros(1, heads, 2, block, 2, dim).half()
    none = torch.zeros(1, heads, dtype=i32)
    view = HotBuffer(hot, places, slots, torch.zeros_like(slots), none, none.clone(), last.clone())
    ENTRIES["fetch"].run("triton", Selection(last), store.pool, view, stats)
    torch.testing.assert_close(hot[:, :, 0], ring[:, :, (torch.arange(block) + rows - 2 * block) % 64], rtol=0, atol=0)


class Recorded:
    """In place of a kernel: the grid that it is launched on."""

    def __getitem__(self, grid):
        self.grid = grid
        return lambda *_, **__: None


TOKENS = 1 << 21
LEAD = (1, 8, TOKENS)


def like(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Of that shape, in the memory of its last dimension."""
    return torch.zeros(shape[-1], dtype=dtype, device=DEVICE).expand(shape)


def halves(*shape: int) -> torch.Tensor:
    return like(torch.float16, *shape)


def taken_in(*what) -> tuple:
    """A prompt of as many tokens as the pool has rows, into `what`."""
    return Leaving(halves(*LEAD, 128), halves(*LEAD, 2, 128)), *what, times()


def times() -> Lengths:
    return Lengths(*(like(torch.int32, 1) for _ in range(4)), 64, 128)


def codes() -> Codes:
    u8 = torch.uint8
    return Codes(like(u8, *LEAD, 16), like(u8, *LEAD, 64), halves(*LEAD, 16), like(torch.int32, 1, 8, 16, 256))


GRIDS = {
    "copy_keys": ("_copy", lambda: taken_in(like(torch.uint8, *LEAD, 128), like(torch.float32, *LEAD[:2], 128))),
    "encode_keys": ("_encode", lambda: (*taken_in(codes()), 8, 0)),
    "flush_ring": ("_flush", lambda: (KVStore(halves(*LEAD, 2, 128), halves(*LEAD, 2, 128)), times())),
}


@pytest.mark.parametrize("name", GRIDS)
def test_only_the_first_grid_dimension_exceeds_65535(name, monkeypatch):
    """Only the first dimension may exceed 65,535."""
    (kernel, things), recorded = GRIDS[name], Recorded()
    entry = ENTRIES[name]
    monkeypatch.setitem(entry.reference.__globals__, kernel, recorded)
    entry.run("triton", *things())
    assert recorded.grid[0] >= 65_536
    assert max(recorded.grid[1:]) <= 65_535


def test_grids_of_clusters_fit_a_huge_prompt(monkeypatch):
    """In fp32 with 256 channels a program has 32 keys, or 16 clusters: then there are as many tiles of a head."""
    kernels, recorded = importlib.import_module("torchsparsekv.ops.clusters._kmeans_kernels"), {}
    for name in ("_assign", "_means"):
        monkeypatch.setattr(kernels, name, recorded.setdefault(name, Recorded()))
    f32, i32 = torch.float32, torch.int32
    units = Units(like(i32, 1, 1, 9), like(f32, 1, 1, 8, 256), like(i32, 1, 1))
    run = kernels.Launches(like(f32, 1, 1, TOKENS, 256), units, times(), Kmeans(2, TOKENS, 1, 0, False), TOKENS)
    run.assign(False)
    run.update(False)
    assert [x.grid for x in recorded.values()] == [(65_536,), (65_536,)]


@pytest.mark.parametrize(
    ("name", "most", "said"),
    [
        ("prkv_static", 65_536, "prkv_static: a static set has at most 65536 tokens, this budget makes it 65537"),
        ("oracle", 1_048_576, "a step selects at most 1048576 blocks a kv head, got 1048577"),
    ],
)
def test_budgets_too_large_for_one_program(name, most, said):
    geometry = Geometry(1, 8, 128, TOKENS, torch.bfloat16)
    make_method(name, budget=most).buffers(geometry)
    with pytest.raises(ValueError, match=said):
        make_method(name, budget=most + 1).buffers(geometry)


@pytest.mark.parametrize("promotion", ["quota", "random"])
def test_tree_has_room_for_its_nodes_at_any_cache_size(promotion):
    """By default; not if `r` is given."""
    method = make_method("icecache", promotion=promotion)
    for rows, every in ((64_000 * 16, 16), (64_000 * 16 + 16, 17), (1 << 20, 17), (1 << 21, 33)):
        nodes = method.buffers(Geometry(1, 8, 128, rows, torch.bfloat16))["tree"].key.shape[2]
        assert method.share(rows) == 1 / every
        assert rows // every < nodes <= icecache.MOST_NODES
        drawn = promotion == "random"
        assert method.promoted(rows) == ((0, icecache.DRAWS // every, 2, 0) if drawn else (every, 0, 2, 0))
    given = make_method("icecache", promotion=promotion, r=1 / 16)
    with pytest.raises(ValueError, match=r"2097152 tokens at r=0\.0625 need \d+ nodes, at most 65536"):
        given.buffers(Geometry(1, 8, 128, 1 << 21, torch.bfloat16))


def test_promotion_follows_the_size_of_the_cache(monkeypatch):
    """In a prompt and behind it, were ten nodes all that there is room for."""
    monkeypatch.setattr(icecache, "SURE_NODES", 10)
    layer = Layer(make_method("icecache", sink=8, window=16, page_size=8, budget=64), heads=1, rows=400)
    k = torch.randn(1, 1, 360, 16, generator=torch.Generator().manual_seed(0))
    counts = []
    for part in k.split([250, *[1] * 110], 2):
        layer.feed(part, part, part)
        end = int(layer.state.lengths.ring_begin[0])
        risen = int((levels_of(torch.arange(8, end), icecache.Promotion(40, 0, 2, 0)) > 1).sum())
        assert int(layer.state.tree.node_count) == 1 + risen
        counts.append(risen)
    assert 0 < counts[0] < counts[-1]


@pytest.mark.parametrize("name", ["fetch", "fetch_shared"])
def test_too_many_blocks_for_one_program_are_refused(name, monkeypatch):
    """With room for few: a selection of a million blocks is no test."""
    things = mapped(OPS[name](World()), lambda t: t.to(DEVICE))
    ids = things[0].ids if name == "fetch" else things[0]
    n = ids.shape[2] if name == "fetch" else ids.shape[0] * ids.shape[2]
    monkeypatch.setattr("torchsparsekv.ops.gather._hot_buffer.LANES", n)
    ENTRIES[name].call(*things)
    monkeypatch.setattr("torchsparsekv.ops.gather._hot_buffer.LANES", n - 1)
    with pytest.raises(ValueError, match=f"a step selects at most {n - 1} blocks a kv head, got {n}"):
        ENTRIES[name].call(*things)
