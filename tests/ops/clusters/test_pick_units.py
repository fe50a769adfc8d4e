"""pick_units over many chunks chooses what one chunk would choose."""
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import on, run_both
from world import DEVICE, World

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.clusters.views import Units

SELECT = importlib.import_module("torchsparsekv.ops.clusters.pick_units")
SCORES = importlib.import_module("torchsparsekv.ops.clusters._unit_scores")
ENTRY = load_all()["pick_units"]


@pytest.fixture(autouse=True, scope="module")
def small():
    """Chunks so small that a few units fill many; of the larger size where there are more than three."""
    with pytest.MonkeyPatch.context() as m:
        for module, name, size in ((SELECT, "CHUNK", 16), (SELECT, "CHUNKS", 3), (SCORES, "UNITS", 16)):
            m.setattr(module, name, size)
        yield


def both(q, centroid, sizes: list[int], budget: int, *, now: int = 1, room: int = 0):
    """By kernel and by reference: the rows chosen from units of such sizes, with room for more behind them."""
    centroid = torch.cat([centroid, torch.full((room, 16), torch.nan)])
    first = torch.tensor([5, *sizes, *[7] * room]).cumsum(0).to(torch.int32)
    one = torch.ones(1, 1, dtype=torch.int32)
    things = (q[None, :, None], Units(first[None, None], centroid[None, None], one * len(sizes)), one * now, one * 0)
    want = ENTRY.reference(*things, budget, 0.25)
    there = on(DEVICE, things)
    got = ENTRY.run("triton", *there, budget, 0.25)
    assert int(there[3]) == 0, "the count of the next step starts at 0"
    return got[0, 0].tolist(), want[0, 0].tolist()


def chosen(sizes: list[int], kinds: list[int], budget: int, **more):
    """The same, of units whose centroids are of so many kinds."""
    g = torch.Generator().manual_seed(len(sizes))
    few = torch.randint(-2, 3, (max(kinds, default=0) + 1, 16), generator=g).float()
    return both(torch.randint(-2, 3, (2, 16), generator=g).float(), few[kinds], sizes, budget, **more)


def by_score(scores: list[float], sizes: list[int], budget: int, heads: int = 1):
    """The same, of units with such products of query and centroid."""
    centroid = torch.zeros(len(scores), 16)
    centroid[:, 0] = 4 * torch.tensor(scores)
    return both(torch.eye(16)[:1].expand(heads, -1).contiguous(), centroid, sizes, budget)


SIZES = {
    "ones": st.just(1),
    "like clusters": st.integers(1, 31),
    "empty ones too": st.integers(0, 3),
    "one huge": st.one_of(st.just(1), st.just(1), st.just(1), st.just(400)),
}


@pytest.mark.parametrize("of", SIZES)
@given(data=st.data(), budget=st.one_of(st.integers(1, 40), st.integers(1, 700)))
def test_several_chunks_choose_what_one_chunk_would(of, data, budget):
    sizes = data.draw(st.lists(SIZES[of], min_size=1, max_size=100))
    most = data.draw(st.sampled_from([0, 1, 4, 63]))  # few kinds: many ties
    kinds = data.draw(st.lists(st.integers(0, most), min_size=len(sizes), max_size=len(sizes)))
    got, want = chosen(sizes, kinds, budget, room=data.draw(st.integers(0, 40)))
    assert got == want


@pytest.mark.parametrize("units", [15, 16, 17, 31, 32, 33, 47, 48, 49, 95, 96, 97])
def test_numbers_of_units_at_the_edges_of_chunks(units):
    got, want = chosen([1 + u % 5 for u in range(units)], [u % 7 for u in range(units)], 2 * units)
    assert got == want


def test_ties_across_chunks_go_to_the_lower_unit():
    """All alike: the first units in order, the last of them cut."""
    got, want = chosen([3] * 80, [0] * 80, 100)
    assert got == want == [*range(5, 105)]


def test_best_unit_in_a_late_chunk_is_chosen():
    sizes = [10] * 60
    for best in (0, 17, 40, 59):
        got, want = chosen(sizes, [int(u == best) for u in range(60)], 10)
        assert got == want
        got, want = chosen(sizes, [int(u != best) for u in range(60)], 590)
        assert got == want


def test_a_budget_larger_than_everything_takes_everything():
    got, want = chosen([2] * 50, [u % 9 for u in range(50)], 130)
    assert got == want == [*range(5, 105)] + [-1] * 30


@pytest.mark.parametrize(("sizes", "now"), [([], 1), ([], 0), ([4] * 40, 0), ([0] * 40, 1)])
def test_no_units_choose_nothing(sizes, now):
    got, want = chosen(sizes, [0] * len(sizes), 50, now=now, room=20)
    assert got == want == [-1] * 50


def test_positive_and_negative_scores_are_ranked():
    """One unit has nearly all the attention of both heads: the logarithm of its sum is above 0, the rest is below."""
    got, want = by_score([20.0 if u == 30 else u % 3 for u in range(60)], [4] * 60, 50, heads=2)
    assert got == want
    assert {5 + 4 * 30, 5 + 4 * 2, 5 + 4 * 5} < set(got)


def test_more_than_2048_units_between_two_thresholds(monkeypatch):
    """2,049 units between two thresholds are 1 in 11 bits, and yet the search must go on: the later half is better."""
    monkeypatch.setattr(SELECT, "CHUNK", 512)
    scores = [10.0] * 100 + [5.0] * 1000 + [5.0025] * 1049 + [0.0] * 2100
    got, want = by_score(scores, [1] * len(scores), 2100)
    assert got == want == [*range(5, 5 + 100 + 951), *range(5 + 1100, 5 + 2149)]


def test_rows_and_heads_are_independent():
    for seed in range(8):
        w = World(lengths=[190, 77], rows=192, block=2, sink=2, heads=2, group=3, seed=seed)
        run_both("pick_units", "triton", w)
