"""Each kernel of the decode step at a real shape, in a CUDA graph, beside what torch offers and the measured ceilings.

Every call of a replay has inputs of its own, so that no cache carries over from one to the next.
"""
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchsparsekv import host
from torchsparsekv.benchmarks import _common
from torchsparsekv.method import make_method
from torchsparsekv.ops.attend.dense_attention import dense_attention
from torchsparsekv.ops.attend.sparse_attention import sparse_attention
from torchsparsekv.ops.gather.fetch import fetch
from torchsparsekv.ops.index.append import append
from torchsparsekv.ops.index.block_bounds import block_bounds
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.state import Clock, Geometry, LayerState

CALLS = 48  # inputs of a replay: several times the L2 even where one call's are small


@dataclass(frozen=True)
class Options:
    contexts: tuple[int, ...] = (131072, 524288)
    methods: tuple[str, ...] = ("quest", "arkvale")
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    budget: int = 1024


class Bench:
    """States of one method at one context: `CALLS` of them where a kernel's input must be new to the caches."""

    def __init__(self, name: str, o: Options, context: int, device):
        self.o, self.device, self.context = o, device, context
        self.method = make_method(name, budget=o.budget)
        t = self.method.timeline
        g = Geometry(1, o.kv_heads, o.head_dim, context, torch.bfloat16)
        self.clock = Clock(t, 1, context, device)
        buffers = self.method.buffers(g)
        self.pool = host.pinned(buffers["pool"].shape, torch.bfloat16, device)
        small = {k: b for k, b in buffers.items() if k != "pool"}
        self.states = [LayerState(small, self.clock, device, pool_on_host=False) for _ in range(CALLS)]
        self.clock.advance(context - 100)
        for s in self.states:
            for t_ in (s.centre, s.spread):
                t_.view(torch.uint8).random_(1, 100) if t_.dtype.itemsize == 1 else t_.uniform_(0.1, 1)
        shape = (1, 1, o.q_heads, o.head_dim)
        self.q = [torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(CALLS)]
        self.k = torch.randn(1, 1, o.kv_heads, o.head_dim, device=device, dtype=torch.bfloat16).transpose(1, 2)

    def calls(self, f):
        return [lambda i=i, s=s: f(i, s) for i, s in enumerate(self.states)]

    def rows(self) -> list[dict]:
        """In the order of a decode step; bytes are what the kernel must move at least."""
        c, m, o, q, states = self.clock, self.method, self.o, self.q, self.states
        sink, interval, p, n = m.sink, m.timeline.interval, m.block_size, o.budget // m.block_size
        token = o.kv_heads * o.head_dim * 4  # bytes of K and V in bf16, all heads
        still = (c.length, c.leaving, c.leaving)  # nothing leaves the ring, as on most steps
        scores = [bound_scores(q[i], s.centre, s.spread, c.retired, sink, p) for i, s in enumerate(states)]
        same, new = top_blocks(scores[0], n), [self.random_blocks(n) for _ in states]

        def get(chosen, s):
            return fetch(chosen, self.pool, s.hot, s.table, s.resident, s.age, s.arrivals, s.stats)

        def draw():
            for x in new:
                x.copy_(self.random_blocks(n))

        def attend(i, s):
            return sparse_attention(q[i], s.ring, s.hot, places[i], c.length, c.retired, None, sink, 0.09, 0.0)

        def update(i, s):
            return block_bounds(self.k, self.pool, s.centre, s.spread, c.start, *still, interval, p)

        places = [get(same, s) for s in states]
        digests = states[0].centre.nbytes + states[0].spread.nbytes
        return [
            self.row("append", lambda i, s: append(self.k, self.k, s.ring, self.pool, s.stats, *still, sink, interval)),
            self.row("index update (nothing leaves)", update),
            self.row("scores", lambda i, s: bound_scores(q[i], s.centre, s.spread, c.retired, sink, p), digests),
            self.row("top blocks", lambda i, s: top_blocks(scores[i], n)),
            self.row("torch.topk (beside)", lambda i, s: scores[i].topk(n)),
            self.row("fetch, all hits", lambda i, s: get(same, s)),
            self.row("attention", attend, (m.timeline.ring_rows + o.budget) * token),
            self.row("fetch, nearly all misses", lambda i, s: get(new[i], s), n * p * token, draw),
        ]

    def random_blocks(self, n: int) -> torch.Tensor:
        total = self.context // self.method.block_size
        picks = [torch.randperm(total)[:n].sort().values for _ in range(self.o.kv_heads)]
        return torch.stack(picks)[None].to(torch.int32).to(self.device)

    def row(self, what: str, f, nbytes: int = 0, refresh=lambda: None) -> dict:
        us = _common.time_graph(self.calls(f), refresh)
        out = {"context": self.context, "method": self.method.name, "kernel": what, "us": us}
        return out | ({"GB_per_s": nbytes / us / 1e3} if nbytes else {})


def dense_rows(o: Options, context: int, device) -> list[dict]:
    """Attention over everything: ours, and what torch has for a plain contiguous cache."""
    pools = [
        torch.randn(1, o.kv_heads, context, 2, o.head_dim, device=device, dtype=torch.bfloat16) for _ in range(2)
    ]
    q = torch.randn(1, o.q_heads, 1, o.head_dim, device=device, dtype=torch.bfloat16)
    length = torch.tensor([context], dtype=torch.int32, device=device)
    kv = [(p[..., 0, :].contiguous(), p[..., 1, :].contiguous()) for p in pools]
    sdpa = [lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True) for k, v in kv]
    rows = []

    def add(method: str, kernel: str, calls) -> None:
        us = _common.time_graph(calls)
        speed = pools[0].nbytes / us / 1e3
        rows.append({"context": context, "method": method, "kernel": kernel, "us": us, "GB_per_s": speed})

    add("full", "dense attention", [lambda p=p: dense_attention(q, p, length, None, 0.09, 0.0) for p in pools])
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            add("torch", f"sdpa {name} (beside)", sdpa)
    return rows


def ceilings(device) -> list[dict]:
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(2))
    us = _common.time_graph([lambda: torch.bitwise_not(a, out=b)])
    rows = [{"method": "torch", "kernel": "copy in HBM, read + write", "us": us, "GB_per_s": 2 * a.nbytes / us / 1e3}]
    pinned = host.pinned((1 << 30,), torch.uint8, device)
    us = _common.time_graph([lambda: b.copy_(pinned)])
    rows.append({"method": "torch", "kernel": "read of pinned host memory", "us": us, "GB_per_s": a.nbytes / us / 1e3})
    return rows


def run(o: Options, out: Path | None = None) -> dict:
    device = _common.prepare(o.methods)
    rows = ceilings(device)
    for context in o.contexts:
        for name in o.methods:
            rows += Bench(name, o, context, device).rows()
        rows += dense_rows(o, context, device)
        torch.cuda.empty_cache()
    return _common.finish("kernels", rows, dataclasses.asdict(o), out)
