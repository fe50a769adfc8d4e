"""The figures of the README and the docs, made from the files of results.

`python -m torchsparsekv_benchmarks.report.tables` draws them. A picture holds its points, so that a test can compare
them with the files of results without drawing it again.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchsparsekv_benchmarks.report import speed, style
from torchsparsekv_benchmarks.report.load import Result, load
from torchsparsekv_benchmarks.report.markdown import RESULTS, ROOT, Means, floor
from torchsparsekv_benchmarks.report.tables_quality import BASE, BOARD, over_tasks
from torchsparsekv_benchmarks.report.tables_speed import SHORT

PAGES, TOKENS = ("h200_decode_short", "h200_decode"), ("h200_decode_pariskv",)
LINES = (("full", PAGES), ("sdpa-cudnn", PAGES), ("quest", PAGES), ("pariskv", TOKENS))
FLOOR = "h200_decode"
SIZE = (7.2, 3.2)  # inches
DRAWN = ("oracle", "icecache", "pariskv", "louiskv", "clusterkv", "snapkv", "arkvale", "prkv", "quest", "random")


@dataclass(frozen=True)
class Picture:
    """points: what is drawn, as JSON holds it. draw(plt, points): the figure."""

    out: Path
    files: tuple[str, ...]
    points: Callable[[], Any]
    draw: Callable[[Any, Any], Any]

    def held(self) -> str:
        """What the picture says of its points."""
        return json.dumps(self.points())

    def current(self) -> bool:
        return self.out.exists() and self.held().encode() in self.out.read_bytes()


def times() -> dict[str, Result]:
    names = dict.fromkeys(n for _, files in LINES for n in files)
    return {n: load([RESULTS / f"{n}.json"])[0] for n in names}


def time_points() -> list[Any]:
    """A line for each method, at batch 1, and the floor."""
    of, out = times(), []
    for method, files in LINES:
        found = [
            (r["context"], r["tpot_ms"]) for n in files for r in of[n].rows
            if (r["method"], r["batch"]) == (method, 1) and r["context"] >= SHORT
        ]  # fmt: skip
        budget = of[files[-1]].options["budget"]
        label = speed.name(method) + ("" if method in speed.NAMES else f", budget {budget}")
        out.append((label, method, sorted(found)))
    return [out, floor(of[FLOOR])]


def draw_times(plt, points):
    drawn = speed.tpot_lines(plt, *points)
    for line in drawn.axes[0].lines:
        if line.get_marker() == "D":  # another budget, which its name says
            line.set(linestyle="-", marker="o")
    return drawn


def answer_points() -> list[Any]:
    """The dense model's score, and a line for each method: tokens read a step, score."""
    raw = json.loads((RESULTS / BOARD).read_text())
    found = over_tasks(Means(raw["sources"], raw["settings"], raw["rows"]))
    lines = [(m, sorted((round(a.read), round(a.score, 3)) for (n, _), a in found.items() if n == m)) for m in DRAWN]
    return [round(found[BASE, None].score, 3), lines]


def draw_answers(plt, points):
    dense, lines = points
    figure, axes = plt.subplots()
    axes.set_xscale("log", base=2)
    axes.set_xticks([256, 512, 1024], ["256", "512", "1024"])
    axes.set_xlim(170, 2400)
    axes.set_ylim(0, 0.9)
    axes.set_xlabel("tokens that a step reads, of 32K")
    axes.set_ylabel("mean score of nine tasks")
    axes.axhline(dense, color=style.INK, linewidth=1, linestyle=(0, (2, 3)), zorder=1)
    axes.annotate("dense", (170, dense), (4, 4), textcoords="offset points", fontsize=9)
    for method, at in lines:
        axes.plot(*zip(*at), marker="o", color=style.colour(method))
    right = max(at[-1][0] for _, at in lines)  # all names in one column
    style.name_lines(axes, [(right, at[-1][1], method, style.colour(method)) for method, at in lines])
    return figure


PICTURES = (
    Picture(ROOT / "docs/tpot.png", tuple(f"{n}.json" for n in (*PAGES, *TOKENS)), time_points, draw_times),
    Picture(ROOT / "docs/board.png", (BOARD,), answer_points, draw_answers),
)


def write(pictures: tuple[Picture, ...] = PICTURES) -> list[Path]:
    """Draw those that are of other points; without matplotlib a picture is left as it is where it is current."""
    old = [p for p in pictures if not p.current()]
    if not old:
        return []
    with style.styled() as plt:
        for picture in old:
            drawn = picture.draw(plt, picture.points())
            drawn.set_size_inches(*SIZE)
            picture.out.write_bytes(style.png(drawn, points=picture.held()))
    return [p.out for p in old]
