"""What is committed as measured: the files hold what their commands ask for and can be drawn, and the tables in the
docs and READMEs are theirs."""
import dataclasses
import html
import importlib
import json
import re
import shlex
import statistics
import sys
from itertools import product
from pathlib import Path

import pytest
import typer
from test_cli import ROOT

from torchsparsekv import commands
from torchsparsekv._methods.louiskv import LouisKV
from torchsparsekv.commands._options import made
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks.quality import recall_digests, recall_icecache, recall_pariskv, text_options
from torchsparsekv_benchmarks.quality import run as quality
from torchsparsekv_benchmarks.quality.options import settings
from torchsparsekv_benchmarks.quality.store import heads, key, read
from torchsparsekv_benchmarks.recall_model.tasks import TASKS
from torchsparsekv_benchmarks.report import scores
from torchsparsekv_benchmarks.report.load import load

QUALITY = ROOT / "benchmarks/results/quality"
FILES = sorted(QUALITY.glob("*.jsonl"))
TEXTS = sorted((QUALITY / "text").glob("*.jsonl"))
PAGES = sorted((QUALITY / "pages").glob("*.jsonl"))  # one method, with pages of another size
TAUS = sorted((QUALITY / "tau").glob("*.jsonl"))
RATES = sorted((QUALITY / "rates").glob("*.jsonl"))
PACKED = sorted((QUALITY / "int8").glob("*.jsonl"))  # not on the page, which takes one kind of pool only
ON_CPU = sorted((QUALITY / "recall_cpu").glob("*.jsonl"))  # few samples; not on the page beside those of the H200
REUSE = QUALITY / "icecache/reuse.jsonl"
READOUT = [QUALITY / f"readout/readout_{n}.jsonl" for n in (8192, 16384, 32768)]
NEEDLES = sorted((QUALITY / "needles").glob("*.jsonl"))  # of a language model
PAPERS_CLUSTERS = sorted((QUALITY / "clusterkv").glob("*.jsonl"))
LENGTHS, BUDGETS = (8192, 16384, 32768), (64, 128, 256, 512)


@pytest.fixture(scope="module")
def measured():
    """(files, samples) of the H200."""
    (found,) = [g for g in scores.groups(load(FILES)) if "H200" in g[0][0].hardware]
    return found


def rows_of(name: str) -> list[dict]:
    return json.loads((QUALITY.parent / name).read_text())["rows"]


def tables(path: Path) -> list[list[list[str]]]:
    """The cells of every table, without the heads."""
    found = re.findall(r"(?:^\|.*\n)+", path.read_text(), re.MULTILINE)
    return [[[c.strip(" `") for c in line.strip("|").split("|")] for line in t.splitlines()[2:]] for t in found]


def test_the_table_of_scores_is_that_of_the_files(measured):
    _, rows = measured
    want = [list(r.values()) for r in scores.overview(rows, scores.averaged(rows))]
    assert len(want[0]) == 1 + len(LENGTHS) * len(BUDGETS)
    assert want in tables(ROOT / "docs/quality.md")


def test_what_is_said_of_results_is_so(measured):
    _, rows = measured
    by_method = {r["method"]: list(r.values())[1:] for r in scores.overview(rows, ["common"])}
    dense = by_method.pop("dense")
    others = [float(x) for cells in by_method.values() for x in cells if "/" not in x and x != scores.NONE]
    said = " ".join((ROOT / "docs/quality.md").read_text().split())
    assert f"dense scores {dense[0]}, {dense[4]} and {dense[8]} at the three lengths" in said
    assert f"between {min(others):.2f} and {max(others):.2f} at every budget" in said


