"""Code that tables of the docs share: the register, the result files, and the format of cells."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchsparsekv_benchmarks.report.load import MEANS, Result, load
from torchsparsekv_benchmarks.report.style import tokens

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
SINCE = (0, 1)  # the version of the library whose results are published
DENSE = ("full", "sdpa-cudnn", "sdpa-flash", "flashinfer")
NAMES = {"full": "dense, ours", "sdpa-cudnn": "dense, cuDNN", "sdpa-flash": "dense, flash", "dense": "dense"}
FLOOR = 256  # tokens of a step over which "floor" counts


@dataclass(frozen=True)
class Means:
    """A file of condense.py."""

    sources: list[dict[str, Any]]
    settings: list[dict[str, Any]]
    rows: list[dict[str, Any]]

    def of(self, file: str) -> list[dict[str, Any]]:
        """The rows of the raw files with this in their name."""
        wanted = {i for i, s in enumerate(self.sources) if file in s["file"]}
        if not wanted:
            raise ValueError(f"no source has {file} in its name")
        return [r for r in self.rows if r["source"] in wanted]

    def beside(self, other: "Means") -> "Means":
        """The rows of both files."""
        sources, settings = len(self.sources), len(self.settings)
        rows = [r | {"source": r["source"] + sources, "setting": r["setting"] + settings} for r in other.rows]
        return Means(self.sources + other.sources, self.settings + other.settings, self.rows + rows)


@dataclass(frozen=True)
class Table:
    name: str
    files: tuple[str, ...]
    since: tuple[int, ...]
    make: Callable[..., str]

    def text(self, results: Path = RESULTS) -> str:
        """Conditions in one line, then the table. Names the file that is missing or too old."""
        return self.make(*(opened(results / f, f"table {self.name}", self.since) for f in self.files))


TABLES: dict[str, Table] = {}


def table(name: str, *files: str, since: tuple[int, ...] = SINCE) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Register a function of these files, each a Result or Means, as the table of that name."""

    def register(make: Callable[..., str]) -> Callable[..., str]:
        if name in TABLES:
            raise ValueError(f"two tables are named {name}")
        TABLES[name] = Table(name, files, since, make)
        return make

    return register


def opened(path: Path, what: str, since: tuple[int, ...]) -> Result | Means:
    """A file that `what` is made of, or an error that names both."""
    if not path.is_file():
        raise ValueError(f"{what} needs {path.name}, which is missing in {path.parent}")
    head = json.loads(path.read_text())
    sources = head["sources"] if head.get("benchmark") == MEANS else [head]
    for s in sources:
        has = tuple(int(n) for n in s["environment"]["torchsparsekv"].split(".")[:2])
        if has < since:
            older, least = (".".join(map(str, v)) for v in (has, since))
            raise ValueError(f"{what} needs results of torchsparsekv {least} or later, {path.name} is of {older}")
    if head.get("benchmark") == MEANS:
        return Means(head["sources"], head["settings"], head["rows"])
    return load([path])[0]


def named(row: dict[str, Any]) -> str:
    """A method as tables write it, with what it has else than its defaults."""
    if row["method"] in NAMES:
        return NAMES[row["method"]]
    told = row.get("hyper") and row["method"] not in ONCE
    return f"`{row['method']}`" + (f", {row['hyper']}" if told else "")


def markdown(about: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """`about` is the condition line above the table; numbers stand to the right."""
    lines = [[str(c) for c in row] for row in rows]
    if not lines:
        raise ValueError(f"no rows for the table of {', '.join(head)}")
    right = [all(line[i][:1] in "0123456789-" or not line[i] for line in lines) for i in range(len(head))]
    rule = ["---:" if r else "---" for r in right]
    return "\n".join([about, "", *(f"| {' | '.join(line)} |" for line in [list(head), rule, *lines])])


def number(x: float | None, digits: int = 2) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def times(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}x"


def span(values: Iterable[float], digits: int = 2) -> str:
    """`0.93 to 0.94`, or one number."""
    found = sorted(values)
    low, high = number(found[0], digits), number(found[-1], digits)
    return low if low == high else f"{low} to {high}"


def hits(rows: Iterable[dict[str, Any]]) -> str:
    return span(r["hit_rate"] for r in rows if r.get("hit_rate") is not None)


def floor(r: Result) -> float | None:
    """ms of a step over 256 tokens with transformers' static cache, in the same run."""
    return next((x["tpot_ms"] for x in r.rows if x["method"] == "hf-static" and x["context"] == FLOOR), None)


def at(r: Result, method: str, context: int) -> dict[str, Any]:
    """The row of a method with its defaults."""
    found = [x for x in r.rows if x["method"] == method and x.get("context") == context and not x.get("hyper")]
    if not found:
        raise ValueError(f"{r.path.name} has no {method} at {tokens(context)}")
    return found[0]


def gpu(*results: Result) -> str:
    """`One H200` of the files of a table, which must be of one kind of GPU."""
    names = {r.environment["gpu"].removeprefix("NVIDIA ").split()[0] for r in results}
    (name,) = names
    return f"One {name}"


def shape(*results: Result) -> str:
    (name,) = {r.options["shape"] for r in results}
    return {"llama-3.1-8b": "shape of Llama-3.1-8B", "qwen2.5-7b-1m": "shape of Qwen2.5-7B-1M"}[name]


ONCE = ("snapkv", "h2o", "raas")  # fetch little or nothing after a prompt, so nearly all their blocks are hits


def queries(given: Iterable[dict[str, Any]], *results: Result) -> str:
    """Which queries the runs had, and how many of the blocks that the shown rows chose were on the GPU: no speed is
    without it."""
    rows = list(given)
    localities = span({r.options["locality"] for r in results})
    fetching = [x for x in rows if x.get("hit_rate") is not None and x["method"] not in ONCE]
    told = [f"hits {hits(fetching)}"] if fetching else []
    if once := [f"`{m}`" for m in ONCE if any(x["method"] == m for x in rows)]:
        told.append(f"hits near 1 with {', '.join(once)}: little or nothing to fetch after a prompt")
    return f"synthetic queries of locality {localities}, {'; '.join(told)}"
