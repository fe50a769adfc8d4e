"""The pictures of the README, of docs/ and of the head of a report, made from files of results alone.

`make docs` draws them. A picture keeps its points in the PNG, so a test compares them with the files without drawing.
Axes of numbers begin at 0, and names stand beside the lines. Pictures are narrow, so that they can be read on a phone.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchsparsekv_benchmarks.report import style
from torchsparsekv_benchmarks.report.figures import Drawn, Figure, of
from torchsparsekv_benchmarks.report.load import BOARD as BOARD_FILES
from torchsparsekv_benchmarks.report.load import HOT_BUFFER, SERVE, Result
from torchsparsekv_benchmarks.report.markdown import (
    DENSE,
    RESULTS,
    ROOT,
    SINCE,
    Means,
    floor,
    opened,
)  # fmt: skip
from torchsparsekv_benchmarks.report.tables_quality import (
    BASE,
    BOARD_LONG,
    LONG_REST,
    LONG_SEEDS,
    TOO_HARD,
    over_tasks,
)
from torchsparsekv_benchmarks.report.tables_serving import STAGES
from torchsparsekv_benchmarks.report.tables_speed import LONG, SHORT

SIZE = (3.9, 2.9)  # inches, names at the right not included
Points = Any  # what JSON can hold


@dataclass(frozen=True)
class Picture:
    """files: relative to the folder of results. points(*files): what is drawn. draw(plt, points): the figure."""

    name: str
    files: tuple[str, ...]
    points: Callable[..., Points]
    draw: Callable[[Any, Points], Any]
    since: tuple[int, ...] = SINCE

    @property
    def out(self) -> Path:
        return ROOT / "docs" / f"{self.name}.png"

    def held(self, results: Path = RESULTS) -> str:
        """The points as text. Names the file that is missing or too old."""
        return json.dumps(self.points(*(opened(results / f, f"picture {self.name}", self.since) for f in self.files)))

    def current(self, results: Path = RESULTS) -> bool:
        return self.out.exists() and self.held(results).encode() in self.out.read_bytes()

    def png(self, plt: Any, results: Path = RESULTS) -> bytes:
        held = self.held(results)
        figure = self.draw(plt, json.loads(held))
        return style.png(figure, points=held)


def axes_of(plt, x: str, y: str):
    """A figure with axes from 0."""
    figure, axes = plt.subplots(figsize=SIZE)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def named_lines(axes, lines: Sequence[tuple[str, str, Sequence[tuple[float, float]]]], right: float | None = None):
    """(name, method, points) each. With `right`, all names are in one column there."""
    for _, method, at in lines:
        axes.plot(*zip(*at), marker="o", markersize=4, color=style.colour(method))
    style.name_lines(axes, [(right or at[-1][0], at[-1][1], name, style.colour(m)) for name, m, at in lines])


def level(axes, y: float, name: str) -> None:
    """A dotted line, with its name above its left end."""
    axes.axhline(y, color=style.SOFT, linewidth=1, linestyle=(0, (2, 3)), zorder=1)
    axes.annotate(name, (0.01, y), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=9)


# ---------------------------------------------------------------- answers against tokens read


ANSWERING = ("oracle", "icecache", "pariskv + rest", "pagemean + rest", "louiskv", "prkv", "quest")


def answer_points(board: Means, rest: Means) -> Points:
    """The dense model's score and tokens, and a line for each method: tokens that a step reads, score."""
    found = over_tasks(board.beside(rest), LONG_SEEDS[:1])
    dense = found[BASE, None]
    points = {m: sorted((round(a.read), round(a.score, 3)) for (n, _), a in found.items() if n == m) for m in ANSWERING}
    lines = [(m, m.partition(" ")[0], at) for m, at in points.items()]
    return [round(dense.score, 3), round(dense.read), lines]


def draw_answers(plt, points: Points):
    dense, tokens, lines = points
    figure, axes = axes_of(plt, "tokens that a step reads", "mean score of all tasks")
    right = max(at[-1][0] for _, _, at in lines)
    axes.set_xlim(0, 1.04 * right)
    axes.set_ylim(0, 1)
    level(axes, dense, f"dense: {dense:.2f}, reads {tokens}")
    named_lines(axes, lines, right)
    return figure


