"""Record which blocks methods select on a real model, step by step, for `bench decode --trace`.

The prompt is the beginning of a text. Each method then decodes the tokens that follow in the text. For some layers the
file keeps the block ids that each kv head selected at each step, sorted.
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchsparsekv
from torchsparsekv.method import all_methods, make_method
from torchsparsekv_benchmarks._options import at_least, different, option, parse
from torchsparsekv_benchmarks._progress import now
from torchsparsekv_benchmarks._traces import repeated, write
from torchsparsekv_benchmarks.quality import replay, texts
from torchsparsekv_benchmarks.quality.options import OnModel
from torchsparsekv_benchmarks.quality.pretrained import pretrained
from torchsparsekv_benchmarks.quality.sources import placed
from torchsparsekv_benchmarks.quality.text_options import check_text, name_of


@dataclass(frozen=True)
class Options(OnModel):
    model: str = option(
        "qwen-1.5b", "qwen-1.5b, qwen-0.5b, smollm2 (`make real-model`), a Hugging Face path or name, or a .gguf file."
    )
    sink: int = option(64, "First tokens, always attended to.")
    text: str = option("sympy", "sympy or moby-dick (`make real-model`), or a file of plain text.")
    length: int = option(32768, "Tokens of the prompt.")
    steps: int = option(256, "Decode steps to record.")
    methods: tuple[str, ...] = option(
        ("quest=1024", "pariskv=256", "icecache=256", "prkv=1024"), "Methods, comma-separated METHOD=BUDGET."
    )
    layers: int = option(4, "Number of layers to record, at equal distances.")
    window: int = option(256, "Latest tokens, always attended to.")
    hyper: tuple[str, ...] = ()


def check(o: Options) -> dict[str, int]:
    """The methods with their budgets."""
    at_least(o, length=1024, steps=2, layers=1)
    different(o, "methods")
    found = {}
    for text in o.methods:
        name, equals, budget = text.partition("=")
        if not equals or name not in all_methods() or not budget.isdecimal():
            raise ValueError(f"methods are METHOD=BUDGET with a known method, got {text!r}")
        found[name] = int(budget)
    check_text(o.text)
    return found


class Recorder:
    """Keeps the block ids that some layers choose at every step."""

    def __init__(self, layers: dict[int, Any]):
        self.chosen: dict[int, list[Tensor]] = {i: [] for i in layers}
        for i, layer in layers.items():
            layer.state.on_step = lambda s, q, a, selection, out, i=i: self.chosen[i].append(
                selection.ids[0].sort(-1).values.cpu()
            )

    def array(self) -> np.ndarray:
        """[layers * kv heads, steps, chosen]"""
        by_layer = [torch.stack(steps, 1) for steps in self.chosen.values()]
        return torch.cat(by_layer).numpy().astype(np.int32)


@torch.no_grad()
def record(model, ids: Tensor, method: str, budget: int, o: Options, recording: replay.Recording) -> np.ndarray:
    own = dict(budget=budget, sink=o.sink, window=o.window, **parse(o.hyper).get(method, {}))
    where: dict[str, Any] = dict(offload="device", skip_layers=o.skip_layers, max_length=ids.shape[1])
    with torchsparsekv.patch(model, method, **where, **own) as handle:
        cache = replay.filled(handle, recording, ids.shape[1], o.length)
        sparse = {i: x for i, x in cache.stored.items() if x.method.name == method}
        chosen = np.linspace(0, len(sparse) - 1, min(o.layers, len(sparse))).round().astype(int)
        recorder = Recorder({i: sparse[i] for i in np.array(list(sparse))[chosen].tolist()})
        step = replay.stepper(model, cache)
        for t in range(o.steps):
            at = o.length + t
            step(ids[:, at : at + 1], torch.full_like(ids[:, :1], at))
    return recorder.array()


def run(o: Options, out: Path | None = None) -> dict[str, np.ndarray]:
    """Record and write one file for all methods."""
    budgets = check(o)
    if out is None or out.suffix != ".npz":
        raise ValueError(f"out must name a file that ends with .npz, got {out}")
    for name, budget in budgets.items():
        make_method(name, budget=budget)
    tokenizer, model = pretrained(o.model, *placed(o), o.yarn)
    text = texts.read_one(o.text, tokenizer)
    total = o.length + o.steps
    texts.check_room(text, total, 1)
    ids = text.rows(total, range(1))[:, :total].to(model.device)
    recording = replay.record(model, ids, ids.new_zeros(1, dtype=torch.int32), o.steps, methods=budgets)
    found = {}
    for name, budget in budgets.items():
        now(f"{name} {budget}")
        found[f"{name}={budget}"] = record(model, ids, name, budget, o, recording)
    write(out, found, {"model": o.model, "text": name_of(o.text), "length": o.length, "yarn": o.yarn})
    for key, ids_ in found.items():
        print(f"{key}: {ids_.shape[0]} heads, {ids_.shape[1]} steps, {repeated(ids_):.1%} also selected a step before")
    return found
