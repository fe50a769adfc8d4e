"""Time of each kernel of a decode step at a real shape, in a CUDA graph, beside kernels of torch and the GPU's limits.

Each call in the replayed CUDA graph has its own inputs, so that they are not in the caches of the GPU.
"""
import dataclasses
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchsparsekv import host
from torchsparsekv.method import Method, make_method
from torchsparsekv.ops.attend.dense_attention import dense_attention
from torchsparsekv.ops.attend.sparse_attention import sparse_attention
from torchsparsekv.ops.gather.fetch import fetch
from torchsparsekv.ops.icecache.best_pages import best_pages
from torchsparsekv.ops.icecache.page_peaks import page_peaks
from torchsparsekv.ops.icecache.visit_nodes import visit_nodes
from torchsparsekv.ops.pariskv.centroid_votes import centroid_votes
from torchsparsekv.ops.pariskv.rank_by_votes import rank_by_votes
from torchsparsekv.ops.pariskv.rerank import rerank
from torchsparsekv.ops.prkv.update_static_set import update_static_set
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.ops.store.append import append
from torchsparsekv.ops.store.rows import stored_width
from torchsparsekv.ops.store.views import Attention, HotBuffer, Leaving, Lengths, Scored, Selection, Token
from torchsparsekv.patches._install import check_pool_dtype
from torchsparsekv.state import Geometry, LayerState
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._options import PoolChoice, check_measured, option, parse, pool_told
from torchsparsekv_benchmarks._progress import now
from torchsparsekv_benchmarks.speed import _common, _flashinfer
from torchsparsekv_benchmarks.speed._layers import Layers
from torchsparsekv_benchmarks.speed._synthetic import Topics

READ, LINK = "read in HBM", "read of pinned host memory"
PINNED_GIB = 16  # to be pinned for their time, a quarter of the free host memory at most; torch is slow and gets less
TORCH_GIB = 4
LOCALITY = 0.9  # of queries that ask for topics
TENTH = 10  # one block in so many is a miss
CALLS = 48  # inputs of a replay: several times the L2 even where one call's are small


@dataclass(frozen=True)
class Options:
    contexts: tuple[int, ...] = (131072, 524288)
    methods: tuple[str, ...] = ("quest", "arkvale", "pariskv")
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    budget: int = 1024
    tokens: int = option(100, "The budget of methods that retrieve single tokens.")
    hyper: tuple[str, ...] = ()
    pool_dtype: PoolChoice = "auto"

    def method(self, name: str) -> Method:
        budget = self.tokens if name == "pariskv" else self.budget
        return make_method(name, budget=budget, **parse(self.hyper).get(name, {}))


