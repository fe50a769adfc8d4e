"""The figure of benchmarks/quality/recall_pariskv.py: what an index still finds after the keys have moved away."""
from torchsparsekv_benchmarks.report import style
from torchsparsekv_benchmarks.report.figures import Drawn, Figure, of
from torchsparsekv_benchmarks.report.load import DRIFT, Result

MEASURES = {"recall": "share of the exact top-k chosen", "mass": "attention weight kept, of the exact top-k's"}


def drift(plt, results: list[Result]) -> list[Drawn]:
    return [_drift(plt, r) for r in of(results, DRIFT)]


def _drift(plt, source: Result) -> Drawn:
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.5), sharey=True)
    figure.subplots_adjust(wspace=0.12)
    for axes, (measure, title) in zip(panels, MEASURES.items()):
        ends = []
        for method in dict.fromkeys(r["method"] for r in source.rows):
            points = [(r["step"], r[measure]) for r in source.rows if r["method"] == method]
            dash = "--" if method.endswith("mean") else "-"
            axes.plot(*zip(*points), marker="o", color=style.colour(method), linestyle=dash)
            ends.append((*points[-1], method, style.colour(method)))
        steps = sorted({r["step"] for r in source.rows})
        axes.set_xticks(steps[:: max(1, len(steps) // 4)], [style.tokens(s) for s in steps[:: max(1, len(steps) // 4)]])
        axes.set_xlabel("tokens after the prompt")
        axes.set_ylim(0, 1.02)
        axes.set_title(title)
    style.name_lines(panels[-1], ends)
    o = source.options
    note = (
        f"Keys whose offset and topics move away after a prompt of {style.tokens(o['prefill'])}. Budget: k = {o['k']} "
        f"tokens per kv head. {o['queries']} queries per point, {o['heads']} kv heads of {o['group']} query heads each."
    )
    return Drawn(figure, note, (source,))


FIGURES = (Figure("drift", "Recall while keys drift", "python benchmarks/quality/recall_pariskv.py drift", drift),)
