"""What LouisKV's units and boundaries are like, from the queries and keys of one dense forward: the ablations of its
paper that ask for nothing else.

    python benchmarks/quality/segments.py --model smollm2 --out cpu_segments_smollm2.json

Two kinds of text. prompt: most of what is read is a prompt, then come --steps steps. own: nearly all of it is what the
dense model wrote itself. Of smollm2 a novel, and what it draws at temperature 1 after its beginning; of the recall
model a readout (recall_model/readout.py) and a journal (journal.py), both written by it.

- units (the paper's figure 13b): attention weight on sinks, window and a budget of tokens, chosen anew at every step,
  by whole units of a mean key each. Units are clusters of the prompt and segments of the output as `louiskv` cuts them,
  or pages of consecutive tokens. Tokens between the last whole unit and the window are attended to and count in the
  budget, so that all have as many. "single tokens" is the most that any choice has. Mean over samples, sparse layers,
  query heads and steps: of smollm2 every --every th, of its own text in the second half; of recall all that answer.
- lengths (figure 15): steps from one retrieval of a layer to the next by the paper's rule, of all sparse layers. The
  last segment of a sample is cut off by its end.
- layers (figure 16): their mean in each layer, dense ones too, and the Jaccard similarity of the steps at which it and
  the next layer retrieve, the first step left out. chance: what it would be if the two had nothing to do with each
  other.
"""
import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchsparsekv._methods.louiskv import LouisKV
from torchsparsekv.ops.clusters._kmeans import DRAWS, kmeans
from torchsparsekv_benchmarks._results import save
from torchsparsekv_benchmarks.quality import sources, texts, turns
from torchsparsekv_benchmarks.quality._clusters import in_order
from torchsparsekv_benchmarks.quality._recall import given, parser, show
from torchsparsekv_benchmarks.quality.ablate_pariskv import DENSE
from torchsparsekv_benchmarks.quality.heads import Recorded, continued, recorded
from torchsparsekv_benchmarks.quality.options import RECALL, Options
from torchsparsekv_benchmarks.quality.pretrained import pretrained
from torchsparsekv_benchmarks.quality.text_options import Options as TextOptions
from torchsparsekv_benchmarks.quality.turn_mass import SINK
from torchsparsekv_benchmarks.quality.turn_mass import turns as turned
from torchsparsekv_benchmarks.recall_model.journal import LIKELIEST

BENCHMARK = "segments"
TAUS = (0.7, 0.85, 0.95)  # the paper's for long answers and for long prompts, and our default
SIZE = 16  # tokens of a cluster on average, and of a page
WINDOW = {"prompt": 64, "own": 32}  # by the kind of text
TASK = {"prompt": sources.READOUT, "own": sources.JOURNAL}
BEST = "single tokens"


@dataclass(frozen=True)
class Read:
    """A text, where its prompt ends, and the steps of which the weight is measured, as positions."""

    name: str
    ids: Tensor = field(repr=False)
    prompt: int
    scored: Sequence[int] = field(repr=False)

    @property
    def sink(self) -> int:
        """Of its own text the whole prompt, so that only its own is retrieved."""
        return SINK if self.name == "prompt" else self.prompt

    @property
    def window(self) -> int:
        return WINDOW[self.name]


@dataclass(frozen=True)
class Units:
    """The retrievable tokens from `begin` on: keys they are known by [heads, units, dim], the unit of each token
    [heads, tokens], and where each unit is whole (ascending)."""

    begin: int
    centres: Tensor
    name: Tensor
    ends: Tensor

    @property
    def tokens(self) -> float:
        """Of a unit, on average."""
        return self.name.shape[1] / len(self.ends)


# ---------------------------------------------------------------- boundaries


def lengths(now: Tensor) -> list[int]:
    """Steps from each retrieval to the next, the last to the end; now [steps], of which the first retrieves."""
    at = [*now.nonzero()[:, 0].tolist(), len(now)]
    return [j - i for i, j in pairwise(at)]


