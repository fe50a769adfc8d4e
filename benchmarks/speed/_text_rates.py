"""Hit rates on real text, by method and budget, from the committed file of `eval-text`: what a locality stands on."""
import json
import math
import statistics
from collections.abc import Mapping

from torchsparsekv_benchmarks._results import FOLDER

FILE = FOLDER / "results" / "quality" / "text" / "text_2048_h200.jsonl"
SHARE = 8  # of a text; a budget above one eighth of it finds nearly all of its tokens there whatever it chooses
Rates = Mapping[str, Mapping[int, float]]  # of a method and a budget, the mean over samples


def measured() -> Rates:
    samples: dict[tuple[str, int, int], float] = {}
    for line in FILE.read_text().splitlines():
        r = json.loads(line)
        if r.get("hit_rate") is not None and SHARE * r["budget"] <= r["length"]:
            samples[r["method"], r["budget"], r["index"]] = r["hit_rate"]
    found: dict[str, dict[int, list[float]]] = {}
    for (method, budget, _), rate in samples.items():
        found.setdefault(method, {}).setdefault(budget, []).append(rate)
    return {m: {b: statistics.fmean(x) for b, x in by.items()} for m, by in found.items()}


def nearest(method: str, budget: int) -> tuple[float, int]:
    """The hit rate of a method, and at which budget it was measured: the one closest by ratio, of two the smaller."""
    rates = measured()
    if method not in rates:
        raise ValueError(f"{FILE.name} has no hit rate of {method}; it has: {', '.join(sorted(rates))}")
    at = min(sorted(rates[method]), key=lambda b: abs(math.log(b / budget)))
    return rates[method][at], at
