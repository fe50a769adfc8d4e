"""The report: what it draws are the numbers of the files, and what it cannot draw it names."""
import base64
import json
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from cases import METHODS
from cli import answered, refused
from evaluating import SMALL
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT
from standin import source

from torchsparsekv_benchmarks.quality import run as quality
from torchsparsekv_benchmarks.quality.options import Options
from torchsparsekv_benchmarks.quality.summary import summarize
from torchsparsekv_benchmarks.report import answers, pictures, scores, speed, style
from torchsparsekv_benchmarks.report.load import load
from torchsparsekv_benchmarks.report.make import FIGURES, make

pytest.importorskip("matplotlib")

RESULTS = ROOT / "benchmarks/results"
MEASURED = sorted(RESULTS.glob("*.json"))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("eval") / "eval.jsonl"
    o = Options(**{**SMALL, "methods": ("quest", "random"), "budgets": (16, 32), "samples": 4})
    quality.run(o, path, source())
    torch._dynamo.reset()
    return path


@pytest.fixture(scope="module")
def written(evaluated, tmp_path_factory) -> list[Path]:
    """The page of all that was measured, and its pictures."""
    return make([*MEASURED, evaluated], tmp_path_factory.mktemp("report") / "out/report.html")


@pytest.fixture
def plt():
    with style.styled() as pyplot:
        yield pyplot


def rows(name: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text())["rows"]


# ---------------------------------------------------------------- the page


def test_everything_that_was_measured_is_on_one_page(written, evaluated):
    text = written[0].read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(pictures) == len(written) - 1
    assert sorted(base64.b64decode(p) for p in pictures) == sorted(p.read_bytes() for p in written[1:])
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written[1:])
    assert not re.search(r'(?:src|href)="(?!data:image|#)', text), "it needs nothing from elsewhere"
    for f in FIGURES:
        drawn = f'<section id="{f.name}">' in text
        assert drawn != (f"<li>{f.title}: a file of <code>{f.provided_by}</code></li>" in text)
    for said in ("NVIDIA H200", "torch 2.11.0+cu130", "llama-3.1-8b", "stand-in", "4 samples per task", "Budget: "):
        assert said in text
    for path in (*MEASURED, evaluated):
        assert path.name in text


def test_every_figure_says_what_it_was_measured_on(written):
    text = written[0].read_text()
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text, re.S)
    assert len(captions) >= 9
    for caption in captions:
        assert re.search(r"bfloat16|float32", caption)
        assert re.search(r"torch \d", caption)
        assert re.search(r"Budget: .*per kv head|budget plays no part|cache of one row", caption), "what it counts"
        assert "From <code>" in caption


def test_one_file_makes_its_figures_and_the_others_are_named(tmp_path):
    written = make([RESULTS / "h200_kernels.json"], tmp_path / "r.html")
    assert [p.name for p in written] == ["r.html", "r_stages.png"]
    text = written[0].read_text()
    assert text.count("<li>") == len(FIGURES) - 1
    assert "Accuracy against budget: a file of <code>torchsparsekv eval</code>" in text


def test_a_real_model_leads_the_page(tmp_path):
    quality = RESULTS / "quality"
    files = [RESULTS / "h200_kernels.json", quality / "hot_buffer.json", quality / "board_32k.json"]
    text = make(files, tmp_path / "r.html")[0].read_text()
    assert re.findall(r'<section id="(\w+)">', text)[:3] == ["board", "hits", "stages"]
    assert "qwen-1.5b (1543.7M parameters, bfloat16)" in text


def test_the_page_draws_the_board_of_the_docs(plt):
    """The file has means of samples, which the docs and the page weigh alike."""
    (drawn,) = pictures.board(plt, load([RESULTS / "quality/board_128k.json"]))
    points = json.loads(pictures.PICTURES[0].held())
    held = [(name, at) for name, _, at in points[2] if not name.endswith(" + rest")]  # those are in another file
    assert len(held) == 5
    for name, at in held:
        found = line(drawn.figure.axes[0], style.colour(name), len(at))
        assert found == [(x, pytest.approx(y, abs=2e-3)) for x, y in at]


