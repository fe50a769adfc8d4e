"""Answers of few samples, and by other devices than the table of scores: what the pages say is what the files hold."""
import json
import statistics
from itertools import product

from test_cli import ROOT
from test_measured_h100 import said
from test_results import NEEDLES, ON_CPU, PAPERS_CLUSTERS, READOUT, REUSE, tables

from torchsparsekv_benchmarks.quality.store import read
from torchsparsekv_benchmarks.report import scores

SAMPLES_ON_CPU = {"8192": 8, "16384": 4, "32768": 1}


def test_the_scores_on_a_cpu():
    """A line for every method: at each budget the mean of the five tasks, of samples that all of them have."""
    want, said = [], " ".join((ROOT / "docs/quality.md").read_text().split())
    for path in ON_CPU:
        method, length = path.stem.split("_")
        rows = [r for r in read(path)[0] if "benchmark" not in r]
        cells = {}
        for budget in dict.fromkeys(r["budget"] for r in rows):
            mine = [r for r in rows if r["budget"] == budget]
            assert len(mine) == 5 * SAMPLES_ON_CPU[length]
            cells[budget] = f"{statistics.fmean(r['score'] for r in mine):.2f}"
        dense = cells.pop(None)
        if length == "8192":
            assert dense == "0.98"
            want.append([method, *(cells.get(b, scores.NONE) for b in (64, 256))])
        else:
            assert f"at {int(length) // 1024}K ({SAMPLES_ON_CPU[length]} " in said
            assert f"it has {cells[64]} with 64 tokens and {cells[256]} with 256, dense {dense}." in said
    assert want in tables(ROOT / "docs/quality.md")


def test_what_is_read_out():
    """At each budget the mean share of the records."""
    cells: dict[str, list[str]] = {}
    for path in READOUT:
        rows = [r for r in read(path)[0] if "benchmark" not in r]
        for method, budget in dict.fromkeys((r["method"], r["budget"]) for r in rows):
            mine = [r["score"] for r in rows if (r["method"], r["budget"]) == (method, budget)]
            assert len(mine) == 2
            cells.setdefault(method, []).append(f"{statistics.fmean(mine):.2f}")
    assert cells.pop("dense") == ["1.00"] * len(READOUT)
    assert [[name, *each] for name, each in cells.items()] in tables(ROOT / "docs/quality.md")


def test_the_scores_of_its_papers_clusters():
    """Means of the five tasks, four samples of each, at 64 and 256 tokens."""
    found = []
    for path in PAPERS_CLUSTERS:
        rows = [r for r in read(path)[0] if "benchmark" not in r and r["task"] != "common"]
        by = {b: [r["score"] for r in rows if r["budget"] == b] for b in (None, 64, 256)}
        assert all(len(x) == 20 for x in by.values())
        assert statistics.fmean(by[None]) == 1
        found += [f"{statistics.fmean(by[b]):.2f}" for b in (64, 256)]
    said = " ".join((ROOT / "docs/quality.md").read_text().split())
    assert "{} with 64 tokens and {} with 256 at 16K, {} and {} at 32K.".format(*found) in said


def test_needles_of_a_language_model():
    """At each length and budget the mean of the tasks; dense answers all."""
    for path in NEEDLES:
        cells: dict[str, list[str]] = {}
        rows = [r for r in read(path)[0] if "benchmark" not in r]
        samples = {(r["task"], r["index"]) for r in rows}
        for method, budget in dict.fromkeys((r["method"], r["budget"]) for r in rows):
            mine = [r["score"] for r in rows if (r["method"], r["budget"]) == (method, budget)]
            assert len(mine) == len(samples)
            cells.setdefault(method, []).append(f"{statistics.fmean(mine):.2f}")
        assert cells.pop("dense") == ["1.00"]
        assert [[name, *both] for name, both in cells.items()] in tables(ROOT / "docs/quality.md")


def test_what_reuse_costs_icecache():
    """Means of the tasks, in the order of the file."""
    rows = [r for r in read(REUSE)[0] if "benchmark" not in r]
    want = []
    for name, budget, every in (
        ("dense", None, None), *((f"{b}, reuse_every={e}", b, e) for b in (64, 256) for e in (1, 2, 3)),
    ):  # fmt: skip
        own = [r for r in rows if r["budget"] == budget and (r["hyper"] or {}).get("reuse_every") == every]
        assert len(own) == 96
        tasks = dict.fromkeys(r["task"] for r in own)
        each = [statistics.fmean(r["score"] for r in own if r["task"] == task) for task in tasks]
        want.append([name, *(f"{x:.3f}" for x in each), f"{statistics.fmean(each):.3f}"])
    assert want in tables(ROOT / "benchmarks/results/README.md")
    page = said("docs/methods/icecache.md")
    mean = {name: 100 * float(cells[-1]) for name, *cells in want}
    for every, budget, text in (
        (3, 64, "costs {:.1f} points of the mean"), (3, 256, "and {:.1f} with 256"),
        (2, 64, "costs {:.1f} points at 64"),
    ):  # fmt: skip
        assert text.format(mean[f"{budget}, reuse_every=1"] - mean[f"{budget}, reuse_every={every}"]) in page


