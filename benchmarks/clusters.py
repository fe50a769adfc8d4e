"""The kernels of LouisKV and ClusterKV at a real shape: off the boundary, at one, and k-means of a whole prompt.

Every call of a replay has inputs of its own, so that no cache carries over from one to the next.
"""
import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from torchsparsekv import host
from torchsparsekv.benchmarks import _common
from torchsparsekv.benchmarks.synthetic import Topics
from torchsparsekv.ops.attend.sparse_attention import sparse_attention
from torchsparsekv.ops.gather.refetch import refetch
from torchsparsekv.ops.index._kmeans_kernels import launch
from torchsparsekv.ops.index.append import append
from torchsparsekv.ops.index.find_boundary import find_boundary
from torchsparsekv.ops.select.pick_units import pick_units
from torchsparsekv.state import Clock, Geometry, LayerState
from torchsparsekv.zoo.louiskv import LouisKV

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


class Bench:
    """`CALLS` layers after a prompt, clustered as far as their kernels can tell: units of 16 rows, random centroids."""

    def __init__(self, o: Options, context: int, device):
        self.o, self.context, self.device = o, context, device
        self.method = m = LouisKV(budget=o.budget)
        g = Geometry(1, o.kv_heads, o.head_dim, context + 64, torch.bfloat16, o.q_heads // o.kv_heads)
        self.clock = Clock(m.timeline, 1, g.rows, device)
        buffers = m.buffers(g)
        self.pool = host.pinned(buffers["pool"].shape, torch.bfloat16, device)
        small = {name: b for name, b in buffers.items() if name != "pool"}
        self.states = [LayerState(small, self.clock, device, pool_on_host=False) for _ in range(CALLS)]
        self.clock.advance(context)
        shape = (1, 1, o.q_heads, o.head_dim)
        self.q = [torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(CALLS)]
        self.k = torch.randn(1, 1, o.kv_heads, o.head_dim, device=device, dtype=torch.bfloat16).transpose(1, 2)
        self.units = int(self.clock.retired[0] - m.sink) // m.per_cluster
        for s, q in zip(self.states, self.q):
            s.centroid.normal_()
            s.first.copy_((torch.arange(s.first.shape[2], device=device) * m.per_cluster + m.sink).expand_as(s.first))
            s.previous.copy_(q[:, None, :, 0])
        self.off()

    def off(self) -> None:
        """As before a step without a boundary: the query is that of the step before."""
        for s in self.states:
            s.seen.copy_(self.clock.length[:, None] - 1)
            self.enter(s, self.units)

    def at(self) -> None:
        """As before a boundary at which two segments are whole."""
        self.off()
        for s in self.states:
            s.seen.zero_()
            s.cuts[..., :: self.method.per_cluster] = 1
            self.enter(s, self.units - 2)

    def enter(self, s: LayerState, units: int) -> None:
        s.units.fill_(units)
        s.frontier.fill_(self.method.sink + units * self.method.per_cluster)

    def row(self, what: str, f, nbytes: int = 0, refresh=lambda: None) -> dict:
        us = _common.time_graph([partial(f, i, s) for i, s in enumerate(self.states)], refresh)
        out = {"context": self.context, "kernel": what, "us": us}
        return out | ({"GB_per_s": nbytes / us / 1e3} if nbytes else {})

    # ---- the stages: functions of the number of a call and its state

    def boundary(self, i: int, s: LayerState) -> None:
        c, m = self.clock, self.method
        find_boundary(
            self.q[i], s.ring, s.previous, s.seen, s.cuts, s.begun, s.frontier, s.units, s.first, s.centroid, s.wanted,
            s.retrievals, s.stats, c.length, c.retired, m.sink, *m.trigger, *m.segment,
        )  # fmt: skip

    def pick(self, wanted: torch.Tensor):
        budget = self.o.budget
        return lambda i, s: pick_units(self.q[i], s.centroid, s.first, s.units, wanted, s.picked, budget, 0.09)

    def get(self, wanted: torch.Tensor, rows: list[torch.Tensor]):
        tables = lambda s: (s.hot, s.table, s.resident, s.age, s.arrivals, s.stats, s.chosen)  # noqa: E731
        return lambda i, s: refetch(wanted, rows[i], self.pool, *tables(s))

    def attend(self, i: int, s: LayerState) -> torch.Tensor:
        sink, length = self.method.sink, self.clock.length
        return sparse_attention(self.q[i], s.ring, s.hot, s.chosen, length, s.frontier, None, sink, 0.09, 0.0)

    def write(self, i: int, s: LayerState) -> None:
        c, t = self.clock, self.method.timeline
        append(self.k, self.k, s.ring, self.pool, s.stats, c.length, c.leaving, c.leaving, t.sink, t.interval)

    def rows(self) -> list[dict]:
        """In the order of a decode step; bytes are what the kernel must move at least."""
        o, key = self.o, self.o.kv_heads * self.o.head_dim * 2
        no, yes = (torch.full_like(self.states[0].wanted, n) for n in (0, 1))
        picks = [self.pick(yes)(i, s) for i, s in enumerate(self.states)]
        new = [self.random_rows() for _ in picks]

        def draw():
            for x in new:
                x.copy_(self.random_rows())

        near = self.method.timeline.ring_rows + o.budget
        return [
            self.row("append", self.write),
            self.row("boundary: none", self.boundary, refresh=self.off),
            self.row("boundary, two segments enter", self.boundary, refresh=self.at),
            self.row("pick: not wanted", self.pick(no)),
            self.row("pick", self.pick(yes), self.units * key),
            self.row("refetch, all hits", self.get(yes, picks)),
            self.row("refetch: not wanted", self.get(no, picks)),
            self.row("attention", self.attend, near * 2 * key),
            self.row("refetch, nearly all misses", self.get(yes, new), o.budget * 2 * key, draw),
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
    b = m.buffers(g)
    new = lambda name: torch.zeros(b[name].shape, dtype=b[name].dtype, device=device)  # noqa: E731
    units, first, centroid = new("units"), new("first"), new("centroid")
    clock = Clock(m.timeline, 1, tokens, device)
    clock.advance(tokens)
    k = Topics(o.kv_heads, o.head_dim, tokens // 1024).keys(1, 0, tokens, device, torch.bfloat16)
    now = (clock.start, clock.length, clock.retired)

    def call():
        launch(k, units, first, centroid, *now, m.sink, m.per_cluster, m.stretch, m.rounds, m.seed)

    us = _common.time_graph([call], units.zero_)
    flops = 4 * tokens * (m.stretch // m.per_cluster) * o.kv_heads * o.head_dim * m.rounds
    row = {"context": tokens, "kernel": "k-means", "us": us, "TFLOP_per_s": flops / us / 1e6}
    return row | {"all_layers_ms": us * o.layers / 1e3}


def run(o: Options, out: Path | None = None) -> dict:
    device = _common.prepare(("louiskv",), o)
    rows = [clustering(o, n, device) for n in o.prompts]
    for context in o.contexts:
        rows += Bench(o, context, device).rows()
        torch.cuda.empty_cache()
    return _common.finish("clusters", rows, dataclasses.asdict(o), out)