def test_what_is_said_of_the_journal_is_so():
    (group,) = [g for g in scores.groups(load(FILES)) if "H200" not in g[0][0].hardware]
    said = " ".join((ROOT / "docs/quality.md").read_text().split())
    found = {r["method"]: r["4K: 64"] for r in scores.overview(group[1], ["journal"])}
    assert {r["index"] for r in group[1]} == {0, 1}
    for method in ("pariskv", "louiskv", "clusterkv", "quest", "random", "streaming"):
        assert f"`{method}` {found[method]}" in said.split("text that the model wrote")[1]
    assert f"`streaming` {found['streaming']}; dense {found['dense']}" in said
    later = [r for r in read(QUALITY / "journal/journal_icecache.jsonl")[0] if "benchmark" not in r]
    assert {(r["budget"], r["index"]) for r in later} == {*product((None, 64, 256), (0, 1))}
    assert {r["score"] for r in later} == {1.0}
    assert "`icecache`, asked later, has 1.00 with 64 and with 256 tokens." in said


def test_the_table_of_time_per_token_is_that_of_the_files():
    files = {
        "h200_decode": ("128K", "256K", "512K"), "h200_decode_skip0": ("512K, no dense layers",),
        "h200_decode_1m": ("1M (shape of Qwen2.5-7B-1M)",),
        "h200_decode_worst": ("128K, every block new at every step",),
    }  # fmt: skip
    want, beside, said = [], [], " ".join((ROOT / "docs/results.md").read_text().split())
    for name, labels in files.items():
        rows = rows_of(f"{name}.json")
        floor = next(r["tpot_ms"] for r in rows if r["context"] <= 1024)
        for label, context in zip(labels, sorted({r["context"] for r in rows if r["context"] > 1024})):
            at = {r["method"]: r["tpot_ms"] for r in rows if r["context"] == context}
            dense = [at["full"], at["sdpa-cudnn"]]
            if "arkvale" not in at:
                later = {r["method"]: r["tpot_ms"] for r in rows_of(f"{name}_arkvale.json") if r["context"] == context}
                at["arkvale"] = later["arkvale"]
                beside.append(later["quest"])
            cells = [f"{x:.2f}" for x in (*dense, at["quest"], at["arkvale"], at["quest"] / floor)]
            want.append([label, *cells, f"{min(dense) / at['quest']:.2f}x"])
    assert want in tables(ROOT / "docs/results.md")
    assert "`quest` took {:.2f}, {:.2f} and {:.2f} ms in these".format(*beside) in said


def test_the_table_of_vllm_is_that_of_the_files():
    files = (ROOT / "benchmarks/results").glob("h200_serve_*.json")
    rows = [r for f in files for r in json.loads(f.read_text())["rows"]]
    places, want, said = ("triton", "device", "host"), [], " ".join((ROOT / "README.md").read_text().split())
    for context, label in ((32768, "32K"), (131072, "128K")):
        of = {p: {r["batch"]: r for r in rows if (r["place"], r["context"]) == (p, context)} for p in places}
        found = [[of[p][batch] for p in places] for batch in (1, 8)] + [[of[p][of[p][1]["admitted"]] for p in places]]
        for each in found:
            batches = [r["batch"] for r in each]
            of_all = "all: {}, {}, {}".format(*(r["admitted"] for r in each))
            ms = [f"{r['tpot_ms']:.1f}" if "tpot_ms" in r else "not admitted" for r in each]
            rate = [f"{r['tokens_per_s']:.0f}" if "tpot_ms" in r else "-" for r in each]
            fetched = f"{each[2]['fetched_blocks']:.0f}" if "tpot_ms" in each[2] else "-"
            want.append([label, str(batches[0]) if batches[0] in (1, 8) else of_all, *ms, *rate, fetched])
            if len({*batches}) > 1:
                assert f"{batches[1]} requests of 32K at a time make {rate[1]} tokens" in said
                assert f"Triton backend, which attends to everything, {batches[0]} requests make {rate[0]} " in said
    assert want in tables(ROOT / "docs/vllm.md")


