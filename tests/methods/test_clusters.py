"""LouisKV and ClusterKV on one layer: when they retrieve, how they group tokens and which units they choose."""
import math
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import on
from layer import Layer
from past import Past, pasts
from planted import LENGTH, PLANTED, finds
from world import DEVICE

from torchsparsekv.method import make_method
from torchsparsekv.ops._machinery.chain import use_kernels
from torchsparsekv.ops.clusters._segments import unit_capacity
from torchsparsekv.ops.clusters.pick_units import MOST_ROWS, pick_units, scores
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.store.rows import counted, keys_of, ring_positions
from torchsparsekv.state import Geometry

SMALL = dict(sink=8, window=6, cluster_size=4, stretch=16)
LOUIS = dict(SMALL, segment_min=2, segment_max=4)
PAPER = dict(SMALL, stretch=None, every=8, new_clusters=2, rounds=2)  # of ClusterKV
RUNS = dict(SMALL, run=3, rounds=2, cosine=False)


# ---------------------------------------------------------------- every token is somewhere, once


def check_partition(layer: Layer, past: Past) -> None:
    """Sinks and what follows the frontier are in the ring, the rest in units; a unit's centroid is its mean key."""
    s, sink, at = layer.state, layer.method.sink, layer.state.lengths
    ring_rows, units = s.store.ring.shape[2], s.units
    for b, first in enumerate((past.pad, 0)):
        n, begin = int(at.length[b]), int(at.ring_begin[b])
        kv = torch.stack([past.k[b, :, first : first + n], past.v[b, :, first : first + n]], 2)
        for h in range(past.heads):
            upto = s.segments.frontier[b, h : h + 1] if "segments" in s.buffers else at.ring_begin[b : b + 1]
            end, count = int(upto), int(units.unit_count[b, h])
            near = ring_positions(ring_rows, at.length[b : b + 1], upto, sink)[0]
            held = sorted(near[near >= 0].tolist())
            assert held == [*range(min(n, sink)), *range(end, n)]
            assert sink <= end <= begin
            ring = s.store.ring[b, h].cpu()
            for row, pos in enumerate(near.tolist()):
                assert pos < 0 or torch.equal(ring[row], kv[h, pos])
            edges = units.first[b, h, : count + 1].tolist()
            assert edges[0] == sink
            assert edges[-1] == end
            assert all(i < j for i, j in pairwise(edges)), "an empty unit"
            pool = s.store.pool[b, h, sink:end].cpu()
            order = [(pool == row).all(-1).all(-1).nonzero().flatten().tolist() for row in kv[h, sink:end]]
            assert sorted(chain(*order)) == list(range(end - sink)), "the pool holds every token once"
            for u, (i, j) in enumerate(pairwise(edges)):
                mean = keys_of(s.store.pool[b, h, i:j]).mean(0)
                torch.testing.assert_close(units.centroid[b, h, u], mean, atol=1e-5, rtol=1e-5)


HOW = [
    ("louiskv", dict(tau=0.1)), ("louiskv", dict(tau=-0.9)), ("louiskv", dict(tau=0.1, per_head=True)),
    ("clusterkv", {}), ("clusterkv", RUNS), ("clusterkv", dict(every=10, new_clusters=5, cluster_size=3, cosine=False)),
]  # fmt: skip


def made(name: str, budget: int = 64, **more):
    return make_method(name, **{**(LOUIS if name == "louiskv" else PAPER), "budget": budget, **more})


@pytest.mark.parametrize(("name", "more"), HOW)
@given(past=pasts())
def test_every_token_is_stored_exactly_once(name, more, past):
    """However it came in: prompts, turns, chunks and single tokens."""
    check_partition(past.fill(made(name, **more)), past)


def test_a_lost_token_is_noticed():
    past = Past(80, 3, 2, [60] + [1] * 20, 1, False)
    layer = past.fill(made("louiskv", tau=0.1))
    check_partition(layer, past)
    layer.state.units.first[0, 0, 3] += 1
    with pytest.raises(AssertionError):
        check_partition(layer, past)


