"""Find the selecting layers of a model, so that answers change least when the other layers share their selections.

The model answers samples of the tasks. The first --steps tokens of an answer are then predicted again, while one layer
shares the selection of another layer. Heads are matched as `icecache` matches them (ops/icecache/share_prompt.py). A
head attends to the tokens with the largest weight in the matched head, and to the first and the latest tokens. The loss
of the layer is its KL to the dense model, in nats, minus the KL with its own selection. Losses of layers are assumed to
add up. The result has the selecting layers with the smallest sum.
"""
import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.ops.icecache.share_prompt import matched
from torchsparsekv.ops.icecache.top_tokens_of_last_queries import QUERIES, WANTED
from torchsparsekv.patches._names import NAME
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._options import at_least, option
from torchsparsekv_benchmarks._progress import Progress, now
from torchsparsekv_benchmarks.quality import options
from torchsparsekv_benchmarks.quality.heads import attending
from torchsparsekv_benchmarks.quality.sources import Source, load

BENCHMARK = "selecting_layers"
HELD_OUT = 1000  # samples from this one on, which no evaluation asks for


@dataclass(frozen=True)
class Options(options.OnModel):
    every: int = option(3, "Layers for each selecting layer, on average; compare `reuse_every` of icecache.")
    tasks: tuple[str, ...] = option((), "Tasks, comma-separated. Empty: all tasks, except journal and readout.")
    samples: int = option(2, "Samples of each task. `eval` has other samples.")
    length: int = option(2048, "Tokens of prompt and answer together.")
    steps: int = option(64, "Tokens at the start of an answer that are predicted again.")
    budget: int = option(64, "Tokens that a head retrieves.")


class Asked(NamedTuple):
    """What layers do with one sample. chosen [layer][kv heads, steps, tokens]: the tokens to which each gives most
    weight, if any; sought [layer][1, kv heads, queries, wanted]: what they look for at the end of the prompt. seen
    [steps, tokens]: all that a step may see, near: what it attends to anyway."""

    chosen: dict[int, Tensor]
    sought: dict[int, Tensor]
    seen: Tensor
    near: Tensor


def products(q: Tensor, k: Tensor) -> Tensor:
    """Of queries [1, heads, steps, dim] with all keys [1, kv heads, tokens, dim]: [kv heads, group, steps, tokens]."""
    return q[0].float().unflatten(0, (k.shape[1], -1)) @ k[0, :, None].float().transpose(-1, -2)


