"""RaaS stamps the better half of its pages, evicts the page with the oldest stamp for good, and keeps the prompt."""
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer import Layer
from models import MAX_LENGTH, greedy_logits, prompts, tiny
from torch._dynamo.utils import counters

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.ops.raas.stamp_pages import WIDEST
from torchsparsekv.state import Geometry

HEADS, DIM, SINK, WINDOW, PAGE, BUDGET = 2, 16, 4, 6, 4, 16


def bound(page, queries) -> float:
    """Quest's, of a group of query heads."""
    low, high = page.min(0).values, page.max(0).values
    return max(float(torch.maximum(q * low, q * high).sum()) for q in queries)


class Story:
    """Random whole numbers, so that bounds are exact, of rows that begin at `pads`."""

    def __init__(self, length=150, group=1, pads=(0,), seed=0, **hyper):
        g = torch.Generator().manual_seed(seed)
        draw = lambda heads: (2 * torch.randn(len(pads), heads, length, DIM, generator=g)).round()  # noqa: E731
        self.pads, self.group = pads, group
        self.q, self.k, self.v = draw(HEADS * group), draw(HEADS), draw(HEADS)
        sizes = dict(sink=SINK, window=WINDOW, block_size=PAGE, budget=BUDGET, digest="float32")
        self.method = make_method("raas", **sizes | hyper)

    def layer(self) -> Layer:
        return Layer(self.method, batch=len(self.pads), heads=HEADS, group=self.group, left_pad=self.pads)

    def feed(self, sizes, layer=None):
        """The pages that each (row, kv head) attended to at every step."""
        layer, seen = layer or self.layer(), []
        layer.state.on_step = lambda s, q, a, selection, out: seen.append(attended(s))
        layer.feed_parts(*(t[:, :, : sum(sizes)] for t in (self.q, self.k, self.v)), sizes)
        return seen

    def by_hand(self, b: int, h: int, sizes):
        """By the paper, its code and the page of the method, from raw keys."""
        pad, most, share = self.pads[b], self.method.budget // PAGE, self.method.share
        keys = self.k[b, h, pad:].double()
        queries = self.q[b, h * self.group : (h + 1) * self.group, pad:].double()
        kept, stamps, gone, prompt_end, n, begin, stepped, seen = [], {}, set(), 0, -pad, SINK, False, []

        def score(p):
            return bound(keys[p * PAGE : (p + 1) * PAGE], queries[:, n - 1])

        for size in sizes:
            n, old = n + size, begin
            begin = SINK + max(0, (n - SINK - WINDOW) // PAGE) * PAGE
            if size > 1:
                if stepped:
                    gone |= set(range(SINK // PAGE, old // PAGE)) - set(kept)
                live = [p for p in range(SINK // PAGE, begin // PAGE) if p not in gone]
                kept = sorted(sorted(live, key=lambda p: (-score(p), p))[:most])
                stamps.update(dict.fromkeys(live, math.inf))
                prompt_end, stepped = n, False
                continue
            for p in range(old // PAGE, begin // PAGE):
                stamps[p] = math.inf if p * PAGE < prompt_end else n
                kept.append(p)
                if len(kept) > most:
                    oldest = min(kept, key=lambda p: (stamps[p], p))
                    kept[kept.index(oldest)] = p  # it takes the place, which decides ties
                    kept.pop()
            best = sorted(range(len(kept)), key=lambda i: (-score(kept[i]), i))[: math.ceil(len(kept) * share)]
            stamps.update({kept[i]: n for i in best if stamps[kept[i]] < math.inf})
            stepped = True
            seen.append(sorted(kept))
        return seen


def attended(s) -> dict:
    found = {}
    for b, begin in enumerate(s.lengths.ring_begin.tolist()):
        for h in range(s.hot.chosen.shape[1]):
            pages = [int(s.hot.block_of[b, h, i]) for i in s.hot.chosen[b, h].tolist() if i >= 0]
            assert len(set(pages)) == len(pages)
            assert all(SINK // PAGE <= p < begin // PAGE for p in pages)
            found[b, h] = sorted(pages)
    return found


# ---------------------------------------------------------------- what is kept


@given(
    seed=st.integers(0, 999), group=st.sampled_from([1, 3]), prompt=st.integers(2, 40), budget=st.integers(1, 6),
    share=st.sampled_from([0.5, 0.0, 1.0, 0.3]),
)  # fmt: skip
def test_pages_of_a_long_answer_equal_brute_force(seed, group, prompt, budget, share):
    story = Story(group=group, seed=seed, budget=budget * PAGE, share=share)
    sizes = [prompt, *[1] * 60]
    got = story.feed(sizes)
    for h in range(HEADS):
        assert [step[0, h] for step in got] == story.by_hand(0, h, sizes)


@given(
    seed=st.integers(0, 999), sizes=st.lists(st.sampled_from([1, 1, 1, 2, 9, 21]), min_size=3, max_size=16),
    budget=st.integers(1, 6),
)  # fmt: skip
def test_chunks_turns_and_ragged_rows_equal_brute_force(seed, sizes, budget):
    story = Story(length=360, group=2, seed=seed, pads=(0, 5), budget=budget * PAGE)
    sizes = [12, *sizes]
    got = story.feed(sizes)
    for b in range(2):
        for h in range(HEADS):
            assert [step[b, h] for step in got] == story.by_hand(b, h, sizes)


@given(seed=st.integers(0, 999), cuts=st.lists(st.integers(2, 20), min_size=1, max_size=4))
def test_chunks_of_a_prompt_equal_the_whole_prompt(seed, cuts):
    story, steps = Story(seed=seed, group=2, pads=(0, 3)), [1] * 12
    whole, parts = story.feed([12 + sum(cuts), *steps]), story.feed([12, *cuts, *steps])
    assert whole == parts


@given(seed=st.integers(0, 999), turn=st.integers(2, 9))
def test_an_evicted_page_never_comes_back(seed, turn):
    """Not at a step, and not by a second turn, whose queries attend to it."""
    story = Story(seed=seed)
    lost = [set() for _ in range(HEADS)]
    last = [set() for _ in range(HEADS)]
    for step in story.feed([20, *[1] * 50, turn, *[1] * 40]):
        for h in range(HEADS):
            pages = set(step[0, h])
            lost[h] |= last[h] - pages
            assert not lost[h] & pages
            last[h] = pages
    assert all(lost)


def test_pages_of_the_prompt_stay():
    """A prompt of two pages outside sinks and window, and of two and a half that leave later."""
    story = Story(budget=6 * PAGE)
    steps = story.feed([SINK + 2 * PAGE + WINDOW, *[1] * 120])
    for h in range(HEADS):
        assert all({1, 2, 3} <= set(step[0, h]) for step in steps[20:])
        assert len(steps[-1][0, h]) == 6


def test_a_prompt_that_fills_the_budget_leaves_no_room_for_generated_pages():
    """As in the paper: the pages of the prompt are not evicted for them."""
    story = Story(budget=4 * PAGE)
    steps = story.feed([SINK + 4 * PAGE + WINDOW, *[1] * 60])
    late = story.by_hand(0, 0, [SINK + 4 * PAGE + WINDOW, *[1] * 60])[-1]
    assert steps[-1][0, 0] == late
    assert max(late) * PAGE < SINK + 4 * PAGE + WINDOW


def test_a_page_that_is_looked_at_outlives_later_pages():
    """A page whose keys match all queries keeps getting new stamps."""
    story = Story(budget=4 * PAGE)
    story.q += 3
    story.k[:, :, 40 : 40 + PAGE] = 6.0
    steps = story.feed([8, *[1] * 130])
    assert all(10 in steps[-1][0, h] for h in range(HEADS))


def test_a_row_of_a_batch_keeps_what_it_keeps_alone():
    story, sizes = Story(pads=(0, 7, 11), group=2), [25, *[1] * 30, 6, *[1] * 30]
    together = story.feed(sizes)
    for b, pad in enumerate(story.pads):
        alone = Story(group=2)
        alone.q, alone.k, alone.v = (t[b : b + 1, :, pad:] for t in (story.q, story.k, story.v))
        steps = alone.feed([25 - pad, *sizes[1:]])
        for mine, its in zip(together, steps, strict=True):
            assert [mine[b, h] for h in range(HEADS)] == [its[0, h] for h in range(HEADS)]


# ---------------------------------------------------------------- models


@torch.no_grad()
@pytest.mark.parametrize("pool_dtype", [None, "int8"])
def test_steps_compile_to_one_graph(pool_dtype):
    counters.clear()
    model, (ids, mask) = tiny(), prompts(2, 41)
    how = dict(max_length=MAX_LENGTH, budget=16, sink=4, window=6, block_size=4, skip_layers=1, pool_dtype=pool_dtype)
    with torchsparsekv.patch(model, "raas", **how) as handle:
        want = greedy_logits(model, ids, mask, 20, handle.make_cache(2))
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        got = greedy_logits(model, ids, mask, 20, handle.make_cache(2), step)
        assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_fork_evicts_as_its_original():
    model, (ids, _) = tiny(), prompts(1, 80, ragged=False)
    how = dict(max_length=MAX_LENGTH, budget=16, sink=4, window=6, block_size=4, skip_layers=1)
    with torchsparsekv.patch(model, "raas", **how) as handle:
        cache = handle.make_cache(1)
        model(ids[:, :20], past_key_values=cache)
        for t in range(20, 50):
            model(ids[:, t : t + 1], past_key_values=cache)
        twin = handle.fork(cache)
        for t in range(50, 80):
            want, got = (model(ids[:, t : t + 1], past_key_values=c).logits for c in (cache, twin))
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (dict(share=1.5), "raas: share must be from 0 to 1, got 1.5"),
        (dict(share=True), "raas: share must be from 0 to 1, got True"),
        (dict(digest="int4"), "raas: digest must be one of float8, bfloat16, float32, got 'int4'"),
        (dict(budget=20), "raas: budget must be a multiple of block_size 16, got 20"),
        (dict(estimate_rest=True), "estimate_rest cannot be True: this method evicts pages"),
        (dict(prefetch_async=0.8), "prefetch_async is for methods that select at every step"),
    ],
)
def test_wrong_hyper_parameters_are_refused(more, said):
    with pytest.raises(ValueError, match=said):
        make_method("raas", **more)


def test_too_many_pages_are_refused_before_anything_is_allocated():
    rows = 2 * WIDEST
    method = make_method("raas", block_size=1, budget=rows)
    with pytest.raises(ValueError, match=f"raas: a budget must be at most {WIDEST} pages, got {rows} pages"):
        method.buffers(Geometry(1, 1, 16, rows, torch.float32))