def cut(now: Tensor, begin: int, prompt: int, shortest: int, longest: int) -> list[int]:
    """Where the segments end that are whole, as ops/clusters/find_boundary.py cuts them; the tokens of the prompt from
    `begin` on every `longest`, as close_segments.py does. now [steps]: whether a step is a boundary."""
    start = begin + max(prompt - 1 - begin, 0) // longest * longest
    ends = [*range(begin + longest, start + 1, longest)]
    for p, found in enumerate(now.tolist(), prompt):
        if (found and p - start >= shortest) or p - start >= longest:
            ends.append(p)
            start = p
    return ends


class Boundaries:
    """Of one kind of text and one tau, what all samples have: for every layer the steps that retrieve."""

    def __init__(self):
        self.now: dict[int, list[Tensor]] = {}  # by layer, of each sample

    def add(self, layer: int, now: Tensor) -> None:
        self.now.setdefault(layer, []).append(now)

    def length_row(self) -> dict[str, Any]:
        found = Counter(n for layer, many in self.now.items() if layer >= DENSE for x in many for n in lengths(x))
        steps = sum(n * count for n, count in found.items())
        return {"mean": steps / found.total(), "steps": steps, "histogram": sorted(map(list, found.items()))}

    def layer_rows(self) -> Iterator[dict[str, Any]]:
        for layer, many in self.now.items():
            mean = sum(map(len, many)) / sum(int(x.sum()) for x in many)
            following = self.now.get(layer + 1)
            both = jaccard(many, following) if following else (None, None)
            yield {"layer": layer, "mean": mean, "jaccard": both[0], "chance": both[1]}


