"""How often a step waits for what it chose, as benchmarks/quality/waiting.py counts it, and what the docs say of it."""
import argparse
import dataclasses
import statistics

import pytest
from test_cli import ROOT
from test_measured_h100 import said
from test_results import QUALITY, rows_of, tables
from test_static_mass import some

from torchsparsekv_benchmarks.quality.store import read
from torchsparsekv_benchmarks.quality.waiting import measured

O = argparse.Namespace(method="oracle", prompt=60, steps=50, settle=0, sink=4, window=8)
BUDGET = 8


def told(heads, value):
    return measured(heads, O, BUDGET, value)


def test_who_waits_for_everything_is_as_without():
    heads = some()
    plain, waits = told(heads, None), told(heads, 1.0)
    assert waits == {**plain, "prefetch_async": 1.0, "turned": 1.0, "late": 0.0}


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
    plain = {r["budget"]: r for r in rows if "prefetch_async" not in r}
    want = []
    for value in (0.9, 0.8, 0.7, -1.0):
        mine = {r["budget"]: r for r in rows if r.get("prefetch_async") == value}
        (turned,) = {r["turned"] for r in mine.values()}
        cells = [f"{value:g}", f"{turned:.2f}"]
        for budget in (64, 256, 1024):
            lost = 1 - mine[budget]["weight"] / plain[budget]["weight"]
            cells += [f"{mine[budget]['late']:.2f}", f"{lost:.1%}"]
        want.append(cells)
    assert want in tables(ROOT / "docs/results.md")


def test_the_table_of_kl_is_that_of_the_files():
    """Without at 256 and 1024: the run of the hot buffer's, of the same settings otherwise."""
    found: dict[tuple, list[float]] = {}
    files = {"none": "late/text_8192_none", "0.8": "late/text_8192_0.8", "-1": "late/text_8192_-1"}
    for value, file in (*files.items(), ("none", "hot/text_8192_hot2")):
        for r in read(QUALITY / f"{file}.jsonl")[0]:
            if r.get("kl") and r["method"] in ("quest", "pariskv"):
                found.setdefault((r["method"], r["budget"], value), []).append(statistics.fmean(r["kl"]))
    want = []
    for method in ("quest", "pariskv"):
        for budget in (64, 256, 1024):
            kl = [statistics.fmean(found[method, budget, value]) for value in files]
            assert all(len(found[method, budget, value]) == 2 for value in files)
            want.append([method, str(budget), *(f"{x:.4f}" for x in kl), *(f"{x / kl[0]:.2f}" for x in kl[1:])])
    assert want in tables(ROOT / "docs/results.md")
    page = said("docs/results.md")
    more = {m: [round(100 * (float(row[5]) - 1)) for row in want if row[0] == m] for m in ("quest", "pariskv")}
    text = "At 0.8 `quest` loses {} to {} % more than it did, `pariskv`, which chooses single tokens and loses least, "
    text += "{} to {} %."
    assert text.format(*(f(more[m]) for m in more for f in (min, max))) in page
    assert f"at a KL {want[2][5]} times as large (above, 1024 tokens, as here)" in page
    times = {m: [row[5] for row in want if row[0] == m] for m in more}
    text = "by a KL {} to {} times as large, with `pariskv` up to {} times"
    assert text.format(min(times["quest"]), max(times["quest"]), max(times["pariskv"])) in said("docs/using.md")


def test_what_is_said_of_the_recall_model_is_so():
    scores: dict[tuple, dict[str, float]] = {}
    for value in ("none", "0.8"):
        for r in read(QUALITY / f"late/recall_8192_{value}.jsonl")[0]:
            if r.get("budget"):
                scores.setdefault((r["method"], r["budget"], r["task"], r["index"]), {})[value] = r["score"]
    assert len(scores) == 480
    other = [x for x in scores.values() if x["none"] != x["0.8"]]
    page = said("docs/results.md")
    assert len(other) == 2
    assert all(x["0.8"] > x["none"] for x in other)
    assert "answer 478 of 480 samples alike, and the other two better with 0.8" in page
    found: dict[tuple, list[float]] = {}
    for r in read(QUALITY / "late/recall_8192_-1_cpu.jsonl")[0]:
        if "score" in r:
            found.setdefault((r["method"], r["task"]), []).append(r["score"])
    tasks = ("single", "multikey", "multivalue", "multiquery", "chain")
    never, dense = (", ".join(f"{statistics.fmean(found[m, t]):.2f}" for t in tasks) for m in ("pariskv", "dense"))
    assert f"scores {never} in single" in page
    assert f"where dense scores {dense} " in page
    rows = rows_of("quality/late/waiting_recall.json")
    (turned,), late = ({r[x] for r in rows if r.get("prefetch_async") == 0.8} for x in ("turned", "late"))
    assert {f"{x:.2f}" for x in late} == {"0.11"}
    assert f"There {100 * turned:.0f} % of the heads turn at 0.8, and 11 % of the traffic is late" in page