def test_what_reuse_costs_on_needles():
    """By budget the mean of the six tasks, of the dense model, with 1, 2 and 3, and with 2 and 3 and the same heads."""
    means: dict[int | None, list[float]] = {}
    for every in ("1", "2", "3", "2_same", "3_same"):
        rows = [r for r in read(REUSE.parent / f"needles_2048_reuse{every}.jsonl")[0] if "task" in r]
        assert len(rows) == 3 * 6 * 8
        for budget in (None, 64, 256):
            own = [r["score"] for r in rows if r["budget"] == budget]
            means.setdefault(budget, []).append(statistics.fmean(own))
    dense = {f"{x:.2f}" for x in means.pop(None)}
    assert len(dense) == 1
    want = [[str(budget), *dense, *(f"{x:.2f}" for x in found)] for budget, found in means.items()]
    assert want in tables(ROOT / "docs/methods/icecache.md")


def mean(name: str, budget: int | None, samples: int) -> float:
    own = [r["score"] for r in read(REUSE.parent / name)[0] if "task" in r and r["budget"] == budget]
    assert len(own) == samples
    return statistics.fmean(own)


def test_what_layers_that_were_found_cost():
    """They are as many as of `reuse_every=3`; the goal is 1.5 points."""
    page, kinds = said("docs/methods/icecache.md"), ("reuse1", "reuse3", "selecting_layers")
    needles = {b: [mean(f"needles_2048_h200_{kind}.jsonl", b, 144) for kind in kinds] for b in (None, 64, 256)}
    assert len(set(needles[None])) == 1
    want = [[str(b), *(f"{x:.3f}" for x in (needles[None][0], *needles[b]))] for b in (64, 256)]
    assert want in tables(ROOT / "docs/methods/icecache.md")
    lost = {b: 100 * (needles[b][0] - needles[b][2]) for b in (64, 256)}
    assert f"`selecting_layers` lose {lost[64]:.1f} points at 64 tokens and nothing at 256" in page
    assert max(lost.values()) < 1.5
    rows = [r for r in read(REUSE)[0] if "task" in r and (r["hyper"] or {}).get("reuse_every") == 1]
    for budget in (64, 256):
        whole = statistics.fmean(r["score"] for r in rows if r["budget"] == budget)
        assert 100 * (whole - mean("recall_choosers.jsonl", budget, 96)) < 1.5
    for model, layers, evenly in (("smollm2", 28, 46.5), ("recall", 4, None)):
        found = json.loads((REUSE.parent / f"choosers_{model}.json").read_text())["rows"]
        which = [r["layer"] for r in found if r["follows"] is None]
        assert len(found) == layers
        assert len(which) == -(-layers // 3)
        if evenly:
            assert f"{', '.join(map(str, which[:-2]))}, {which[-2]} and {which[-1]}, with" in page
            assert f"with {sum(r['nats'] for r in found):.1f} nats lost" in page
            lost_by = sum(r["by"].get(str(2 + i // 3 * 3), 0.0) for i, r in enumerate(found))
            assert f"where every third layer loses {lost_by:.1f}" in page
        else:
            assert f"layers {which[0]} and {which[1]} (" in page


def test_answers_from_a_pool_in_8_bits():
    """By method and budget the mean of three tasks: no answer is another one."""
    means = []
    for pool in ("", "_int8"):
        rows = read(ROOT / f"benchmarks/results/quality/int8/recall_2048{pool}_cpu.jsonl")[0]
        cells: dict[tuple[str, int], list[float]] = {}
        for r in rows:
            if r.get("budget"):
                cells.setdefault((r["method"], r["budget"]), []).append(r["score"])
        assert {len(x) for x in cells.values()} == {30}
        means.append({x: statistics.fmean(scored) for x, scored in cells.items()})
    assert means[0] == means[1]
    want = [[m, *(f"{means[0][m, budget]:.2f}" for budget in (64, 64, 256, 256))] for m, _ in list(means[0])[::2]]
    table = next(t for t in tables(ROOT / "docs/quality.md") if want[0] in t)
    assert [row for row in table if row[0] not in ("quest", "pariskv")] == want


def test_answers_of_icecache_told_by_a_sample():
    """Of five tasks, 8 samples each; those missed in 32K are of one task."""
    page = said("docs/methods/icecache.md")
    for length in (8192, 16384, 32768):
        dense, *found = (mean(f"recall_{length}_sample.jsonl", budget, 40) for budget in (None, 64, 256))
        lost = {"8192": [], "16384": [], "32768": ["0.994", "0.994"]}[str(length)]
        assert [f"{x / dense:.3f}" for x in found if x < dense] == lost
    assert "the dense model at 8K and 16K, 8 samples of each task, and at 32K 0.994 of them" in page


def test_what_icecache_lost_of_its_own_text():
    dense, *found = (mean("journal_h200_float32.jsonl", budget, 8) for budget in (None, 64, 256))
    assert (dense, [f"{x:.3f}" for x in found]) == (1, ["0.961", "0.961"])
    assert "it found 0.961 of the answers, with 64 tokens and with 256 alike" in said("docs/methods/icecache.md")
    assert [mean("journal_always.jsonl", budget, 5) for budget in (None, 64)] == [1, 1]
    for kind, budget in product(("", "_float32"), (64, 256)):
        assert [mean(f"journal_always_h200{kind}_{budget}.jsonl", at, 8) for at in (None, budget)] == [1, 1]
