"""Compare the answers of every method with those of the dense model, by length and budget.

All methods answer the same samples of the tasks, through the generate() of transformers.
"""
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import torchsparsekv
from torchsparsekv.method import Step, named_method
from torchsparsekv.probe import Probe, probe
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._progress import watched
from torchsparsekv_benchmarks.quality import summary
from torchsparsekv_benchmarks.quality.options import (
    DENSE,
    OF_THE_PATCH,
    Compared,
    Options,
    Setting,
    check_compared,
    resolved,
    settings,
    widened,
)
from torchsparsekv_benchmarks.quality.sources import Sample, Source, placed, without_weights
from torchsparsekv_benchmarks.quality.store import Store, check_file, key

BENCHMARK = "eval"
Work = tuple[dict, Sample]  # a row without its results, and its sample


class Runner:
    """One method at one budget and length, ready to answer."""

    def __init__(self, model, setting: Setting, length: int, o: Options, handle=None):
        self.model, self.setting, self.length, self.o, self.handle = model, setting, length, o, handle
        self.cache: Any = None

    def answer(self, samples: Sequence[Sample], *, probed: bool) -> list[dict]:
        """Everything measured on samples with prompts of one length; what was read is the mean over them."""
        row: dict[str, Any] = dict.fromkeys((*summary.COST, "mass", "error"))
        if not self.handle:
            return [row | x for x in self._generate(samples)]
        self._make_room(len(samples))
        with probe(self.cache) if probed else contextlib.nullcontext() as seen:
            how = {"past_key_values": self.cache, "disable_compile": probed or not self.o.compiled}
            told = self._generate(samples, **how)
        row |= cost(self.handle.report(), len(samples))
        if seen and row["density"] is not None:
            row |= kept(seen)
        return [row | x for x in told]

    def _make_room(self, batch: int) -> None:
        if self.cache is None or self.cache.batch != batch:
            self.cache = None  # freed before the next one is made
            self.cache = self.handle.make_cache(batch, self.length)
        self.cache.reset()

    def _generate(self, samples: Sequence[Sample], **how) -> list[dict]:
        ids = torch.tensor([s.prompt for s in samples], device=self.model.device)
        steered = getattr(samples[0], "processor", None)
        if steered:
            torch.manual_seed(0)
            how["logits_processor"] = [steered(self.model.device)]
        begin = time.perf_counter()
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=samples[0].new_tokens,
            do_sample=bool(steered), temperature=None, top_p=None, top_k=None, pad_token_id=pad_token(self.model),
            **how,
        )  # fmt: skip
        told = out[:, ids.shape[1] :].tolist()
        seconds = round((time.perf_counter() - begin) / len(samples), 3)
        return [{"score": s.score(x), "output": x, "seconds": seconds} for s, x in zip(samples, told)]


def pad_token(model) -> int:
    """What stands after the end of a row that ends before the others of its batch."""
    known = (model.generation_config.pad_token_id, model.generation_config.eos_token_id)
    first = next((x for x in known if x is not None), 0)
    return first[0] if isinstance(first, list) else first


@contextlib.contextmanager
def runner(source: Source, setting: Setting, length: int, o: Options) -> Iterator[Runner]:
    if setting.patch is None:
        yield Runner(source.model, setting, length, o)
        return
    with patched(source.model, setting, length, o) as handle:
        yield Runner(source.model, setting, length, o, handle)


def patched(model, setting: Setting, length: int, o: Compared, step: Step = "compiled"):
    return torchsparsekv.patch(model, setting.method, step=step, **told(setting, length, o))


def told(setting: Setting, length: int, o: Compared) -> dict[str, Any]:
    """The keywords of patch() for a setting."""
    keywords = dict(setting.patch or {})
    if keywords and widened(setting.method):
        keywords["window"] = min(keywords["window"], length)  # window and budget together may be all there is, and more
    return {"max_length": length, "offload": o.offload, **keywords}


def captured(model) -> Step:
    """How a step of which there are many in a row becomes a graph."""
    return "captured" if model.device.type == "cuda" else "auto"


def cost(report, rows: int) -> dict:
    """Of the layers that leave something out, of a dense method of all layers; nothing where no decode step ran."""
    ran = [r for r in report.layers if r.steps]
    sparse = [r for r in ran if r.method == report.method] or ran
    if not sparse:
        return {}
    selected, fetched = (sum(getattr(r, f"blocks_{what}") for r in sparse) for what in ("selected", "fetched"))
    return {
        "density": sum(r.attended_per_step for r in sparse) / sum(r.context_per_step for r in sparse),
        "attended": sum(r.attended_per_step for r in sparse) / len(sparse),
        "bytes_per_token": sum(r.pool_bytes_read / r.steps for r in sparse) / rows,
        "hit_rate": 1 - fetched / selected if selected else None,
        "retrieval_rate": sum(r.retrieval_rate for r in sparse) / len(sparse),
    }


def kept(seen: Probe, row: int | None = None) -> dict:
    """Mass and error over the sparse layers, and the means of every head of every layer; of all rows of the batch, or
    of one."""
    rows = slice(None) if row is None else slice(row, row + 1)
    layers = seen.sparse() or list(range(len(seen.layers)))
    out = {}
    for what, of_all, tail in (("mass", seen.mass(), 0.05), ("error", seen.error(), 0.95)):
        values = of_all[:, :, rows]
        sparse = values[layers].flatten().double()
        heads = [[round(x, 5) for x in layer] for layer in values.mean((1, 2)).tolist()]
        out[what] = {
            "mean": float(sparse.mean()), f"p{tail * 100:.0f}": float(sparse.quantile(tail)), "heads": heads,
            "layers": layers,
        }  # fmt: skip
    return out