@given(
    sizes=st.lists(st.one_of(st.just(1), st.just(2), st.integers(2, 30)), min_size=20, max_size=120),
    seed=st.integers(0, 99), every=st.sampled_from([(1, 1), (2, 1), (4, 4), (8, 2), (9, 3)]), size=st.integers(2, 9),
)  # fmt: skip
def test_clusters_never_outgrow_their_buffer(sizes, seed, every, size):
    more = dict(every=every[0], new_clusters=every[1], cluster_size=size, rounds=1)
    method = made("clusterkv", **more, window=1, sink=0)
    sizes = [n for n, total in zip(sizes, torch.tensor(sizes).cumsum(0).tolist()) if total <= 256]
    x = torch.randn(1, 1, sum(sizes), 16, generator=torch.Generator().manual_seed(seed))
    layer = Layer(method, heads=1)
    layer.feed_parts(x, x, x, sizes)
    assert int(layer.state.units.unit_count.max()) <= layer.state.units.centroid.shape[2]


@given(
    sizes=st.lists(st.one_of(st.just(1), st.just(2), st.integers(2, 30)), min_size=20, max_size=120),
    seed=st.integers(0, 99), segment=st.sampled_from([(1, 1), (1, 3), (2, 4), (4, 4)]),
)  # fmt: skip
def test_units_never_outgrow_their_buffer(sizes, seed, segment):
    method = made("louiskv", tau=1.0, segment_min=segment[0], segment_max=segment[1], window=1, sink=0)
    sizes = [n for n, total in zip(sizes, torch.tensor(sizes).cumsum(0).tolist()) if total <= 256]
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 1, sum(sizes), 16, generator=g)
    layer = Layer(method, heads=1)
    layer.feed_parts(x, x, x, sizes)
    units = layer.state.units
    assert int(units.unit_count.max()) <= units.centroid.shape[2]
    assert units.centroid.shape[2] == unit_capacity(256, 2 * segment[1], min(segment[0], 4))


@pytest.mark.parametrize(("name", "more"), HOW)
@given(past=pasts(), other=pasts())
def test_reset_layer_equals_a_new_layer(name, more, past, other):
    method = made(name, budget=10, **more)
    if other.group != past.group:
        other = Past(other.length, other.pad, past.group, other.sizes, other.seed, False)
    used = past.fill(method)
    used.state.reset()
    used.row_lengths.reset()
    used.row_lengths.left_pad.copy_(torch.tensor([other.pad, 0]))
    again = used.feed_parts(other.q, other.k, other.v, other.sizes)
    fresh = Layer(method, batch=2, heads=other.heads, group=other.group, dim=other.dim, left_pad=[other.pad, 0])
    for a, b in zip(again, fresh.feed_parts(other.q, other.k, other.v, other.sizes)):
        assert torch.equal(a, b)


def test_rows_too_long_for_the_choice_are_refused():
    sizes = dict(batch=1, kv_heads=1, head_dim=16, dtype=torch.float32)
    made("louiskv").buffers(Geometry(rows=MOST_ROWS, **sizes))
    with pytest.raises(ValueError, match="louiskv: a cache row holds at most 2097152 tokens, got 2097153"):
        made("louiskv").buffers(Geometry(rows=MOST_ROWS + 1, **sizes))


# ---------------------------------------------------------------- the trigger