class Bench(Layers):
    """One method at one context."""

    def __init__(self, name: str, o: Options, context: int, device):
        self.o, self.device, self.context = o, device, context
        pool, group = check_pool_dtype(pool_told(o.pool_dtype).get("pool_dtype")), o.q_heads // o.kv_heads
        geometry = Geometry(1, o.kv_heads, o.head_dim, context, torch.bfloat16, group, pool_dtype=pool)
        super().__init__(o.method(name), geometry, o.q_heads, CALLS, device)
        self.lengths.advance(context - 100)
        for s in self.states:
            STAGES[name].fill(s, self)

    def rows(self) -> list[dict]:
        """In the order of a decode step; bytes are what the kernel must move at least."""
        m, o, q, states = self.method, self.o, self.q, self.states
        n, token, scale = m.budget // m.block_size, o.kv_heads * o.head_dim * 4, Attention(o.head_dim**-0.5)
        chosen = [m.choose(s, q[i], scale).ids for i, s in enumerate(states)]
        new = [self.random_blocks(n, chosen[0].shape[-1]) for _ in states]
        pool = states[0].store.pool
        moved = m.budget * o.kv_heads * stored_width(pool) * pool.itemsize

        def draw():
            for x in new:
                x.copy_(self.random_blocks(n, x.shape[-1]))

        few, misses = [x.clone() for x in new], max(1, n // TENTH)

        def draw_few(misses=misses):
            for x, s in zip(few, states):
                x[..., :n] = held_and_new(s.hot, n, misses)

        def get(blocks):
            return lambda i, s: fetch(Selection(blocks[i]), s.store.pool, s.hot, s.stats)

        def attend(i, s):
            return sparse_attention(q[i], s.store.ring, s.hot, s.lengths, Selection(), scale)

        for i, s in enumerate(states):
            get(chosen)(i, s)
        for _ in range(2 * states[0].hot.block_of.shape[2] // n):  # until every slot holds a block
            draw_few(n)
            for i, s in enumerate(states):
                get(few)(i, s)
        draw_few()
        for i, s in enumerate(states):
            get(chosen)(i, s)
        self.still()
        return [
            self.row("append", lambda i, s: append(Token(self.k, self.k), s.store, s.stats, s.lengths)),
            *STAGES[m.name].select(self),
            self.row("select, all of it (beside)", lambda i, s: m.choose(s, q[i], scale)),
            self.row("fetch, all hits", get(chosen)),
            self.row("attention", attend, self.near * token),
            self.row("fetch, a tenth misses", get(few), moved * misses // n, draw_few),
            self.row("fetch, nearly all misses", get(new), moved, draw),
        ]

    def index_update(self, what: str = "nothing leaves") -> dict:
        step = lambda i, s: self.method.step(s, self.q[i], Leaving(self.k, s.store.pool))  # noqa: E731
        return self.row(f"index update ({what})", step)

    @property
    def near(self) -> int:
        """The tokens that a step attends to."""
        return self.method.ring_plan.ring_rows + self.method.budget

    def random_blocks(self, n: int, slots: int) -> torch.Tensor:
        """`n` blocks, the rest of the slots empty."""
        total = (self.context - self.method.ring_plan.ring_rows) // self.method.block_size
        picks = [torch.randperm(total)[:n].sort().values for _ in range(self.o.kv_heads)]
        picks = torch.nn.functional.pad(torch.stack(picks), (0, slots - n), value=-1)
        return picks[None].to(torch.int32).to(self.device)

    def row(self, what: str, f, nbytes: int = 0, refresh=lambda: None) -> dict:
        us = self.time(f, refresh)
        out = {"context": self.context, "method": self.method.name, "kernel": what, "us": us}
        return out | ({"GB_per_s": nbytes / us / 1e3} if nbytes else {})


def held_and_new(hot: HotBuffer, n: int, misses: int) -> torch.Tensor:
    """`n` blocks of each head, of which `misses` are not in the hot buffer, whatever its size is."""
    draw = torch.rand(hot.slot_of.shape, device=hot.slot_of.device)
    held = hot.slot_of >= 0
    new = draw.masked_fill(held, -1).topk(misses).indices
    return torch.cat([draw.masked_fill(~held, -1).topk(n - misses).indices, new], -1).sort(-1).values.int()


class PageStages:
    @staticmethod
    def fill(s: LayerState, b: Bench) -> None:
        for t in s.digests[:2]:
            t.view(torch.uint8).random_(1, 100) if t.dtype.itemsize == 1 else t.uniform_(0.1, 1)

    @staticmethod
    def select(b: Bench) -> list[dict]:
        n = b.method.budget // b.method.block_size
        score = lambda i, s: bound_scores(b.q[i], s.digests, s.lengths)  # noqa: E731
        scored = [score(i, s) for i, s in enumerate(b.states)]
        return [
            b.index_update(),
            b.row("scores", score, sum(t.nbytes for t in b.states[0].digests[:2])),
            b.row("top blocks", lambda i, s: top_blocks(scored[i], n)),
            b.row("torch.topk (beside)", lambda i, s: scored[i][0].topk(n)),
        ]


class ParisKVStages:
    @staticmethod
    def fill(s: LayerState, b: Bench) -> None:
        c = s.codes
        c.ids.random_(0, 256), c.codes.random_(0, 256), c.weights.uniform_(0.5, 1)
        names = c.ids[0, :, b.method.sink : int(s.lengths.ring_begin[0])].transpose(1, 2).long()
        c.counts[0].scatter_add_(2, names, torch.ones_like(names, dtype=torch.int32))

    @staticmethod
    def select(b: Bench) -> list[dict]:
        m = b.method
        capacity, dense = m.sizes(b.context)

        def vote(i, s):
            return centroid_votes(b.q[i], s.codes, s.lengths, m.ratios, m.group == "mean", m.seed)

        rotated, votes = zip(*(vote(i, s) for i, s in enumerate(b.states)))

        def stage_1(i, s):
            return rank_by_votes(votes[i], s.codes, s.lengths, m.ratios, m.budget, dense, capacity)

        candidates = [stage_1(i, s) for i, s in enumerate(b.states)]
        stage_2 = lambda i, s: rerank(rotated[i], s.codes, candidates[i])  # noqa: E731
        scored = [stage_2(i, s) for i, s in enumerate(b.states)]
        found, codes = int((candidates[0] >= 0).sum()), b.states[0].codes
        return [
            b.index_update(),
            b.row("votes", vote),
            b.row("rank_by_votes", stage_1, codes.ids.nbytes),
            b.row("rerank", stage_2, found * (b.o.head_dim // 2 + 2 * codes.weights.shape[-1])),
            b.row("top of the candidates", lambda i, s: top_blocks(scored[i], m.budget, candidates[i])),
            b.row("torch.topk (beside)", lambda i, s: scored[i][0].topk(m.budget)),
        ]


class PRKVStages(PageStages):
    """A step at which no token leaves and the static set stays: one launch finds out both."""

    @staticmethod
    def select(b: Bench) -> list[dict]:
        scale = Attention(b.o.head_dim**-0.5)

        def update(i, s):
            update_static_set(
                s.observed, s.static, s.store, b.method.coarse(s), s.hot, s.digests, s.lengths, scale
            )

        def pages(i, s):
            return b.method.best(s, *bound_scores(b.q[i], s.digests, s.lengths, s.static.count))

        def without(i, s):
            b.method.summarise(s, Leaving(b.k, s.store.pool))
            return pages(i, s)

        return [
            b.row("update of the static set (nothing due)", update),
            b.row("pages (beside)", pages),
            b.row("digests and pages, no static set (beside)", without),
        ]


class IceCacheStages:
    """Over the tree of tokens that belong to topics, and by queries that ask for one."""

    @staticmethod
    def fill(s: LayerState, b: Bench) -> None:
        o, many = b.o, b.context - 100
        topics = Topics(o.kv_heads, o.head_dim, max(2, b.context // o.budget), o.q_heads // o.kv_heads)
        b.q = list(topics.queries(CALLS, LOCALITY, b.device, torch.bfloat16)[:, None, :, None])
        keys = topics.keys(1, 0, many, b.device, torch.bfloat16)
        b.method.prompt(s, b.q[0], Leaving(keys, s.store.pool), join=True)

    @staticmethod
    def select(b: Bench) -> list[dict]:
        m = b.method
        visit = lambda i, s: visit_nodes(b.q[i], s.tree, m.view)  # noqa: E731
        visited = [visit(i, s) for i, s in enumerate(b.states)]
        rank = lambda i, s: page_peaks(b.q[i], visited[i], s.leaves, m.view.min_nodes)  # noqa: E731
        ranked = [rank(i, s) for i, s in enumerate(b.states)]
        rows = [
            b.index_update(),
            b.row("expanding nodes", visit, b.states[0].tree.code.nbytes + b.states[0].tree.scale.nbytes),
            b.row("ranking pages", rank),
            b.row("best pages by turns", lambda i, s: best_pages(Scored(*ranked[i]), s.selected_pages)),
        ]
        b.leaving()
        rows.append(b.index_update("a page leaves"))
        b.still()
        return rows


STAGES: dict[str, Any] = {
    "quest": PageStages, "arkvale": PageStages, "pariskv": ParisKVStages, "prkv": PRKVStages,
    "icecache": IceCacheStages,
}  # fmt: skip


def dense_rows(o: Options, context: int, device) -> list[dict]:
    """Attention over everything: ours, and what torch has for a plain contiguous cache."""
    pools = [
        torch.randn(1, o.kv_heads, context, 2, o.head_dim, device=device, dtype=torch.bfloat16) for _ in range(2)
    ]
    q = torch.randn(1, o.q_heads, 1, o.head_dim, device=device, dtype=torch.bfloat16)
    length = torch.tensor([context], dtype=torch.int32, device=device)
    lengths, plain = Lengths(length, length, length, length, 0, 1), Attention(0.09)
    kv = [(p[..., 0, :].contiguous(), p[..., 1, :].contiguous()) for p in pools]
    sdpa = [lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True) for k, v in kv]
    rows = []

    def add(method: str, kernel: str, calls) -> None:
        us = _common.time_graph(calls)
        speed = pools[0].nbytes / us / 1e3
        rows.append({"context": context, "method": method, "kernel": kernel, "us": us, "GB_per_s": speed})

    add("full", "dense attention", [lambda p=p: dense_attention(q, p, lengths, plain) for p in pools])
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            add("torch", f"sdpa {name} (beside)", sdpa)
    return rows + [{"context": context, **row} for row in flashinfer_rows(o, context, len(pools), device)]


def flashinfer_rows(o: Options, tokens: int, copies: int, device) -> list[dict]:
    """FlashInfer's attention over `tokens` tokens, by its two kernels; nothing where FlashInfer is not installed."""
    rows = []
    for name, tensor_cores in (("", False), (" on tensor cores", True)) if _flashinfer.installed() else ():
        calls = _flashinfer.paged_decode(o.q_heads, o.kv_heads, o.head_dim, tokens, device, tensor_cores, copies)
        us = _common.time_graph(calls)
        what = f"attention over {tokens} tokens{name} (beside)"
        speed = tokens * o.kv_heads * o.head_dim * 4 / us / 1e3
        row = {"method": "flashinfer", "version": _flashinfer.version(), "kernel": what, "us": us, "GB_per_s": speed}
        rows.append(row)
    return rows


def pinning(device) -> list[dict]:
    """How long it takes to pin host memory, by a clock on the wall. Nothing of it is left afterwards."""
    gib = max(1, min(PINNED_GIB, host.available() >> 32))
    less = min(TORCH_GIB, gib)
    ways = (
        ("torchsparsekv", f"pin host memory ({gib} GiB)", gib << 30, lambda n: host.pinned((n,), torch.uint8, device)),
        ("torch", f"torch.empty(pin_memory=True), {less} GiB (beside)", less << 30,
         lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=True)),
    )  # fmt: skip
    rows = []
    for method, kernel, nbytes, pin in ways:
        pin(1)  # what a first call takes is not of the memory
        us = statistics.median(time_pin(pin, nbytes) for _ in range(3))
        rows.append({"method": method, "kernel": kernel, "us": us, "GB_per_s": nbytes / us / 1e3})
    return rows


def time_pin(pin, nbytes: int) -> float:
    """Microseconds. What was pinned is let go of, by torch's cache too."""
    begin = time.perf_counter()
    held = pin(nbytes)
    us = (time.perf_counter() - begin) * 1e6
    del held
    torch._C._host_emptyCache()
    return us


def ceilings(device) -> list[dict]:
    a, b = (torch.zeros(1 << 30, dtype=torch.uint8, device=device) for _ in range(2))
    pinned = host.pinned((1 << 30,), torch.uint8, device)
    calls = {
        "copy in HBM, read + write": (lambda: torch.bitwise_not(a, out=b), 2),
        READ: (lambda: a.view(torch.float32).sum(), 1), LINK: (lambda: b.copy_(pinned), 1),
    }  # fmt: skip
    rows = []
    for kernel, (call, times) in calls.items():
        us = _common.time_graph([call])
        rows.append({"method": "torch", "kernel": kernel, "us": us, "GB_per_s": times * a.nbytes / us / 1e3})
    return rows


def against_ceilings(rows: list[dict]) -> None:
    """Which share of its ceiling a kernel reaches: of the link where it fetches, else of a plain read."""
    speed = {r["kernel"]: r["GB_per_s"] for r in rows if "context" not in r and "GB_per_s" in r}
    for r in rows:
        if "GB_per_s" in r and "context" in r:
            r["of_ceiling"] = r["GB_per_s"] / speed[LINK if r["kernel"].startswith("fetch") else READ]


def run(o: Options, out: Path | None = None) -> dict:
    unknown = [name for name in o.methods if name not in STAGES]
    if unknown:
        raise ValueError(f"no kernels to time for {', '.join(unknown)}; available: {', '.join(STAGES)}")
    check_measured(o.hyper, o.methods)
    device = _common.prepare(o.methods, o, o.method)
    rows = pinning(device) + ceilings(device)
    near = set()
    for context in o.contexts:
        for name in o.methods:
            now(f"{name} at {context} tokens")
            bench = Bench(name, o, context, device)
            rows += bench.rows()
            near.add(bench.near)
            del bench
        torch.cuda.empty_cache()  # from pieces of what the states had, a pool of 2 GiB was read 14 % slower
        rows += dense_rows(o, context, device)
        torch.cuda.empty_cache()
    for tokens in sorted(near):  # the same at every context
        rows += flashinfer_rows(o, tokens, CALLS, device)
    against_ceilings(rows)
    return _results.finish("kernels", rows, dataclasses.asdict(o), out)