# ---------------------------------------------------------------- hit rate against size of the hot buffer


HITTING = (("quest", 1024), ("pariskv", 256))
TRACED = {"qwen_32k": "32K", "qwen_120k": "120K"}


def hit_points(result: Result) -> Points:
    """A line for each method and prompt: size of the hot buffer in budgets, hit rate."""
    lines = []
    for method, budget in HITTING:
        for trace, length in TRACED.items():
            rows = [r for r in result.rows if (r["method"], r["budget"], r["trace"]) == (method, budget, trace)]
            at = sorted((r["hot_budgets"], round(r["hit_rate"], 3)) for r in rows)
            lines.append((f"{method} {budget}, {length}", method, at))
    return lines


def draw_hits(plt, lines: Points):
    figure, axes = axes_of(plt, "size of the hot buffer, in budgets", "hit rate")
    axes.set_xlim(0, 16.5)
    axes.set_ylim(0, 1)
    axes.set_xticks([1, 2, 4, 6, 8, 12, 16])
    named_lines(axes, lines)
    for line, (name, _, _) in zip(axes.lines, lines):
        line.set_linestyle("-" if name.endswith("120K") else (0, (4, 2)))
    return figure


# ---------------------------------------------------------------- time of a token against context


SPEED = ("h200_decode_short.json", "h200_decode.json")
SPEED_TOKENS, SPEED_WORST = "h200_decode_pariskv.json", "h200_decode_worst.json"


def time_points(short: Result, long: Result, tokens: Result, worst: Result) -> Points:
    """Lines of ms a token by context at batch 1, the floor, and `quest` where every block is new."""

    def at(method: str, *results: Result) -> list[tuple[int, float]]:
        rows = [r for x in results for r in x.rows if r["method"] == method and r["batch"] == 1]
        return sorted((r["context"], round(r["tpot_ms"], 2)) for r in rows if r["context"] >= SHORT)

    faster: dict[int, float] = {}
    for context, ms in (p for m in DENSE for p in at(m, short, long)):
        faster[context] = min(ms, faster.get(context, ms))
    lines = [
        ("dense", "full", sorted(faster.items())),
        (f"quest, budget {long.options['budget']}", "quest", at("quest", short, long)),
        (f"pariskv, budget {tokens.options['budget']}", "pariskv", at("pariskv", tokens)),
    ]
    return [lines, round(floor(long) or 0, 2), at("quest", worst)[0]]


def draw_times(plt, points: Points):
    lines, least, worst = points
    figure, axes = axes_of(plt, "tokens in the cache", "milliseconds a token")
    contexts = sorted({x for _, _, at in lines for x, _ in at})
    axes.set_xlim(0, contexts[-1] * 1.02)
    axes.set_ylim(0, 1.05 * max(y for _, _, at in lines for _, y in at))
    axes.set_xticks(contexts, [style.tokens(x) for x in contexts])
    axes.plot(*worst, marker="x", markersize=7, markeredgewidth=2, color=style.colour("quest"))
    axes.annotate("quest, every block new", worst, (8, 1), textcoords="offset points", fontsize=9, va="center",
                  color=style.colour("quest"))  # fmt: skip
    axes.axhline(least, color=style.SOFT, linewidth=1, linestyle=(0, (2, 3)), zorder=1)
    axes.annotate(f"a step over 256 tokens: {least:.1f}", (contexts[-1], least), (0, -11), textcoords="offset points",
                  fontsize=9, color=style.SOFT, ha="right")  # fmt: skip
    named_lines(axes, lines)
    return figure


# ---------------------------------------------------------------- tokens a second against batch


SERVED = tuple(f"h200_serve_native_{name}.json" for name in ("32k_most", "32k", "32k_host", "32k_more"))
PLACES = {"triton": ("dense, Triton", "full"), "flash": ("FlashAttention", "full"),
          "flash-fp8": ("FlashAttention, fp8", "streaming"), "device": ("{}, on GPU", "quest"),
          "auto": ("{}, auto", "louiskv"), "host": ("{}, on host", "pagemean")}  # fmt: skip


