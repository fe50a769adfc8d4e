"""Rows of a table from samples of text."""
import math
import statistics
from collections.abc import Iterable

from torchsparsekv_benchmarks.quality import summary
from torchsparsekv_benchmarks.quality.options import DENSE

ABOUT = (
    "perplexity: of the scored tokens, each after the true tokens. KL: of the next-token distributions of the dense "
    "model and the method, in nats, mean over samples and steps with the bootstrap 95 % interval over samples; p95: "
    "the 95th percentile over all steps. top-1: share of the steps at which both find the same token most probable. "
    "loss: nats a token more than the dense model, over the same samples, with its bootstrap interval. The other "
    "columns are of the layers that are not dense, as in `eval`."
)


def summarize(rows: Iterable[dict]) -> list[dict]:
    """One row per text, length, method and budget, in the order in which they were first measured."""
    cells: dict[tuple, list[dict]] = {}
    dense: dict[tuple, float] = {}
    for r in rows:
        cells.setdefault(tuple(r[k] for k in summary.CELL), []).append(r)
        if r["method"] == DENSE:
            dense[_sample(r)] = r["nats"]
    return [_cell(dict(zip(summary.CELL, cell)), mine, dense) for cell, mine in cells.items()]


def _sample(r: dict) -> tuple:
    return r["task"], r["length"], r["index"]


def percentile(values: list[float], share: float) -> float:
    """The least of the values that so large a share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _cell(out: dict, rows: list[dict], dense: dict) -> dict:
    out |= {"samples": len(rows), "perplexity": math.exp(statistics.fmean(r["nats"] for r in rows))}
    if out["method"] != DENSE:
        means = [statistics.fmean(r["kl"]) for r in rows]
        out |= {"kl": statistics.fmean(means), **_interval("kl", means)}
        out["kl_p95"] = percentile([x for r in rows for x in r["kl"]], 0.95)
        out["agrees"] = statistics.fmean(r["agrees"] for r in rows)
        losses = [r["nats"] - dense[_sample(r)] for r in rows if _sample(r) in dense]
        if losses:
            out |= {"loss": statistics.fmean(losses), **_interval("loss", losses)}
    return out | summary.costs(rows)


def _interval(name: str, values: list[float]) -> dict[str, float]:
    """Nothing of a single sample."""
    return dict(zip((f"{name}_low", f"{name}_high"), summary.bootstrap(values))) if len(values) > 1 else {}


def shown(row: dict) -> dict:
    """A row of the summary as a person reads it."""
    text = lambda name, f: "-" if row.get(name) is None else format(row[name], f)  # noqa: E731

    def spread(name: str, form: str) -> str:
        if row.get(f"{name}_low") is None:
            return text(name, form)
        return f"{row[name]:{form}} [{row[name + '_low']:{form}}, {row[name + '_high']:{form}}]"

    return {
        "text": row["task"], "length": row["length"], "method": row["method"], "budget": text("budget", "d"),
        "n": row["samples"], "perplexity": text("perplexity", ".2f"), "KL": spread("kl", ".4f"),
        "p95": text("kl_p95", ".3f"), "top-1": text("agrees", ".3f"), "loss": spread("loss", ".4f"),
        **summary.shown_costs(row),
    }  # fmt: skip
