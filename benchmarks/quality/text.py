"""Compare next-token distributions on real text with those of the dense model, and what each step reads.

A sample is a stretch of a text. The prompt is all but its last --steps tokens, with dense attention. The method then
decodes the last tokens one by one, each after the true tokens of the text (teacher forcing).
"""
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchsparsekv.probe import probe
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._progress import watched
from torchsparsekv_benchmarks.quality import replay, summary, teacher, text_summary, texts
from torchsparsekv_benchmarks.quality.options import Setting, settings
from torchsparsekv_benchmarks.quality.pretrained import opened
from torchsparsekv_benchmarks.quality.run import captured, check_settings, cost, kept, patched, tell
from torchsparsekv_benchmarks.quality.sources import about, placed
from torchsparsekv_benchmarks.quality.store import Store, check_file, key
from torchsparsekv_benchmarks.quality.text_options import Options, check

BENCHMARK = "eval-text"
DIGITS = 4  # of a single step's values in the file


class Chunk:
    """Samples that are decoded together. What the dense model says of them is computed when it is first needed."""

    def __init__(self, model, text: texts.Text, length: int, samples: range, o: Options):
        self.model, self.text, self.length, self.samples, self.o = model, text, length, samples, o
        self.probed = samples.start < o.probe
        self.ids = text.rows(length, samples).to(model.device)
        self._logits: Any = None
        self._recording: Any = None

    @property
    def logits(self):
        if self._logits is None:
            self._logits = teacher.dense_logits(self.model, self.ids, self.o.steps)
        return self._logits

    @property
    def recording(self) -> replay.Recording:
        """The prompts and the scored steps. A replay leaves the scored steps out."""
        if self._recording is None:
            ids = self.ids[:, :-1]
            pad = ids.new_zeros(len(ids), dtype=torch.int32)
            self._recording = replay.record(self.model, ids, pad, self.o.steps, self.o.methods)
        return self._recording

    def rows(self, setting: Setting) -> list[dict]:
        """Without results."""
        of_all = {"task": self.text.name, "length": self.length, **dataclasses.asdict(setting)}
        return [{**of_all, "index": i} for i in self.samples]

    def measured(self, setting: Setting) -> list[dict]:
        """The results of its samples: what was read and the seconds are the mean over them."""
        begin, row = time.perf_counter(), dict.fromkeys((*summary.COST, "mass", "error"))
        seen: list[dict] = [{} for _ in self.samples]
        if setting.patch is None:
            forced = teacher.of_the_teacher(self.logits, self.ids)
        else:
            logits, recording = self.logits, self.recording  # before the model is patched
            how = captured(self.model)
            with patched(self.model, setting, self.length, self.o, how) as handle:
                cache = replay.filled(handle, recording, self.length, self.length - self.o.steps)
                with probe(cache) if self.probed else contextlib.nullcontext() as found:
                    step = replay.stepper(self.model, cache)
                    forced = teacher.steps_through(self.model, self.ids, logits, cache, step=step)
                row |= cost(handle.report(), len(self.samples))
                if found:
                    seen = [_brief(kept(found, i)) for i in range(len(self.samples))]
        row["seconds"] = round((time.perf_counter() - begin) / len(self.samples), 3)
        return [row | seen[i] | _values(forced, i, dense=setting.patch is None) for i in range(len(self.samples))]


def _values(forced: teacher.Forced, i: int, *, dense: bool) -> dict:
    """Of every step the KL, for its percentiles; of the others the mean is all that is asked for."""
    kl = None if dense else [float(f"{x:.{DIGITS}g}") for x in forced.kl[i].tolist()]
    return {"nats": float(forced.nats[i].mean()), "agrees": float(forced.agrees[i].mean()), "kl": kl}


def _brief(seen: dict) -> dict:
    """With the heads of the mass alone, to three digits: there are hundreds."""
    heads = [[round(x, 3) for x in layer] for layer in seen["mass"]["heads"]]
    return {"mass": seen["mass"] | {"heads": heads}, "error": {k: v for k, v in seen["error"].items() if k != "heads"}}


def chunks(model, text: texts.Text, length: int, o: Options) -> Iterator[Chunk]:
    """All samples of a text, probed ones apart from the others."""
    probed = min(o.probe, o.samples)
    for start, end in ((0, probed), (probed, o.samples)):
        for i in range(start, end, o.batch):
            yield Chunk(model, text, length, range(i, min(i + o.batch, end)), o)


def evaluate(model, every: list[texts.Text], o: Options, store: Store) -> Iterator[dict]:
    """Rows as they are measured; those that the store has are not measured again."""
    for length in o.lengths:
        for text in every:
            for chunk in chunks(model, text, length, o):
                for setting in settings(o):
                    rows = chunk.rows(setting)
                    if not all(_has(store, row, chunk) for row in rows):
                        for row, found in zip(rows, chunk.measured(setting)):
                            store.add(row | found)
                    yield from (store.rows[key(row)] for row in rows)


def _has(store: Store, row: dict, chunk: Chunk) -> bool:
    had = store.had(row)
    return had is not None and (not chunk.probed or row["patch"] is None or had["mass"] is not None)


def check_model(model, o: Options, wanted: list[Setting]) -> None:
    """Refuse what the model cannot do, before the weights are loaded."""
    positions = model.config.get_text_config(decoder=True).max_position_embeddings
    for length in o.lengths:
        if length > positions:
            raise ValueError(f"lengths must be at most {positions}, the positions of {o.model}, got {length}")
    check_settings(model, wanted, o, min(o.batch, o.samples))


def run(o: Options, out: Path | None = None) -> list[dict]:
    """Evaluate, print the table, write samples to `out` and the table beside it as CSV."""
    check(o)
    if out is None or out.suffix == ".csv":
        raise ValueError(f"out must be a file of JSON lines, and the table is written beside it as CSV; got {out}")
    wanted, header = settings(o), _results.header(BENCHMARK, dataclasses.asdict(o))
    check_file(out, header)
    device, dtype = placed(o)
    files = opened(o.model, o.yarn)
    every = texts.read(o, files.tokenizer)
    check_model(files.empty(dtype), o, wanted)
    model = files.load(device, dtype)
    check_settings(model, wanted, o, min(o.batch, o.samples))  # the weights have taken their memory
    which = about(o.model, model, BENCHMARK) | {"steps": o.steps, "texts": {t.name: t.digest for t in every}}
    store = Store(out, header | {"model": which})
    total = len(o.lengths) * len(every) * len(wanted) * o.samples
    rows = list(watched(evaluate(model, every, o, store), total, "sample"))
    table = text_summary.summarize(rows)
    tell(rows, table, [text_summary.shown(r) for r in table], text_summary.ABOUT, out)
    return table
