"""Engine ops without an engine: requests come, grow, share prefixes and leave, and their blocks are reused.

Expected values come from the raw keys and values of every request, which the store never sees again.
"""
import importlib
import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch
from layer import Layer
from world import DEVICE

from torchsparsekv import use_kernels
from torchsparsekv.engines._blocks import BlockStore
from torchsparsekv.engines._options import read_options
from torchsparsekv.method import all_methods
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.ops.store.views import Attention, BlockTable
from torchsparsekv_benchmarks.speed._replay import Replay, replay_in_engine
from torchsparsekv_benchmarks.speed.serve import fetched

HEADS, GROUP, DIM, BLOCK = 2, 2, 16, 4
PLACES, BLOCKS, MOST = 24, 60, 6  # blocks of a request, of the engine, and requests at a time
SINK, WINDOW = 4, 6
ATTENTION = Attention(DIM**-0.5)


@dataclass(eq=False)
class Request:
    keys: torch.Tensor  # [heads, tokens, dim], of all that it will ever hold
    values: torch.Tensor
    ids: list[int] = field(default_factory=list)
    length: int = 0


class Engine:
    """Gives blocks out and takes them back, in no order, and calls the store as an engine does."""

    def __init__(
        self, kv: str, method: str = "quest", budget: int = 8, seed: int = 0, most: int = MOST, room: int = 0,
        **hyper: object,
    ):
        exact = {} if method == "pariskv" else {"digest": "float32"}
        hyper = dict(budget=budget, sink=SINK, window=WINDOW) | exact | hyper
        options = read_options({"method": method, "kv": kv, **hyper}, BLOCK)
        self.store = BlockStore(options, HEADS, DIM, torch.float32, DEVICE, requests=most, places=PLACES)
        if kv == "auto":
            self.store.reserve(room * self.store.host_bytes)
        self.random, self.free = random.Random(seed), list(range(1, BLOCKS))
        self.g = torch.Generator().manual_seed(seed)
        self.store.allocate(BLOCKS)
        self.store.bind(torch.zeros(BLOCKS, self.store.page_bytes, dtype=torch.uint8, device=DEVICE))
        self.requests: list[Request] = []

    def begin(self, like: Request | None = None, shared: int = 0) -> Request:
        """One that may have its first blocks in common with another: they are there already."""
        k, v = (torch.randn(HEADS, PLACES * BLOCK, DIM, generator=self.g) for _ in range(2))
        new = Request(k, v)
        if like is not None:
            tokens = shared * BLOCK
            new.keys[:, :tokens], new.values[:, :tokens] = like.keys[:, :tokens], like.values[:, :tokens]
            new.ids, new.length = like.ids[:shared], tokens
        self.requests.append(new)
        return new

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        held = {x for r in self.requests for x in r.ids}
        self.free += [x for x in request.ids if x not in held]

    def _room(self, request: Request, tokens: int) -> list[int]:
        """Rows of the pool for its next tokens."""
        while len(request.ids) * BLOCK < request.length + tokens:
            request.ids.append(self.free.pop(self.random.randrange(len(self.free))))
        at = range(request.length, request.length + tokens)
        return [request.ids[p // BLOCK] * BLOCK + p % BLOCK for p in at]

    def _write(self, those: list[tuple[Request, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """New tokens of several requests, one after another, padded as batches of an engine are."""
        to = [row for r, n in those for row in self._room(r, n)] + [-1]
        k, v = (
            torch.cat([getattr(r, name)[:, r.length : r.length + n] for r, n in those], 1)
            for name in ("keys", "values")
        )
        k, v = (torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, 0, 0, 1)).to(DEVICE) for x in (k, v))
        self.store.write(k, v, torch.tensor(to, device=DEVICE))
        for r, n in those:
            r.length += n
        return k[:-1], v[:-1]

    def prompt(self, request: Request, tokens: int) -> None:
        """A chunk, which attends to everything."""
        past = request.length
        k, v = self._write([(request, tokens)])
        q = torch.randn(tokens, HEADS * GROUP, DIM, generator=self.g)
        table = torch.tensor(request.ids, dtype=torch.int32, device=DEVICE)
        got = self.store.prompt(q.to(DEVICE), k, v, table, past, ATTENTION).cpu()
        for i in range(tokens):
            seen = torch.ones(HEADS, past + i + 1, dtype=torch.bool)
            torch.testing.assert_close(got[i], attend(q[i], request, seen), rtol=1e-4, atol=1e-5)

    def tables(self, those: list[Request]) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.randint(0, BLOCKS, (len(those) + 1, PLACES), generator=self.g, dtype=torch.int32)
        for row, r in zip(table, those):
            row[: len(r.ids)] = torch.tensor(r.ids, dtype=torch.int32)
        return torch.tensor([r.length for r in those] + [0], dtype=torch.int32).to(DEVICE), table.to(DEVICE)

    def decode(self, those: list[Request], steered: bool = False) -> torch.Tensor:
        """A step of these, in this order, and of a row that pads the batch. Steered: that row has blocks too, and its
        result is not checked."""
        self._write([(r, 1) for r in those])
        q = torch.randn(len(those) + 1, HEADS * GROUP, DIM, generator=self.g)
        length, table = self.tables(those)
        out = torch.empty_like(q, device=DEVICE)
        self.store.decode(q.to(DEVICE), self.store.lengths(length), table, ATTENTION, out)
        got = out.cpu()
        for x, r, out in zip(q, those, got):
            want = attention_of(x, r, self.store.method)
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        assert steered or torch.equal(got[-1], torch.zeros_like(got[-1]))
        return got


def attend(q: torch.Tensor, r: Request, seen: torch.Tensor) -> torch.Tensor:
    """By definition; `seen` is [heads, tokens]."""
    n = seen.shape[1]
    k, v, live = (x.repeat_interleave(GROUP, 0) for x in (r.keys[:, :n], r.values[:, :n], seen))
    z = (k @ q[..., None])[..., 0] * ATTENTION.scale
    return (z.masked_fill(~live, -torch.inf).softmax(-1)[:, None] @ v)[:, 0]


def attention_of(q: torch.Tensor, r: Request, method) -> torch.Tensor:
    """Of a step, from raw keys and values."""
    seen = seen_by(q, r, method)
    return attend_with_rest(q, r, seen, method) if method.rest else attend(q, r, seen)


def attend_with_rest(q: torch.Tensor, r: Request, seen: torch.Tensor, method) -> torch.Tensor:
    """Of every block between sinks and window, the tokens that are not seen count as that many copies of their mean."""
    interval, out = method.ring_plan.interval, []
    end = SINK + max(0, r.length - SINK - WINDOW) // interval * interval
    for h in range(HEADS):
        k, v = r.keys[h, : r.length], r.values[h, : r.length]
        keys, values = [*k[seen[h]]], [*v[seen[h]]]
        for first in range(SINK, end, BLOCK):
            unseen = first + (~seen[h, first : first + BLOCK]).nonzero()[:, 0]
            keys += [k[unseen].mean(0)] * len(unseen)
            values += [v[unseen].mean(0)] * len(unseen)
        z = q[h * GROUP : (h + 1) * GROUP] @ torch.stack(keys).T * ATTENTION.scale
        out.append(z.softmax(-1) @ torch.stack(values))
    return torch.cat(out)


def seen_by(q: torch.Tensor, r: Request, method) -> torch.Tensor:
    """Sinks, window, and of the full blocks between them those with the largest bounds, as the papers say. The bound is
    that of the query heads of a kv head, or of their mean query."""
    n, seen = r.length, torch.zeros(HEADS, r.length, dtype=torch.bool)
    if method.name == "pariskv":
        return _seen_by_patch(q, r, method)
    first, last = SINK // BLOCK, SINK // BLOCK + max(0, n - SINK - WINDOW) // BLOCK
    seen[:, :SINK] = seen[:, last * BLOCK :] = True
    for h in range(HEADS):
        scores = []
        for block in range(first, last):
            keys, x = r.keys[h, block * BLOCK : (block + 1) * BLOCK], q[h * GROUP : (h + 1) * GROUP]
            low, high = keys.amin(0), keys.amax(0)
            if method.group == "mean":
                x = x.mean(0, keepdim=True)
            if method.name == "pagemean":
                score = (x @ keys.mean(0)).amax()
            elif method.name == "quest":
                score = torch.maximum(x * low, x * high).sum(-1).amax()
            else:
                middle = (low + high) / 2
                score = (x @ middle + x.abs() @ (keys - middle).abs().mean(0)).amax()
            scores.append((float(score), block))
        for _, block in sorted(scores, reverse=True)[: method.budget // BLOCK]:
            seen[h, block * BLOCK : (block + 1) * BLOCK] = True
    return seen


def _seen_by_patch(q: torch.Tensor, r: Request, method) -> torch.Tensor:
    """Sinks, ring and selection of a cache of its own, with the same keys, by the ops of patch()."""
    layer = Layer(method, heads=HEADS, group=GROUP, dim=DIM, rows=PLACES * BLOCK)
    k, v = (x[None, :, : r.length] for x in (r.keys, r.values))
    layer.feed(torch.zeros(1, HEADS * GROUP, r.length, DIM), k, v)
    begin = int(layer.state.lengths.ring_begin)
    seen = torch.zeros(HEADS, r.length, dtype=torch.bool)
    seen[:, :SINK] = seen[:, begin:] = True
    for h, ids in enumerate(layer.choose(q[None, :, None])[0].tolist()):
        seen[h, [i for i in ids if i >= 0]] = True
    return seen


PARIS = {  # in place of what it has for long rows: few candidates, few tokens a time
    "interval": dict(update_interval=5, full_threshold=0),
    "short rows": dict(full_threshold=40),
    "mean": dict(group="mean", m=4, full_threshold=0, beta=0.3, rho=0.8),
    "rest": dict(update_interval=8, full_threshold=0, estimate_rest=True),
}
TESTED = [
    *((name, {}) for name in ("quest", "arkvale", "pagemean")), ("quest", dict(estimate_rest=True)),
    ("pagemean", dict(estimate_rest=True)), *(("pariskv", hyper) for hyper in PARIS.values()),
]  # fmt: skip


def test_blocks_stay_on_the_device_until_it_is_full():
    """With room for all that are in use, a step brings only the block that its new token begins."""
    e = Engine("auto", room=BLOCKS - 1)
    assert e.store.slots == BLOCKS - 1
    a, b = e.begin(), e.begin()
    e.prompt(a, 30)
    e.prompt(b, 21)
    for step in range(12):
        begun = sum(r.length % BLOCK == 0 for r in (a, b))
        assert fetched([e.store], lambda: e.decode([a, b])) == begun, step


def test_blocks_that_no_step_selects_leave_a_full_device_first():
    """One request decodes, one waits. A third begins: the one that decodes still misses nothing, the other does."""
    e = Engine("auto", most=2, room=44, budget=BLOCK * 8)
    assert e.store.slots == 44
    active, waiting = e.begin(), e.begin()
    e.prompt(active, BLOCK * 10)
    e.prompt(waiting, BLOCK * 20)
    for _ in range(2):
        e.decode([active])  # of its blocks every one
    e.prompt(e.begin(), BLOCK * PLACES)
    there = e.store.hot.slot_of[0].cpu() >= 0
    held = [there[:, r.ids].float().mean().item() for r in (active, waiting)]
    assert held[0] == 1
    assert held[1] <= 0.5
    e.decode([waiting, active])  # fetched again, and equal to brute force


def test_hot_buffer_is_reserved_before_the_tables():
    with pytest.raises(RuntimeError, match='kv="auto" needs a hot buffer'):
        BlockStore(
            read_options({"method": "quest", "kv": "auto"}, 16), HEADS, DIM, torch.float32, DEVICE, requests=1, places=4
        ).allocate(9)


@pytest.mark.parametrize(
    ("method", "hyper"), TESTED, ids=["quest", "arkvale", "pagemean", "quest rest", "pagemean rest", *PARIS]
)
@pytest.mark.parametrize("kv", ["device", "host", "auto"])
def test_random_requests_equal_brute_force(kv, method, hyper):
    """Every step of every request: rows of the batch change, beginnings are shared, blocks are given to others."""
    e, r = Engine(kv, method, **hyper), random.Random(0)
    given = 0
    for _ in range(40):
        if len(e.requests) < MOST - 1 and len(e.free) > 2 * 8:
            old = r.choice(e.requests) if e.requests and r.random() < 0.5 else None
            new = e.begin(old, r.randrange(old.length // BLOCK + 1) if old else 0)
            for _ in range(r.randint(1, 2)):
                e.prompt(new, r.randint(1, 15))
        r.shuffle(e.requests)
        e.decode(e.requests[: r.randint(1, len(e.requests))])
        if r.random() < 0.3 or len(e.free) < 8 or any(x.length > PLACES * BLOCK - 40 for x in e.requests):
            gone = max(e.requests, key=lambda x: x.length)
            given += len(gone.ids)
            e.end(gone)
    assert given > BLOCKS  # so ids were given again


@pytest.mark.parametrize(
    ("kv", "method", "hyper"),
    [
        ("device", "pariskv", {}), ("host", "quest", {}), ("device", "pariskv", PARIS["rest"]),
        ("host", "pagemean", dict(estimate_rest=True)),
    ],
)
def test_kernels_equal_references_over_many_requests(kv, method, hyper):
    """As on a GPU, where nothing else runs; here they are interpreted."""
    with use_kernels("triton"):
        e = Engine(kv, method, **hyper)
        a = e.begin()
        e.prompt(a, 30)
        b = e.begin(a, 5)
        e.prompt(b, 6)
        for those in ([a, b], [b], [b, a]):
            e.decode(those)


@pytest.mark.parametrize("method", ["quest", "pariskv"])
@pytest.mark.parametrize("kv", ["device", "host"])
@pytest.mark.parametrize("rest", [{}, dict(estimate_rest=True)])
def test_full_budget_is_dense(kv, method, rest):
    e = Engine(kv, method, budget=PLACES * BLOCK, **rest, **(dict(update_interval=4) if method == "pariskv" else {}))
    a, b = e.begin(), e.begin()
    e.prompt(a, 50)
    e.prompt(b, 13)
    for _ in range(9):
        assert seen_by(torch.ones(HEADS * GROUP, DIM), a, e.store.method).all()
        e.decode([b, a])


@pytest.mark.parametrize(("method", "rest"), [("quest", False), ("pariskv", False), ("pagemean", True)])
def test_reused_block_keeps_nothing_of_its_last_request(method, rest):
    """The one before had a key that every query likes; the one after has not, but something else elsewhere."""
    e = Engine("host", method, budget=BLOCK, estimate_rest=rest)
    loud = e.begin()
    loud.keys *= 50
    e.prompt(loud, 40)
    e.decode([loud])
    used = loud.ids[:]
    e.end(loud)
    e.free = used[:]  # nothing else is free
    quiet = e.begin()
    e.prompt(quiet, 30)
    for _ in range(10):
        e.decode([quiet])
    assert set(quiet.ids) <= set(used)


@pytest.mark.parametrize("method", ["quest", "pariskv"])
def test_shared_prefix_is_indexed_once(method):
    e = Engine("device", method)
    a = e.begin()
    e.prompt(a, 32)
    view, rows = (e.store.layer.digests[:2], 1) if method == "quest" else (e.store.layer.codes[:3], BLOCK)
    ids = [i * rows + j for i in a.ids for j in range(rows)]
    before = [t[:, :, ids].clone() for t in view]
    b = e.begin(a, 8)
    e.decode([b])
    for t, was in zip(view, before):
        assert was.float().abs().sum() > 0
        assert torch.equal(t[:, :, ids].float(), was.float())
    assert b.ids[:8] == a.ids


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_bias_of_a_channel_changes_no_choice_of_an_engine(kernels, monkeypatch):
    """Digests in fp8 of all requests count from one origin, which the first block of all decides."""
    monkeypatch.setattr(importlib.import_module("torchsparsekv.ops.engine.filled_bounds"), "SCANNED", 4)
    best = []
    with use_kernels(kernels):
        for digest in ("float32", "float8"):
            e, origins = Engine("device", digest=digest), []
            for _ in range(2):
                r = e.begin()
                r.keys[..., 3] += 600
                e._write([(r, 10)])
                e._write([(r, 70)])
                origins.append(e.store.layer.digests.origin.clone())
            assert torch.equal(*origins)
            first = e.requests[0].keys[:, :BLOCK]
            assert torch.equal(origins[0][0].cpu(), (first.amin(1) + first.amax(1)) / 2)
            length, ids = e.tables(e.requests)
            its, table = e.store.lengths(length), BlockTable(ids, BLOCK)
            q = torch.randn(3, HEADS * GROUP, 1, DIM, generator=torch.Generator().manual_seed(5)).to(DEVICE)
            scores, _ = bound_scores(q, e.store.layer.digests, its, table=table)
            best.append(scores[:2].topk(5).indices.flatten(0, 1).tolist())
    kept = [len({*a} & {*b}) for a, b in zip(*best)]
    assert sum(kept) >= 17, kept  # of 4 * 5


def test_shared_block_is_fetched_once():
    e = Engine("host")
    a = e.begin()
    e.prompt(a, 40)
    b = e.begin(a, 10)
    e.decode([a, b])
    held = e.store.hot.block_of[0]
    for h in range(HEADS):
        of_head = [x for x in held[h].tolist() if x >= 0]
        assert len(of_head) == len(set(of_head)) > 0


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_evicted_blocks_are_fetched_again(kernels):
    """Two requests in turn, with room for fewer blocks than they have: most slots change hands, some of them often."""
    with use_kernels(kernels):
        e = Engine("host", most=2)
        those = e.begin(), e.begin()
        for r in those:
            e.prompt(r, 60)
        brought = sum(fetched([e.store], lambda r=r: e.decode([r])) for r in those * 10)
    assert brought > 2 * e.store.slots  # per head


def test_fetched_blocks_of_a_step_are_counted():
    """Per kv head: the first step brings all that there is, and the next has it; what is on the device brings none."""
    e, other = Engine("host", budget=PLACES * BLOCK), Engine("device")
    a = e.begin()
    e.prompt(a, 40)
    assert fetched([e.store, other.store], lambda: e.decode([a])) == 11
    assert fetched([e.store], lambda: e.decode([a])) == 0
    assert fetched([other.store], lambda: None) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(host_gib=2), 'with kv="host" or kv="auto", got 2 and kv="device"'),
        (dict(kv="host", host_gib=0), "positive number of GiB"),
        (dict(kv="host", host_gib="8"), "got '8'"),
        (dict(kv="disk"), "kv must be one of device, host, auto, got 'disk'"),
        (dict(kv="host", device_gib=2), 'device_gib is a positive number of GiB, with kv="auto", got 2'),
        (dict(kv="auto", device_gib=-1), "got -1"),
        (dict(prefetch_async=0.8), "an engine has no prefetch_async, got 0.8"),
        (dict(estimate_rest=8), "the groups of estimate_rest are its blocks of 4 tokens, got 8: give true, or"),
        (dict(method="pariskv", update_interval=6, estimate_rest=True), "divide sink 64 and the interval 6 at which"),
        (dict(method="quest", sink=4, window=4, estimate_rest=8), "the groups of estimate_rest are its blocks of 4"),
        (dict(method="arkvale", estimate_rest=3), "a power of two from 2 on, got 3"),
        (dict(hot_budgets=6), "an engine has no hot_budgets: max_num_seqs and device_gib decide, got 6"),
        (dict(method="arkvale", group="layer"), "cannot run in an engine: it selects for all heads of a layer"),
        (dict(method="dense"), "method must be one of arkvale, pagemean, pariskv, quest, got 'dense'"),
        (dict(block_size=8), "block_size is that of the engine, 4, got 8"),
    ],
)
def test_impossible_options_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        read_options({"method": "quest", **given}, BLOCK)


@pytest.mark.parametrize(
    ("given", "block", "rest"),
    [
        ({}, 64, 64), ({}, 32, 32), ({}, 16, False), ({}, 128, False), ({}, 1, False), (dict(sink=128), 128, 128),
        (dict(estimate_rest="auto"), 32, 32), (dict(estimate_rest=True), 4, 4), (dict(estimate_rest=4), 4, 4),
        (dict(estimate_rest=False), 32, False), (dict(update_interval=48), 32, False), (dict(sink=16), 32, False),
        (dict(method="quest"), 32, False), (dict(method="quest", estimate_rest=True), 32, 32),
        (dict(method="pagemean"), 32, 32), (dict(method="arkvale"), 32, False),
    ],
)
def test_groups_of_the_rest_are_the_blocks_of_the_engine(given, block, rest):
    """By default for the methods that gain most, if blocks are as large as the groups of patch(), and tokens leave the
    window in whole blocks."""
    assert read_options({"method": "pariskv", **given}, block).method.rest is rest


SERVES = {"arkvale", "pagemean", "pariskv", "quest"}
WHY = {
    "icecache": "stores the tokens of a request in the order of its tree",
    "louiskv": "stores the tokens of a prompt in the order of their clusters",
    "prkv": "moves the static set of each request within the pool",
    "snapkv": "selects by the latest queries of each request",
}


@pytest.mark.parametrize("name", [name for name in all_methods() if name not in SERVES])
def test_method_whose_index_requests_cannot_share_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=f"arkvale, pagemean, pariskv, quest, got '{name}': it {WHY.get(name, '.+')}"):
        read_options({"method": name}, BLOCK)


@pytest.mark.parametrize("method", ["quest", "pariskv"])
def test_engine_with_blocks_of_no_power_of_two_is_refused(method):
    with pytest.raises(ValueError, match="must be a power of two, got 48"):
        read_options({"method": method}, 48)


@pytest.mark.parametrize("placed", [dict(block_size=16), {}])
def test_single_tokens_have_no_block_size(placed):
    """Of the engine they take any."""
    if placed:
        with pytest.raises(TypeError, match="'pariskv' has no hyper-parameter block_size"):
            read_options({"method": "pariskv", **placed}, BLOCK)
    else:
        assert read_options({"method": "pariskv"}, BLOCK).block_size == BLOCK


def test_allocated_memory_equals_the_plan():
    store = Engine("host").store
    assert store.hot.rows.shape[2] == MOST * (1 + 3 + 2 * 2)  # of each request its sink, its window, twice its budget
    assert store.host_bytes == HEADS * BLOCK * 2 * DIM * 4
    assert store.page_bytes == HEADS * 2 * DIM * 4  # the digest, in fp32 here: keys and values are elsewhere
    assert Engine("device").store.page_bytes == store.page_bytes + store.host_bytes
    codes = Engine("host", "pariskv", update_interval=5).store
    assert codes.hot.rows.shape[2:4] == (MOST * (4 + 10 + 2 * 96), 1)  # single tokens, of rows of 96
    of_block = HEADS * BLOCK * (2 + 8 + 2 * 2) + 4  # ids, codes, weights; how often it was begun
    assert codes.page_bytes == of_block
    odd = Engine("device", "pariskv").store._on_page(7)
    before = itertools.accumulate(b.nbytes for b in odd.values())
    assert all(at % 16 == 0 for at, name in zip(before, list(odd)[1:]))
    counts = MOST * HEADS * 2 * (256 + 3)  # of ids, and how far they go
    assert sum(t.numel() for name, t in codes._of_all.items() if name.startswith("counted")) == counts


@pytest.mark.parametrize("method", ["quest", "pariskv"])
def test_other_memory_begins_with_an_empty_index(method):
    """An engine may measure with a small cache, and then give the store another one."""
    e = Engine("device", method)
    r = e.begin()
    e.prompt(r, 40)
    e.decode([r])
    old = {name: t.clone() for name, t in e.store._of_all.items()}
    assert any(bool((t > 0).any()) for t in old.values())
    e.store.bind(torch.zeros(BLOCKS, e.store.page_bytes, dtype=torch.uint8, device=DEVICE))
    for name, t in e.store._of_all.items():
        assert bool(t.isnan().all() if t.dtype.is_floating_point else (t == 0).all()), name


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "rest"), [("quest", False), ("pariskv", False), ("pagemean", True)])
@pytest.mark.parametrize("kv", ["device", "host"])
def test_step_replays_in_a_cuda_graph(kv, method, rest):
    """Replayed with other lengths, tables and tokens than it was captured with."""
    e = Engine(kv, method, estimate_rest=rest)
    those = [e.begin() for _ in range(3)]
    for r, n in zip(those, (40, 9, 21)):
        e.prompt(r, n)
    e.decode(those)  # compiles
    n = len(those) + 1
    q, k = torch.zeros(n, HEADS * GROUP, DIM, device=DEVICE), torch.zeros(n, HEADS, DIM, device=DEVICE)
    v, to = torch.zeros_like(k), torch.full((n,), -1, device=DEVICE)
    length, table = (x.clone() for x in e.tables(those))
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        e.store.write(k, v, to)
        e.store.decode(q, e.store.lengths(length), table, ATTENTION, out)
    for step in range(14):
        r = random.Random(step)
        r.shuffle(those)
        rows = [row for x in those for row in e._room(x, 1)]
        k[:-1] = torch.stack([x.keys[:, x.length] for x in those]).to(DEVICE)
        v[:-1] = torch.stack([x.values[:, x.length] for x in those]).to(DEVICE)
        to[:-1] = torch.tensor(rows)
        for x in those:
            x.length += 1
        asked = torch.randn(q.shape, generator=e.g)
        q.copy_(asked)
        for t, new in zip((length, table), e.tables(those)):
            t.copy_(new)
        graph.replay()
        for x, request, got in zip(asked, those, out.cpu()):
            want = attention_of(x, request, e.store.method)
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kv", ["device", "host"])
def test_layers_of_an_engine_attend_to_what_a_trace_has(kv, monkeypatch):
    """Two layers take the heads of a trace in turn, rows begin at different steps; afterwards they choose again."""
    layers, choosing = [Engine(kv, seed=0), Engine(kv, seed=1)], seen_by
    for layer in layers:
        for tokens in (55, 60):
            layer.prompt(layer.begin(), tokens)
    heads = ([[1, 5], [2, 7], [3, 8]], [[9, 4], [6, 2], [1, 3]], [[7, 8], [4, 5], [6, 9]], [[2, 3], [8, 1], [5, 4]])
    units = torch.tensor(heads, dtype=torch.int32)  # [heads, steps, selected]
    replay = Replay(units, layers=2, rows=3, heads=HEADS, device=DEVICE)

    def replayed(q, r, method):
        i = next(i for i, layer in enumerate(layers) if r in layer.requests)
        row, begin = layers[i].requests.index(r), SINK + (r.length - SINK - WINDOW) // BLOCK * BLOCK
        seen = torch.zeros(HEADS, r.length, dtype=torch.bool)
        seen[:, :SINK] = seen[:, begin:] = True
        for h in range(HEADS) if replay.done else ():
            for unit in units[i * HEADS + h, (replay.done - 1 + row) % 3].tolist():
                seen[h, unit * BLOCK : (unit + 1) * BLOCK] = True
        return seen

    for layer in layers:
        layer.decode(layer.requests)
    with replay_in_engine(layers[0].store.method, replay):
        monkeypatch.setitem(globals(), "seen_by", replayed)
        for step in range(5):
            if step:
                replay()  # before the first step nothing is selected
            for layer in layers:
                layer.decode(layer.requests, steered=True)
        other = Engine(kv, budget=12)
        other.prompt(other.begin(), 60)
        with pytest.raises(ValueError, match="the trace has 2 blocks a step, quest selects 3 here"):
            other.decode(other.requests)
    monkeypatch.setitem(globals(), "seen_by", choosing)
    for layer in layers:
        layer.decode(layer.requests)