def test_means_without_their_samples_are_refused():
    with pytest.raises(ValueError, match=r"kl_32k\.json holds means of eval-text: a report draws the samples, or"):
        load([RESULTS / "quality/kl_32k.json"])


# ---------------------------------------------------------------- the figures


def line(axes, colour: str, length: int):
    """The points of the only line of that colour and length."""
    found = [x for x in axes.lines if x.get_color() == colour and len(x.get_xdata()) == length]
    assert len(found) == 1
    return list(zip(found[0].get_xdata(), found[0].get_ydata()))


def texts(figure) -> list[str]:
    return [t.get_text() for t in figure.findobj(match=lambda a: hasattr(a, "get_text"))]


def test_time_per_token(plt):
    found = speed.tpot(plt, load([p for p in MEASURED if "decode" in p.name]))
    tags = {f.tag for f in found}
    assert {"llama-3.1-8b", "llama-3.1-8b, 128K", "qwen2.5-7b-1m, 1M"} <= tags, "bars where there is one context only"
    axes = found[0].figure.axes[0]
    files = ("h200_decode_short.json", "h200_decode.json")
    plain = [r for name in files for r in rows(name) if not r.get("hyper")]
    for method, points in (("full", 5), ("quest", 5), ("arkvale", 3)):
        want = sorted((r["context"], r["tpot_ms"]) for r in plain if r["method"] == method)
        assert line(axes, style.colour(method), points) == want
    assert {"quest", "dense", "arkvale", "cuDNN", "pariskv, budget 100"} <= set(texts(found[0].figure))
    single = next(f for f in found if f.tag == "llama-3.1-8b, 128K")
    assert {"quest, locality 0", "quest, locality 0.919", "louiskv, tau=1, locality 0.9"} <= set(texts(single.figure))
    assert speed.OF_RUNS in single.caption
    million = next(f for f in found if f.tag == "qwen2.5-7b-1m, 1M")
    assert speed.OF_RUNS not in million.caption, "of one run"
    value = next(r["tpot_ms"] for r in rows("h200_decode_1m.json") if r["method"] == "full")
    assert f"{value:.2f}" in texts(million.figure), "bars have their values"


def test_each_batch_of_a_file_has_a_figure_and_a_floor_of_its_own(plt, tmp_path):
    head = json.loads((RESULTS / "h200_decode_short.json").read_text())
    eight = [{**r, "batch": 8, "tpot_ms": r["tpot_ms"] * 2} for r in head["rows"]]
    (tmp_path / "both.json").write_text(json.dumps(head | {"rows": head["rows"] + eight}))
    found = speed.tpot(plt, load([tmp_path / "both.json"]))
    assert [f.tag for f in found] == ["llama-3.1-8b", "llama-3.1-8b, batch 8"]
    floor = head["rows"][0]["tpot_ms"]
    for drawn, want in zip(found, (floor, floor * 2)):
        assert f"floor: 256 tokens, {want:.2f} ms" in texts(drawn.figure)
    assert "at batch 8;" in found[1].caption


def test_other_hyper_parameters_are_another_line(tmp_path):
    head = json.loads((RESULTS / "h200_decode.json").read_text())
    mine = next(r for r in head["rows"] if r["method"] == "quest" and r["context"] == 131072)
    (tmp_path / "more.json").write_text(json.dumps(head | {"rows": [mine, {**mine, "hyper": "block_size=32"}]}))
    found = speed.lines(load([tmp_path / "more.json"]))
    assert [label for label, _, _ in found] == ["quest", "quest, block_size=32"]


