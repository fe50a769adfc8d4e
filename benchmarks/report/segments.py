"""The figures of benchmarks/quality/segments.py: LouisKV's units beside pages, and how long its segments are."""
from statistics import fmean

from torchsparsekv_benchmarks.report import style
from torchsparsekv_benchmarks.report.figures import Drawn, Figure, of
from torchsparsekv_benchmarks.report.load import MODELS, SEGMENTS, Result
from torchsparsekv_benchmarks.report.turns import TEXTS

SHADES = {0.7: "#d55e00", 0.85: "#009e73", 0.95: "#0072b2"}  # by tau
OURS, ALIKE = ("clusters and segments", "segments"), "pages as long"
OTHERS = {"clusters and pages of 16": "#b8860b", "pages of 16": style.INK, "single tokens": "#8e4fb0"}
READ = {
    "recall": {"prompt": "a text and 16 questions about its records, answered by it", "own": "a journal it writes"},
}  # fmt: skip
NOVEL = {"prompt": "a stretch of a novel", "own": "what it wrote, at temperature 1"}
ON = "queries and keys of one dense forward"


def rows_of(result: Result, figure: str) -> dict[str, list[dict]]:
    """By the kind of text."""
    rows = [r for r in result.rows if r["figure"] == figure]
    return {text: [r for r in rows if r["text"] == text] for text in dict.fromkeys(r["text"] for r in rows)}


def _panels(plt, rows: dict[str, list[dict]], lines: int = 1, **how):
    figure, grid = plt.subplots(lines, len(rows), figsize=(4.7 * len(rows), 3.3 * lines), squeeze=False, **how)
    figure.subplots_adjust(wspace=0.22, hspace=0.42)
    return figure, grid


def _beside(ax) -> None:
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _read(result: Result, rows: dict[str, list[dict]]) -> str:
    """What was read, of the first row of each kind."""
    about, parts = READ.get(result.options["model"], NOVEL), []
    for text, (r, *_) in rows.items():
        parts.append(
            f"{TEXTS[text].capitalize()}: {r['samples']} samples of {about[text]}, {r['prompt']:.0f} tokens of prompt, "
            f"{r['scored']:.0f} steps of each scored, beside {r['sink']} sink and {r['window']} latest tokens"
        )
    return ". ".join(parts)


def _tag(result: Result) -> str:
    model = result.options["model"]
    return MODELS.get(model, model)


# ---------------------------------------------------------------- units


def units(plt, results: list[Result]) -> list[Drawn]:
    return [_units(plt, r) for r in of(results, SEGMENTS)]


def _units(plt, result: Result) -> Drawn:
    rows = rows_of(result, "units")
    figure, (axes,) = _panels(plt, rows)
    for ax, (text, mine) in zip(axes, rows.items()):
        for name, tau in dict.fromkeys((r["units"], r["tau"]) for r in mine):
            line = [r for r in mine if (r["units"], r["tau"]) == (name, tau)]
            x, y, tokens = zip(*sorted((r["budget"], r["mass"], r["unit_tokens"]) for r in line))
            said = name if tau is None else f"{name} at tau {tau:g}"
            ax.plot(
                x, y, marker="o", linewidth=1.4, color=SHADES[tau] if tau else OTHERS[name],
                linestyle="-" if name in OURS else "--", label=f"{said} ({fmean(tokens):.0f} tokens)",
            )  # fmt: skip
        style.token_axis(ax, sorted({r["budget"] for r in mine}), "tokens retrieved")
        ax.set_title(TEXTS[text])
        ax.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    axes[0].set_ylabel("attention weight kept")
    return Drawn(figure, _said_of_units(result, rows), (result,), _tag(result))


def _said_of_units(result: Result, rows: dict[str, list[dict]]) -> str:
    return (
        f"Softmax weight that is attended to, by {ON}: mean over samples, sparse layers, query heads and scored steps. "
        f"Retrieved anew at every step, whole units by their mean keys; in brackets tokens of a unit on average. "
        f"{_read(result, rows)}. Budget: tokens retrieved per kv head and step; what lies between the last whole unit "
        f"and the window counts in it. {verdict(rows)}"
    )


def at(rows: list[dict], name: str, tau: float | None, budget: int) -> dict:
    (found,) = (r for r in rows if (r["units"], r["tau"], r["budget"]) == (name, tau, budget))
    return found


def verdict(rows: dict[str, list[dict]]) -> str:
    """At the smallest budget: clusters beside pages, and segments beside pages of as many tokens."""
    said = []
    for text, mine in rows.items():
        budget, taus = min(r["budget"] for r in mine), [r["tau"] for r in mine if r["units"] in OURS]
        if text == "prompt":
            ours, page = at(mine, OURS[0], max(taus), budget), at(mine, "pages of 16", None, budget)
            said.append(
                f"With {budget} tokens of a prompt clusters and segments keep {ours['mass']:.3f}, pages of 16 "
                f"{page['mass']:.3f}."
            )
        else:
            pairs = [(tau, *(at(mine, n, tau, budget)["mass"] for n in ("segments", ALIKE))) for tau in sorted({*taus})]
            each = ", ".join(f"{a:.3f} and {b:.3f} at tau {tau:g}" for tau, a, b in pairs)
            page = at(mine, "pages of 16", None, budget)["mass"]
            said.append(
                f"With {budget} of its own text segments and pages of as many tokens keep {each}; pages of 16 keep "
                f"{page:.3f}."
            )
    return " ".join(said)


