"""The figure of `eval-text`: it shows the numbers of the file, first on the page, and says what its budget counts."""
import json
import math
from pathlib import Path

import pytest
import torch
from evaluating import SMALL
from evaluating_text import STEPS, folder, options  # noqa: F401
from standin import source

from torchsparsekv_benchmarks.quality import run as quality
from torchsparsekv_benchmarks.quality import text as measured
from torchsparsekv_benchmarks.quality.options import Options
from torchsparsekv_benchmarks.report import style, text
from torchsparsekv_benchmarks.report.load import load
from torchsparsekv_benchmarks.report.make import make

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def file(folder, tmp_path_factory) -> Path:  # noqa: F811
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    measured.run(options(folder, budgets=(16, 32)), path)
    torch._dynamo.reset()
    return path


@pytest.fixture
def plt():
    with style.styled() as pyplot:
        yield pyplot


def lines(drawn, title: str) -> dict[str, list[tuple[float, float]]]:
    """By colour, the points of a panel's lines; a line across the whole panel has no budget."""
    (ax,) = (a for a in drawn.figure.axes if a.get_visible() and a.get_title(loc="left") == title)
    across = lambda x: list(x) == [0, 1]  # noqa: E731
    return {
        f"{line.get_color()} {line.get_linestyle()}": [
            (None if across(line.get_xdata()) else x, y) for x, y in zip(line.get_xdata(), line.get_ydata())
        ]
        for line in ax.lines
    }


def test_it_draws_what_the_file_holds(file, plt):
    (drawn,) = text.text(plt, load([file]))
    rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    for method in ("quest", "streaming"):
        for title, of in (
            ("KL to dense, mean (nats)", lambda r: sum(r["kl"]) / STEPS),
            ("top-1 agreement with dense", lambda r: r["agrees"]),
        ):
            points = lines(drawn, title)[f"{style.colour(method)} -"]
            for budget, y in points:
                mine = [of(r) for r in rows if (r["method"], r["budget"]) == (method, budget)]
                assert len(mine) == 3
                assert y == pytest.approx(sum(mine) / 3)
            assert [b for b, _ in points] == [16, 32]
    dense = [r["nats"] for r in rows if r["method"] == "dense"]
    (level, _) = lines(drawn, "perplexity")[f"{style.colour('dense')} --"]
    assert level == (None, pytest.approx(math.exp(sum(dense) / 3)))


def test_its_caption_says_what_was_measured(file, plt):
    (drawn,) = text.text(plt, load([file]))
    for said in (
        "3 stretches of the text", "84 tokens of prompt", "then 12 steps", "noise of the data type", "Budget: tokens "
        "retrieved per kv head and decode step, beside 8 sink and 16 latest tokens, 0 dense layers",
    ):  # fmt: skip
        assert said in drawn.caption


def test_a_method_with_fewer_samples_is_named_and_left_out(file, plt, tmp_path):
    head, *rows = file.read_text().splitlines(keepends=True)
    gone = [r for r in rows if (d := json.loads(r))["method"] == "quest" and d["budget"] == 32 and d["index"] == 2]
    short = tmp_path / "short.jsonl"
    short.write_text("".join([head, *(r for r in rows if r not in gone)]))
    (drawn,) = text.text(plt, load([short]))
    assert "On fewer samples, and left out: quest 32." in drawn.caption
    points = lines(drawn, "KL to dense, mean (nats)")[f"{style.colour('quest')} -"]
    assert [b for b, _ in points] == [16]


def test_it_is_the_first_on_the_page_before_the_table_of_scores(file, tmp_path):
    answers = tmp_path / "eval.jsonl"
    o = Options(**{**SMALL, "methods": ("quest",), "tasks": ("chain", "journal"), "samples": 1})
    quality.run(o, answers, source())
    page = make([answers, file], tmp_path / "report.html")[0].read_text()
    at = [page.index(f'<section id="{name}"') for name in ("text", "scores", "accuracy", "numbers")]
    assert at == sorted(at)
    nav = page[page.index("<nav>") : page.index("</nav>")]
    assert nav.index("#text") < nav.index("#scores") < nav.index("#accuracy")
    for said in (f"{STEPS} steps", "text.jsonl", "perplexity: of the scored tokens"):
        assert said in page


def test_its_caption_names_defaults_that_have_changed_since(file, plt, tmp_path):
    (drawn,) = text.text(plt, load([file]))
    assert "Defaults have changed" not in drawn.caption
    head, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    for r in rows:
        if (r["method"], r["budget"]) == ("quest", 32):
            r["hyper"] |= {"digest": "bfloat16", "since gone": 1}
    old = tmp_path / "old.jsonl"
    old.write_text("\n".join(map(json.dumps, (head, *rows))) + "\n")
    (drawn,) = text.text(plt, load([old]))
    assert "Defaults have changed since: here quest at 32 with digest=bfloat16. " in drawn.caption