def test_the_table_of_dense_answers_is_that_of_the_training():
    rows = json.loads((ROOT / "benchmarks/recall_model/weights/accuracy.json").read_text())["greedy"]
    want = [[r["task"], *(f"{r[n]:.2f}" for n in ("1024", "4096", "16384", "32768", "65536"))] for r in rows]
    assert want in tables(ROOT / "docs/quality.md")


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


SAMPLED = [*FILES, *TAUS, *RATES, *ON_CPU, *READOUT, *PAPERS_CLUSTERS, *NEEDLES]


@pytest.mark.parametrize("path", [*SAMPLED, *TEXTS, *PAGES, *PACKED, REUSE], ids=lambda p: p.name)
def test_a_file_says_what_made_it(path):
    lines, whole = read(path)
    assert whole == path.stat().st_size, "no line is cut off"
    for head in heads(lines):
        words = shlex.split(head["command"])
        of_text = path in (*TEXTS, *PAGES, *PACKED) and not path.name.startswith("recall")
        assert words[:2] == ["torchsparsekv", "eval-text" if of_text else "eval"]
        assert words[words.index("--out") + 1] == path.name
        assert "/" not in head["command"]


def means(command: str):
    """The options that a command line gives to its benchmark."""
    words = shlex.split(command)
    words = words[5 if words[0] == "torchrun" else 1 :]
    at, name = typer.main.get_command(commands.load(words[0])), ""
    while hasattr(at, "commands"):
        name = words.pop(0)
        at = at.commands[name]
    given = at.make_context(name, words).params
    known = {"eval": quality, "eval-text": text_options}
    where = known[name] if name in known else importlib.import_module(
        f"torchsparsekv_benchmarks.speed.{name.replace('-', '_')}"
    )
    return made(where.Options, {k: v for k, v in given.items() if k != "out"})


def holds(head: dict, options: dict) -> None:
    """A head has the options of its command; one that came later is not in an old head, and was not needed."""
    options = json.loads(json.dumps(options))
    assert options | head["options"] == head["options"] | options


@pytest.mark.parametrize("path", SAMPLED, ids=lambda p: p.name)
def test_the_commands_of_a_file_of_samples_ask_for_what_it_holds(path):
    lines, _ = read(path)
    asked = set()
    for head in heads(lines):
        o = means(head["command"])
        holds(head, dataclasses.asdict(o))
        cells = product(o.tasks or TASKS, o.lengths, range(o.samples), settings(o))
        asked |= {key({"task": t, "length": n, "index": i, **dataclasses.asdict(s)}) for t, n, i, s in cells}
    found = [key(row) for row in lines if "benchmark" not in row]
    assert len(found) == len(set(found))
    assert set(found) == asked


@pytest.mark.parametrize("path", [*TEXTS, *PAGES], ids=lambda p: p.name)
def test_the_commands_of_a_file_of_text_ask_for_what_it_holds(path):
    lines, _ = read(path)
    asked = set()
    for head in heads(lines):
        o = means(head["command"])
        holds(head, dataclasses.asdict(o))
        assert head["model"]["texts"].keys() == {text_options.name_of(t) for t in o.texts}
        assert head["model"]["steps"] == o.steps
        cells = product(head["model"]["texts"], o.lengths, range(o.samples), settings(o))
        asked |= {key({"task": t, "length": n, "index": i, **dataclasses.asdict(s)}) for t, n, i, s in cells}
    found = [key(row) for row in lines if "benchmark" not in row]
    assert len(found) == len(set(found))
    assert set(found) == asked


