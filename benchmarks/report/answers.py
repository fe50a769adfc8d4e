"""Figures of `eval`: accuracy against budget, where needles are found, and which heads keep the attention weight."""
import statistics
from collections.abc import Callable, Iterable

from torchsparsekv.benchmarks.quality.options import DENSE
from torchsparsekv.benchmarks.quality.store import key
from torchsparsekv.benchmarks.quality.summary import head_means, wilson
from torchsparsekv.benchmarks.report import style
from torchsparsekv.benchmarks.report.figures import Drawn, Figure, by_model, of
from torchsparsekv.benchmarks.report.load import EVAL, Result

COMMAND, STREAMING = "torchsparsekv eval", "streaming"
DEPTHS = 5  # rows of the needle map
MEAN = "mean of the tasks"
ACROSS = 4  # panels beside one another


def groups(results: list[Result]) -> list[tuple[list[Result], list[dict]]]:
    """(files, their samples) for every model; of a sample that is in two files, the later one."""
    out = [(g, list({key(row): row for r in g for row in r.rows}.values())) for g in by_model(of(results, EVAL))]
    for sources, rows in out:
        _one_setting(sources, rows)
    return out


def _one_setting(sources: list[Result], rows: list[dict]) -> None:
    """A figure cannot tell apart a method under two windows, say: better none than a mean of both."""
    first: dict[str, dict] = {}
    for r in rows:
        if r["patch"] is None:
            continue
        setting = {k: v for k, v in r["patch"].items() if k != "budget"}
        if r["method"] == STREAMING:
            setting["window"] -= r["budget"]
        if first.setdefault(r["method"], setting) != setting:
            names = ", ".join(s.path.name for s in sources)
            raise ValueError(f"{names}: {r['method']} with {first[r['method']]} and {setting}; report them separately")


def ordered(values: Iterable) -> list:
    return sorted(set(values))


def method_order(rows: list[dict]) -> list[str]:
    """As they were run; the dense model first."""
    names = dict.fromkeys(r["method"] for r in rows)
    return [*(n for n in names if n == DENSE), *(n for n in names if n != DENSE)]


def counted(rows: list[dict]) -> str:
    """How the budget is counted, and on how many samples."""
    cells: dict[tuple, set] = {}
    for r in rows:
        cells.setdefault((r["task"], r["length"]), set()).add(r["index"])
    sizes = ordered(len(x) for x in cells.values())
    n = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    patches = [r["patch"] for r in rows if r["patch"] and r["method"] not in (STREAMING, "full")]
    near = ordered((p["sink"], p["window"], p["skip_layers"]) for p in patches)
    beside = "; ".join(f"{s} sink and {w} latest tokens, {k} dense layers" for s, w, k in near)
    return (
        f"{n} samples per task and length, the same for every method. Budget: tokens retrieved per kv head and decode "
        f"step, beside {beside}; streaming has the budget in its window."
    )


# ---------------------------------------------------------------- accuracy against budget


def accuracy(plt, results: list[Result]) -> list[Drawn]:
    """One figure for every length."""
    out = []
    for sources, rows in groups(results):
        if not any(r["budget"] for r in rows):
            continue
        budgets = ordered(r["budget"] for r in rows if r["budget"])
        what = "Dashed: the dense model." if len(budgets) > 1 else f"At a budget of {budgets[0]}."
        note = f"{what} Thin lines: Wilson 95 % intervals. {counted(rows)}"
        for length in ordered(r["length"] for r in rows):
            mine = [r for r in rows if r["length"] == length]
            tag = f"{sources[0].model['name']}, {style.tokens(length)} tokens"
            out.append(Drawn(_accuracy(plt, mine), note, tuple(sources), tag))
    return out