def jaccard(mine: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[float | None, float | None]:
    """Of the steps of all samples but the first of each, at which nothing is left to decide; and what two independent
    choices of as many steps would have. None where neither has any."""
    a, b = (torch.cat([x[1:] for x in many]) for many in (mine, others))
    p, q = (float(x.double().mean()) for x in (a, b))
    if not p + q:
        return None, None
    return int((a & b).sum()) / int((a | b).sum()), p * q / (p + q - p * q)


# ---------------------------------------------------------------- units


def units(keys: Tensor, begin: int, ends: Sequence[int], clustered: int | None = None) -> Units:
    """Runs of tokens that end there, the first of which begins at `begin`, or where those before that are clustered
    end. keys [heads, tokens, dim]."""
    start = begin if clustered is None else clustered
    sizes = torch.tensor([j - i for i, j in pairwise([start, *ends])], dtype=torch.int64)
    centres = torch.stack([keys[:, i:j].mean(1) for i, j in pairwise([start, *ends])], 1)
    name = torch.arange(len(ends)).repeat_interleave(sizes).expand(len(keys), -1)
    whole = torch.tensor(ends)
    if clustered is not None:
        of_prompt, names = kmeans(keys[:, begin:start], max(1, (start - begin) // SIZE), DRAWS, 3, 0, False)
        n = of_prompt.shape[1]
        centres, name = torch.cat([of_prompt, centres], 1), torch.cat([names, name + n], 1)
        whole = torch.cat([torch.full((n,), start), whole])
    return Units(begin, centres, name, whole)


def pages(begin: int, total: int, size: int) -> list[int]:
    return [*range(begin + size, total + 1, size)]


def of_a_layer(keys: Tensor, read: Read, now: dict[float, Tensor]) -> Iterator[tuple[str, float | None, Units]]:
    """(name, tau of its segments, units); now: whether a step is a boundary, by tau."""
    own, total = read.name == "own", keys.shape[1]
    middle = read.prompt if own else read.prompt - read.window  # from here on there are no clusters
    clustered = None if own else middle
    for tau, found in now.items():
        ends = cut(found, middle, read.prompt, LouisKV.segment_min, LouisKV.segment_max)
        segments = units(keys, read.sink, ends, clustered)
        yield "segments" if own else "clusters and segments", tau, segments
        if own:
            yield "pages as long", tau, units(keys, read.sink, pages(read.sink, total, round(segments.tokens)))
    if not own:
        yield f"clusters and pages of {SIZE}", None, units(keys, read.sink, pages(middle, total, SIZE), middle)
    yield f"pages of {SIZE}", None, units(keys, read.sink, pages(read.sink, total, SIZE))


def reached(of: Units, q: Tensor, weight: Tensor, limit: int, budgets: Sequence[int]) -> Tensor:
    """Weight on what is attended to, [heads, budgets], where tokens from `limit` on are near: q [heads, group, dim],
    weight [heads, tokens], none of it on tokens that are yet to come."""
    count = int(torch.searchsorted(of.ends, limit, right=True))
    frontier = int(of.ends[count - 1]) if count else of.begin
    room = torch.tensor([min(max(b - (limit - frontier), 0), frontier - of.begin) for b in budgets])
    near = weight[:, : of.begin].sum(1) + weight[:, frontier:].sum(1)
    out = []
    for x, mine, centres, name in zip(q, weight[:, of.begin : frontier], of.centres[:, :count], of.name):
        taken = in_order(x, centres, name[: frontier - of.begin]) if count else name[:0]
        out.append(torch.cat([mine.new_zeros(1), mine[taken].cumsum(0)])[room])
    return near[:, None] + torch.stack(out)


def most(weight: Tensor, begin: int, limit: int, budgets: Sequence[int]) -> Tensor:
    """The same of the tokens that have most of it."""
    near = weight[:, :begin].sum(1) + weight[:, limit:].sum(1)
    best = weight[:, begin:limit].sort(descending=True).values.cumsum(1)
    return near[:, None] + best[:, [min(b, limit - begin) - 1 for b in budgets]]


def masses(layer: Recorded, read: Read, now: dict[float, Tensor], budgets: Sequence[int]) -> Iterator[tuple]:
    """(name, tau, tokens of a unit, weight at each budget, mean over heads and scored steps)."""
    at = torch.tensor(read.scored)
    q = layer.queries[at].unflatten(1, (layer.heads, -1))  # [steps, heads, group, dim]
    logits = torch.einsum("shgd,hnd->shgn", q, layer.keys) * layer.d**-0.5
    ahead = torch.arange(layer.total) > at[:, None]
    weights = logits.masked_fill(ahead[:, None, None], -torch.inf).softmax(-1).mean(2)
    limits = [t + 1 - read.window for t in read.scored]
    for name, tau, of in of_a_layer(layer.keys, read, now):
        found = [reached(of, x, w, limit, budgets) for x, w, limit in zip(q, weights, limits)]
        yield name, tau, of.tokens, torch.stack(found).mean((0, 1))
    best = [most(w, read.sink, limit, budgets) for w, limit in zip(weights, limits)]
    yield BEST, None, 1.0, torch.stack(best).mean((0, 1))


# ---------------------------------------------------------------- texts


def of_a_language_model(o: argparse.Namespace, kinds: Sequence[str]) -> tuple[Any, list[Read]]:
    tokenizer, model = pretrained(o.model, torch.device(o.device), torch.float32)
    out = []
    if "prompt" in kinds:
        (text,) = texts.read(TextOptions(lengths=(o.length,), steps=o.steps, samples=o.samples), tokenizer)
        begin = o.length - o.steps
        for ids in text.rows(o.length, range(o.samples))[:, :-1]:
            out.append(Read("prompt", ids, begin, range(begin, o.length, o.every)))
    if "own" in kinds:
        half = o.own_prompt + o.own // 2
        for ids in turns.own_ids(o, tokenizer, model).cpu()[:, :-1]:
            out.append(Read("own", ids, o.own_prompt, range(half, len(ids), o.every)))
    return model, out


def of_recall(o: argparse.Namespace, kinds: Sequence[str]) -> tuple[Any, list[Read]]:
    """A step is scored where its query decides a word of an answer."""
    source, out = sources.load(Options(model=RECALL, device=o.device, dtype="float32")), []
    for name in kinds:
        for i in range(o.samples):
            asked: Any = source.sample(TASK[name], o.length, i)
            prompt = torch.tensor(asked.prompt)
            ids = continued(source.model, prompt, asked.new_tokens, [asked.processor(source.model.device)])
            answers = torch.from_numpy(asked.plan == LIKELIEST).nonzero()[:, 0] + len(prompt) - 1
            out.append(Read(name, ids, len(prompt), answers.tolist()))
    return source.model, out


def rows(o: argparse.Namespace) -> list[dict]:
    model, reads = (of_recall if o.model == RECALL else of_a_language_model)(o, tuple(WINDOW))
    steps: dict[tuple[str, float], Boundaries] = {}
    kept: dict[tuple, list[list[tuple[float, list[float]]]]] = {}  # of each sample and sparse layer
    for i, read in enumerate(reads):
        show({"text": read.name, "sample": i, "prompt": read.prompt, "steps": len(read.ids) - read.prompt})
        mine: dict[tuple, list[tuple[float, list[float]]]] = {}
        for at, layer in enumerate(recorded(model, read.ids, seed=o.seed)):
            q = layer.queries[read.prompt :].unflatten(1, (layer.heads, -1))
            now = {tau: turned(q, turns.Rule("last step", tau))[:, 0] for tau in TAUS}
            for tau, found in now.items():
                steps.setdefault((read.name, tau), Boundaries()).add(at, found)
            for name, tau, tokens, mass in masses(layer, read, now, o.budgets) if at >= DENSE else ():
                mine.setdefault((read.name, name, tau), []).append((tokens, mass.tolist()))
        for what, found in mine.items():
            kept.setdefault(what, []).append(found)
    return [*unit_rows(kept, reads, o), *boundary_rows(steps, reads)]


def unit_rows(kept: dict, reads: Sequence[Read], o: argparse.Namespace) -> Iterator[dict]:
    for (text, name, tau), samples in kept.items():
        tokens = torch.tensor([[x for x, _ in layers] for layers in samples], dtype=torch.float64).mean()
        mass = torch.tensor([[x for _, x in layers] for layers in samples], dtype=torch.float64).mean(1)
        for budget, each in zip(o.budgets, mass.T.tolist()):
            yield {
                "figure": "units", "text": text, "units": name, "tau": tau, "unit_tokens": float(tokens),
                "budget": budget, "mass": sum(each) / len(each), "by_sample": [round(x, 4) for x in each],
                **about(text, reads),
            }  # fmt: skip


def boundary_rows(steps: dict[tuple[str, float], Boundaries], reads: Sequence[Read]) -> Iterator[dict]:
    for (text, tau), found in steps.items():
        of = {"text": text, "tau": tau}
        yield {"figure": "lengths", **of, **found.length_row(), **about(text, reads)}
        for row in found.layer_rows():
            yield {"figure": "layers", **of, **row, **about(text, reads)}


def about(text: str, reads: Sequence[Read]) -> dict[str, Any]:
    """How many samples there are, and in each the tokens of its prompt and the scored steps, on average."""
    mine = [r for r in reads if r.name == text]
    prompt, scored = (sum(x) / len(mine) for x in ([r.prompt for r in mine], [len(r.scored) for r in mine]))
    return {"samples": len(mine), "prompt": prompt, "scored": scored, "sink": mine[0].sink, "window": mine[0].window}


def options(about: str | None) -> argparse.ArgumentParser:
    p = parser(about, "float32")
    p.add_argument("--model", default="smollm2", help=f"smollm2, {RECALL}, or a Hugging Face path or name")
    p.add_argument("--length", type=int, default=2048, help="tokens of prompt and steps; of recall, of its own too")
    p.add_argument("--steps", type=int, default=256)
    p.add_argument("--samples", type=int, default=4, help="of each kind of text")
    p.add_argument("--own-prompt", type=int, default=64)
    p.add_argument("--own", type=int, default=1024, help="tokens it writes")
    p.add_argument("--every", type=int, default=4, help="steps from one that is scored to the next")
    p.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256])
    return p


def main() -> None:
    o = options(__doc__).parse_args()
    found = rows(o)
    for row in found:
        show({k: v for k, v in row.items() if k not in ("histogram", "by_sample")})
    save(BENCHMARK, found, given(o), o.out)


if __name__ == "__main__":
    main()