def steps_of(q: torch.Tensor, prompt: int, method, dtype=torch.float32):
    """`retrieve_now` after every decode step on queries q [heads, tokens, dim], and the layer."""
    g = torch.Generator().manual_seed(1)
    k = torch.randn(1, 2, q.shape[1], q.shape[2], generator=g).to(dtype)
    layer = Layer(method, heads=2, group=q.shape[0] // 2, dim=q.shape[2], dtype=dtype)
    layer.feed(q[None, :, :prompt], k[:, :, :prompt], k[:, :, :prompt])
    now = []
    for t in range(prompt, q.shape[1]):
        layer.feed(q[None, :, t : t + 1], k[:, :, t : t + 1], k[:, :, t : t + 1])
        now.append(layer.state.trigger.retrieve_now[0].tolist())
    return now, layer


def turning(cosines: list[list[float]], prompt: int) -> torch.Tensor:
    """Queries whose head h at decode step t has cosine cosines[t][h] with its step before (in the plane of 2 axes)."""
    angles = torch.tensor(cosines).acos().cumsum(0).T  # [heads, steps]
    q = torch.zeros(angles.shape[0], prompt + angles.shape[1], 16)
    q[:, :prompt, 0] = 1
    q[:, prompt:, 0], q[:, prompt:, 1] = angles.cos(), angles.sin()
    return q * torch.rand(q.shape[:2], generator=torch.Generator().manual_seed(2)).add(0.5)[..., None]


FOUR = st.lists(st.sampled_from([-0.5, 0.0, 0.3, 0.8, 0.95]), min_size=4, max_size=4)
COSINES = st.lists(FOUR, min_size=2, max_size=20)


@pytest.mark.parametrize("per_head", [False, True])
@given(cosines=COSINES, tau=st.sampled_from([-0.4, 0.11, 0.29, 0.61, 0.9]))
def test_retrieval_happens_where_the_mean_cosine_is_below_tau(per_head, cosines, tau):
    """The taus are no mean of 2 or 4 of the cosines, so rounding decides nothing. The first step always retrieves."""
    now, _ = steps_of(turning(cosines, 30), 30, made("louiskv", tau=tau, per_head=per_head, window=40))
    for t, (got, row) in enumerate(zip(now, cosines)):
        means = [sum(row[:2]) / 2, sum(row[2:]) / 2] if per_head else [sum(row) / 4] * 2
        assert got == [int(t == 0 or mean < tau) for mean in means]


def test_query_is_compared_with_the_last_retrieving_query():
    """A walk of queries: memory 0 sees only its last step, 1 how far it has come since the last retrieval."""
    q = (torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(3)) + 1.0).cumsum(1)
    tau, every = 0.995, []
    for memory in (0.0, 0.6, 1.0):
        now, held = [], None
        for x in q[:, 5:].unbind(1):
            found = held is None or float(torch.cosine_similarity(x, held, dim=-1).mean()) < tau
            held = x if found else memory * held + (1 - memory) * x
            now.append([int(found)] * 2)
        assert steps_of(q, 5, made("louiskv", tau=tau, memory=memory, window=40))[0] == now
        every.append(sum(x[0] for x in now))
    assert every == sorted(set(every)), "each retrieves more often than the one before"
    assert every[-1] < 35


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_earlier_query_moves_where_memory_is_near_1(dtype):
    """The query turns a little and stays there for 200 steps, and the mean follows. So a further turn is not far from
    it. In bf16 each of the 200 steps is too small to change a number, and the further turn would retrieve."""
    q = torch.zeros(2, 220, 16)
    q[:, :, 0], q[:, :20, 1], q[:, 20:, 1], q[:, -1, 1] = 1, 1.5, 0.375, 0.125
    now, layer = steps_of(q.to(dtype), 10, made("louiskv", tau=0.7, memory=0.998, window=250), dtype=dtype)
    assert [t for t, heads in enumerate(now) if heads[0]] == [0]
    mean = q[:, 10]
    for x in q[:, 11:].unbind(1):
        mean = 0.998 * mean + 0.002 * x
    torch.testing.assert_close(layer.state.trigger.previous[0, 0].cpu(), mean, atol=1e-4, rtol=0)


def test_a_second_turn_retrieves_at_its_first_step():
    method = made("louiskv", tau=-0.99)
    q = torch.ones(1, 2, 60, 16)
    layer = Layer(method, heads=2)
    now = []
    for n in (30, 1, 1, 1, 20, 1, 1):
        layer.feed(q[:, :, :n], q[:, :, :n], q[:, :, :n])
        now.append(int(layer.state.trigger.retrieve_now[0, 0]))
    assert [now[i] for i in (1, 2, 3, 5, 6)] == [1, 0, 0, 1, 0]


def test_steps_between_boundaries_choose_and_move_nothing():
    """And attention goes on over what was chosen last; a full ring makes a boundary of its own."""
    now, layer = steps_of(torch.ones(2, 100, 16), 30, made("louiskv", budget=8, tau=0.5))
    slack = layer.state.segments.cuts.shape[2]
    forced = [t for t, w in enumerate(now) if w[0]]
    assert forced[0] == 0
    assert 1 < len(forced) <= 1 + math.ceil(70 / (slack - layer.method.window - layer.method.ring_plan.interval - 4))
    selected, missed = (int(counted(layer.state.stats.counts, name)[0, 0]) for name in ("selected", "missed"))
    assert selected > 8 * 60
    assert missed <= 8 * len(forced)
    assert layer.state.trigger.retrievals.tolist() == [[len(forced)] * 2]


# ---------------------------------------------------------------- clusters


@pytest.mark.parametrize("name", ["louiskv", "clusterkv"])
@pytest.mark.parametrize(
    ("budget", "size"), [(32, 2), (63, 2), (64, 4), (100, 4), (128, 8), (255, 8), (256, 16), (1024, 16), (1 << 20, 16)]
)
def test_small_budget_holds_16_clusters(name, budget, size):
    hyper = dict(budget=budget, sink=8, window=6)
    assert make_method(name, **hyper, cluster_size=None).per_cluster == size
    for told in (4, 16):
        assert make_method(name, **hyper, cluster_size=told).per_cluster == told


