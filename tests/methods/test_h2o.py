"""H2O keeps the tokens that the authors' code keeps, evicts for good, and steps attend to nothing else."""
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer import Layer
from models import MAX_LENGTH, greedy_logits, prompts, tiny
from torch._dynamo.utils import counters
from world import DEVICE

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.ops.store.views import Attention

HEADS, DIM, WINDOW, BUDGET = 2, 16, 5, 7


def official(q, k, prompt: int, heavy: int, recent: int, scale: float):
    """The authors' code (utils_real_drop/modify_llama.py) for one query head: q, k [tokens, dim]. The positions that
    each step behind the prompt attends to. The newest token is not one of the `recent` tokens."""
    received, kept, seen = torch.zeros(len(q), dtype=torch.float64), [*range(prompt)], []
    for i in range(prompt):
        received[: i + 1] += torch.softmax(k[: i + 1] @ q[i] * scale, -1)
    for t in range(prompt, len(q)):
        if len(kept) > heavy + recent:
            older = kept[: len(kept) - recent]
            best = sorted(older, key=lambda p: (-float(received[p]), p))[:heavy]
            kept = sorted(best) + kept[len(kept) - recent :]
        kept.append(t)
        seen.append(kept.copy())
        received[kept] += torch.softmax(k[kept] @ q[t] * scale, -1)
    return seen


class Story:
    """Random tokens of rows that begin at `pads`, and which positions steps attend to."""

    def __init__(self, length=60, group=1, pads=(0,), seed=0, dtype=torch.float32, **hyper):
        g = torch.Generator().manual_seed(seed)
        draw = lambda heads: torch.randn(len(pads), heads, length, DIM, generator=g).to(dtype)  # noqa: E731
        self.pads, self.group = pads, group
        self.q, self.k, self.v = 2 * draw(HEADS * group), draw(HEADS), draw(HEADS)
        self.hyper = {"window": WINDOW, "budget": BUDGET} | hyper

    def layer(self, rows=range(9), attention=None, **hyper) -> Layer:
        pads = [p for b, p in enumerate(self.pads) if b in rows]
        method = make_method("h2o", **{**self.hyper, **hyper})
        layer = Layer(method, batch=len(pads), heads=HEADS, group=self.group, dim=DIM, left_pad=pads)
        layer.attention = attention or layer.attention
        return layer

    def feed(self, layer: Layer, sizes, first=0):
        """Feed tokens from `first` on; the positions that each (row, kv head) attended to at every step."""
        seen = []
        layer.state.on_step = lambda s, q, a, selection, out: seen.append(attended(s))
        layer.feed_parts(*(t[:, :, first : first + sum(sizes)] for t in (self.q, self.k, self.v)), sizes)
        return seen

    def by_hand(self, b: int, h: int, sizes, attention=None):
        """By the definition of the page: the sums of a group of query heads added up, one set for each kv head; prompts
        attend to everything, and what steps evicted stays evicted."""
        a, pad = attention or Attention(DIM**-0.5), self.pads[b]
        keys, sink = self.k[b, h, pad:].double(), self.hyper.get("sink", 0)
        queries = self.q[b, h * self.group : (h + 1) * self.group, pad:].double()
        extra = None if a.sink_logits is None else a.sink_logits.double()[h * self.group : (h + 1) * self.group]
        received, gone, kept, seen = torch.zeros(len(keys), dtype=torch.float64), set(), set(), []

        def pay(i, tokens):
            for g, x in enumerate(queries[:, i]):
                z = keys[tokens] @ x * a.scale
                z = torch.tanh(z / a.softcap) * a.softcap if a.softcap else z
                z = z if extra is None else torch.cat([z, extra[g, None]])
                received[tokens] += z.softmax(-1)[: len(tokens)]

        n, stepped = -pad, False
        for size in sizes:
            start, n = max(n, 0), n + size
            begin = max(sink, n - WINDOW)
            if size > 1:
                if stepped:
                    gone |= set(range(sink, max(sink, start - WINDOW))) - kept
                    stepped = False
                for i in range(start, n):
                    pay(i, [*range(i + 1)])
                continue
            live = set(range(sink, begin)) - gone
            if stepped:  # only the kept tokens, and the token that leaves, are candidates
                live = kept | ({begin - 1} & live if begin > max(sink, n - 1 - WINDOW) else set())
            kept = set(sorted(live, key=lambda p: (-float(received[p]), p))[: self.hyper["budget"]])
            stepped, near = True, {*range(min(sink, n)), *range(begin, n)}
            seen.append(sorted(kept | near))
            pay(n - 1, seen[-1])
        return seen