# Rows of `kernels` that a file need not have: FlashInfer stands beside where it is installed, our pinning is of late.
EXTRA = ("flashinfer", "torchsparsekv")
# By benchmark: what tells its rows apart, and the values of these that its options ask for.
CELLS = {
    "decode": (("method", "context", "batch"), lambda o: {
        *product(("hf-static",), (256, *(n for n in o.contexts if o.hf_static and n <= 131072)), o.batches),
        *product((*("full",) * o.ours, *o.dense, *o.methods), o.contexts, o.batches),
    }),
    "parallel": (("method", "context", "batch"), lambda o: {
        *product(("hf-static",), (256,), o.batches), *product(("full", *o.dense, *o.methods), o.contexts, o.batches),
    }),
    "prefill": (("method", "context"), lambda o: {*product(("dense", *o.methods), o.contexts)}),
    "throughput": (("method", "cap_GiB"), lambda o: {*product(("full", *o.dense, *o.methods), o.caps_gib)}),
    "patterns": (("method", "pattern", "asked"), lambda o: {
        *product(o.methods, o.patterns, [str(b or "largest") for b in o.batches])
    }),
    "clusters": (("context",), lambda o: {*product({*o.contexts, *o.prompts})}),
    "serve": (("place", "context"), lambda o: {*product(o.places, o.contexts)}),
    "shapes": (("shape", "method", "context"), lambda o: {
        *product(o.shapes, ("full",), (256, o.context)[not o.floor :]), *product(o.shapes, o.methods, (o.context,))
    }),
    "first_call": (("method", "step", "caches"), lambda o: {*product(o.methods, o.step, o.caches)}),
    "kernels": (("method", "context"), lambda o: {
        ("torch", None), *product(("full", "torch", *o.methods), o.contexts)
    }),
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(QUALITY.parent.glob("h200_*.json")), ids=lambda p: p.name)
def test_the_command_of_a_benchmark_asks_for_what_the_file_holds(path):
    result = json.loads(path.read_text())
    o = means(result["command"])
    holds(result, dataclasses.asdict(o))
    assert shlex.split(result["command"])[-2:] == ["--out", f"benchmarks/results/{path.name}"]
    columns, asked = CELLS[result["benchmark"]]
    extra = EXTRA if result["benchmark"] == "kernels" else ()
    found = {tuple(r.get(c) for c in columns) for r in result["rows"] if r.get("method") not in extra}
    assert found == asked(o)


FAR = ("recall_64k", "structured_128k", "structured_512k")
RECALL = {
    "cpu_drift": (recall_pariskv, "drift"), "cpu_lengths": (recall_pariskv, "lengths"),
    "cpu_lengths_authors": (recall_pariskv, "lengths"), "cpu_digests": (recall_digests, "digests"),
    **{f"cpu_icecache_{keys}": (recall_icecache, "icecache") for keys in recall_icecache.KINDS},
    **{f"quality/icecache/{name}": (recall_icecache, "icecache") for name in FAR},
}  # fmt: skip


@pytest.mark.parametrize("file", RECALL)
def test_the_command_of_a_recall_asks_for_what_the_file_holds(monkeypatch, file):
    result = json.loads((QUALITY.parent / f"{file}.json").read_text())
    module, name = RECALL[file]
    words, told = shlex.split(result["command"]), []
    assert words[:2] == ["python", f"benchmarks/quality/{module.__name__.split('.')[-1]}.py"]
    monkeypatch.setattr(sys, "argv", words[1:])
    monkeypatch.setattr(module, name, lambda o: [])
    monkeypatch.setattr(_results, "finish", lambda *a: told.append(a))
    module.main()
    ((kind, _, options, out),) = told
    assert kind == result["benchmark"] == name
    assert {**options, "device": "cpu"} == result["options"]
    assert str(out) == f"benchmarks/results/{file}.json"
    if name == "drift":
        steps = {r["step"] for r in result["rows"]}
        assert (min(steps), max(steps), len(steps)) == (options["first"], options["steps"], options["points"])
    else:
        assert [*dict.fromkeys(r["context"] for r in result["rows"])] == options["contexts"]