def test_cluster_size_of_a_prompt_follows_the_budget():
    for more, size in ((None, 4), (2, 2), (32, 32)):
        method = make_method("clusterkv", budget=64, sink=8, window=6, cluster_size=more, every=32)
        layer = Layer(method, batch=1, heads=1, group=1)
        k = torch.randn(1, 1, LENGTH, layer.state.store.ring.shape[-1], generator=torch.Generator().manual_seed(0))
        layer.feed(k, k, k)
        inside = int(layer.state.lengths.ring_begin[0]) - 8
        assert int(layer.state.units.unit_count[0, 0]) == inside // size


def test_generated_tokens_are_clustered_in_batches():
    """Of 3 kinds of keys in turn, 12 leave together; a unit is a kind. Until then all are attended to. So it goes too
    with what a second prompt finds in the ring."""
    method = make_method("clusterkv", budget=64, sink=2, window=3, cluster_size=4, every=12, new_clusters=3, rounds=5)
    layer, kinds = Layer(method, batch=1, heads=1), torch.eye(16)[:3]
    x = kinds[torch.arange(44) % 3] * torch.arange(1, 45)[:, None]  # by cosine lengths do not matter
    x = x[None, None]
    units, seen = layer.state.units, []
    for part in x.split([2] + [1] * 26 + [16], 2):
        before = int(units.unit_count)
        layer.feed(part, part, part)
        seen.append((int(layer.state.lengths.length), int(units.unit_count) - before))
    assert [s for s in seen if s[1]] == [(2 + 12 + 3, 3), (44, 6)]
    edges = units.first[0, 0, :10].tolist()
    assert edges == [2, *range(6, 15, 4), *edges[4:6], 26, *edges[7:9], 38]
    pool = keys_of(layer.state.store.pool[0, 0]).cpu()
    for i, j in pairwise(edges[:7]):
        assert len((pool[i:j] > 0).nonzero()[:, 1].unique()) == 1, "keys of one kind"


# ---------------------------------------------------------------- segments


