"""The figure of benchmarks/quality/recall_icecache.py: what grouping by a tree gives, and what choosing by it does."""
from torchsparsekv_benchmarks.report import style
from torchsparsekv_benchmarks.report.figures import Drawn, Figure, of
from torchsparsekv_benchmarks.report.load import ICECACHE, Result

MEASURES = {
    "recall": "best tokens held", "mass": "attention weight held",
    "agrees": "exactly chosen pages held",
}  # fmt: skip
# (pages, choice): how its points are drawn; of those chosen exactly there is one value.
LINES = {("tree", "codes"): "-", ("paper", "paper"): "--"}
LEVELS = {("tree", "exact"): (0, (1, 1)), ("token order", "exact"): (0, (6, 2, 1, 2))}
SHADES = ("#332288", "#d55e00", "#009e73", "#8a8f98")


def tree(plt, results: list[Result]) -> list[Drawn]:
    return [_tree(plt, r, context) for r in of(results, ICECACHE) for context in r.options["contexts"]]


def _tree(plt, source: Result, context: int) -> Drawn:
    figure, panels = plt.subplots(1, len(MEASURES), figsize=(9.6, 3.3))
    figure.subplots_adjust(wspace=0.22)
    here = [r for r in source.rows if r["context"] == context]
    shades = dict(zip(dict.fromkeys(r["budget"] for r in here), SHADES))
    for axes, (measure, title) in zip(panels, MEASURES.items()):
        for budget, shade in shades.items():
            _draw(axes, [r for r in here if r["budget"] == budget and measure in r], measure, shade)
        axes.set_xscale("log")
        ticks = (0.05, 0.1, 0.2, 0.5, 1.0)
        axes.set_xticks(ticks, [f"{x:.0%}" for x in ticks])
        axes.minorticks_off()
        axes.set_xlabel("tokens visited")
        axes.set_ylim(0, 1.02)
        axes.set_title(title)
    ends = []
    for budget, shade in shades.items():
        (last,) = [r for r in here if (r["budget"], r["choice"], r["field_of_view"]) == (budget, "codes", 1.0)]
        ends.append((last["visited"], last["agrees"], f"{budget}", shade))
    style.name_lines(panels[-1], ends)
    return Drawn(figure, _note(source, context), (source,), f"{source.options['keys']} {style.tokens(context)}")


def _draw(axes, rows: list[dict], measure: str, shade: str) -> None:
    for (pages, choice), dash in (LINES | LEVELS).items():
        points = [(r["visited"], r[measure]) for r in rows if (r["pages"], r["choice"]) == (pages, choice)]
        if (pages, choice) in LINES:
            axes.plot(*zip(*points), color=shade, linestyle=dash, marker="o", markersize=3) if points else None
        elif points and measure != "agrees":
            axes.axhline(points[0][1], color=shade, linestyle=dash, linewidth=1)


def _note(source: Result, context: int) -> str:
    o = source.options
    return (
        f"{style.tokens(context)} keys, r = {o['r']:g}, {o['levels']} levels. Solid: our "
        "descent, ranking by 4-bit codes, against the share of tokens that a query head sees. Dashed: the paper's "
        "algorithms 1 to 4, each node with pages of its own. Dotted: the exact choice of our pages; dash-dotted: that "
        f"of pages in token order. Best tokens: the {o['top']} of largest q.k of a query head. {o['queries']} queries. "
        "Budget: tokens of the chosen pages per kv head and query, one colour each."
    )


FIGURES = (
    Figure("tree", "IceCache: grouping and choice", "python benchmarks/quality/recall_icecache.py", tree),
)  # fmt: skip
