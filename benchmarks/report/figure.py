"""The figure of the README: time per token against context, of two methods and of dense attention.

`python -m torchsparsekv_benchmarks.report.tables` draws it. The picture holds its points, so that a test can compare
them with the files of results without drawing it again.
"""

import json
from pathlib import Path

from torchsparsekv_benchmarks.report import speed, style
from torchsparsekv_benchmarks.report.load import Result, load
from torchsparsekv_benchmarks.report.markdown import RESULTS, ROOT, floor
from torchsparsekv_benchmarks.report.tables_speed import SHORT

OUT = ROOT / "docs/tpot.png"
PAGES, TOKENS = ("h200_decode_short", "h200_decode"), ("h200_decode_pariskv",)
LINES = (("full", PAGES), ("sdpa-cudnn", PAGES), ("quest", PAGES), ("pariskv", TOKENS))
FLOOR = "h200_decode"
SIZE = (7.2, 3.2)  # inches


def results() -> dict[str, Result]:
    names = dict.fromkeys(n for _, files in LINES for n in files)
    return {n: load([RESULTS / f"{n}.json"])[0] for n in names}


def points(of: dict[str, Result]) -> list[speed.Line]:
    """A line for each method, at batch 1."""
    out: list[speed.Line] = []
    for method, files in LINES:
        found = [
            (r["context"], r["tpot_ms"]) for n in files for r in of[n].rows
            if (r["method"], r["batch"]) == (method, 1) and r["context"] >= SHORT
        ]  # fmt: skip
        budget = of[files[-1]].options["budget"]
        label = speed.name(method) + ("" if method in speed.NAMES else f", budget {budget}")
        out.append((label, method, sorted(found)))
    return out


def held() -> str:
    """What the picture says of its points."""
    of = results()
    return json.dumps([points(of), floor(of[FLOOR])])


def write(out: Path = OUT) -> list[Path]:
    """Draw it, where the picture is of other points; without matplotlib it is left as it is where it is current."""
    if out.exists() and held().encode() in out.read_bytes():
        return []
    of = results()
    with style.styled() as plt:
        drawn = speed.tpot_lines(plt, points(of), floor(of[FLOOR]))
        drawn.set_size_inches(*SIZE)
        for line in drawn.axes[0].lines:
            if line.get_marker() == "D":  # another budget, which its name says
                line.set(linestyle="-", marker="o")
        out.write_bytes(style.png(drawn, points=held()))
    return [out]
