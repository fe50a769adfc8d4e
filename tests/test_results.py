"""What is committed as measured: the files can be read and drawn, and the tables in the READMEs are theirs."""
import re
import shlex
import statistics
from pathlib import Path

import pytest
from test_cli import ROOT

from torchsparsekv.benchmarks.quality.store import heads, read
from torchsparsekv.benchmarks.report import scores
from torchsparsekv.benchmarks.report.load import load
from torchsparsekv.zoo.louiskv import LouisKV

QUALITY = ROOT / "benchmarks/results/quality"
FILES = sorted(QUALITY.glob("*.jsonl"))
TAUS = sorted((QUALITY / "tau").glob("*.jsonl"))
RATES = sorted((QUALITY / "rates").glob("*.jsonl"))
LENGTHS, BUDGETS = (8192, 16384, 32768), (64, 128, 256, 512)


@pytest.fixture(scope="module")
def measured():
    """(files, samples) of the H200."""
    (found,) = [g for g in scores.groups(load(FILES)) if "H200" in g[0][0].hardware]
    return found


def tables(path: Path) -> list[list[list[str]]]:
    """The cells of every table, without the heads."""
    found = re.findall(r"(?:^\|.*\n)+", path.read_text(), re.MULTILINE)
    return [[[c.strip(" `") for c in line.strip("|").split("|")] for line in t.splitlines()[2:]] for t in found]


def test_the_table_of_scores_is_that_of_the_files(measured):
    _, rows = measured
    want = [list(r.values()) for r in scores.overview(rows, scores.averaged(rows))]
    assert len(want[0]) == 1 + len(LENGTHS) * len(BUDGETS)
    assert want in tables(ROOT / "README.md")


def test_what_is_said_of_common_is_so(measured):
    _, rows = measured
    by_method = {r["method"]: list(r.values())[1:] for r in scores.overview(rows, ["common"])}
    dense = by_method.pop("dense")
    others = [float(x) for cells in by_method.values() for x in cells if "/" not in x and x != scores.NONE]
    said = " ".join((ROOT / "README.md").read_text().split())
    assert f"dense scores {dense[0]}, {dense[4]} and {dense[8]} at the three lengths" in said
    assert f"between {min(others):.2f} and {max(others):.2f} at every budget" in said


def test_what_is_said_of_the_journal_is_so():
    (group,) = [g for g in scores.groups(load(FILES)) if "H200" not in g[0][0].hardware]
    said = " ".join((ROOT / "README.md").read_text().split())
    found = {r["method"]: r["4K: 64"] for r in scores.overview(group[1], ["journal"])}
    assert {r["index"] for r in group[1]} == {0, 1}
    for method in ("pariskv", "louiskv", "clusterkv", "quest", "random", "streaming"):
        assert f"`{method}` {found[method]}" in said.split("text that the model wrote")[1]
    assert f"`streaming` {found['streaming']}; dense {found['dense']}" in said


def test_the_thresholds_of_louiskv():
    """The rows are thresholds by budget: score, then KB per token."""
    measured = {float(p.stem.removeprefix("tau_")): load([p]) for p in TAUS} | {LouisKV().tau: load(FILES)}
    assert list(measured) == [0.7, 0.8, 0.85, 0.9, 0.95]
    tasks, want = ("single", "multikey", "multiquery", "chain"), []
    runs = [(r, "louiskv") for r in measured.values()] + [(measured[0.95], "clusterkv")]
    for budget in (64, 256):
        cells = []
        for results, method in runs:
            at = dict(length=16384, method=method, budget=budget)
            every = [r for result in results for r in result.rows]
            cells.append([r for r in every if r["task"] in tasks and all(r[k] == v for k, v in at.items())])
        assert [len(c) for c in cells] == [64] * 6
        want.append([f"budget {budget}", *(f"{statistics.fmean(r['score'] for r in c):.2f}" for c in cells)])
        want.append(["KB", *(f"{statistics.fmean(r['bytes_per_token'] for r in c) / 1e3:.0f}" for c in cells)])
    assert want in tables(ROOT / "benchmarks/results/README.md")


def test_the_retrieval_rates_of_louiskv():
    rates = [[r["retrieval_rate"] for r in read(p)[0] if r.get("method") == "louiskv"] for p in RATES]
    want = ["retrieval rate", *(f"{statistics.fmean(x):.2f}" for x in rates)]
    assert [len(x) for x in rates] == [8] * 5
    assert [want] in tables(ROOT / "benchmarks/results/README.md")


@pytest.mark.parametrize("path", [*FILES, *TAUS, *RATES], ids=lambda p: p.name)
def test_a_file_says_what_made_it(path):
    lines, whole = read(path)
    assert whole == path.stat().st_size, "no line is cut off"
    (head,) = heads(lines)
    words = shlex.split(head["command"])
    assert words[:2] == ["torchsparsekv", "eval"]
    assert words[words.index("--out") + 1] == path.name
    assert "/" not in head["command"]


def test_the_committed_page_is_of_the_committed_files():
    """Pictures differ with matplotlib's version; the numbers do not."""
    page = (ROOT / "benchmarks/results/report/report.html").read_text()
    assert scores.section(load(FILES)) in page
    for path in (*FILES, *sorted(FILES[0].parents[1].glob("*.json"))):
        assert f"<td>{path.name}</td>" in page, "run `make report`"


def test_they_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from torchsparsekv.benchmarks.report.make import make

    names = [p.name for p in make(FILES, tmp_path / "report.html")]
    committed = {p.name for p in (ROOT / "benchmarks/results/report").iterdir()}
    assert len(names) == 7, "the page, four lengths, needles, heads"
    assert set(names) <= committed
    assert committed - {p.name for p in (ROOT / "benchmarks/results/report").glob("*.png")} == {"report.html"}