def attended(s) -> dict:
    """Positions by (row, kv head)."""
    found = {}
    for b, (n, begin) in enumerate(zip(s.lengths.length.tolist(), s.lengths.ring_begin.tolist())):
        for h in range(s.hot.chosen.shape[1]):
            slots = [i for i in s.hot.chosen[b, h].tolist() if i >= 0]
            kept = [int(s.hot.block_of[b, h, i]) for i in slots]
            assert len(set(kept)) == len(kept)
            assert not any(s.lengths.sink > p or p >= begin for p in kept)
            found[b, h] = sorted({*kept, *range(min(s.lengths.sink, n)), *range(begin, n)})
    return found


# ---------------------------------------------------------------- what is kept


@given(seed=st.integers(0, 999), prompt=st.integers(2, 40), budget=st.integers(1, 20))
def test_one_query_head_per_kv_head_equals_the_authors_code(seed, prompt, budget):
    """Its recent tokens are the window without the newest token."""
    story = Story(seed=seed, budget=budget)
    got = story.feed(story.layer(), [prompt, *[1] * 15])
    for h in range(HEADS):
        q, k = (t[0, h, : prompt + 15].double() for t in (story.q, story.k))
        want = official(q, k, prompt, budget, WINDOW - 1, DIM**-0.5)
        assert [step[0, h] for step in got] == want


EXTRA = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 0.3, -0.2, 0.1])


@given(
    seed=st.integers(0, 999), group=st.sampled_from([1, 4]), sink=st.sampled_from([0, 3]),
    sizes=st.lists(st.sampled_from([1, 1, 2, 9, 17]), min_size=3, max_size=12), softcap=st.sampled_from([0.0, 2.0]),
    extra=st.booleans(), budget=st.integers(1, 12),
)  # fmt: skip
def test_chunks_turns_and_ragged_rows_equal_brute_force(seed, group, sink, sizes, softcap, extra, budget):
    story = Story(length=sum(sizes) + 12, group=group, seed=seed, pads=(0, 3), sink=sink, budget=budget)
    sizes = [12, *sizes]
    a = Attention(DIM**-0.5, softcap, EXTRA[: HEADS * group] if extra else None)
    got = story.feed(story.layer(attention=a), sizes)
    for b in range(2):
        for h in range(HEADS):
            assert [step[b, h] for step in got] == story.by_hand(b, h, sizes, a)


@given(seed=st.integers(0, 999), cuts=st.lists(st.integers(2, 12), min_size=1, max_size=4))
def test_chunks_of_a_prompt_equal_the_whole_prompt(seed, cuts):
    story = Story(seed=seed, group=2, pads=(0, 5))
    whole, chunks = story.layer(), story.layer()
    steps = [1] * 6
    want, got = story.feed(whole, [6 + sum(cuts), *steps]), story.feed(chunks, [6, *cuts, *steps])
    assert got == want
    torch.testing.assert_close(chunks.state.heavy.received, whole.state.heavy.received, atol=1e-4, rtol=1e-4)


@given(seed=st.integers(0, 999), turn=st.integers(2, 9))
def test_an_evicted_token_never_comes_back(seed, turn):
    """Not at a step, and not by a second turn, whose queries attend to it."""
    story = Story(seed=seed, budget=4)
    layer, lost = story.layer(), {h: set() for h in range(HEADS)}
    steps = story.feed(layer, [30, *[1] * 8, turn, *[1] * 8])
    for number, step in enumerate(steps):
        n = 31 + number + (turn if number >= 8 else 0)
        for h in range(HEADS):
            assert not lost[h] & set(step[0, h])
            lost[h] |= set(range(n)) - set(step[0, h])
    assert all(lost.values())


def test_tokens_of_a_turn_are_candidates():
    """What a second prompt brings may stay: its queries pay attention to its own tokens."""
    story = Story(budget=4)
    story.q[:, :, 24:], story.k[:, :, 30] = story.q[:, :, 24:] + 1, 4.0
    steps = story.feed(story.layer(), [20, *[1] * 4, 20, *[1] * 4])
    assert all(30 in steps[-1][0, h] for h in range(HEADS))


