"""The figure of `eval-text`: how far next-token distributions are from those of the dense model, on real text."""
from collections.abc import Callable
from typing import Any

from torchsparsekv_benchmarks.quality import text_summary
from torchsparsekv_benchmarks.quality.options import DENSE
from torchsparsekv_benchmarks.report import style
from torchsparsekv_benchmarks.report.answers import budget_counts, changed, holding
from torchsparsekv_benchmarks.report.figures import Drawn, Figure
from torchsparsekv_benchmarks.report.load import TEXT, Result
from torchsparsekv_benchmarks.report.scores import budgets, groups, method_order, ordered

# Column of the summary, title, and whether its axis is logarithmic.
PANELS = (
    ("kl", "KL to dense, mean (nats)", True), ("kl_p95", "KL to dense, 95th percentile", True),
    ("agrees", "top-1 agreement with dense", False), ("perplexity", "perplexity", False),
    ("mass", "attention weight kept", False), ("bytes_per_token", "KB read per token", True),
)  # fmt: skip
ACROSS = 3
COMMAND = "torchsparsekv eval-text"


def text(plt, results: list[Result]) -> list[Drawn]:
    """One figure for every model, text and length."""
    out = []
    for sources, rows in groups(results, TEXT):
        for name, length in dict.fromkeys((r["task"], r["length"]) for r in rows):
            mine = [r for r in rows if (r["task"], r["length"]) == (name, length)]
            if budgets(mine):
                tag = f"{sources[0].model['name']} on {name}, {style.tokens(length)} tokens"
                out.append(Drawn(_figure(plt, mine), _caption(sources[0], mine), holding(sources, mine), tag))
    return out


def _caption(source: Result, rows: list[dict]) -> str:
    steps, samples = source.model["steps"], len({r["index"] for r in rows})
    return (
        f"Teacher-forced on {samples} stretch{'es' if samples > 1 else ''} of the text, the same for every method: "
        f"{rows[0]['length'] - steps} tokens of prompt, taken in exactly, then {steps} steps through the method, each "
        f"after the true tokens. Dashed: the dense model; dotted: full, which leaves nothing out. {_noise(rows)}"
        "Attention weight and reads are of the layers that are not dense; oracle and full read every key. "
        f"{_short(rows)}{changed(rows)}{budget_counts(rows)}"
    )


def _noise(rows: list[dict]) -> str:
    """What of the KL is of the data type: that of `full`, whose line is not drawn where it is far below the others."""
    kl = [r["kl"] for r in text_summary.summarize(rows) if r["method"] == "full"]
    return f"The KL of full, {kl[0]:.2g}, is the noise of the data type. " if kl else ""


def _short(rows: list[dict]) -> str:
    """Methods with fewer samples than others, in words: a mean over other samples is no comparison."""
    count: dict[tuple, int] = {}
    for r in rows:
        count[r["method"], r["budget"]] = count.get((r["method"], r["budget"]), 0) + 1
    most = max(count.values())
    named = [f"{m} {b or ''}".strip() for (m, b), n in count.items() if n < most]
    return f"On fewer samples, and left out: {', '.join(named)}. " if named else ""


def _figure(plt, rows: list[dict]):
    table = text_summary.summarize(rows)
    most = max(r["samples"] for r in table)
    table = [r for r in table if r["samples"] == most]
    panels = [p for p in PANELS if any(r.get(p[0]) is not None for r in table if r["method"] != DENSE)]
    down = -(-len(panels) // ACROSS)
    figure, axes = plt.subplots(down, ACROSS, figsize=(9.4, 0.5 + 2.6 * down), squeeze=False)
    figure.subplots_adjust(hspace=0.42, wspace=0.3)
    for i, ax in enumerate(axes.flat):
        ax.set_visible(i < len(panels))
        if i < len(panels):
            _panel(ax, table, *panels[i])
            ax.set_xlabel("budget" if i + ACROSS >= len(panels) else "")
    _legend(figure, method_order(table))
    return figure


def _panel(ax, table: list[dict], column: str, title: str, logarithmic: bool) -> None:
    unit = 1e-3 if column == "bytes_per_token" else 1.0
    value: Callable = lambda r: None if r.get(column) is None else r[column] * unit  # noqa: E731
    at = ordered(r["budget"] for r in table if r["budget"])
    for method in method_order(table):
        shade = style.colour(method)
        found = [(r["budget"], value(r)) for r in table if r["method"] == method and value(r) is not None]
        for _, y in (p for p in found if p[0] is None and (p[1] or not logarithmic)):
            ax.axhline(y, color=shade, linewidth=1.2, linestyle="--" if method == DENSE else ":", zorder=1)
        points = [p for p in found if p[0] is not None and (p[1] or not logarithmic)]
        if points:
            ax.plot(*zip(*sorted(points)), color=shade, marker="o", linewidth=1.4)
    if logarithmic:
        _decades(ax, [value(r) for r in table if r["budget"] is not None])
    style.token_axis(ax, at, "budget")
    ax.set_title(title)


def _decades(ax, values: list[float | None]) -> None:
    """A logarithmic axis for these, and not for what lies orders of magnitude below them."""
    ax.set_yscale("log")
    least = min((y for y in values if y), default=None)
    if least is not None:
        ax.set_ylim(bottom=max(ax.get_ylim()[0], least / 4))


def _legend(figure, methods: list[str]) -> None:
    from matplotlib.lines import Line2D

    dashes: dict[str, Any] = {DENSE: "--", "full": ":"}
    handles = [
        Line2D([], [], color=style.colour(m), label=m, linestyle=dashes.get(m, "-"), marker="" if m in dashes else "o")
        for m in methods
    ]
    figure.legend(
        handles=handles, fontsize=9, labelcolor="linecolor", handlelength=1.4, labelspacing=0.35, loc="center left",
        bbox_to_anchor=(0.92, 0.5),
    )  # fmt: skip


FIGURES = (Figure("text", "A real language model on real text", COMMAND, text, leads=True),)