def batch_points(*results: Result) -> Points:
    """A line for each place of keys and values: requests at a time, tokens a second. Of our methods only the first.
    `auto` beside `device` only with more host memory than in other runs: with less it is `device`."""
    method, lines = results[0].options["methods"][0], []
    usual = min((x.options["host_gib"] for x in results if x.options["host_gib"]), default=0)
    found: dict[tuple[str, str], dict[int, int]] = {}
    for x in results:
        for r in (r for r in x.rows if "tokens_per_s" in r and r.get("method", method) == method):
            more = r["place"] == "auto" and x.options["host_gib"] > usual
            if r["place"] == "auto" and not more and "device" in {other["place"] for other in x.rows}:
                continue
            size = f", {x.options['host_gib']:g} GiB" if more else ""
            found.setdefault((r["place"], size), {})[r["batch"]] = round(r["tokens_per_s"])
    for place, (name, shade) in PLACES.items():
        sizes = (size for at, size in found if at == place)
        lines += [(name.format(method) + size, shade, sorted(found[place, size].items())) for size in sizes]
    return lines


def draw_batches(plt, lines: Points):
    figure, axes = axes_of(plt, "requests at a time", "tokens a second")
    right = max(x for _, _, at in lines for x, _ in at)
    axes.set_xlim(0, 1.03 * right)
    axes.set_ylim(0, 1.05 * max(y for _, _, at in lines for _, y in at))
    named_lines(axes, lines, right)
    return figure


# ---------------------------------------------------------------- where the microseconds of a layer go


KERNELS, KERNELS_TREE = "h200_kernels.json", "h200_kernels_icecache.json"
TIMED = ("quest", "arkvale", "icecache", "pariskv")
PARTS = ("append", "index update", "select", "attention", "fetch, hits")  # in this order; the first two are one
MISSES = "fetch, misses"


def stage_points(pages: Result, tree: Result) -> Points:
    """For each method: microseconds of store and index, select, attend, fetch; and those that misses add at most."""
    us = {(r["method"], r["kernel"]): r["us"] for x in (tree, pages) for r in x.rows if r.get("context") == LONG}
    budgets = {"pariskv": pages.options["tokens"]}
    out = []
    for method in TIMED:
        append, index, select, attend, fetch = (us[method, STAGES[part]] for part in PARTS)
        more = us[method, STAGES[MISSES]] - fetch
        name = f"{method} {budgets.get(method, pages.options['budget'])}"
        out.append((name, [round(x, 1) for x in (append + index, select, attend, fetch)], round(more, 1)))
    return [out, round(us["full", "dense attention"], 1)]


