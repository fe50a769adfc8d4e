"""The replay of recorded selections counts the misses that `fetch` counts."""
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from torchsparsekv.ops.gather.fetch import fetch
from torchsparsekv.ops.store.rows import STATS
from torchsparsekv.ops.store.views import HotBuffer, Selection, Stats
from torchsparsekv_benchmarks.research.hot_buffer import Clock, hit_rate

BLOCKS = 12
steps = st.lists(st.sets(st.integers(0, BLOCKS - 1), max_size=4), min_size=1, max_size=12)


@given(steps, st.integers(4, 9))
def test_misses_are_those_of_fetch(selected, slots):
    ints = lambda *shape, fill=0: torch.full((1, 1, *shape), fill, dtype=torch.int32)  # noqa: E731
    slot_of, block_of, chosen = (ints(n, fill=-1) for n in (BLOCKS, slots, 4))
    hot = HotBuffer(torch.zeros(1, 1, slots, 1, 2, 16), slot_of, block_of, ints(slots), ints(), ints(), chosen)
    stats, pool = Stats(torch.zeros(1, 1, len(STATS), dtype=torch.int64)), torch.randn(1, 1, BLOCKS, 2, 16)
    clock = Clock(slots)
    for ids in map(sorted, selected):
        stats.counts.zero_()
        fetch(Selection(torch.tensor([[[*ids, *[-1] * (4 - len(ids))]]], dtype=torch.int32)), pool, hot, stats)
        assert clock.select(ids) == stats.counts[0, 0, STATS.index("missed")]
        assert clock.used == hot.used[0, 0].tolist()
        assert clock.hand == hot.hand


def test_hit_rate_counts_the_steps_behind_the_warm_up():
    ids = torch.tensor([[[0, 1], [0, 2], [0, 2], [3, -1]]])
    assert hit_rate(ids, 4, warm_up=0) == pytest.approx(3 / 7)
    assert hit_rate(ids, 4, warm_up=2) == pytest.approx(2 / 3)


def test_the_replay_hits_as_often_as_the_measured_step():
    """`quest` with six budgets, on an H200, by the same trace."""
    results = ROOT / "benchmarks/results"
    rows = json.loads((results / "quality/hot_buffer.json").read_text())["rows"]
    (replayed,) = (r["hit_rate"] for r in rows
                   if (r["trace"], r["method"], r["hot_budgets"]) == ("qwen_120k", "quest", 6))  # fmt: skip
    measured = json.loads((results / "h200_decode_trace_5.json").read_text())["rows"]
    steps = [r["hit_rate"] for r in measured if r["method"] == "quest"]  # without and with the rest
    assert steps == pytest.approx([replayed] * 2, abs=0.01)
