"""From files of results to a page."""
import re
from pathlib import Path

from torchsparsekv.benchmarks.quality import summary
from torchsparsekv.benchmarks.quality.options import DENSE
from torchsparsekv.benchmarks.report import answers, drift, page, scores, speed, style
from torchsparsekv.benchmarks.report.figures import Drawn, Figure, of
from torchsparsekv.benchmarks.report.load import EVAL, Result, load

FIGURES: tuple[Figure, ...] = (*answers.FIGURES, *speed.FIGURES, *drift.FIGURES)


def check_name(out: Path) -> None:
    if out.suffix != ".html":
        raise ValueError(f"the report is a page: its name must end in .html, got {out}")


def make(paths: list[Path], out: Path) -> list[Path]:
    """Write the page and its pictures; a figure that has nothing to show is named on the page instead."""
    check_name(out)
    results = load(paths)
    made: list[tuple[Figure, list[tuple[Drawn, bytes]]]] = []
    absent: list[Figure] = []
    files: dict[str, bytes] = {}
    with style.styled() as plt:
        for f in FIGURES:
            pictures = [(drawn, style.png(drawn.figure)) for drawn in f.draw(plt, results)]
            if not pictures:
                absent.append(f)
                continue
            made.append((f, pictures))
            files |= {file_name(f, drawn, i): data for i, (drawn, data) in enumerate(pictures)}
    text = page.page(made, absent, scores.section(results), _numbers(results), results)
    return page.write(out, text, files)


def file_name(f: Figure, drawn: Drawn, number: int) -> str:
    """The first of its kind has the plain name, others what tells them apart."""
    return f.name if not number else f"{f.name}_{re.sub(r'[^a-z0-9.]+', '-', drawn.tag.lower()) or number}_{number}"


def _numbers(results: list[Result]) -> str:
    """The table of every evaluation, folded away."""
    out = ""
    for r in of(results, EVAL):
        rows = [summary.shown(x) for x in summary.summarize(r.rows, DENSE)]
        warnings = "".join(f"<li>{w}</li>" for w in summary.warnings(r.rows, DENSE))
        out += f"<details><summary>{r.path.name}</summary><ul>{warnings}</ul>{page.table(rows, left=3)}</details>"
    head = f'<section id="numbers"><h2>All numbers</h2><p class="note">{summary.ABOUT}</p>'
    return f"{head}{out}</section>" if out else ""
