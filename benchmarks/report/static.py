"""The figure of benchmarks/quality/static_mass.py: attention weight that PRKV keeps by its static share."""
from statistics import fmean

from torchsparsekv_benchmarks.report import style
from torchsparsekv_benchmarks.report.figures import Drawn, Figure, of
from torchsparsekv_benchmarks.report.load import STATIC, Result

LEVELS = ("oracle", "quest", "prkv_static")  # settings that have no share
LITERAL, ENDS = "literal", {"prkv 0.0", "prkv 1.0"}


def static(plt, results: list[Result]) -> list[Drawn]:
    """One for every model and prompt of which both ends of the share were measured."""
    out = []
    for r in of(results, STATIC):
        for prompt, steps in dict.fromkeys((row["prompt"], row["steps"]) for row in r.rows):
            rows = [row for row in r.rows if (row["prompt"], row["steps"]) == (prompt, steps)]
            if not ENDS.issubset(row["setting"] for row in rows):
                continue
            tag = f"{r.options['model']}, {prompt} tokens of prompt and {steps} steps"
            out.append(Drawn(_figure(plt, rows), _caption(r, rows), (r,), tag))
    return out


def _caption(r: Result, rows: list[dict]) -> str:
    o, layers = r.options, len(rows[0]["layers"])
    return (
        f"Share of the softmax weight that was attended to, mean over {layers} layers, all query heads and every "
        f"{o['every']}th step; queries and keys are those of the dense model over one text. Line: prkv by its static "
        f"share, of which 0 is arkvale; pages of {o['block_size']}, a new set every {o['update_every']} tokens. Star: "
        "auto, at the mean of the shares that the layers found. Hollow: in the paper's order of the pool. Budget: "
        f"tokens retrieved per kv head and step, beside {o['sink']} sink and {o['window']} latest tokens."
    )


def _figure(plt, rows: list[dict]):
    at = sorted({r["budget"] for r in rows})
    figure, axes = plt.subplots(1, len(at), figsize=(1.6 + 2.6 * len(at), 3.2), squeeze=False, sharey=True)
    figure.subplots_adjust(wspace=0.1)
    for ax, budget in zip(axes.flat, at):
        _panel(ax, {r["setting"]: r for r in rows if r["budget"] == budget})
        ax.set_title(f"budget {style.tokens(budget)}")
        ax.set_xlabel("static share")
    return figure


def _panel(ax, row: dict[str, dict]) -> None:
    shade, ends = style.colour("prkv"), []
    line: list[tuple[float, float]] = []
    hollow: list[tuple[float, float]] = []
    for setting, r in row.items():
        method, *more = setting.split()
        if setting in LEVELS:
            ax.axhline(r["mass"], color=style.colour(setting), linewidth=1.2, linestyle="--", zorder=1)
            ends.append((1.0, r["mass"], setting, style.colour(setting)))
        elif method == "prkv" and more == ["auto"]:
            ax.plot(fmean(r["shares"]), r["mass"], marker="*", markersize=11, color=shade, linestyle="none", zorder=4)
        elif method == "prkv":
            (hollow if LITERAL in more else line).append((float(more[0]), r["mass"]))
    if line:
        ax.plot(*zip(*sorted(line)), marker="o", color=shade)
    if hollow:
        ax.plot(*zip(*hollow), marker="o", color=shade, markerfacecolor="white", linestyle="none", zorder=3)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
    if ax.get_subplotspec().is_last_col():
        style.name_lines(ax, ends)


FIGURES = (
    Figure("static", "Attention weight by static share", "python benchmarks/quality/static_mass.py", static),
)