class Answered:
    """One sample, and how the model goes on after it, to be predicted again. `layers`: those that retrieve."""

    def __init__(self, model: Any, layers: Sequence[int], sample: Any, o: Options):
        self.model, self.layers, self.o = model, layers, o
        prompt = torch.tensor([sample.prompt], device=model.device)
        new = min(o.steps, sample.new_tokens)
        said = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
        self.known, self.tokens = prompt.shape[1] - 1, said.shape[1] - 1
        self.given = said[:, self.known : self.tokens]
        self.asked, self.dense = self._asked(prompt[:, :-1])

    def _asked(self, prompt: Tensor) -> tuple[Asked, Tensor]:
        """And what the dense model predicts."""
        sought: dict[int, Tensor] = {}
        chosen: dict[int, Tensor] = {}
        at = torch.arange(self.tokens, device=prompt.device)
        own = at[self.known :, None]
        seen, near = at <= own, (at < self.o.sink) | (at > own - self.o.window)

        def looking(sdpa, module, q, k, v, mask, **more):
            if module.layer_idx in self.layers:
                best = products(q[:, :, -QUERIES:], k).amax(1)
                far = ~near[0, : self.known]
                best = best.masked_fill(~far, -torch.inf)
                sought[module.layer_idx] = best.topk(min(WANTED, int(far.sum())), -1).indices[None]
            return sdpa(module, q, k, v, mask, **more)

        def choosing(sdpa, module, q, k, v, mask, **more):
            if module.layer_idx in self.layers:
                scale = more.get("scaling") or q.shape[-1] ** -0.5
                weight = (products(q, k) * scale).masked_fill(~seen, -torch.inf).softmax(-1).amax(1)
                best = weight.masked_fill(near | ~seen, -1).topk(min(self.o.budget, self.tokens), -1).indices
                chosen[module.layer_idx] = torch.zeros_like(weight, dtype=torch.bool).scatter_(-1, best, True)
            return sdpa(module, q, k, v, mask, **more)

        with attending(self.model, looking):
            self.cache = getattr(self.model(prompt, use_cache=True, logits_to_keep=1), NAME)
        dense = self._predicted(choosing)
        return Asked(chosen, sought, seen, near), dense

    def _predicted(self, attend: Callable[..., Any]) -> Tensor:
        """Log-probabilities [steps, words] with this attention."""
        with attending(self.model, attend):
            logits = self.model(self.given, **{NAME: copy.deepcopy(self.cache)}).logits
        return logits[0].float().log_softmax(-1)

    def changed(self, layer: int, chooser: int) -> float:
        """Nats that the answer is farther from the dense one where the layer attends to what that one chose."""
        a = self.asked
        heads = matched(a.sought[layer], a.sought[chooser])[0] if layer != chooser else slice(None)
        mask = (a.chosen[chooser][heads] | a.near) & a.seen

        def masked(sdpa, module, q, k, v, usual, **more):
            if module.layer_idx == layer:
                usual = mask.repeat_interleave(q.shape[1] // len(mask), 0)[None]
            return sdpa(module, q, k, v, usual, **more)

        return float(torch.nn.functional.kl_div(self._predicted(masked), self.dense, log_target=True, reduction="sum"))


@torch.no_grad()
def losses(source: Source, layers: Sequence[int], o: Options) -> Tensor:
    """Nats that each layer loses by what each one before it chose, summed over the samples: [layers, layers]."""
    lost = torch.zeros(len(layers), len(layers), dtype=torch.float64)
    tasks = o.tasks or source.tasks
    with Progress(len(tasks) * o.samples * len(layers), "layer") as progress:
        for task in tasks:
            for i in range(HELD_OUT, HELD_OUT + o.samples):
                sample = Answered(source.model, layers, source.sample(task, o.length, i), o)
                for x, layer in enumerate(layers):
                    by = torch.tensor([sample.changed(layer, chooser) for chooser in layers[: x + 1]])
                    lost[x, : x + 1] += (by - by[x]).clamp(min=0)
                    progress.step()
    return lost


def least(lost: Tensor, count: int) -> tuple[int, ...]:
    """Of rows of `lost`, the `count` that choose, where each other follows the last before it and least is lost."""
    rows = len(lost)
    # best[i][c]: what is lost by the first i rows with c of them choosing, and which these are
    best: list[list[tuple[float, tuple[int, ...]]]] = [[(torch.inf, ())] * (count + 1) for _ in range(rows + 1)]
    best[0][0] = 0.0, ()
    for first in range(rows):
        for c in range(count):
            before, which = best[first][c]
            for end in range(first + 1, rows + 1):
                total = before + float(lost[first:end, first].sum())
                best[end][c + 1] = min(best[end][c + 1], (total, (*which, first)))
    return best[rows][count][1]


def retrieving(model: Any, o: Options) -> list[int]:
    """The layers that would retrieve, which all must have as many heads."""
    with torchsparsekv.patch(model, "icecache", skip_layers=o.skip_layers) as handle:
        plan = handle.planned
        layers = [i for i, m in enumerate(plan.methods) if m is not None and m.name == "icecache"]
        kinds = {(x.kv_heads, x.heads) for i in layers if (x := plan.layers[i])}
    if len(kinds) > 1:
        raise NotImplementedError(f"layers with different (kv heads, query heads) cannot share: {sorted(kinds)}")
    if len(layers) < 2:
        raise ValueError(f"sharing needs at least two layers that retrieve, this model has {len(layers)}")
    return layers


def rows_of(layers: Sequence[int], lost: Tensor, choosing: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each layer: which one it follows, None where it chooses, and the nats that it loses by each."""
    rows, chooser = [], 0
    for x, layer in enumerate(layers):
        chooser = x if x in choosing else chooser
        follows = None if x == chooser else layers[chooser]
        by = {str(layers[y]): round(float(lost[x, y]), 4) for y in range(x)}
        rows.append({"layer": layer, "follows": follows, "nats": round(float(lost[x, chooser]), 4), "by": by})
    return rows


def nats(lost: Tensor, choosing: Sequence[int]) -> float:
    """What is lost in all where these choose."""
    ends = [*choosing[1:], len(lost)]
    return sum(float(lost[a:b, a].sum()) for a, b in zip(choosing, ends))


def check(o: Options, out: Path) -> None:
    at_least(o, every=2, samples=1, length=1, steps=1, budget=1, sink=0, window=1)
    options.check_dtype(o.dtype)
    if out.exists():
        raise FileExistsError(f"{out} exists already: name another file with --out")
    make_method("icecache", budget=o.budget, sink=o.sink, window=o.window)


def run(o: Options, out: Path) -> None:
    check(o, out)
    source = load(o)
    if unknown := set(o.tasks) - set(source.tasks):
        raise ValueError(f"unknown tasks {', '.join(sorted(unknown))}; {source.name} has {', '.join(source.tasks)}")
    layers = retrieving(source.model, o)
    now(f"{source.name} on {source.model.device}: {len(layers)} layers that retrieve")
    lost = losses(source, layers, o)
    evenly = range(0, len(layers), o.every)
    choosing = least(lost, len(evenly))
    rows = rows_of(layers, lost, choosing)
    _results.save(BENCHMARK, rows, dataclasses.asdict(o) | {"about": source.about()}, out)
    _results.print_table([{k: v for k, v in row.items() if k != "by"} for row in rows])
    chosen = [layers[x] for x in choosing]
    even = f"reuse_every={o.every}: {nats(lost, evenly):.3g}"
    print(f"\nselecting_layers {chosen}: {nats(lost, choosing):.3g} nats lost; {even}")
