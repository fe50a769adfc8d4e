"""Rows of a table from samples: means with intervals, and what the method read."""
import csv
import functools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torchsparsekv.method import make_method

Z = 1.96  # of a two-sided interval of 95 %
RESAMPLES = 2000
CELL = ("task", "length", "method", "budget")
COST = ("density", "attended", "bytes_per_token", "hit_rate", "retrieval_rate")
ABOUT = (
    "score: mean share of the answers found, with the Wilson 95 % interval (too wide if samples have scores between 0 "
    "and 1). loss: score of the dense model minus this score, over the same samples, with the bootstrap 95 % interval. "
    "The other columns are of the layers that are not dense. density: attended tokens / all tokens. attended: tokens "
    "that a step attends to, per kv head. hits: share of the selected blocks that are in the hot buffer. "
    "retrieves: share of the steps that select anew. mass: share of the attention weight that a step attends to; p5: "
    "mean over samples of its 5th percentile over steps, layers and heads; worst: the smallest mean of a head. error: "
    "relative error of the attention output. KB: read from the pool per token."
)


def wilson(mean: float, n: int, z: float = Z) -> tuple[float, float]:
    """Wilson's score interval. It ends at 0 and 1 where the mean is that; rounding must not put the mean outside it."""
    centre, half = mean + z * z / (2 * n), z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    low, high = ((centre + side * half) / (1 + z * z / n) for side in (-1, 1))
    return min(max(0.0, low), mean), max(min(1.0, high), mean)


@functools.lru_cache(maxsize=8)
def _draws(n: int, resamples: int) -> list[list[int]]:
    """Which of `n` values are drawn, the same for all of that number: drawing takes longer than their means."""
    rng = random.Random(0)
    return [rng.choices(range(n), k=n) for _ in range(resamples)]


def bootstrap(values: Sequence[float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """The central 95 % of the means of samples drawn again from these."""
    draws = _draws(len(values), resamples)
    means = sorted(statistics.fmean([values[i] for i in drawn]) for drawn in draws)
    return means[int(0.025 * resamples)], means[int(0.975 * resamples) - 1]


def _mean(rows: Iterable[dict], value: Callable[[dict], float | None]) -> float | None:
    known = [x for x in map(value, rows) if x is not None]
    return statistics.fmean(known) if known else None


def head_means(rows: Sequence[dict], what: str) -> list[list[float]] | None:
    """[layer][head], the mean over the probed samples."""
    maps = [r[what]["heads"] for r in rows if r.get(what)]
    if not maps:
        return None
    return [[statistics.fmean(cell) for cell in zip(*layer)] for layer in zip(*maps)]


def _worst(rows: Sequence[dict]) -> float | None:
    heads = head_means(rows, "mass")
    if not heads:
        return None
    sparse = next(r["mass"]["layers"] for r in rows if r.get("mass"))
    return min(x for layer in sparse for x in heads[layer])


def summarize(rows: Iterable[dict], dense: str) -> list[dict]:
    """One row per task, length, method and budget, in the order of the samples."""
    cells: dict[tuple, list[dict]] = {}
    for r in rows:
        cells.setdefault(tuple(r[k] for k in CELL), []).append(r)
    right = {(r["task"], r["length"], r["index"]): r["score"] for c, x in cells.items() if c[2] == dense for r in x}
    return [_cell(dict(zip(CELL, cell)), mine, right, dense) for cell, mine in cells.items()]


def _cell(out: dict, rows: list[dict], right: dict, dense: str) -> dict:
    score = statistics.fmean(r["score"] for r in rows)
    low, high = wilson(score, len(rows))
    out |= {"samples": len(rows), "score": score, "score_low": low, "score_high": high}
    at = [((r["task"], r["length"], r["index"]), r["score"]) for r in rows if r["method"] != dense]
    losses = [right[sample] - score for sample, score in at if sample in right]
    if losses:
        loss_low, loss_high = bootstrap(losses)
        out |= {"loss": statistics.fmean(losses), "loss_low": loss_low, "loss_high": loss_high}
    return out | costs(rows)


def costs(rows: list[dict]) -> dict:
    """What was read for them, and how much of the attention was kept."""
    out: dict = {name: _mean(rows, lambda r, name=name: r.get(name)) for name in (*COST, "seconds")}  # type: ignore
    out["mass"] = _mean(rows, lambda r: r["mass"] and r["mass"]["mean"])
    out["mass_p5"] = _mean(rows, lambda r: r["mass"] and r["mass"]["p5"])
    out["mass_worst"] = _worst(rows)
    out["error"] = _mean(rows, lambda r: r["error"] and r["error"]["mean"])
    return out


def warnings(rows: Iterable[dict], dense: str) -> list[str]:
    """What a reader must not overlook: a method that left nothing out, or that never ran."""
    out = {}
    for r in rows:
        where = f"{r['method']} {r['budget']} on {r['task']} at {r['length']}"
        if r["method"] == dense:
            continue
        if r["density"] is None:
            out[where] = f"!! {where}: no decode step ran through the patch"
        elif r["density"] > 0.999 and r["budget"] is not None and not make_method(r["method"]).traits.partial_blocks:
            out[where] = f"!! {where}: density 1.00, nothing was left out: these are answers of dense attention"
    return list(out.values())


def shown(row: dict) -> dict:
    """A row of the summary as a person reads it."""
    text = lambda x, f: "-" if x is None else format(x, f)  # noqa: E731
    interval = lambda name: f"{row[name]:.2f} [{row[name + '_low']:.2f}, {row[name + '_high']:.2f}]"  # noqa: E731
    return {
        "task": row["task"], "length": row["length"], "method": row["method"], "budget": text(row["budget"], "d"),
        "n": row["samples"], "score": interval("score"), "loss": interval("loss") if "loss" in row else "-",
        **shown_costs(row),
    }  # fmt: skip


def shown_costs(row: dict) -> dict[str, str]:
    text = lambda x, f: "-" if x is None else format(x, f)  # noqa: E731
    return {
        "density": text(row["density"], ".3f"), "attended": text(row["attended"], ".0f"),
        "hits": text(row["hit_rate"], ".2f"), "retrieves": text(row["retrieval_rate"], ".2f"),
        "KB/token": text(row["bytes_per_token"] and row["bytes_per_token"] / 1e3, ".0f"),
        "mass": text(row["mass"], ".3f"), "p5": text(row["mass_p5"], ".3f"), "worst": text(row["mass_worst"], ".3f"),
        "error": text(row["error"], ".3f"), "s": text(row["seconds"], ".1f"),
    }  # fmt: skip


def write_csv(rows: list[dict], path: Path) -> None:
    columns = list(dict.fromkeys(c for r in rows for c in r))
    with path.open("w", newline="") as f:
        table = csv.DictWriter(f, columns, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows({k: "" if v is None else v for k, v in r.items()} for r in rows)