def test_the_table_of_far_views_is_that_of_the_files():
    page = " ".join((QUALITY.parent / "README.md").read_text().split())
    for name in FAR:
        result = json.loads((QUALITY / f"icecache/{name}.json").read_text())
        for budget in result["options"]["budgets"]:
            rows = [r for r in result["rows"] if r["budget"] == budget and r["choice"] == "codes"]
            context, at = rows[0]["context"], {r["field_of_view"]: r for r in rows}
            few = next((r for view, r in at.items() if abs(view * context / 16 - 512) < 3), None)
            each = [f"{r['recall']:.3f} | {r['mass']:.3f}" if r else "- | -" for r in (few, at[0.1], at.get(1.0))]
            if few is None:
                each[0] = "(fewer: a tenth) |"
            assert f"| {result['options']['keys']}, {context // 1024}K, {budget} | {' | '.join(each)} |" in page


def test_the_table_of_icecache_is_that_of_the_files():
    want = []
    for keys in ("smollm2", "recall", "structured"):
        result = json.loads((QUALITY.parent / f"cpu_icecache_{keys}.json").read_text())
        for budget in result["options"]["budgets"]:
            rows = [r for r in result["rows"] if r["budget"] == budget and r["context"] <= 8192]
            at = {(r["pages"], r["choice"], r["field_of_view"]): r for r in rows}
            at_view = (("token order", "exact"), 1.0), (("tree", "exact"), 1.0), (("tree", "codes"), 0.1)
            four = [(*which, view) for which, view in (*at_view, (("paper", "paper"), 0.1))]
            cells = [at[which][m] for m in ("recall", "mass") for which in four]
            ours = [r for r in rows if r["choice"] == "codes"]
            cells += [min(r[ratio] for r in ours) for ratio in ("of_paper", "of_paper_pages")]
            want.append([f"{keys}, {budget}", *(f"{x:.3f}" for x in (*cells, at["tree", "codes", 0.1]["visited"]))])
            assert min(r["of_paper"] for r in rows if "of_paper" in r) > 0.95
    assert want in tables(ROOT / "benchmarks/results/README.md")


def test_the_table_of_digests_is_that_of_the_file():
    result = json.loads((QUALITY.parent / "cpu_digests.json").read_text())
    groups: dict[tuple, list[dict]] = {}
    for r in result["rows"]:
        groups.setdefault((r["offset"], r["method"], r["digest"]), []).append(r)
    o = result["options"]
    assert set(groups) == {*product(o["offsets"], recall_digests.PAGE_METHODS, o["digests"])}
    want = []
    for (offset, method, digest), rows in groups.items():
        cells = [f"{r[k]:.3f}" for k in ("recall", "mass") for r in rows]
        want.append([f"{offset:.0f}, `{method}`, {digest}", *cells])
    for offset in o["offsets"]:
        best = [f"{r['best']:.3f}" for r in groups[offset, "quest", "float8"]]
        want.append([f"{offset:.0f}, the best pages", "", "", "", *best])
    assert want in tables(ROOT / "benchmarks/results/README.md")


def test_the_committed_page_is_of_the_committed_files():
    """Pictures differ with matplotlib's version; the numbers do not."""
    page = (ROOT / "benchmarks/results/report/report.html").read_text()
    assert scores.section(load(FILES)) in page
    for r in load([*FILES, *TEXTS, *(QUALITY / "static").glob("*.json"), *QUALITY.parent.glob("*.json")]):
        assert f"<td>{r.path.name}</td><td>{html.escape('; '.join(r.commands))}</td>" in page, "run `make report`"


def test_they_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from torchsparsekv_benchmarks.report.make import make

    names = [p.name for p in make([*FILES, *TEXTS], tmp_path / "report.html")]
    committed = {p.name for p in (ROOT / "benchmarks/results/report").iterdir()}
    drawn = {(r.model["name"], row["task"], row["length"]) for r in load(TEXTS) for row in r.rows}
    assert len(names) == 7 + len(drawn), "the page, four lengths, needles, heads, and one of each model and text"
    assert set(names) <= committed
    assert committed - {p.name for p in (ROOT / "benchmarks/results/report").glob("*.png")} == {"report.html"}
