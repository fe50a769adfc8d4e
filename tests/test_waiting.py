"""How often a step waits for what it chose, as benchmarks/quality/waiting.py counts it, and what the docs say of it."""
import argparse
import dataclasses
import statistics

import pytest
from test_cli import ROOT
from test_results import rows_of, tables
from test_static_mass import some

from torchsparsekv.benchmarks.quality.waiting import measured

O = argparse.Namespace(method="oracle", prompt=60, steps=50, settle=0, sink=4, window=8)
BUDGET = 8


def told(heads, value):
    return measured(heads, O, BUDGET, value)


def test_who_waits_for_everything_is_as_without():
    heads = some()
    plain, waits = told(heads, None), told(heads, 1.0)
    assert waits == {**plain, "fetch_late": 1.0, "turned": 1.0, "late": 0.0}


def test_weight_is_lost_where_nobody_waits():
    """One step's weight by hand: the tokens of largest weight a step ago, of the window and of the sinks."""
    heads = some()
    plain, never = told(heads, None), told(heads, -1.0)
    assert never["turned"] == pytest.approx(1 / O.steps), "the first step"
    assert 0.8 < never["late"] < 1
    assert never["hits"] == plain["hits"]
    assert never["weight"] < plain["weight"]
    o = argparse.Namespace(**{**vars(O), "steps": 2, "settle": 1})
    at, weight = O.prompt + 1, []
    for layer, head in ((x, h) for x in range(heads.keys.shape[0]) for h in range(heads.queries.shape[1])):
        mine = heads.weights(at)[layer, head]
        group = slice(head // heads.group * heads.group, (head // heads.group + 1) * heads.group)
        before = heads.weights(at - 1)[layer, group].amax(0)
        begin = at - O.window  # where the ring began a step ago
        best = before[O.sink : begin].topk(BUDGET).indices + O.sink
        seen = {*range(O.sink), *best.tolist(), *range(begin, at + 1)}
        weight.append(float(mine[sorted(seen)].sum()))
    assert measured(heads, o, BUDGET, -1.0)["weight"] == pytest.approx(statistics.fmean(weight), abs=2e-5)


def test_queries_that_stay_the_same_wait_once():
    heads = some()
    still = dataclasses.replace(heads, queries=heads.queries[:, :, :1].expand_as(heads.queries).contiguous())
    assert told(still, 0.99)["turned"] == pytest.approx(1 / O.steps)


def test_the_docs_say_what_the_files_do():
    rows = rows_of("quality/late/waiting_quest.json")
    plain = {r["budget"]: r for r in rows if "fetch_late" not in r}
    want = []
    for value in (0.9, 0.8, 0.7, -1.0):
        mine = {r["budget"]: r for r in rows if r.get("fetch_late") == value}
        (turned,) = {r["turned"] for r in mine.values()}
        cells = [f"{value:g}", f"{turned:.2f}"]
        for budget in (64, 256, 1024):
            lost = 1 - mine[budget]["weight"] / plain[budget]["weight"]
            cells += [f"{mine[budget]['late']:.2f}", f"{lost:.1%}"]
        want.append(cells)
    assert want in tables(ROOT / "docs/results.md")
