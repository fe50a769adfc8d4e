"""Hit rates of Qwen2.5-Coder-1.5B on text of 32K, by method and budget, from the committed means of `eval-text`."""
import json
import math
from collections.abc import Mapping

from torchsparsekv_benchmarks._results import FOLDER

FILE = FOLDER / "results" / "quality" / "kl_32k.json"
SOURCE = 0  # the run that had all methods
SHARE = 8  # of a text; a budget above one eighth of it finds nearly all of its tokens there whatever it chooses
Rates = Mapping[str, Mapping[int, float]]  # of a method and a budget, the mean over samples


def measured() -> Rates:
    found: dict[str, dict[int, float]] = {}
    for r in json.loads(FILE.read_text())["rows"]:
        if r["source"] == SOURCE and r.get("hit_rate") is not None and SHARE * r["budget"] <= r["length"]:
            found.setdefault(r["method"], {})[r["budget"]] = r["hit_rate"]
    return found


def nearest(method: str, budget: int) -> tuple[float, int]:
    """The hit rate of a method, and at which budget it was measured: the one closest by ratio, of two the smaller."""
    rates = measured()
    if method not in rates:
        raise ValueError(f"{FILE.name} has no hit rate of {method}; it has: {', '.join(sorted(rates))}")
    at = min(sorted(rates[method]), key=lambda b: abs(math.log(b / budget)))
    return rates[method][at], at