# ---------------------------------------------------------------- lengths


def lengths(plt, results: list[Result]) -> list[Drawn]:
    return [_lengths(plt, r) for r in of(results, SEGMENTS)]


def _lengths(plt, result: Result) -> Drawn:
    rows = rows_of(result, "lengths")
    figure, (axes,) = _panels(plt, rows, sharey=True)
    for ax, (text, mine) in zip(axes, rows.items()):
        for r in mine:
            x, y = shares(r)
            ax.step(x, y, where="post", color=SHADES[r["tau"]], label=f"tau {r['tau']:g}: mean {r['mean']:.1f}")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_ylim(0, 1.03)
        ax.set_xlabel("steps of a segment")
        ax.set_title(TEXTS[text])
        ax.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("share of the steps, in segments up to there")
    said = ". ".join(
        f"{TEXTS[text].capitalize()}: {mine[0]['samples']} samples, {mine[0]['steps']:,} steps of all sparse layers"
        for text, mine in rows.items()
    )
    note = (
        f"Steps from one retrieval of a layer to the next, by the paper's rule on {ON}. {said}. A segment in which a "
        f"sample ends is cut off there. {long_ones(rows)} A budget plays no part."
    )
    return Drawn(figure, note, (result,), _tag(result))


def shares(row: dict) -> tuple[list[int], list[float]]:
    """Of the steps, how many are in segments of at most so many."""
    x, y, seen = [1], [0.0], 0
    for n, count in row["histogram"]:
        seen += n * count
        x.append(n)
        y.append(seen / row["steps"])
    return x, y


def in_long_ones(row: dict, least: int = 16) -> float:
    return sum(n * count for n, count in row["histogram"] if n >= least) / row["steps"]


def long_ones(rows: dict[str, list[dict]]) -> str:
    each = [
        f"{TEXTS[text]} " + ", ".join(f"{in_long_ones(r):.0%} at tau {r['tau']:g}" for r in mine)
        for text, mine in rows.items()
    ]
    return f"In segments of 16 steps or more are so many of the steps: {'; '.join(each)}."


# ---------------------------------------------------------------- layers


def layers(plt, results: list[Result]) -> list[Drawn]:
    return [_layers(plt, r) for r in of(results, SEGMENTS)]


def _layers(plt, result: Result) -> Drawn:
    rows = rows_of(result, "layers")
    figure, (above, below) = _panels(plt, rows, 2)
    for mean, likeness, (text, mine) in zip(above, below, rows.items()):
        for tau in dict.fromkeys(r["tau"] for r in mine):
            every = [r for r in mine if r["tau"] == tau]
            mean.plot([r["layer"] for r in every], [r["mean"] for r in every], color=SHADES[tau], label=f"tau {tau:g}")
            known = [r for r in every if r["jaccard"] is not None]
            for column, dash in (("jaccard", "-"), ("chance", ":")):
                x, y = [r["layer"] + 0.5 for r in known], [r[column] for r in known]
                likeness.plot(x, y, color=SHADES[tau], linestyle=dash, linewidth=1.4)
        mean.set_yscale("log", base=2)
        mean.yaxis.set_major_formatter("{x:g}")
        mean.set_title(TEXTS[text])
        for ax in (mean, likeness):
            ax.set_xlabel("layer")
        likeness.set_ylim(0, 1.03)
    above[0].set_ylabel("steps of a segment, mean")
    below[0].set_ylabel("Jaccard similarity")
    _beside(above[-1])
    note = (
        f"Above: the mean length of a segment in every layer, by the paper's rule on {ON}; the first two layers are "
        "dense in use. Below: of the steps at which two layers that follow one another retrieve, how many are the same "
        "(Jaccard; the first step, at which all do, left out), and dotted what it would be by chance at their rates. "
        f"{_samples(rows)} A layer that never turns has one segment, as long as the sample. A budget plays no part."
    )
    return Drawn(figure, note, (result,), _tag(result))


def _samples(rows: dict[str, list[dict]]) -> str:
    return " ".join(f"{TEXTS[text].capitalize()}: {mine[0]['samples']} samples." for text, mine in rows.items())


COMMAND = "python benchmarks/quality/segments.py"
FIGURES = (
    Figure("segment_units", "LouisKV: its units beside pages", COMMAND, units),
    Figure("segment_lengths", "LouisKV: how long segments are", COMMAND, lengths),
    Figure("segment_layers", "LouisKV: segments by layer", COMMAND, layers),
)