def test_another_pool_is_another_line_and_older_files_had_the_usual_one(tmp_path):
    head = json.loads((RESULTS / "h200_decode_int8.json").read_text())
    packed, usual = head["options"], head["options"] | {"pool_dtype": "auto"}
    older = {k: v for k, v in usual.items() if k != "pool_dtype"}
    for i, options in enumerate((older, usual, packed)):
        (tmp_path / f"{i}.json").write_text(json.dumps(head | {"options": options}))
    names = lambda *files: {label for label, _, _ in speed.lines(load([tmp_path / f"{i}.json" for i in files]))}  # noqa: E731
    methods = {"quest", "arkvale", "pariskv", "prkv"}
    assert names(0, 1) == names(0) >= methods
    assert names(0, 2) >= {f"{m}, pool in int8" for m in methods} | methods
    assert names(2, 1) >= {f"{m}, pool in the model's type" for m in methods} | methods


def test_stages_add_up(plt):
    said = texts(speed.stages(plt, load([RESULTS / "h200_kernels.json"]))[0].figure)
    at = [r for r in rows("h200_kernels.json") if r.get("context") == 131072]
    mine = {r["kernel"]: r["us"] for r in at if r["method"] == "quest"}
    hits, new = mine.pop("fetch, all hits"), mine.pop("fetch, nearly all misses")
    others = sum(us for kernel, us in mine.items() if "beside" not in kernel)
    assert f"  {others + hits:.0f} us, with new blocks {others + new:.0f}" in said
    (dense,) = (r["us"] for r in at if r["kernel"] == "dense attention")
    assert f"  {dense:.0f} us" in said


