"""The README: short, its example runs as pasted, its figures are those of the files; and no link of a page is dead."""
import contextlib
import json
import random
import re
import statistics
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import prompts, tiny
from test_cli import ROOT

import torchsparsekv
from torchsparsekv.api import methods
from torchsparsekv_benchmarks.quality import text_summary
from torchsparsekv_benchmarks.report import readme, scores
from torchsparsekv_benchmarks.report.load import load

README = ROOT / "README.md"
TEXT = README.read_text()
RESULTS = ROOT / "benchmarks/results"
PAGES = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", RESULTS / "README.md", *(ROOT / "docs").rglob("*.md")]
# The table of what to take: method, what is said beside it, samples of its answers, has it a KL, where its time is
TAKE = (
    ("pariskv", "", 80, True, "h200_decode_pariskv"), ("louiskv", "", 80, True, "h200_decode_clusters"),
    ("clusterkv", "", 20, True, "h200_decode_p99"),
    ("clusterkv", ", 16 by distance", 80, False, "h200_decode_clusters"), ("quest", "", 80, True, "h200_decode"),
    ("streaming", ", no index", 80, True, None),
)  # fmt: skip


def decode(file: str, context: int) -> dict[str, dict]:
    rows = json.loads((RESULTS / f"{file}.json").read_text())["rows"]
    return {r["method"]: r for r in rows if r["context"] == context}


def ratios(file: str) -> list[float]:
    """cuDNN's time over that of our dense attention, at the contexts of the figure and of the table."""
    rows = [decode(file, context) for context in (131072, 262144, 524288)]
    return [r["sdpa-cudnn"]["tpot_ms"] / r["full"]["tpot_ms"] for r in rows if "sdpa-cudnn" in r]


def test_it_is_read_in_a_minute():
    lines = TEXT.splitlines()
    assert len(lines) <= 150
    assert max(map(len, (x for x in lines if "](" not in x))) <= 125
    first = "\n".join(lines[:30])
    for part in ("(docs/tpot.png)", "docs/architecture.md"):
        assert part in first
    assert len(re.findall(r"^- \*\*[\d.]+ .*\*\*", first, re.MULTILINE)) == 3