def check_settings(model, wanted: Sequence[Setting], o: Compared, batch: int = 1) -> None:
    """Refuse a setting that patch() or a cache of `batch` rows would refuse, and name it. The model may be without
    weights."""
    device, _ = placed(o)
    for length, setting in itertools.product(o.lengths, wanted):
        if setting.patch is None:
            continue
        try:
            _check_setting(model, device, setting, length, o, batch)
        except (ValueError, MemoryError) as e:
            raise type(e)(f"{setting.label} at a length of {length}: {e}") from e


def _check_setting(model, device: torch.device, setting: Setting, length: int, o: Compared, batch: int) -> None:
    from torchsparsekv.patches import _install, _memory

    keywords = told(setting, length, o)
    of_patch = {n: keywords.pop(n, None) for n in ("max_length", "offload", *OF_THE_PATCH)}
    method, given = named_method(setting.method, keywords)
    plan, _, _ = _install.planned(model, method, given, device, layers=None, **of_patch)
    _memory.check_memory(plan, batch, length, _memory.placed(plan, o.offload, batch, length))


def check_model(source: Source, o: Options, wanted: list[Setting]) -> None:
    """Refuse what the model or its tasks cannot do, before the weights are loaded."""
    has = (*source.tasks, *source.on_request)
    unknown = [t for t in o.tasks if t not in has]
    if unknown:
        raise ValueError(f"unknown task {', '.join(unknown)}; {source.kind} has: {', '.join(has)}")
    check_settings(source.model, wanted, o)
    for length, task in itertools.product(o.lengths, o.tasks or source.tasks):
        source.sample(task, length, 0)


def evaluate(source: Source, o: Options, store: Store) -> Iterator[dict]:
    """Rows in the order of the table; those that the store has are not run again."""
    for length in o.lengths:
        for setting in settings(o):
            with contextlib.ExitStack() as stack:
                ready = None
                for task in o.tasks or source.tasks:
                    rows = [
                        {"task": task, "length": length, "index": i, **dataclasses.asdict(setting)}
                        for i in range(o.samples)
                    ]
                    for chunk, probed in chunks(source, rows, o, store):
                        ready = ready or stack.enter_context(runner(source, setting, length, o))
                        measure(ready, chunk, store, probed=probed)
                    yield from (store.rows[key(row)] for row in rows)


def chunks(source: Source, rows: list[dict], o: Options, store: Store) -> Iterator[tuple[list[Work], bool]]:
    """What is still to be run, with its samples: the probed ones one by one, of the others up to `batch` whose prompts
    are as long as one another (no padding, so nothing depends on what else is in the batch)."""
    alike: dict[tuple[int, int], list[Work]] = {}
    for row in rows:
        had, probed = store.had(row), row["index"] < o.probe and row["patch"] is not None
        if had and (not probed or had["mass"] is not None or had["density"] is None):
            continue
        sample = source.sample(row["task"], row["length"], row["index"])
        if probed or o.batch == 1 or hasattr(sample, "processor"):
            yield [(row, sample)], probed
        else:
            alike.setdefault((len(sample.prompt), sample.new_tokens), []).append((row, sample))
    for group in alike.values():
        for i in range(0, len(group), o.batch):
            yield group[i : i + o.batch], False


def measure(ready: Runner, chunk: list[Work], store: Store, *, probed: bool) -> None:
    answers = ready.answer([sample for _, sample in chunk], probed=probed)
    for (row, sample), found in zip(chunk, answers):
        if not 0 <= found["score"] <= 1:
            raise ValueError(f"{row['task']} gave a score of {found['score']}; scores are from 0 to 1")
        store.add(row | {"depth": getattr(sample, "depth", None), "prompt_tokens": len(sample.prompt)} | found)


def run(o: Options, out: Path | None = None, source: Source | None = None) -> list[dict]:
    """Evaluate, print the table, write samples to `out` and the table beside it as CSV."""
    o = resolved(o)
    check_compared(o)
    if out is None:
        raise ValueError("out must name a file for the finished samples")
    if out.suffix == ".csv":
        raise ValueError(f"out must be a file of JSON lines, and the table is written beside it as CSV; got {out}")
    if min(o.lengths) < max(o.budgets):
        what = f"a length of {min(o.lengths)} tokens is below a budget of {max(o.budgets)}"
        raise ValueError(f"{what}: longer --lengths, or smaller --budgets")
    wanted, header = settings(o), _results.header(BENCHMARK, dataclasses.asdict(o))
    check_file(out, header)
    source = source or without_weights(o)
    check_model(source, o, wanted)
    source = source.loaded()
    check_settings(source.model, wanted, o)  # the weights have taken their memory
    store = Store(out, header | {"model": source.about()})
    total = len(o.lengths) * len(wanted) * len(o.tasks or source.tasks) * o.samples
    rows = list(watched(evaluate(source, o, store), total, "sample"))
    table = summary.summarize(rows, DENSE)
    tell(rows, table, [summary.shown(r) for r in table], summary.ABOUT, out)
    return table


def tell(rows: list[dict], table: list[dict], shown: list[dict], about: str, out: Path) -> None:
    """The table of all samples, beside their file and on the screen, with what it means and what must not be missed."""
    summary.write_csv(table, out.with_suffix(".csv"))
    _results.print_table(shown)
    print(about)
    for warning in summary.warnings(rows, DENSE):
        print(warning)
