"""Tasks x lengths x methods x budgets through stock generate(), on the same samples for every method."""
import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import torchsparsekv
from torchsparsekv.benchmarks import _common
from torchsparsekv.benchmarks.quality import summary
from torchsparsekv.benchmarks.quality.options import DENSE, Options, Setting, check, resolved, settings
from torchsparsekv.benchmarks.quality.sources import Sample, Source, load
from torchsparsekv.benchmarks.quality.store import Store
from torchsparsekv.probe import Probe, probe

BENCHMARK = "eval"


class Runner:
    """One method at one budget and length, ready to answer."""

    def __init__(self, model, setting: Setting, length: int, o: Options, handle=None):
        self.model, self.setting, self.o, self.handle = model, setting, o, handle
        self.cache: Any = handle.make_cache(1, length) if handle else None

    def answer(self, sample: Sample, *, probed: bool) -> dict:
        """Everything measured on one sample."""
        row: dict[str, Any] = dict.fromkeys(("density", "bytes_per_token", "hit_rate", "mass", "error"))
        if not self.handle:
            return row | self._generate(sample)
        self.cache.reset()
        with probe(self.cache) if probed else contextlib.nullcontext() as seen:
            row |= self._generate(sample, past_key_values=self.cache, disable_compile=probed or not self.o.compiled)
        row |= cost(self.handle.report())
        if seen and row["density"] is not None:
            row |= kept(seen)
        return row

    def _generate(self, sample: Sample, **how) -> dict:
        ids = torch.tensor([sample.prompt], device=self.model.device)
        steered = getattr(sample, "processor", None)
        if steered:
            torch.manual_seed(0)
            how["logits_processor"] = [steered(self.model.device)]
        begin = time.perf_counter()
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=sample.new_tokens,
            do_sample=bool(steered), temperature=None, top_p=None, top_k=None, **how,
        )  # fmt: skip
        output = out[0, ids.shape[1] :].tolist()
        return {"score": sample.score(output), "output": output, "seconds": round(time.perf_counter() - begin, 3)}


@contextlib.contextmanager
def runner(source: Source, setting: Setting, length: int, o: Options) -> Iterator[Runner]:
    if setting.patch is None:
        yield Runner(source.model, setting, length, o)
        return
    with patched(source.model, setting, length, o) as handle:
        yield Runner(source.model, setting, length, o, handle)


def patched(model, setting: Setting, length: int, o: Options):
    offload: Any = o.offload
    return torchsparsekv.patch(model, setting.method, max_length=length, offload=offload, **(setting.patch or {}))


def cost(report) -> dict:
    """Of the layers that leave something out, of a dense method of all; None where no decode step ran."""
    ran = [r for r in report.layers if r.steps]
    sparse = [r for r in ran if r.method == report.method] or ran
    if not sparse:
        return {}
    selected, fetched = (sum(getattr(r, f"blocks_{what}") for r in sparse) for what in ("selected", "fetched"))
    return {
        "density": sum(r.attended_per_step for r in sparse) / sum(r.context_per_step for r in sparse),
        "bytes_per_token": sum(r.pool_bytes_read / r.steps for r in sparse),
        "hit_rate": 1 - fetched / selected if selected else None,
    }


def kept(seen: Probe) -> dict:
    """Mass and error over the sparse layers, and the means of every head of every layer."""
    layers = seen.sparse() or list(range(len(seen.layers)))
    out = {}
    for what, values, tail in (("mass", seen.mass(), 0.05), ("error", seen.error(), 0.95)):
        sparse = values[layers].flatten().double()
        heads = [[round(x, 5) for x in layer] for layer in values.mean((1, 2)).tolist()]
        out[what] = {
            "mean": float(sparse.mean()), f"p{tail * 100:.0f}": float(sparse.quantile(tail)), "heads": heads,
            "layers": layers,
        }  # fmt: skip
    return out


def check_model(source: Source, o: Options, wanted: list[Setting]) -> None:
    """Refuse what the model or its tasks cannot do, before the first of many samples."""
    has = (*source.tasks, *source.on_request)
    unknown = [t for t in o.tasks if t not in has]
    if unknown:
        raise ValueError(f"unknown task {', '.join(unknown)}; {source.kind} has: {', '.join(has)}")
    for length in o.lengths:
        for setting in wanted:
            if setting.patch is not None:
                with patched(source.model, setting, length, o) as handle:
                    handle.plan.bytes(1, length, pool_on_host=False)  # a method checks its sizes when it declares them
        for task in o.tasks or source.tasks:
            source.sample(task, length, 0)


def evaluate(source: Source, o: Options, store: Store) -> Iterator[dict]:
    """Rows in the order of the table; those that the store has are not run again."""
    for length in o.lengths:
        for setting in settings(o):
            todo = [(task, i) for task in o.tasks or source.tasks for i in range(o.samples)]
            with contextlib.ExitStack() as stack:
                ready = None
                for task, i in todo:
                    row = {"task": task, "length": length, "index": i, **dataclasses.asdict(setting)}
                    probed = i < o.probe and setting.patch is not None
                    had = store.get(row)
                    if had is None or (probed and had["mass"] is None and had["density"] is not None):
                        ready = ready or stack.enter_context(runner(source, setting, length, o))
                        had = measured(source, ready, row, probed=probed)
                        store.add(had)
                    yield had


def measured(source: Source, ready: Runner, row: dict, *, probed: bool) -> dict:
    sample = source.sample(row["task"], row["length"], row["index"])
    found = ready.answer(sample, probed=probed)
    if not 0 <= found["score"] <= 1 or math.isnan(found["score"]):
        raise ValueError(f"{row['task']} gave a score of {found['score']}; scores are from 0 to 1")
    return row | {"depth": getattr(sample, "depth", None), "prompt_tokens": len(sample.prompt)} | found


def run(o: Options, out: Path | None = None, source: Source | None = None) -> list[dict]:
    """Evaluate, print the table, write samples to `out` and the table beside it as CSV."""
    from tqdm import tqdm

    o = resolved(o)
    check(o)
    if out is None:
        raise ValueError("out must name a file for the finished samples")
    if out.suffix == ".csv":
        raise ValueError(f"out is the file of samples, JSON lines; the table goes beside it as CSV: {out}")
    source = source or load(o)
    check_model(source, o, settings(o))
    store = Store(out, _common.header(BENCHMARK, dataclasses.asdict(o)) | {"model": source.about()})
    total = len(o.lengths) * len(settings(o)) * len(o.tasks or source.tasks) * o.samples
    rows = list(tqdm(evaluate(source, o, store), total=total, unit="sample", disable=None))
    table = summary.summarize(rows, DENSE)
    summary.write_csv(table, out.with_suffix(".csv"))
    _common.print_table([summary.shown(r) for r in table])
    print(summary.ABOUT)
    for warning in summary.warnings(rows, DENSE):
        print(warning)
    return table
