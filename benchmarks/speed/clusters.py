"""Time of the kernels of LouisKV and ClusterKV at a real shape: steps with and without a boundary, k-means of a prompt.

Each call in the replayed CUDA graph has its own inputs, so that they are not in the caches of the GPU.
"""
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from torchsparsekv._methods.louiskv import LouisKV
from torchsparsekv.ops.attend.sparse_attention import sparse_attention
from torchsparsekv.ops.clusters.cluster_keys import cluster_keys
from torchsparsekv.ops.clusters.find_boundary import find_boundary
from torchsparsekv.ops.clusters.pick_units import pick_units
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.gather.fetch import fetch
from torchsparsekv.ops.store.append import append
from torchsparsekv.ops.store.views import Attention, Selection, Token
from torchsparsekv.state import Geometry, LayerState, RowLengths
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._progress import now
from torchsparsekv_benchmarks.speed import _common
from torchsparsekv_benchmarks.speed._layers import Layers
from torchsparsekv_benchmarks.speed._synthetic import Topics

CALLS = 24  # inputs of a replay: several times the L2 even where one call's are small


@dataclass(frozen=True)
class Options:
    contexts: tuple[int, ...] = (131072, 524288)
    prompts: tuple[int, ...] = (32768, 65536)
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    budget: int = 1024
    layers: int = 32


class Bench(Layers):
    """`CALLS` layers after a prompt, clustered as far as their kernels can tell: units of 16 rows, random centroids."""

    def __init__(self, o: Options, context: int, device):
        self.o, self.context, self.device = o, context, device
        m = LouisKV(budget=o.budget)
        g = Geometry(1, o.kv_heads, o.head_dim, context + 64, torch.bfloat16, o.q_heads // o.kv_heads)
        super().__init__(m, g, o.q_heads, CALLS, device)
        self.lengths.advance(context)
        self.units = int(self.lengths.view.ring_begin[0] - m.sink) // m.per_cluster
        for s, q in zip(self.states, self.q):
            first = s.units.first
            s.units.centroid.normal_()
            first.copy_((torch.arange(first.shape[2], device=device) * m.per_cluster + m.sink).expand_as(first))
            s.trigger.previous.copy_(q[:, None, :, 0])
        self.off()

    def off(self) -> None:
        """As before a step without a boundary: the query is that of the step before."""
        for s in self.states:
            s.trigger.seen.copy_(s.lengths.length[:, None] - 1)
            self.enter(s, self.units)

    def at(self) -> None:
        """As before a boundary at which two segments are whole."""
        self.off()
        for s in self.states:
            s.trigger.seen.zero_()
            s.segments.cuts[..., :: self.method.per_cluster] = 1
            self.enter(s, self.units - 2)

    def enter(self, s: LayerState, units: int) -> None:
        s.units.unit_count.fill_(units)
        s.segments.frontier.fill_(self.method.sink + units * self.method.per_cluster)

    def row(self, what: str, f, nbytes: int = 0, refresh=lambda: None) -> dict:
        us = self.time(f, refresh)
        out = {"context": self.context, "kernel": what, "us": us}
        return out | ({"GB_per_s": nbytes / us / 1e3} if nbytes else {})

    # ---- the stages: functions of the number of a call and its state

    def boundary(self, i: int, s: LayerState) -> None:
        find_boundary(self.q[i], s.store.ring, s.units, s.segments, s.trigger, s.stats, s.lengths, self.method.rule)

    def pick(self, now: torch.Tensor):
        return lambda i, s: pick_units(self.q[i], s.units, now, s.pick_done, self.o.budget, 0.09)

    def get(self, now: torch.Tensor, rows: list[torch.Tensor]):
        return lambda i, s: fetch(Selection(rows[i], now), s.store.pool, s.hot, s.stats)

    def attend(self, i: int, s: LayerState) -> torch.Tensor:
        selection = Selection(frontier=s.segments.frontier)
        return sparse_attention(self.q[i], s.store.ring, s.hot, s.lengths, selection, Attention(0.09))

    def write(self, i: int, s: LayerState) -> None:
        append(Token(self.k, self.k), s.store, s.stats, s.lengths)

    def rows(self) -> list[dict]:
        """In the order of a decode step; bytes are what the kernel must move at least."""
        o, key = self.o, self.o.kv_heads * self.o.head_dim * 2
        no, yes = (torch.full_like(self.states[0].trigger.retrieve_now, n) for n in (0, 1))
        picks = [self.pick(yes)(i, s) for i, s in enumerate(self.states)]
        new = [self.random_rows() for _ in picks]

        def draw():
            for x in new:
                x.copy_(self.random_rows())

        self.still()
        near = self.method.ring_plan.ring_rows + o.budget
        return [
            self.row("append", self.write),
            self.row("boundary: none", self.boundary, refresh=self.off),
            self.row("boundary, two segments enter", self.boundary, refresh=self.at),
            self.row("pick: not now", self.pick(no)),
            self.row("pick", self.pick(yes), self.units * key),
            self.row("fetch, all hits", self.get(yes, picks)),
            self.row("fetch: not now", self.get(no, picks)),
            self.row("attention", self.attend, near * 2 * key),
            self.row("fetch, nearly all misses", self.get(yes, new), o.budget * 2 * key, draw),
        ]

    def random_rows(self) -> torch.Tensor:
        """The rows of random units, as many as the budget holds."""
        size = self.method.per_cluster
        picks = [torch.randperm(self.units)[: self.o.budget // size].sort().values for _ in range(self.o.kv_heads)]
        rows = (torch.stack(picks)[..., None] * size + torch.arange(size)).flatten(1) + self.method.sink
        return rows[None].to(torch.int32).to(self.device)


def clustering(o: Options, tokens: int, device) -> dict:
    """K-means of one layer's prompt, of keys with topics."""
    m = LouisKV()
    g = Geometry(1, o.kv_heads, o.head_dim, tokens, torch.bfloat16)
    units = Units(*(torch.zeros(b.shape, dtype=b.dtype, device=device) for b in m.buffers(g)["units"]))
    lengths = RowLengths(m.ring_plan, 1, tokens, device)
    lengths.advance(tokens)
    k = Topics(o.kv_heads, o.head_dim, tokens // 1024).keys(1, 0, tokens, device, torch.bfloat16)
    kmeans = m.kmeans

    def call():
        cluster_keys(k, units, lengths.view, kmeans, True)

    us = _common.time_graph([call], units.unit_count.zero_)
    flops = 4 * tokens * (kmeans.stretch // kmeans.size) * o.kv_heads * o.head_dim * m.rounds
    row = {"context": tokens, "kernel": "k-means", "us": us, "TFLOP_per_s": flops / us / 1e6}
    return row | {"all_layers_ms": us * o.layers / 1e3}


def run(o: Options, out: Path | None = None) -> dict:
    device = _common.prepare(("louiskv",), o)
    now(f"k-means of prompts of {', '.join(map(str, o.prompts))} tokens")
    rows = [clustering(o, n, device) for n in o.prompts]
    for context in o.contexts:
        now(f"louiskv at {context} tokens")
        rows += Bench(o, context, device).rows()
        torch.cuda.empty_cache()
    return _results.finish("clusters", rows, dataclasses.asdict(o), out)