def test_throughput_and_memory(plt, tmp_path):
    head = json.loads((RESULTS / "h200_throughput_32k.json").read_text())
    less = lambda r: {"cap_GiB": 68.0, "batch": r["batch"] // 2, "tokens_per_s": r["tokens_per_s"] / 2}  # noqa: E731
    half = [{**r, **less(r)} for r in head["rows"]]
    (tmp_path / "caps.json").write_text(json.dumps(head | {"rows": head["rows"] + half}))
    (caps,) = speed.throughput(plt, load([tmp_path / "caps.json"]))
    want = [(r["batch"], r["tokens_per_s"]) for r in head["rows"] + half if r["method"] == "quest"]
    assert line(caps.figure.axes[0], style.colour("quest"), 2) == sorted(want)
    several = speed.throughput(plt, load(sorted(RESULTS.glob("h200_throughput*.json"))))
    assert {r["cap_GiB"] for d in several for s in d.sources for r in s.rows} == {136}
    said = [{s.options.get("trace", "") for s in d.sources} for d in several]
    assert [len(x) for x in said] == [1] * 4, "a replay is no comparison with synthetic queries"
    drawn = [t.get_text() for d in several for t in d.figure.axes[0].get_yticklabels()]
    assert {"dense, pool in int8, batch 14", "quest, batch 7", "quest, hot_budgets=15, batch 57"} < set(drawn)
    assert "pariskv, budget 100, pool in int8, batch 8" in drawn
    gpu, host = speed.memory(plt, load([RESULTS / "h200_decode.json"]))[0].figure.axes
    of = [r for r in rows("h200_decode.json") if r["method"] == "quest"]
    assert line(gpu, style.colour("quest"), 3) == [(r["context"], r["device_GiB"]) for r in of]
    assert line(host, style.colour("quest"), 3) == [(r["context"], r["host_GiB"]) for r in of]
    assert not [x for x in host.lines if x.get_color() == style.colour("full")], "dense has nothing on the host"


def test_throughput_of_several_caps_says_whose_pool_is_in_which_type(plt, tmp_path):
    head = json.loads((RESULTS / "h200_throughput_32k.json").read_text())
    for cap, pool in ((136.0, "auto"), (68.0, "int8")):
        changed = head | {"options": head["options"] | {"pool_dtype": pool}}
        changed["rows"] = [{**r, "cap_GiB": cap} for r in head["rows"]]
        (tmp_path / f"{pool}.json").write_text(json.dumps(changed))
    (found,) = speed.throughput(plt, load(sorted(tmp_path.glob("*.json"))))
    assert {"dense", "quest", "quest, pool in int8"} <= (named := set(texts(found.figure)))
    assert "dense, pool in int8" not in named


def test_accuracy_is_that_of_the_table(plt, evaluated):
    results = load([evaluated])
    table = summarize(results[0].rows, "dense")
    axes = answers.accuracy(plt, results)[0].figure.axes[0]
    for method in ("quest", "random"):
        want = [(pytest.approx(r["budget"], rel=0.1), r["score"]) for r in table if r["method"] == method]
        assert line(axes, style.colour(method), 2) == want, "beside its budget, so that no point covers another"
    dense = next(r for r in table if r["method"] == "dense")["score"]
    assert any(set(x.get_ydata()) == {dense} and x.get_color() == style.colour("dense") for x in axes.lines)


def test_one_budget_is_drawn_as_dots(plt, evaluated, tmp_path):
    lines = evaluated.read_text().splitlines()
    some = [x for x in lines if json.loads(x).get("budget", 16) in (None, 16)]
    path = tmp_path / "one.jsonl"
    path.write_text("\n".join(some) + "\n")
    drawn = answers.accuracy(plt, load([path]))[0]
    assert "At a budget of 16." in drawn.caption
    assert [t.get_text() for t in drawn.figure.axes[0].get_yticklabels()] == ["random", "quest", "dense"]


def test_what_is_missing_is_not_drawn_and_is_named(plt, evaluated, tmp_path):
    """random 32 was cut short after one sample, and quest 16 never ran."""
    lines = [json.loads(x) for x in evaluated.read_text().splitlines()]
    at = lambda x: (x.get("method"), x.get("budget"))  # noqa: E731
    kept = [x for x in lines if at(x) != ("quest", 16) and (at(x) != ("random", 32) or x["index"] == 0)]
    path = tmp_path / "short.jsonl"
    path.write_text("\n".join(map(json.dumps, kept)) + "\n")
    drawn = answers.accuracy(plt, load([path]))[0]
    assert "Not measured, or on fewer samples (hollow): quest (1 of 2 points), random (1 of 2 points)." in drawn.caption
    axes = drawn.figure.axes[0]
    assert [x for x, _ in line(axes, style.colour("quest"), 1)] == [pytest.approx(32, rel=0.1)]
    (hollow,) = [x for x in axes.lines if x.get_markerfacecolor() == "white"]
    assert hollow.get_xdata() == [pytest.approx(32, rel=0.1)]
    assert hollow.get_color() == style.colour("random")
    rows = {r["method"]: r for r in scores.overview(load([path])[0].rows, ["chain"])}
    assert rows["quest"]["256: 16"] == "-"
    assert rows["random"]["256: 32"] == "1/4"


def test_a_mean_is_over_whole_tasks_only():
    """A method that only ran on the easy task has no mean, and `common` is in none."""
    one = dict(length=8, index=0, budget=64)
    rows = [{**one, "task": t, "method": "dense", "budget": None, "score": 1.0} for t in ("easy", "hard", "common")]
    rows += [{**one, "task": t, "method": "whole", "score": s} for t, s in (("easy", 1.0), ("hard", 0.5))]
    rows += [{**one, "task": "easy", "method": "short", "score": 1.0}]
    assert scores.averaged(rows) == ["easy", "hard"]
    table = {r["method"]: r["8: 64"] for r in scores.overview(rows, scores.averaged(rows))}
    assert table == {"dense": "1.00", "whole": "0.75", "short": "1/2"}


def test_needles(plt, evaluated, tmp_path):
    assert answers.needles(plt, load([evaluated])) == [], "the stand-in's are all in the middle: no map of depths"
    lines = [json.loads(x) for x in evaluated.read_text().splitlines()]
    path = tmp_path / "deep.jsonl"
    path.write_text("\n".join(json.dumps({**x, "depth": 0.1 + 0.25 * x.get("index", 0)}) for x in lines) + "\n")
    grid = answers.needles(plt, load([path]))[0].figure.axes[0].images[0].get_array()
    assert grid.shape == (answers.DEPTHS, 1)
    assert grid[[0, 1, 3, 4], 0].tolist() == [1, 1, 1, 1], "dense finds all"
    assert grid.mask[:, 0].tolist() == [False, False, True, False, False], "no sample, no value"


def test_maps_hold_the_means(plt, evaluated):
    results = load([evaluated])
    probed = [r for r in results[0].rows if r["mass"] and r["method"] == "quest" and r["budget"] == 16]
    drawn = answers.recall_map(plt, results)[0].figure
    image = drawn.axes[0].images[0].get_array()
    assert image.tolist() == probed[0]["mass"]["heads"]


@pytest.mark.parametrize("what", ["patch", "hyper"])
def test_two_settings_are_not_averaged(evaluated, tmp_path, what):
    """Of what `patch` was told, or of what a default meant."""
    lines = evaluated.read_text().splitlines()
    other = [json.dumps({**json.loads(x), what: {**json.loads(x)[what], "sink": 0}}) for x in lines[-1:]]
    path = tmp_path / "two.jsonl"
    path.write_text("\n".join([*lines, *other]) + "\n")
    with pytest.raises(ValueError, match=r"two\.jsonl: random with .* and .*; report them separately"):
        make([path], tmp_path / "report.html")


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9))
def test_names_do_not_lie_on_one_another(heights):
    heights = sorted(heights)
    moved = style.spread(heights, 10, 0, 100)
    assert all(b - a > 9.999 for a, b in pairwise(moved))
    assert -1e-9 < moved[0] <= moved[-1] < 100 + 1e-9