def test_its_example_runs_as_pasted(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    random.seed(0)
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    said = capsys.readouterr().out
    assert said.startswith("v187 v052 v134 v248 .\ntorchsparsekv: pariskv\n")
    assert "!!" not in said
    assert all(r.density < 0.25 for r in names["handle"].report().layers[2:])
    assert not hasattr(names["model"], "_torchsparsekv"), "and is a plain model again"


def test_the_loop_of_using_runs_as_pasted(monkeypatch, capsys):
    """Without inductor, whose compilation is what it takes; dynamo traces the step whole all the same."""
    block = re.findall(r"```python\n(.*?)```", (ROOT / "docs/using.md").read_text(), flags=re.S)[0]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    ids = prompts(1, 700, ragged=False)[0]
    names = dict(torch=torch, torchsparsekv=torchsparsekv, model=tiny(max_position_embeddings=4096), prompt=ids)
    exec(compile(block, "using.md", "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"^ +2 quest +15 +\d", said, re.MULTILINE)
    assert "!!" not in said


class Replayed:
    """In the place of a CUDA graph: what is captured does not run, and runs at a replay."""

    def __init__(self, names: dict):
        self.names = names

    @contextlib.contextmanager
    def captured(self, graph):
        model, names = self.names["model"], self.names
        names["model"] = lambda ids, **_: SimpleNamespace(logits=torch.zeros(*ids.shape, model.config.vocab_size))
        yield
        names["model"] = model
        names["position"].sub_(1)

    def replay(self):
        self.names["logits"].copy_(self.names["step"]())


def test_the_captured_loop_of_using_runs_as_pasted(monkeypatch):
    block = re.findall(r"```python\n(.*?)```", (ROOT / "docs/using.md").read_text(), flags=re.S)[1]
    model, prompt = tiny(max_position_embeddings=4096), prompts(1, 700, ragged=False)[0]
    names = dict(torch=torch, model=model, prompt=prompt)
    graph, stream = Replayed(names), SimpleNamespace(wait_stream=lambda other: None)
    with torchsparsekv.patch(model, "quest", budget=256, sink=32, window=64) as handle, torch.no_grad():
        want = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, 700:]
        cache = handle.make_cache(batch_size=1, max_length=4096)
        token = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
        assert token.item() == want[0]
        names.update(cache=cache, token=token)
        stand_ins = (
            ("Stream", lambda: stream), ("current_stream", lambda: stream), ("CUDAGraph", lambda: graph),
            ("stream", lambda s: contextlib.nullcontext()), ("graph", graph.captured),
        )  # fmt: skip
        for name, stands_for in () if torch.cuda.is_available() else stand_ins:
            monkeypatch.setattr(torch.cuda, name, stands_for)
        exec(compile(block.replace("range(100)", "range(20)"), "using.md", "exec"), names)
        assert names["ids"].item() == want[-1]
        assert names["position"].item() + 1 == cache.get_seq_length() == 700 + 3 + 20


def test_what_stands_on_the_first_screen():
    said = " ".join(TEXT.split("## Install")[0].split())
    long, short = decode("h200_decode_pariskv", 524288), decode("h200_decode_pariskv", 131072)
    assert f"**{long['pariskv']['speedup']:.2f} times as fast as our dense attention**" in said
    assert f"at 512K with pariskv, {short['pariskv']['speedup']:.2f} at 128K" in said
    both = [x for f in RESULTS.glob("h200_decode*.json") for x in ratios(f.stem)]
    assert f"cuDNN's takes {min(both):.2f} to {max(both):.2f} of the time of ours" in said
    for context, method in ((32, "arkvale"), (128, "quest")):
        file = RESULTS / f"h200_throughput_{context}k_int8.json"
        rows = {r["method"]: r for r in json.loads(file.read_text())["rows"]}
        best, mine = max((rows["full"], rows["sdpa-cudnn"]), key=lambda r: r["tokens_per_s"]), rows[method]
        assert best["method"] == "sdpa-cudnn"
        assert f"{mine['tokens_per_s'] / best['tokens_per_s']:.1f} times" in said.replace("*", "")
        assert re.search(rf"`{method}` runs {mine['batch']} (rows )?and cuDNN's (attention )?{best['batch']}\b", said)
    gib = long["pariskv"]["device_GiB"], long["full"]["device_GiB"], long["pariskv"]["host_GiB"]
    assert "**{:.1f} GiB of GPU memory instead of {:.1f}**".format(*gib[:2]) in said
    assert f"with {gib[2]:.1f} GiB in host memory" in said
    assert f"quest is {decode('h200_decode_worst', 131072)['quest']['speedup']:.2f} times as fast as dense" in said
    answers = [r for r in answered() if r["method"] in ("pariskv", "dense") and r["budget"] in (64, None)]
    assert f"**{statistics.fmean(r['score'] for r in answers):.2f} of the recall answers, as dense**" in said


def answered(files: str = "*_32768_*.jsonl") -> list[dict]:
    """Samples of the recall model at 32K on the H200, but of the task that needs no retrieval."""
    found = load(sorted((RESULTS / "quality").glob(files)))
    return [r for f in found for r in f.rows if r["task"] not in scores.APART]


def attended(text, method: str, budget: int) -> int:
    """Tokens that a scored step reads, in the mean over steps and samples."""
    mine = [r for r in text.rows if (r["method"], r["budget"], r["length"]) == (method, budget, 2048)]
    of = {r["index"]: r["density"] for r in mine}
    return round(statistics.fmean(of.values()) * (2048 - (text.options["steps"] - 1) / 2))


def test_the_table_of_what_to_take():
    text = load([RESULTS / "quality/text/text_2048_h200.jsonl"])
    kl = {(r["method"], r["budget"]): r["kl"] for r in text_summary.summarize(text[0].rows) if r.get("kl") is not None}
    want = []
    for method, said, samples, reads, file in TAKE:
        every = answered() if samples == 80 else answered("clusterkv/recall_32768.jsonl")
        of = {(r["task"], r["index"]): r["score"] for r in every if (r["method"], r["budget"]) == (method, 64)}
        assert len(of) == samples
        told = f"{kl[method, 64]:.3f} ({attended(text[0], method, 64)})" if reads else "-"
        cells = [f"{statistics.fmean(of.values()):.2f}", told]
        row = decode(file, 131072)[method] if file else None
        cells += [f"{row['tpot_ms']:.2f}", f"{row['speedup']:.2f}x", f"{row['device_GiB']:.1f}"] if row else ["-"] * 3
        want.append(f"| `{method}`{said} | {' | '.join(cells)} |")
    assert "\n".join(want) in TEXT
    read = [attended(text[0], name, 64) for name in ("oracle", "pariskv")]
    assert "read {} a step, where `pariskv` reads {})".format(*read) in " ".join(TEXT.split())
    assert attended(text[0], "clusterkv", 64) == attended(text[0], "quest", 256)
    assert f"reads at 256, where its KL is {kl['quest', 256]:.3f}." in " ".join(TEXT.split())


def test_its_figure_has_the_points_of_the_files():
    of = readme.results()
    lines = {label: points for label, _, points in readme.points(of)}
    assert list(lines) == ["dense", "cuDNN", "quest, budget 1024", "pariskv, budget 100"]
    assert [x for x, _ in lines["dense"]] == [8192, 131072, 262144, 524288]
    for context in (131072, 524288):
        assert (context, decode("h200_decode", context)["full"]["tpot_ms"]) in lines["dense"]
        assert (context, decode("h200_decode_pariskv", context)["pariskv"]["tpot_ms"]) in lines["pariskv, budget 100"]


def test_its_figure_is_small_and_can_be_drawn_again(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = readme.draw(tmp_path / "tpot.png").read_bytes()
    committed = (ROOT / "docs/tpot.png").read_bytes()
    assert committed.startswith(b"\x89PNG")
    assert len(committed) < 60_000
    assert drawn[16:24] == committed[16:24] or abs(len(drawn) - len(committed)) < 5_000, "matplotlib's versions differ"


def test_every_method_is_in_the_table_of_methods():
    rows = re.findall(r"^\| \[`(\w+)`\]\(methods/(\w+)\.md\)", (ROOT / "docs/methods.md").read_text(), re.MULTILINE)
    assert sorted(rows) == [(name, name) for name in sorted(methods())]
    assert "all thirteen" in TEXT
    assert len(rows) == 13


def test_the_table_of_text_is_that_of_the_file():
    text = load([RESULTS / "quality/text/text_2048_h200.jsonl"])[0]
    found = {(r["method"], r["budget"]): r for r in text_summary.summarize(text.rows)}
    page = (ROOT / "docs/quality.md").read_text()
    for method in {m for m, budget in found if budget}:
        columns = (("kl", 4), ("kl_p95", 3), ("agrees", 3))
        cells = [f"{found[method, b][k]:.{digits}f}" for b in (64, 256, 1024) for k, digits in columns]
        assert f"| `{method}` | {' | '.join(cells)} |" in page
        if method not in ("oracle", "random"):
            assert f"`{method}` {attended(text, method, 64)}" in page
    assert f"a perplexity of {found['dense', None]['perplexity']:.1f}." in page
    assert f"retrieved at {found['louiskv', 64]['retrieval_rate']:.0%}".replace("%", " %") in page


def test_the_table_of_one_run_is_that_of_the_file():
    after = json.loads((RESULTS / "earlier/h200_room.json").read_text())["tpot_after"]
    page = (ROOT / "docs/results.md").read_text()
    for method in {r["method"] for r in after}:
        cells = [f"{r['tpot_ms']:.2f}" for r in after if r["method"] == method]
        assert f"| `{method}` | {' | '.join(cells)} |" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_link_is_dead(page: Path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
    dead = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    assert not dead
