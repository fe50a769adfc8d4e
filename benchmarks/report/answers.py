"""Figures of `eval`: accuracy against budget, where needles are found, and which heads keep the attention weight."""
import statistics
from collections.abc import Callable, Sequence

from torchsparsekv_benchmarks.quality.options import DENSE, defaults_since
from torchsparsekv_benchmarks.quality.store import key
from torchsparsekv_benchmarks.quality.summary import head_means
from torchsparsekv_benchmarks.report import style
from torchsparsekv_benchmarks.report.figures import Drawn, Figure
from torchsparsekv_benchmarks.report.load import Result
from torchsparsekv_benchmarks.report.scores import (
    STREAMING,
    Scores,
    averaged,
    budgets,
    groups,
    method_order,
    ordered,
    task_order,
)  # fmt: skip

COMMAND = "torchsparsekv eval"
DEPTHS = 5  # rows of the needle map
SPREAD = 0.5  # of the depths that a task must cover to be in it
MEAN = "mean of the tasks"
ACROSS = 4  # panels beside one another
BESIDE = 0.045  # octaves between the points of two methods at one budget


def counted(rows: list[dict]) -> str:
    """How the budget is counted, and on how many samples."""
    cells: dict[tuple, set] = {}
    for r in rows:
        cells.setdefault((r["task"], r["length"]), set()).add(r["index"])
    sizes = ordered(len(x) for x in cells.values())
    n = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"{n} samples per task and length, the same for every method. {changed(rows)}{budget_counts(rows)}"


def changed(rows: list[dict]) -> str:
    """Where what a method was told would mean something else by today's defaults, in words."""
    found = []
    for (method, budget), r in {(r["method"], r["budget"]): r for r in rows if r.get("hyper")}.items():
        if other := defaults_since(r["patch"], method, r["hyper"]):
            found.append(f"{method} at {budget} with {', '.join(other)}")
    return f"Defaults have changed since: here {'; '.join(found)}. " if found else ""


def budget_counts(rows: list[dict]) -> str:
    """What the budget of these rows counts."""
    patches = [r["patch"] for r in rows if r["patch"] and r["method"] not in (STREAMING, "full")]
    near = ordered((p["sink"], p["window"], p["skip_layers"]) for p in patches)
    beside = "; ".join(f"{s} sink and {w} latest tokens, {k} dense layers" for s, w, k in near)
    return (
        f"Budget: tokens retrieved per kv head and decode step, beside {beside}; streaming has the budget in its "
        "window."
    )


# ---------------------------------------------------------------- accuracy against budget


def accuracy(plt, results: list[Result]) -> list[Drawn]:
    """One figure for every length."""
    out = []
    for sources, rows in groups(results):
        at, methods = budgets(rows), method_order(rows)
        if not at:
            continue
        what = "Dashed: the dense model." if len(at) > 1 else f"At a budget of {at[0]}."
        for length in ordered(r["length"] for r in rows):
            mine = Scores([r for r in rows if r["length"] == length])
            note = f"{what} Thin lines: Wilson 95 % intervals. {mine.gaps(methods, at)}{counted(mine.rows)}"
            tag = f"{sources[0].model['name']}, {style.tokens(length)} tokens"
            out.append(Drawn(_accuracy(plt, mine, methods, at), note, holding(sources, mine.rows), tag))
    return out


def holding(sources: Sequence[Result], rows: list[dict]) -> tuple[Result, ...]:
    """The files that some of these samples are from."""
    wanted = {key(r) for r in rows}
    return tuple(s for s in sources if any(key(r) in wanted for r in s.rows))