def test_names_that_are_apart_stay_where_they_are():
    assert style.spread([5, 30, 90], 10, 0, 100) == [5, 30, 90]


def test_a_method_has_one_colour():
    assert style.colour("pariskv") == style.colour("pariskv max")
    assert style.colour("somebody's") == style.colour("somebody's") in style.OTHERS
    assert len({style.colour(m) for m in METHODS if m != "full"} | {style.colour("dense")}) == len(METHODS)


# ---------------------------------------------------------------- what it refuses

BAD = {
    "nothing there": (None, r"there is no file .*x\.json"),
    "not JSON": ("x", "x.json is not JSON"),
    "not an object": ("[]", "x.json is not an object"),
    "something else": ('{"benchmark": "weather"}', "benchmark is 'weather', not one of eval, decode"),
    "of before": ('{"rows": []}', "benchmark is None, not one of eval, decode"),
    "half a file": ('{"benchmark": "decode", "command": "", "options": {}}', "has no environment, rows"),
    "no rows": ('{"benchmark": "decode", "command": "", "environment": {}, "options": {}, "rows": []}', "has no rows"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_result_is_refused(tmp_path, what):
    text, says = BAD[what]
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        make([tmp_path / "x.json"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_file_of_bytes_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"{}\n\xfa\xfb\xfc\xfd\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2, is not JSON"):
        make([tmp_path / "x.jsonl"], tmp_path / "report.html")


def test_the_command(tmp_path):
    shutil.copy(RESULTS / "h200_prefill.json", tmp_path)
    told = answered("report", str(tmp_path / "h200_prefill.json"), "-o", str(tmp_path / "a.html"))
    assert told.split() == [str(tmp_path / "a.html"), str(tmp_path / "a_prefill.png")]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nothing.json"], "report: there is no file nothing.json"),
        (["docs"], "report: docs is a folder, not a file"),
        ([str(MEASURED[0]), "-o", "x.pdf"], "report: the report is an HTML page: its name must end in .html, got"),
    ],
)
def test_the_command_refuses_with_2(args, says):
    assert says in refused("report", *args)


def test_without_matplotlib_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "report: the report needs matplotlib: pip install 'torchsparsekv[report]'" in refused(
        "report", str(MEASURED[0]), "-o", "x.html"
    )
