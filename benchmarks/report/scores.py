"""Scores of `eval` by task, method, budget and length: which are complete, which are missing, and their means."""
import html
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchsparsekv_benchmarks.quality.options import DENSE
from torchsparsekv_benchmarks.quality.store import key
from torchsparsekv_benchmarks.quality.summary import wilson
from torchsparsekv_benchmarks.recall_model.tasks import TASKS
from torchsparsekv_benchmarks.report import page, style
from torchsparsekv_benchmarks.report.figures import by_model, of
from torchsparsekv_benchmarks.report.load import EVAL, Result

STREAMING = "streaming"
APART = ("common",)  # asks for what is all over the text: it needs no retrieval, and no mean should hide that
NONE = "-"
ABOUT = (
    "Mean score by length and budget. A mean is over whole tasks only, so that all of a column are over the same "
    "samples: {none} was not measured, and n/m says that only n of the m samples were finished."
)


def groups(results: list[Result], kind: str = EVAL) -> list[tuple[list[Result], list[dict]]]:
    """(files, their samples) for every model; of a sample that is in two files, the later one."""
    out = [(g, list({key(row): row for r in g for row in r.rows}.values())) for g in by_model(of(results, kind))]
    for sources, rows in out:
        _one_setting(sources, rows)
    return out


def _one_setting(sources: list[Result], rows: list[dict]) -> None:
    """A figure cannot tell apart a method under two windows, say, or before and after a default has changed: better
    none than a mean of both."""
    first: dict[tuple, dict | None] = {}
    for r in rows:
        if r["patch"] is None:
            continue
        setting = {k: v for k, v in r["patch"].items() if k != "budget"}
        if r["method"] == STREAMING:
            setting["window"] -= r["budget"]
        for of_what, means in (((r["method"],), setting), ((r["method"], r["budget"]), r.get("hyper"))):
            if first.setdefault(of_what, means) != means:
                names = ", ".join(s.path.name for s in sources)
                raise ValueError(f"{names}: {r['method']} with {first[of_what]} and {means}; report them separately")


def ordered(values: Iterable) -> list:
    return sorted(set(values))


def budgets(rows: list[dict]) -> list[int]:
    return ordered(r["budget"] for r in rows if r["budget"])


def method_order(rows: list[dict]) -> list[str]:
    """As they were run; the dense model first."""
    names = dict.fromkeys(r["method"] for r in rows)
    return [*(n for n in names if n == DENSE), *(n for n in names if n != DENSE)]


def task_order(rows: list[dict]) -> list[str]:
    """Those of the recall model as it lists them, others as they were run."""
    found = dict.fromkeys(r["task"] for r in rows)
    return [*(t for t in TASKS if t in found), *(t for t in found if t not in TASKS)]


def averaged(rows: list[dict]) -> list[str]:
    """The tasks that a mean is over."""
    every = task_order(rows)
    return [t for t in every if t not in APART] or every


@dataclass(frozen=True)
class Score:
    """Mean and Wilson interval of the samples there are, and how many there should be."""

    mean: float
    low: float
    high: float
    samples: int
    wanted: int

    @property
    def whole(self) -> bool:
        return self.samples >= self.wanted


class Scores:
    """Of one model at one length."""

    def __init__(self, rows: list[dict]):
        self.rows = rows
        self.cells: dict[tuple, list[float]] = {}
        for r in rows:
            self.cells.setdefault((r["task"], r["method"], r["budget"]), []).append(r["score"])
        # A run takes every method over the same samples, so a cell with fewer than the fullest was cut short.
        self.wanted = {t: max(len(x) for c, x in self.cells.items() if c[0] == t) for t in task_order(rows)}

    def of(self, method: str, budget: int | None, tasks: Sequence[str]) -> Score | None:
        """Over the samples of these tasks; None where there is none."""
        found = [x for t in tasks for x in self.cells.get((t, method, budget), [])]
        if not found:
            return None
        mean = statistics.fmean(found)
        return Score(mean, *wilson(mean, len(found)), len(found), sum(self.wanted[t] for t in tasks))

    def gaps(self, methods: Sequence[str], at: Sequence[int]) -> str:
        """Which methods are not whole, in words."""
        parts = []
        for method in methods:
            if any(r["method"] == method and r["budget"] is None for r in self.rows):
                continue
            cells = [self.of(method, b, [t]) for b in at for t in self.wanted]
            missing = sum(c is None or not c.whole for c in cells)
            if missing:
                parts.append(f"{method} ({missing} of {len(cells)} points)")
        return f"Not measured, or on fewer samples (hollow): {', '.join(parts)}. " if parts else ""


def written(score: Score | None) -> str:
    if score is None:
        return NONE
    return f"{score.mean:.2f}" if score.whole else f"{score.samples}/{score.wanted}"


def overview(rows: list[dict], tasks: Sequence[str]) -> list[dict[str, str]]:
    """A row per method, a column per length and budget: the mean over these tasks."""
    lengths = {n: Scores([r for r in rows if r["length"] == n]) for n in ordered(r["length"] for r in rows)}
    out = []
    for method in method_order(rows):
        row = {"method": method}
        for n, scores in lengths.items():
            known = [t for t in tasks if t in scores.wanted]
            for b in budgets(rows):
                one = any(r["method"] == method and r["budget"] is None for r in rows)  # no budget: the same for all
                row[f"{style.tokens(n)}: {b}"] = written(scores.of(method, None if one else b, known))
        out.append(row)
    return out


def section(results: list[Result]) -> str:
    """The tables of the page: for every model that was evaluated on more than one task, or at more than one length."""
    out = ""
    for sources, rows in groups(results):
        if not budgets(rows) or len({(r["task"], r["length"]) for r in rows}) == 1:
            continue
        apart = [t for t in task_order(rows) if t not in averaged(rows)]
        for tasks in (averaged(rows), *([t] for t in apart)):
            out += f"<h3>{html.escape(sources[0].about_model)}: {', '.join(tasks)}</h3>"
            out += page.table([dict(r) for r in overview(rows, tasks)], left=1)
    about = ABOUT.format(none=NONE)
    return f'<section id="scores"><h2>Scores</h2>{out}<p class="note">{about}</p></section>' if out else ""
