"""What LouisKV's units are worth in answers: decoding through the method, teacher-forced, by its clusters and segments
and by pages, all of which retrieve at every step (the paper's figure 13b).

    python benchmarks/quality/units.py --model recall --out cpu_units_recall.json

The texts and the scored steps are those of segments.py, beside this file, which says what its pages are and holds them
against one another by attention weight, on more of each text. A page is known by its mean key, as a cluster and a
segment are, and in the method's own place. "pages as long": of as many tokens as the segments before it had on average.
Clusters have 16 tokens at every budget. All let tokens leave the ring 64 at a time, so what is attended to is nearly as
much in all; `attended` says how much. Its own text is read at the first of the budgets only: on a CPU that takes half
an hour of the recall model, and far more of SmolLM2, whose committed file is of prompts (`--kinds prompt`).
"""
import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchsparsekv._methods.louiskv import LouisKV
from torchsparsekv.ops.clusters._kmeans import add_units
from torchsparsekv.ops.clusters.close_segments import close_segments
from torchsparsekv.ops.clusters.find_boundary import find_boundary
from torchsparsekv.ops.select._cosine import cosines
from torchsparsekv.patches._install import install
from torchsparsekv.state import LayerState, RingPlan
from torchsparsekv_benchmarks._results import save
from torchsparsekv_benchmarks.quality import teacher
from torchsparsekv_benchmarks.quality._recall import given, show
from torchsparsekv_benchmarks.quality.options import RECALL
from torchsparsekv_benchmarks.quality.segments import SIZE, Read, of_a_language_model, of_recall, options

BENCHMARK = "units"
TAUS = {"prompt": (0.95,), "own": (0.7, 0.95)}


@dataclass(frozen=True, kw_only=True)
class EveryStep(LouisKV):
    """LouisKV that retrieves at every step, and cuts segments by its rule all the same; one row, on a CPU.

    paged: tokens of a page. The prompt is cut into these too, and what is generated regardless of the rule. 0: none.
    """

    paged: int = 0

    def __post_init__(self) -> None:
        if self.paged:
            object.__setattr__(self, "segment_min", self.paged)
            object.__setattr__(self, "segment_max", self.paged)
        super().__post_init__()

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(self.sink, self.window, 2 * LouisKV.segment_max)

    def prompt(self, s: LayerState, q: Tensor, k: Tensor, *, join: bool) -> Tensor:
        if not self.paged:
            return super().prompt(s, q, k, join=join)
        close_segments(s.store.ring, s.units, s.segments, s.lengths, self.paged)
        order = torch.arange(k.shape[2], dtype=torch.int32).expand(*k.shape[:2], -1).contiguous()
        ((n0, n, end),) = torch.stack([s.lengths.start, s.lengths.length, s.lengths.ring_begin], 1).tolist()
        begin = max(n0, s.lengths.sink)
        if begin < end:
            at = k.shape[2] - n + begin
            x = k[0, :, at : at + end - begin].float()
            means = torch.stack([part.mean(1) for part in x.split(self.paged, 1)], 1).to(k.dtype)
            name = (torch.arange(end - begin) // self.paged).expand(len(x), -1)
            order[0, :, at : at + end - begin] = at + add_units(s.units, 0, begin, means, name)
        return order

    def step(self, s: LayerState, q: Tensor, k: Tensor) -> None:
        n, heads = int(s.lengths.length[0]), s.trigger.previous.shape[2]
        alike = cosines(q[0, :heads, 0], s.trigger.previous[0, (n - 1) % 2]).mean()
        found = bool(alike < self.tau) or int(s.trigger.seen[0, 0]) != n - 1
        s.trigger.seen.fill_(-1)  # so it retrieves
        rule = self.rule if found else self.rule._replace(shortest=self.rule.longest)
        find_boundary(q, s.store.ring, s.units, s.segments, s.trigger, s.stats, s.lengths, rule)


def schemes(read: Read) -> Iterator[tuple[str, float | None]]:
    for tau in TAUS[read.name]:
        if read.name == "prompt":
            yield "clusters and segments", tau
        else:
            yield "segments", tau
            yield "pages as long", tau
    yield f"pages of {SIZE}", None


def measured(model, read: Read, method: EveryStep, dense: Tensor) -> dict[str, float]:
    """Of one sample: what the scored steps lose, what is attended to, and how large units are."""
    ids, at = read.ids[None], [t - read.prompt for t in read.scored if t + 1 < len(read.ids)]
    how: dict[str, Any] = dict(offload="device", skip_layers=None, layers=None)
    with install(model, method, {}, max_length=len(read.ids), **how) as handle:
        cache = handle.make_cache(1)
        forced = teacher.decoded(model, ids, dense, cache)
        ran = [r for r in handle.report().layers if r.method == method.name]
        states = [x.state for x in cache.stored.values() if x.method.name == method.name]
        told = sum(float((s.segments.frontier - s.lengths.sink).sum()) for s in states)
        count = sum(int(s.units.unit_count.sum()) for s in states)
    assert all(r.retrieval_rate == 1 for r in ran)
    return {
        "kl": float(forced.kl[0, at].mean()), "agrees": float(forced.agrees[0, at].mean()),
        "attended": sum(r.attended_per_step for r in ran) / len(ran), "unit_tokens": told / count,
    }  # fmt: skip


def rows(o) -> Iterator[dict]:
    model, reads = (of_recall if o.model == RECALL else of_a_language_model)(o, o.kinds)
    for text in dict.fromkeys(r.name for r in reads):
        mine = [r for r in reads if r.name == text]
        dense = [teacher.dense_logits(model, r.ids[None], len(r.ids) - 1 - r.prompt) for r in mine]
        for budget in o.budgets if text == "prompt" else o.budgets[:1]:
            size = SIZE
            for name, tau in schemes(mine[0]):
                method = EveryStep(budget=budget, sink=mine[0].sink, window=mine[0].window, cluster_size=SIZE)
                if tau and "segments" in name:
                    method = replace(method, tau=tau)
                else:
                    method = replace(method, paged=size if tau else SIZE)
                each = [measured(model, r, method, d) for r, d in zip(mine, dense)]
                mean = {k: sum(x[k] for x in each) / len(each) for k in each[0]}
                size = max(1, round(mean["unit_tokens"]))
                yield {
                    "text": text, "units": name, "tau": tau, "budget": budget, **mean,
                    "by_sample": [round(x["kl"], 5) for x in each], "samples": len(mine), "scored": len(mine[0].scored),
                    "prompt": mine[0].prompt, "sink": mine[0].sink, "window": mine[0].window,
                }  # fmt: skip


def options_of(about: str | None) -> argparse.ArgumentParser:
    p = options(about)
    p.add_argument("--kinds", nargs="+", choices=tuple(TAUS), default=[*TAUS])
    return p


def main() -> None:
    o = options_of(__doc__).parse_args()
    found = []
    for row in rows(o):
        found.append(row)
        show(row)
    save(BENCHMARK, found, given(o), o.out)


if __name__ == "__main__":
    main()