@given(
    cosines=st.lists(st.sampled_from([-0.5, 0.95]), min_size=30, max_size=70), low=st.integers(1, 3),
    more=st.integers(0, 4),
)  # fmt: skip
def test_segments_are_cut_at_boundaries(cosines, low, more):
    """Against the rule in a few lines: a new one at a boundary if the last is long enough, or if it is full."""
    method = made("louiskv", tau=0.2, segment_min=low, segment_max=low + more, window=3, sink=0, cluster_size=8)
    now, layer = steps_of(turning([[c] * 2 for c in cosines], 2), 2, method)
    begins = [*range(0, 2, low + more)]  # of the two tokens of the prompt nothing leaves the ring
    for t, w in enumerate(now):
        size = 2 + t - begins[-1]
        if size >= low + more or (w[0] and size >= low):
            begins.append(2 + t)
    units = layer.state.units
    edges = units.first[0, 0, : int(units.unit_count[0, 0]) + 1].tolist()
    assert edges == begins[: len(edges)]
    last = max(t for t, w in enumerate(now) if w[0])  # when segments entered the index last
    begin = max(0, (2 + last + 1 - 3) // (2 * (low + more))) * 2 * (low + more)
    assert edges[-1] == max(x for x in begins if x <= begin)


# ---------------------------------------------------------------- kernels and references, for a whole life

def life(method, past: Past, kind: str | None):
    """All that a layer holds after these tokens, and its outputs; by references, or by kernels of a kind or of any."""
    layer = Layer(
        method, batch=2, heads=past.heads, group=past.group, left_pad=[past.pad, 0],
        device=torch.device("cpu") if kind == "reference" else DEVICE,
    )  # fmt: skip
    with use_kernels(kind):
        out = layer.feed_parts(past.q, past.k, past.v, past.sizes)
    views = ("far", "units", "segments", "trigger", "hot", "stats")
    held = {view: getattr(layer.state, view)._asdict() for view in views if view in layer.state.buffers}
    return {(view, n): t.cpu() for view, parts in held.items() for n, t in parts.items()}, out


@pytest.mark.parametrize("kind", ["triton", pytest.param(None, marks=pytest.mark.gpu, id="as on a GPU")])
@pytest.mark.parametrize(("name", "more"), HOW)
@settings(max_examples=max(1, settings().max_examples // 4))  # some forty steps each
@given(past=pasts(most=60))
def test_kernels_and_references_agree_over_many_steps(name, more, kind, past):
    """What one op leaves another reads: the same steps, by references and by kernels, end in the same state."""
    method = made(name, budget=20, **more)
    (want, want_out), (got, got_out) = (life(method, past, k) for k in ("reference", kind))
    for part, t in want.items():
        close = 1e-5 if part == ("units", "centroid") else 0
        torch.testing.assert_close(got[part], t, rtol=close, atol=close, msg=lambda m, part=part: f"{part}: {m}")
    for g, w in zip(got_out, want_out, strict=True):
        torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- the choice


def by_hand(units: list[tuple[float, int, int]], budget: int) -> list[int]:
    """Rows of the best units (score, begin, end) until the budget is full, the last cut to its first rows."""
    rows: list[int] = []
    for _, begin, end in sorted(units, key=lambda u: -u[0]):  # stable: ties to the lower unit
        rows += range(begin, end)[: budget - len(rows)]
    return sorted(rows)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=40), kinds=st.integers(1, 8), budget=st.integers(1, 120),
    group=st.sampled_from([1, 2, 3]), seed=st.integers(0, 999),
)  # fmt: skip
def test_whole_units_are_taken_until_the_budget_is_full(sizes, kinds, budget, group, seed):
    g = torch.Generator().manual_seed(seed)
    few = torch.randint(-2, 3, (kinds, 16), generator=g).float()
    centroid = few[torch.randint(0, kinds, (len(sizes),), generator=g)]
    q = torch.randint(-2, 3, (1, group, 1, 16), generator=g).float()
    first = torch.tensor([5, *sizes]).cumsum(0).to(torch.int32)
    one = torch.ones(1, 1, dtype=torch.int32)
    things = (q, Units(first[None, None], centroid[None, None], one * len(sizes)), one, one * 0)
    got = pick_units(*on(DEVICE, things), budget, 0.25)[0, 0].tolist()
    # In double precision: what is equal there is equal, what differs does so by more than fp32 rounds.
    z = q[0, :, 0].double() @ centroid.double().T * 0.25
    mean = torch.softmax(z, -1).mean(0)
    units = [(round(math.log(float(m)), 4), int(a), int(b)) for m, a, b in zip(mean, first, first[1:])]
    want = by_hand(units, budget)
    assert got == want + [-1] * (budget - len(want))


@given(past=pasts(), budget=st.integers(5, 40))
@pytest.mark.parametrize("name", ["louiskv", "clusterkv"])
def test_choice_equals_the_definition_of_the_paper(name, past, budget):
    """Mean of the heads' softmax over the mean keys of the units, recomputed from the pool in double precision."""
    layer = past.fill(made(name, budget=budget))
    s = layer.state
    if name == "louiskv":
        s.trigger.retrieve_now.fill_(1)
    chosen = layer.choose(past.query)
    for b, h, _, queries in past.heads_of_rows():
        edges = s.units.first[b, h, : int(s.units.unit_count[b, h]) + 1].tolist()
        if len(edges) == 1:
            assert (chosen[b, h] == -1).all()
            continue
        pool = keys_of(s.store.pool[b, h]).double().cpu()
        keys = torch.stack([pool[i:j].mean(0) for i, j in pairwise(edges)])
        mean = torch.softmax(queries @ keys.T * past.dim**-0.5, -1).mean(0).log().tolist()
        want = by_hand([(m, *e) for m, e in zip(mean, pairwise(edges))], budget)
        got = chosen[b, h]
        assert got[got >= 0].tolist() == want


def test_a_score_is_a_mean_of_softmaxes_and_cannot_underflow():
    q, centroid = torch.tensor([[400.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [-1.0, 3.0], [-1.0, 2.0]])
    got = scores(q, centroid, 1.0)
    want = torch.softmax(q @ centroid.T, -1).sum(0).log()
    torch.testing.assert_close(got, want)
    assert scores(q[:1], centroid, 1.0)[1:].isfinite().all()


@pytest.mark.parametrize("where", PLANTED)
@pytest.mark.parametrize("name", ["louiskv"])
def test_a_planted_key_is_found(name, where):
    """It stands out of any mean that it is part of."""
    assert LENGTH == 160
    assert finds(made(name, budget=16, cluster_size=4, stretch=64), *PLANTED[where])


@pytest.mark.parametrize("where", PLANTED)
@pytest.mark.parametrize("more", [{}, RUNS], ids=["paper", "runs"])
def test_clusterkv_finds_a_planted_key(where, more):
    assert finds(made("clusterkv", **{**more, "budget": 16}), *PLANTED[where])
