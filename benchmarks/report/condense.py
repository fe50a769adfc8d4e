"""Condense many files of `eval`, `board` or `eval-text` into one small file of means, from which tables are made.

    python -m torchsparsekv_benchmarks.report.condense --commit COMMIT --out FILE.json RAW.jsonl [RAW.jsonl ...]

A cell is a task, length, method and budget with its settings, in one raw file. For each cell the new file has the
number of samples, the mean and the standard error of the measurements, and what the method read. `--against FILES`
names files with the same methods, budgets and samples in another setting. Then each cell also has the difference of its
score to the score there. `sources` has the commands, hardware, options and versions of each raw file. COMMIT is the
commit that holds the raw files.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchsparsekv_benchmarks.quality.options import BASE, DENSE
from torchsparsekv_benchmarks.quality.store import heads, key, read
from torchsparsekv_benchmarks.quality.summary import CELL, COST
from torchsparsekv_benchmarks.quality.text_summary import percentile
from torchsparsekv_benchmarks.report.load import MEANS

ABOUT = "Means over the samples of a cell, with standard errors (_se). The commit holds the raw rows of each source."
DIGITS = 6


def mean_and_error(name: str, values: Sequence[float]) -> dict[str, float]:
    """The standard error only where there is more than one value."""
    out = {name: statistics.fmean(values)}
    if len(values) > 1:
        out[f"{name}_se"] = statistics.stdev(values) / len(values) ** 0.5
    return out


Scores = Mapping[tuple, float]
NONE: Scores = MappingProxyType({})


def cell(rows: list[dict], dense: Scores = NONE, others: Scores = NONE) -> dict[str, Any]:
    """What one cell measured: scores of `eval` or `board`, or nats and KL of `eval-text`. `loss` is what the dense
    model scores above it on the same samples, `gain` what it scores above the same cell in another setting."""
    out: dict[str, Any] = {"samples": len(rows)}
    gains = [r["score"] - others[of_cell(r)] for r in rows if of_cell(r) in others]
    if gains:
        out |= mean_and_error("gain", gains)
    losses = [dense[sample(r)] - r["score"] for r in rows if sample(r) in dense]
    if losses:
        out |= mean_and_error("loss", losses)
    for name in ("score", "nats", "agrees"):
        if rows[0].get(name) is not None:
            out |= mean_and_error(name, [r[name] for r in rows])
    if rows[0].get("kl") is not None:
        out |= mean_and_error("kl", [statistics.fmean(r["kl"]) for r in rows])
        every = [x for r in rows for x in r["kl"]]
        out |= {"tokens": len(every), "kl_p95": percentile(every, 0.95)}
    for name in COST:
        known = [r[name] for r in rows if r.get(name) is not None]
        out |= {name: statistics.fmean(known)} if known else {}
    for name in ("mass", "error"):
        known = [r[name]["mean"] for r in rows if r.get(name)]
        out |= {name: statistics.fmean(known)} if known else {}
    return {k: round(v, DIGITS) if isinstance(v, float) else v for k, v in out.items()}


def sample(r: dict) -> tuple:
    return r["task"], r["length"], r["index"]


def of_cell(r: dict) -> tuple:
    return *sample(r), r["method"], r["budget"]


def condensed(paths: Sequence[Path], commit: str, root: Path, against: Sequence[Path] = ()) -> dict[str, Any]:
    """The content of the file; names of raw files are relative to `root`."""
    others = {of_cell(x): x["score"] for path in against for x in read(path)[0] if "score" in x}
    sources: list[dict] = []
    settings: list[dict] = []
    rows: list[dict] = []
    for number, path in enumerate(paths):
        lines, _ = read(path)
        head = heads(lines)
        sources.append({
            "file": path.resolve().relative_to(root.resolve()).as_posix(), "benchmark": head[0]["benchmark"],
            "commands": list(dict.fromkeys(h["command"] for h in head)), "environment": head[0]["environment"],
            "options": head[-1]["options"], "model": head[0]["model"],
        })  # fmt: skip
        cells: dict[tuple, list[dict]] = {}
        for r in {key(x): x for x in lines if "benchmark" not in x}.values():  # of a repeated sample, the later one
            setting = {"patch": r["patch"], "hyper": r.get("hyper")}
            if setting not in settings:
                settings.append(setting)
            cells.setdefault((*(r[k] for k in CELL), settings.index(setting)), []).append(r)
        of_dense = (r for c, mine in cells.items() if c[2] in (DENSE, BASE) and "score" in mine[0] for r in mine)
        dense = {sample(r): r["score"] for r in of_dense}
        for c, mine in cells.items():
            rows.append(dict(zip((*CELL, "setting"), c), source=number) | cell(mine, dense, others))
    lists = {"sources": sources, "settings": settings, "rows": rows}
    return {"benchmark": MEANS, "about": ABOUT, "commit": commit, **lists}


def written(found: dict[str, Any]) -> str:
    """JSON with a line for each source, setting and row: small, and readable in a diff."""
    lists = {k: ",\n  ".join(json.dumps(x) for x in found[k]) for k in ("sources", "settings", "rows")}
    parts = [f'"{k}": {json.dumps(v)}' for k, v in found.items() if k not in lists]
    parts += [f'"{k}": [\n  {text}\n ]' for k, text in lists.items()]
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("raw", nargs="+", type=Path, help="files of `eval`, `board` or `eval-text`")
    p.add_argument("--commit", required=True, help="the commit that holds the raw files")
    p.add_argument("--root", type=Path, default=Path(), help="the checkout, which names of raw files are relative to")
    p.add_argument("--against", nargs="+", type=Path, default=(), help="files with the same cells in another setting")
    p.add_argument("--out", type=Path, required=True)
    o = p.parse_args()
    o.out.write_text(written(condensed(o.raw, o.commit, o.root, o.against)))


if __name__ == "__main__":
    main()