def _accuracy(plt, rows: list[dict]):
    tasks, several = list(dict.fromkeys(r["task"] for r in rows)), len({r["budget"] for r in rows} - {None}) > 1
    panels = [*([MEAN] if len(tasks) > 1 else []), *tasks]
    across = min(ACROSS, len(panels))
    down, height = -(-len(panels) // across), 2.2 if several else 0.5 + 0.22 * len(method_order(rows))
    figure, axes = plt.subplots(
        down, across, figsize=(1.0 + 2.15 * across, 0.4 + height * down), squeeze=False, sharey=True
    )
    figure.subplots_adjust(hspace=0.62 if several else 0.75, wspace=0.14)
    for i, ax in enumerate(axes.flat):
        ax.set_visible(i < len(panels))
        if i < len(panels):
            mine = [r for r in rows if panels[i] in (r["task"], MEAN)]
            _curves(ax, mine, names=i == len(panels) - 1) if several else _dots(ax, mine)
            ax.set_title(panels[i])
            ax.set_xlabel(ax.get_xlabel() if i + across >= len(panels) else "")
    return figure


def _score(rows: list[dict]) -> tuple[float, float, float]:
    """Mean and interval."""
    mean = statistics.fmean(r["score"] for r in rows)
    return mean, *wilson(mean, len(rows))


def _curves(ax, rows: list[dict], *, names: bool) -> None:
    budgets, ends = ordered(r["budget"] for r in rows if r["budget"]), []
    for method in method_order(rows):
        mine, shade = [r for r in rows if r["method"] == method], style.colour(method)
        if mine[0]["budget"] is None:
            level = _score(mine)[0]
            ax.axhline(level, color=shade, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
            ends.append((budgets[-1], level, method, shade))
            continue
        at = ordered(r["budget"] for r in mine)
        points = [_score([r for r in mine if r["budget"] == b]) for b in at]
        spans = [[m - low for m, low, _ in points], [high - m for m, _, high in points]]
        ax.errorbar(at, [m for m, _, _ in points], yerr=spans, color=shade, marker="o", elinewidth=0.9)
        ends.append((at[-1], points[-1][0], method, shade))
    style.token_axis(ax, budgets, "budget")
    ax.set_ylim(-0.03, 1.05)
    if names:
        style.name_lines(ax, ends)


def _dots(ax, rows: list[dict]) -> None:
    """Of one budget there is no curve to draw: a method a line, the score along it."""
    methods = method_order(rows)[::-1]
    for y, method in enumerate(methods):
        mean, low, high = _score([r for r in rows if r["method"] == method])
        ax.plot([low, high], [y, y], color=style.colour(method), linewidth=1.2)
        ax.plot(mean, y, marker="o", color=style.colour(method), markersize=6)
    ax.set_yticks(range(len(methods)), methods)
    ax.set_xlim(-0.04, 1.04)
    ax.set_xlabel("score")


# ---------------------------------------------------------------- needles by length and depth


def needles(plt, results: list[Result]) -> list[Drawn]:
    out = []
    for sources, rows in groups(results):
        rows = [r for r in rows if r["depth"] is not None]
        if not rows:
            continue
        budget = _smallest(rows)
        rows = [r for r in rows if r["budget"] in (None, budget)]
        figure = _maps(plt, rows, _needle_grid, "length", "depth of the needle", text=True)
        tasks = ", ".join(dict.fromkeys(r["task"] for r in rows))
        note = f"Mean score at budget {budget}, over {tasks}. Blank: no sample. " + counted(rows)
        out.append(Drawn(figure, note, tuple(sources), sources[0].model["name"]))
    return out


def _smallest(rows: list[dict]) -> int | None:
    """The budget at which methods differ most."""
    return min((r["budget"] for r in rows if r["budget"]), default=None)


def _needle_grid(rows: list[dict], every: list[dict]):
    lengths = ordered(r["length"] for r in every)
    cells: dict[tuple, list[float]] = {}
    for r in rows:
        cells.setdefault((min(int(r["depth"] * DEPTHS), DEPTHS - 1), r["length"]), []).append(r["score"])
    grid = [[statistics.fmean(cells[d, n]) if (d, n) in cells else None for n in lengths] for d in range(DEPTHS)]
    names = [f"{100 * d // DEPTHS}-{100 * (d + 1) // DEPTHS} %" for d in range(DEPTHS)]
    return grid, names, [style.tokens(n) for n in lengths]


def _maps(plt, rows: list[dict], grid_of: Callable, x: str, y: str, *, text: bool, low: float = 0.0):
    """One heat map per method, with one scale for all."""
    methods = method_order(rows)
    across = min(ACROSS, len(methods))
    down = -(-len(methods) // across)
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
        figure = _maps(plt, probed, _head_grid, "query head", "layer", text=False)
        tasks = ", ".join(dict.fromkeys(r["task"] for r in probed))
        most = max(sum(r["method"] == m for r in probed) for m in method_order(probed))
        note = (
            f"Share of the full softmax weight that was attended to, mean over the decode steps of {most} samples per "
            f"method ({tasks}; {style.tokens(longest)}; budget {budget}). The first layers are dense. " + counted(rows)
        )
        out.append(Drawn(figure, note, tuple(sources), sources[0].model["name"]))
    return out


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
