"""Make a page from result files."""
import re
from pathlib import Path

from torchsparsekv_benchmarks._progress import watched
from torchsparsekv_benchmarks.quality import summary, text_summary
from torchsparsekv_benchmarks.quality.options import DENSE
from torchsparsekv_benchmarks.report import answers, page, pictures, scores, speed, style, text
from torchsparsekv_benchmarks.report.figures import Drawn, Figure, of
from torchsparsekv_benchmarks.report.load import EVAL, TEXT, Result, load

FIGURES: tuple[Figure, ...] = (
    *pictures.LEADING, *text.FIGURES, *answers.FIGURES, *speed.FIGURES, *pictures.SERVING,
)  # fmt: skip


def check_name(out: Path) -> None:
    if out.suffix != ".html":
        raise ValueError(f"the report is an HTML page: its name must end in .html, got {out}")


def make(paths: list[Path], out: Path) -> list[Path]:
    """Write the page and its pictures; a figure that has nothing to show is named on the page instead."""
    check_name(out)
    results = load(paths)
    made: list[tuple[Figure, list[tuple[Drawn, bytes]]]] = []
    absent: list[Figure] = []
    files: dict[str, bytes] = {}
    with style.styled() as plt:
        for f in watched(FIGURES, len(FIGURES), "figure"):
            pictures = [(drawn, style.png(drawn.figure)) for drawn in f.draw(plt, results)]
            if not pictures:
                absent.append(f)
                continue
            made.append((f, pictures))
            files |= {file_name(f, drawn, i): data for i, (drawn, data) in enumerate(pictures)}
    said = page.page(made, absent, scores.section(results), _numbers(results), results)
    return page.write(out, said, files)


def file_name(f: Figure, drawn: Drawn, number: int) -> str:
    """The first of its kind has the plain name, others what tells them apart."""
    return f.name if not number else f"{f.name}_{re.sub(r'[^a-z0-9.]+', '-', drawn.tag.lower()) or number}_{number}"


def _numbers(results: list[Result]) -> str:
    """The table of every evaluation, folded away."""
    out = ""
    for r in of(results, TEXT):
        out += _table(r, [text_summary.shown(x) for x in text_summary.summarize(r.rows)])
    out = f'<p class="note">{text_summary.ABOUT}</p>{out}' if out else ""
    answered = of(results, EVAL)
    if answered:
        out += f'<p class="note">{summary.ABOUT}</p>'
    for r in answered:
        out += _table(r, [summary.shown(x) for x in summary.summarize(r.rows, DENSE)])
    return f'<section id="numbers"><h2>All numbers</h2>{out}</section>' if out else ""


def _table(r: Result, rows: list[dict[str, object]]) -> str:
    warnings = "".join(f"<li>{w}</li>" for w in summary.warnings(r.rows, DENSE))
    return f"<details><summary>{r.path.name}</summary><ul>{warnings}</ul>{page.table(rows, left=3)}</details>"