def _accuracy(plt, scores: Scores, methods: list[str], at: list[int]):
    tasks, mean = list(scores.wanted), averaged(scores.rows)
    panels = [([t], t) for t in tasks]
    if len(mean) > 1:
        panels.insert(0, (mean, MEAN if mean == tasks else f"mean of {len(mean)} tasks"))
    across = min(ACROSS, len(panels))
    down, height = -(-len(panels) // across), 2.2 if len(at) > 1 else 0.5 + 0.22 * len(methods)
    figure, axes = plt.subplots(
        down, across, figsize=(1.0 + 2.15 * across, 0.4 + height * down), squeeze=False, sharey=True
    )
    figure.subplots_adjust(hspace=0.62 if len(at) > 1 else 0.75, wspace=0.14)
    for i, ax in enumerate(axes.flat):
        ax.set_visible(i < len(panels))
        if i < len(panels):
            over, title = panels[i]
            _curves(ax, scores, methods, at, over) if len(at) > 1 else _dots(ax, scores, methods, at[0], over)
            ax.set_title(title)
            ax.set_xlabel(ax.get_xlabel() if i + across >= len(panels) else "")
    if len(at) > 1:
        _legend(figure, axes.flat[len(panels) :], scores, methods)
    return figure


def _curves(ax, scores: Scores, methods: list[str], at: list[int], tasks: list[str]) -> None:
    for i, method in enumerate(methods):
        shade, level = style.colour(method), scores.of(method, None, tasks)
        if level:
            ax.axhline(level.mean, color=shade, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
            continue
        found = [(b, s) for b in at if (s := scores.of(method, b, tasks)) and (s.whole or len(tasks) == 1)]
        if not found:
            continue
        beside = 2 ** (BESIDE * (i - (len(methods) - 1) / 2))  # so that equal scores do not cover one another
        x, points = [b * beside for b, _ in found], [s for _, s in found]
        spans = [[s.mean - s.low for s in points], [s.high - s.mean for s in points]]
        ax.errorbar(x, [s.mean for s in points], yerr=spans, color=shade, marker="o", elinewidth=0.9, linewidth=1.4)
        part = [(x, s.mean) for x, s in zip(x, points) if not s.whole]
        if part:
            ax.plot(*zip(*part), color=shade, marker="o", markerfacecolor="white", linestyle="none", zorder=4)
    style.token_axis(ax, at, "budget")
    ax.set_ylim(-0.03, 1.05)


def _legend(figure, free, scores: Scores, methods: list[str]) -> None:
    """In the first place that no panel takes, or beside them all; a method without a sample is named as that."""
    from matplotlib.lines import Line2D

    has = {r["method"] for r in scores.rows}
    shown = [
        Line2D([], [], color=style.colour(m), marker="" if m == DENSE else "o", linestyle="--" if m == DENSE else "-",
               label=m if m in has else f"{m} (not measured)")
        for m in methods
    ]  # fmt: skip
    if len(free):
        free[0].set_visible(True)
        free[0].axis("off")
    where = dict(loc="center left", bbox_to_anchor=free[0].get_position().bounds) if len(free) else dict(
        loc="center left", bbox_to_anchor=(0.92, 0.5)
    )
    figure.legend(handles=shown, fontsize=9, labelcolor="linecolor", handlelength=1.4, labelspacing=0.35, **where)


def _dots(ax, scores: Scores, methods: list[str], budget: int, tasks: list[str]) -> None:
    """Of one budget there is no curve to draw: a method a line, the score along it."""
    for y, method in enumerate(methods[::-1]):
        s = scores.of(method, None, tasks) or scores.of(method, budget, tasks)
        if s and (s.whole or len(tasks) == 1):
            face = style.colour(method) if s.whole else "white"
            ax.plot([s.low, s.high], [y, y], color=style.colour(method), linewidth=1.2)
            ax.plot(s.mean, y, marker="o", color=style.colour(method), markerfacecolor=face, markersize=6)
    ax.set_yticks(range(len(methods)), methods[::-1])
    ax.set_xlim(-0.04, 1.04)
    ax.set_xlabel("score")


# ---------------------------------------------------------------- needles by length and depth


def needles(plt, results: list[Result]) -> list[Drawn]:
    out = []
    for sources, rows in groups(results):
        tasks, budget = _spread(rows), _smallest(rows)
        rows = [r for r in rows if r["task"] in tasks and r["budget"] in (None, budget)]
        if not rows:
            continue
        figure = _maps(plt, rows, _needle_grid, "length", "depth of the needle", text=True)
        note = (
            f"Mean score at budget {budget}, over {', '.join(tasks)}; of several needles, the depth of the first. "
            f"{_per_cell(rows)} Blank: none. {counted(rows)}"
        )
        out.append(Drawn(figure, note, holding(sources, rows), sources[0].model["name"]))
    return out


def _spread(rows: list[dict]) -> list[str]:
    """Tasks whose needles stand at all depths; one that has them at the middle only would make a row of its own."""
    depths = {t: [r["depth"] for r in rows if r["task"] == t and r["depth"] is not None] for t in task_order(rows)}
    return [t for t, x in depths.items() if x and max(x) - min(x) >= SPREAD]


def _depth(row: dict) -> int:
    return min(int(row["depth"] * DEPTHS), DEPTHS - 1)


def _per_cell(rows: list[dict]) -> str:
    cells: dict[tuple, int] = {}
    for r in rows:
        at = (r["method"], r["length"], _depth(r))
        cells[at] = cells.get(at, 0) + 1
    sizes = ordered(cells.values())
    return f"{sizes[0]} to {sizes[-1]} samples a cell." if len(sizes) > 1 else f"{sizes[0]} samples a cell."


def _smallest(rows: list[dict]) -> int | None:
    """The budget at which methods differ most."""
    return min((r["budget"] for r in rows if r["budget"]), default=None)


def _needle_grid(rows: list[dict], every: list[dict]):
    lengths = ordered(r["length"] for r in every)
    cells: dict[tuple, list[float]] = {}
    for r in rows:
        cells.setdefault((_depth(r), r["length"]), []).append(r["score"])
    grid = [[statistics.fmean(cells[d, n]) if (d, n) in cells else None for n in lengths] for d in range(DEPTHS)]
    names = [f"{100 * d // DEPTHS}-{100 * (d + 1) // DEPTHS} %" for d in range(DEPTHS)]
    return grid, names, [style.tokens(n) for n in lengths]


def _maps(plt, rows: list[dict], grid_of: Callable, x: str, y: str, *, text: bool, low: float = 0.0):
    """One heat map per method, with one scale for all."""
    methods = method_order(rows)
    down = -(-len(methods) // ACROSS)
    across = -(-len(methods) // down)
    figure, axes = plt.subplots(
        down, across, figsize=(1.3 + 2.1 * across, 0.7 + 1.9 * down), squeeze=False, layout="constrained"
    )
    for ax, method in zip(axes.flat, methods):
        grid, names, columns = grid_of([r for r in rows if r["method"] == method], rows)
        image = style.heat(ax, grid, names, columns, text=text, low=low)
        ax.set_title(method, color=style.colour(method))
    for i, ax in enumerate(axes.flat):
        ax.set_visible(i < len(methods))
        if i % across:
            ax.set_yticklabels([])
        else:
            ax.set_ylabel(y)
        if i + across >= len(methods):
            ax.set_xlabel(x)
    bar = figure.colorbar(image, ax=axes, shrink=0.7, aspect=25, pad=0.015)
    bar.outline.set_visible(False)
    return figure


# ---------------------------------------------------------------- attention weight by layer and head


def recall_map(plt, results: list[Result]) -> list[Drawn]:
    out = []
    for sources, rows in groups(results):
        probed = [r for r in rows if r.get("mass")]
        if not probed:
            continue
        budget, longest = _smallest(probed), max(r["length"] for r in probed)
        probed = [r for r in probed if r["budget"] == budget and r["length"] == longest]
        probed, short = _as_many(probed)
        figure = _maps(plt, probed, _head_grid, "query head", "layer", text=False)
        most = len(probed) // len(method_order(probed))
        note = (
            f"Share of the full softmax weight that was attended to, mean over the decode steps of {most} samples per "
            f"method ({', '.join(task_order(probed))}; {style.tokens(longest)}; budget {budget}). {short}The first "
            f"layers are dense. {counted(rows)}"
        )
        out.append(Drawn(figure, note, holding(sources, probed), sources[0].model["name"]))
    return out


def _as_many(probed: list[dict]) -> tuple[list[dict], str]:
    """The methods that were probed on all samples, and words about the others: other samples are no comparison."""
    count = {m: sum(r["method"] == m for r in probed) for m in method_order(probed)}
    short = [m for m, n in count.items() if n < max(count.values())]
    told = f"Left out, probed on fewer: {', '.join(short)}. " if short else ""
    return [r for r in probed if r["method"] not in short], told


def _head_grid(rows: list[dict], every: list[dict]):
    grid = head_means(rows, "mass") or []
    step = max(1, len(grid) // 8)
    names = [str(i) if i % step == 0 else "" for i in range(len(grid))]
    return grid, names, [str(h) if h % max(1, len(grid[0]) // 8) == 0 else "" for h in range(len(grid[0]))]


FIGURES = (
    Figure("accuracy", "Accuracy against budget", COMMAND, accuracy),
    Figure("needles", "Where needles are found", COMMAND, needles),
    Figure("recall_map", "Attention weight kept, by layer and head", f"{COMMAND} --probe N", recall_map),
)
