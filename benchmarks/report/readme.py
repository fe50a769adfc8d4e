"""The figure of the README: time per token against context, of two methods and of dense attention.

    python -m torchsparsekv_benchmarks.report.readme

Nothing is measured here. Each line says which file its points are from; a method at a context has one point, so a run
that measured dense attention again beside another method does not take its place.
"""
from pathlib import Path

from torchsparsekv_benchmarks.report import speed, style
from torchsparsekv_benchmarks.report.load import Result, load

ROOT = Path(__file__).resolve().parents[2]
RESULTS, OUT = ROOT / "benchmarks/results", ROOT / "docs/tpot.png"
PAGES, TOKENS = ("h200_decode_short", "h200_decode"), ("h200_decode_pariskv",)
LINES = (("full", PAGES), ("sdpa-cudnn", PAGES), ("quest", PAGES), ("pariskv", TOKENS))
SHORTEST = 8192  # below, there is nothing to choose from
FLOOR = "h200_decode"


def results() -> dict[str, Result]:
    """The files by name."""
    names = dict.fromkeys(n for _, files in LINES for n in files)
    return {n: load([RESULTS / f"{n}.json"])[0] for n in names}


def points(of: dict[str, Result]) -> list[speed.Line]:
    """A line for each method, at batch 1."""
    out: list[speed.Line] = []
    for method, files in LINES:
        found = [
            (r["context"], r["tpot_ms"]) for n in files for r in of[n].rows
            if (r["method"], r["batch"]) == (method, 1) and r["context"] >= SHORTEST
        ]  # fmt: skip
        budget = of[files[-1]].options["budget"]
        label = speed.name(method) + ("" if method in speed.NAMES else f", budget {budget}")
        out.append((label, method, sorted(found)))
    return out


def draw(out: Path = OUT) -> Path:
    of = results()
    floor = next(r["tpot_ms"] for r in of[FLOOR].rows if r["context"] == speed.FLOOR)
    with style.styled() as plt:
        figure = speed.tpot_lines(plt, points(of), floor)
        figure.set_size_inches(7.2, 3.2)
        out.write_bytes(style.png(figure))
    return out


if __name__ == "__main__":
    print(draw())