def test_only_the_last_queries_of_a_prompt_count_if_so_asked():
    """By hand: one prompt, then a step attends to the tokens that the last three queries looked at."""
    story = Story(prompt_queries=3)
    (step, *_) = story.feed(story.layer(), [40, 1])
    for h in range(HEADS):
        received = torch.zeros(40, dtype=torch.float64)
        for i in range(37, 40):
            received[: i + 1] += torch.softmax(story.k[0, h, : i + 1].double() @ story.q[0, h, i].double() / 4, -1)
        best = received[: 41 - WINDOW].topk(BUDGET).indices.tolist()
        assert step[0, h] == sorted({*best, *range(41 - WINDOW, 41)})


def test_a_row_of_a_batch_keeps_what_it_keeps_alone():
    story = Story(pads=(0, 7, 11), group=2)
    sizes = [25, *[1] * 9, 4, *[1] * 9]
    together = story.feed(story.layer(), sizes)
    for b, pad in enumerate(story.pads):
        alone = Story(length=60 - pad, group=2)
        alone.q, alone.k, alone.v = (t[b : b + 1, :, pad:] for t in (story.q, story.k, story.v))
        steps = alone.feed(alone.layer(), [25 - pad, *sizes[1:]])
        assert [{h: x for (row, h), x in s.items() if row == b} for s in together] == [
            {h: x for (_, h), x in s.items()} for s in steps
        ]


def test_received_sums_to_the_number_of_queries():
    """Every query pays 1 in all, whatever was evicted."""
    story = Story(group=3, budget=4)
    layer = story.layer()
    story.feed(layer, [30, *[1] * 10])
    total = layer.state.heavy.received.sum(-1)
    torch.testing.assert_close(total.cpu(), torch.full((1, HEADS), 3.0 * 40), atol=1e-3, rtol=0)


# ---------------------------------------------------------------- models


@torch.no_grad()
def test_steps_compile_to_one_graph():
    counters.clear()
    model, (ids, mask) = tiny(), prompts(2, 41)
    how = dict(max_length=MAX_LENGTH, budget=8, window=6, skip_layers=1)
    with torchsparsekv.patch(model, "h2o", **how) as handle:
        want = greedy_logits(model, ids, mask, 12, handle.make_cache(2))
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        got = greedy_logits(model, ids, mask, 12, handle.make_cache(2), step)
        assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_fork_evicts_as_its_original():
    model, (ids, _) = tiny(), prompts(1, 60, ragged=False)
    with torchsparsekv.patch(model, "h2o", max_length=MAX_LENGTH, budget=8, window=6, skip_layers=1) as handle:
        cache = handle.make_cache(1)
        model(ids[:, :40], past_key_values=cache)
        for t in range(40, 46):
            model(ids[:, t : t + 1], past_key_values=cache)
        twin = handle.fork(cache)
        for t in range(46, 60):
            want, got = (model(ids[:, t : t + 1], past_key_values=c).logits for c in (cache, twin))
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        (dict(prompt_queries=0), ValueError, "h2o: prompt_queries must be at least 1, got 0"),
        (dict(prompt_queries=1.5), TypeError, "h2o: prompt_queries must be an int, got 1.5"),
        (dict(estimate_rest=True), ValueError, "estimate_rest cannot be True: this method evicts tokens"),
        (dict(prefetch_async=0.8), ValueError, "prefetch_async is for methods that select at every step"),
    ],
)
def test_wrong_hyper_parameters_are_refused(more, error, said):
    with pytest.raises(error, match=said):
        make_method("h2o", **more)


def test_an_int8_pool_keeps_tokens_by_the_keys_that_steps_read():
    """Kept keys come from the pool, in 8 bits; the sums are of what attention read."""
    story = Story(group=2)
    layer = story.layer()
    assert layer.state.heavy.received.device.type == DEVICE.type
    model, (ids, mask) = tiny(), prompts(1, 41, ragged=False)
    how = dict(max_length=MAX_LENGTH, budget=8, window=6, skip_layers=1)
    with torchsparsekv.patch(model, "h2o", pool_dtype="int8", **how) as handle:
        logits = greedy_logits(model, ids, mask, 12, cache := handle.make_cache(1))
        received = cache.layers[2].state.heavy.received
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(received.sum(-1), torch.full_like(received.sum(-1), 2 * 53.0), atol=1e-2, rtol=0)