def draw_stages(plt, points: Points):
    """A bar for each method. The part that misses add is hatched: its length is the worst case."""
    methods, dense = points
    figure, axes = axes_of(plt, "microseconds of one layer of a step", "")
    named = ("store", "select", "attend", "fetch")
    shades = ("#6f9ccc", "#2f6fb3", "#14375e", "#e08a2e")
    rows = [*methods, ("dense", [dense], 0)]
    for y, (_, parts, more) in enumerate(reversed(rows)):
        left = 0.0
        for us, shade in zip(parts, shades if len(parts) > 1 else (style.colour("full"),)):
            axes.barh(y, us, left=left, height=0.6, color=shade, edgecolor="white", linewidth=0.6)
            left += us
        if more:
            axes.barh(y, more, left=left, height=0.6, color="#fdf1e3", edgecolor=shades[3], hatch="////", linewidth=0.5)
        said = f"{left:.0f}" + (f", all blocks new: {left + more:.0f}" if more else "")
        axes.annotate(said, (left + more, y), (4, 0), textcoords="offset points", fontsize=9, va="center")
    axes.set_yticks(range(len(rows)), [name for name, _, _ in reversed(rows)])
    axes.set_xlim(0, 1.05 * dense)
    axes.set_ylim(-0.5, len(rows) - 0.2)
    axes.grid(axis="y", visible=False)
    for i, (name, shade) in enumerate(zip(named, shades)):
        axes.annotate(name, (0.2 * i, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", fontsize=9,
                      color=shade, fontweight="bold")  # fmt: skip
    return figure


# ---------------------------------------------------------------- the same at the head of a report


def board(plt, results: list[Result]) -> list[Drawn]:
    """A figure for each model and length, of files of `board` or of their means."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for r in of(results, BOARD_FILES):
        for length in sorted({x["length"] for x in r.rows}):
            groups.setdefault((r.about_model, length), []).append(r)
    out = []
    for (_, length), sources in groups.items():
        rows = [x for r in sources for x in r.rows if x["length"] == length and x["task"] not in TOO_HARD]
        if points := _answers(rows):
            note = (
                f"{style.tokens(length)} tokens. Mean score over {', '.join(dict.fromkeys(x['task'] for x in rows))}. "
                "Dotted: the dense model. Each point is a budget. Budget: tokens retrieved per kv head and step, "
                f"beside {sources[0].options['sink']} sink and {sources[0].options['window']} latest tokens."
            )
            name = sources[0].model["name"]
            out.append(Drawn(draw_answers(plt, points), note, tuple(sources), f"{name}, {style.tokens(length)} tokens"))
    return out


def _answers(rows: list[dict]) -> Points:
    """As answer_points, of rows of samples or of means; empty without the dense model or any other method."""
    cells: dict[tuple[str, int | None], dict[str, list[tuple[float, float]]]] = {}
    for r in rows:
        by_task = cells.setdefault((r["method"], r["budget"]), {})
        by_task.setdefault(r["task"], []).append((r["attended"], r["score"]))
    mean = lambda by, i: statistics.fmean(statistics.fmean(x[i] for x in xs) for xs in by.values())  # noqa: E731
    at = {name: (round(mean(by, 0)), round(mean(by, 1), 3)) for name, by in cells.items()}
    methods = dict.fromkeys(m for m, b in at if b is not None)
    if (BASE, None) not in at or not methods:
        return []
    tokens, score = at[BASE, None]
    return [score, tokens, [(m, m, sorted(p for (n, _), p in at.items() if n == m)) for m in methods]]


def hits(plt, results: list[Result]) -> list[Drawn]:
    note = (
        "Blocks that eight kv heads selected, step by step, brought into a hot buffer of each size as a step does it. "
        "The first {} steps fill the buffer and are not counted. Names: method, budget, prompt. Budget: tokens "
        "retrieved per kv head and step."
    )
    return [
        Drawn(draw_hits(plt, hit_points(r)), note.format(r.options["warm_up"]), (r,)) for r in of(results, HOT_BUFFER)
    ]


def batches(plt, results: list[Result]) -> list[Drawn]:
    out = []
    for r in of(results, SERVE):
        o = r.options
        note = (
            f"vLLM, {style.tokens(r.rows[0]['context'])} tokens a request, the last point with as many requests as are "
            f"admitted; {o['methods'][0]} beside vLLM's dense attention. Random weights move to another topic at every "
            f"step. Budget: {o['budget']} tokens per kv head and step."
        )
        out.append(Drawn(draw_batches(plt, batch_points(r)), note, (r,), style.tokens(r.rows[0]["context"])))
    return out


LEADING = (
    Figure("board", "Answers against tokens read", "torchsparsekv board", board, leads=True),
    Figure("hits", "Hit rate against size of the hot buffer", "benchmarks/research/hot_buffer.py", hits, leads=True),
)
SERVING = (Figure("batch", "Tokens a second against requests", "torchsparsekv bench serve", batches),)

PICTURES = (
    Picture("board", (BOARD_LONG, LONG_REST), answer_points, draw_answers),
    Picture("hits", ("quality/hot_buffer.json",), hit_points, draw_hits),
    Picture("tpot", (*SPEED, SPEED_TOKENS, SPEED_WORST), time_points, draw_times),
    Picture("batch", SERVED, batch_points, draw_batches),
    Picture("stages", (KERNELS, KERNELS_TREE), stage_points, draw_stages),
)


def write(pictures: tuple[Picture, ...] = PICTURES, results: Path = RESULTS) -> list[Path]:
    """Draw the pictures whose points have changed. Without matplotlib, current pictures are left as they are."""
    old = [p for p in pictures if not p.current(results)]
    if not old:
        return []
    with style.styled() as plt:
        for picture in old:
            picture.out.write_bytes(picture.png(plt, results))
    return [p.out for p in old]
