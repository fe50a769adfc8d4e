"""On one layer, methods find a planted key and choose blocks by their definition."""
import ast
import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest
import torch
from cases import METHODS
from choice import check_choice
from hypothesis import given
from hypothesis import strategies as st
from layer import BLOCK, PAGES, SINK, Layer, frontier, small
from past import Past, pasts
from planted import PLANTED, finds
from world import DEVICE

import torchsparsekv
from torchsparsekv._methods.arkvale import VOLUMES
from torchsparsekv._methods.quest import Quest
from torchsparsekv.method import make_method
from torchsparsekv.ops.store.rows import ring_positions

# ---------------------------------------------------------------- (a) a planted key is found


FINDERS = [("quest", {}), ("pagemean", {}), ("oracle", {}), *(("arkvale", dict(volume=volume)) for volume in VOLUMES)]


@pytest.mark.parametrize("where", PLANTED)
@pytest.mark.parametrize(("name", "more"), FINDERS)
def test_planted_key_is_found(name, more, where):
    assert finds(small(name, budget=2 * BLOCK, **more), *PLANTED[where])


@pytest.mark.parametrize("where", PLANTED)
def test_streaming_misses_a_planted_key(where):
    assert not finds(small("streaming", budget=2 * BLOCK), *PLANTED[where])


@dataclass(frozen=True, kw_only=True)
class Forgetful(Quest):
    """Quest that never updates its index."""

    def prompt(self, s, q, leaving, *, join) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Delayed(Quest):
    """Quest that indexes prompts only."""

    def step(self, s, q, leaving) -> None: ...


@pytest.mark.parametrize("where", [w for w, (position, _) in PLANTED.items() if position >= SINK + 2 * BLOCK])
def test_missing_index_of_a_prompt_fails_the_needle_test(where):
    """(An index of nothing scores every page alike, and the two first win the tie: there it would go unseen.)"""
    assert not finds(Forgetful(**PAGES, budget=2 * BLOCK), *PLANTED[where])


WHERE = ["in the ring when the prompt ended", "decoded", "last page of all", "everything decoded"]


@pytest.mark.parametrize("where", WHERE)
def test_missing_index_of_steps_fails_the_needle_test(where):
    assert not finds(Delayed(**PAGES, budget=2 * BLOCK), *PLANTED[where])


# ---------------------------------------------------------------- (b) the choice is the paper's


def pages(keys: torch.Tensor) -> dict:
    """The keys of every retrievable page by page number."""
    end = frontier(len(keys))
    return {p // BLOCK: keys[p : p + BLOCK] for p in range(SINK, end, BLOCK)}


def quest_score(page, queries):
    low, high = page.min(0).values, page.max(0).values
    return max(float(torch.maximum(q * low, q * high).sum()) for q in queries)


def arkvale_score(page, queries, volume="cuboid-mean"):
    """The largest product of any of the queries with any point of the volume."""
    if volume == "ball":
        centre = page.mean(0)
        radius = max(float((key - centre).norm()) for key in page)
        return max(float(q @ centre + q.norm() * radius) for q in queries)
    middle = (page.min(0).values + page.max(0).values) / 2
    away = (page - middle).abs()
    half = away.mean(0) if volume == "cuboid-mean" else away.max(0).values
    return max(float(torch.maximum(q * (middle - half), q * (middle + half)).sum()) for q in queries)


def best(scores: dict, n: int) -> list:
    """Highest first, ties to the lower page; returned in order of page."""
    return sorted(sorted(scores, key=lambda p: (-scores[p], p))[:n])


def check_exactly(method, score, past: Past):
    """Whole numbers: every score is exact, so the choice is too."""
    chosen = past.fill(method).choose(past.query)
    for b, h, keys, queries in past.heads_of_rows():
        scores = {p: score(page, queries) for p, page in pages(keys).items()}
        want = best(scores, method.budget // BLOCK)
        got = chosen[b, h]
        assert got[: len(want)].tolist() == want
        assert (got[len(want) :] == -1).all()


@given(past=pasts(whole=True), n=st.integers(1, 12))
def test_quest_chooses_by_its_definition(past, n):
    check_exactly(small("quest", budget=n * BLOCK, digest="float32"), quest_score, past)


MEAN_SCORES = {"quest": quest_score, "arkvale": arkvale_score, "pagemean": lambda page, q: q @ page.mean(0)}


@pytest.mark.parametrize(("name", "score"), MEAN_SCORES.items())
@given(past=pasts(), n=st.integers(1, 12))
def test_a_group_of_heads_may_choose_by_its_mean_query(name, score, past, n):
    chosen = past.fill(small(name, budget=n * BLOCK, digest="float32", group="mean")).choose(past.query)
    for b, h, keys, queries in past.heads_of_rows():
        mean = queries.mean(0, keepdim=True)
        scores = {p: float(score(page, mean)) for p, page in pages(keys).items()}
        check_choice(chosen[b, h], scores, n, slack=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_arkvale_may_choose_the_same_pages_for_all_heads_of_a_layer(seed):
    past, n = Past(90, 60, 1 + seed % 3, [90], seed, False), 2
    chosen = past.fill(small("arkvale", budget=n * BLOCK, digest="float32", group="layer")).choose(past.query)
    layers: dict[int, list] = {}
    for b, h, keys, queries in past.heads_of_rows():
        mean = queries.mean(0, keepdim=True)
        scores = {p: float(arkvale_score(page, mean)) for p, page in pages(keys).items()}
        layers.setdefault(b, []).append((h, scores))
    for b, heads in layers.items():
        mean = {p: sum(scores[p] for _, scores in heads) / len(heads) for p in heads[0][1]}
        for h, _ in heads:
            check_choice(chosen[b, h], mean, n, slack=1e-4)
            assert chosen[b, h].tolist() == chosen[b, 0].tolist()


@given(past=pasts(), n=st.integers(1, 12))
def test_pagemean_by_the_largest_score_of_a_head(past, n):
    chosen = past.fill(small("pagemean", budget=n * BLOCK, digest="float32", group="max")).choose(past.query)
    for b, h, keys, queries in past.heads_of_rows():
        scores = {p: float((queries @ page.mean(0)).max()) for p, page in pages(keys).items()}
        check_choice(chosen[b, h], scores, n, slack=1e-4)


@pytest.mark.parametrize("volume", ["cuboid-mean", "cuboid"])
@given(past=pasts(whole=True), n=st.integers(1, 12))
def test_arkvale_chooses_exactly_by_its_definition(volume, past, n):
    method = small("arkvale", budget=n * BLOCK, digest="float32", volume=volume, group="max")
    check_exactly(method, lambda page, queries: arkvale_score(page, queries, volume), past)


@pytest.mark.parametrize("volume", VOLUMES)
@given(past=pasts(), n=st.integers(1, 12))
def test_arkvale_chooses_by_its_definition(volume, past, n):
    method = small("arkvale", budget=n * BLOCK, digest="float32", volume=volume, group="max")
    chosen = past.fill(method).choose(past.query)
    for b, h, keys, queries in past.heads_of_rows():
        scores = {p: arkvale_score(page, queries, volume) for p, page in pages(keys).items()}
        check_choice(chosen[b, h], scores, n, slack=1e-4)  # scores are below 60: eight bits over their fp32 rounding


@given(past=pasts(), n=st.integers(1, 12))
def test_cuboid_of_arkvale_equals_box_of_quest(past, n):
    hyper = dict(budget=n * BLOCK, digest="float32", group="max")
    of_quest = past.fill(small("quest", **hyper)).choose(past.query)
    assert torch.equal(past.fill(small("arkvale", volume="cuboid", **hyper)).choose(past.query), of_quest)


def test_volumes_choose_different_blocks():
    past = Past(90, 0, 1, [90], 0, False)
    hyper = dict(budget=4 * BLOCK, digest="float32")
    chosen = [past.fill(small("arkvale", volume=v, **hyper)).choose(past.query) for v in VOLUMES]
    assert not any(torch.equal(x, y) for x, y in combinations(chosen, 2))


def test_default_volume_is_the_published_one():
    method = make_method("arkvale")
    assert (method.volume, method.shape, method.block_size) == ("cuboid-mean", "mean-box", 32)
    assert tuple(VOLUMES) == ("cuboid-mean", "cuboid", "ball")


@pytest.mark.parametrize("volume", ["sphere", "mean-box", "", None])
def test_unknown_volume_is_refused(volume):
    says = f"arkvale: volume must be one of cuboid-mean, cuboid, ball, got {volume!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        make_method("arkvale", volume=volume)


def test_argument_of_patch_as_a_hyper_parameter_is_refused():
    """As in `plan --set hot_gib=1`, which has an option --hot-gib of its own."""
    says = r"hot_gib and step must be given to patch\(\), not to method 'pariskv'"
    with pytest.raises(TypeError, match=says):
        make_method("pariskv", step="eager", hot_gib=1)


@pytest.mark.parametrize("block", [1, BLOCK])
@given(past=pasts(), n=st.integers(1, 12))
def test_oracle_chooses_by_true_weights(block, past, n):
    chosen = past.fill(small("oracle", block_size=block, budget=n * block)).choose(past.query)
    for b, h, keys, queries in past.heads_of_rows():
        weights = torch.softmax(queries @ keys.T * past.dim**-0.5, -1).mean(0)
        end = frontier(len(keys), block=block)
        scores = {p // block: float(weights[p : p + block].sum()) for p in range(SINK, end, block)}
        check_choice(chosen[b, h], scores, n, slack=1e-6)  # weights are at most 1


@given(past=pasts(whole=True))
def test_choosing_the_worst_page_fails_the_check(past):
    """The checks above can fail: a choice of the worst pages is refused wherever there is a choice."""
    for _, _, keys, queries in past.heads_of_rows():
        scores = {p: arkvale_score(page, queries) for p, page in pages(keys).items()}
        worst = sorted(scores, key=lambda p: scores[p])[:1]
        if scores and max(scores.values()) > scores[worst[0]] + 1e-3:
            with pytest.raises(AssertionError):
                check_choice(torch.tensor(worst), scores, 1, slack=1e-4)


# ---------------------------------------------------------------- (c) how tokens come in makes no difference


def lives(layer: Layer) -> dict:
    """Everything that counts: the index, the ring rows and the pool rows that hold a token, the lengths."""
    s, at = layer.state, layer.state.lengths
    near = ring_positions(s.store.ring.shape[2], at.length, at.ring_begin, at.sink) >= 0
    row = torch.arange(s.store.pool.shape[2], device=DEVICE)
    far = (row >= at.sink) & (row < at.ring_begin[:, None])
    kept = lambda m, x: x.masked_fill(~m[:, None, :, None, None], 0)  # noqa: E731
    index = {n: getattr(s.digests, n).float() for n in ("centre", "spread", "origin")} if "digests" in s.buffers else {}
    lengths = {"seq_len": layer.row_lengths.seq_len, "length": at.length, "ring_begin": at.ring_begin}
    return {"ring": kept(near, s.store.ring), "pool": kept(far, s.store.pool), **index, **lengths}


# What these methods retrieve together depends on where prompts begin and end.
BY_PROMPT = (
    "clusterkv", "h2o", "icecache", "louiskv", "magicpig", "pqcache", "prkv", "prkv_static", "raas", "retroinfer",
    "shadowkv", "snapkv",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in METHODS if name not in BY_PROMPT])
@given(past=pasts(), other=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_pieces_and_single_tokens_leave_the_same_state(name, past, other):
    """The same tokens as one prompt, as drawn, one by one, and in another cut."""
    method = small(name, **METHODS[name], budget=16)
    cut = []
    while sum(cut) < past.length:
        cut.append(min(other[len(cut) % len(other)], past.length - sum(cut)))
    states = []
    for sizes in ([past.length], past.sizes, [1] * past.length, cut):
        past.sizes = sizes
        layer = past.fill(method)
        states.append(lives(layer))
        if method.traits.attends == "selected":
            states[-1]["chosen"] = layer.choose(past.query)
    for state in states[1:]:
        for part, value in states[0].items():
            assert torch.equal(state[part], value), part


def test_different_tokens_leave_a_different_state():
    """The comparison above can fail, in every part."""
    one, two = (lives(Past(80, 3, 2, [80], seed, False).fill(small("quest"))) for seed in (1, 2))
    assert [part for part in one if torch.equal(one[part], two[part])] == ["seq_len", "length", "ring_begin"]


def test_steps_read_no_property_through_super():
    """torch 2.11 cannot trace one, and what the CPU has can. `least_capability` is read by `patch`."""
    for path in sorted((Path(torchsparsekv.__file__).parent / "_methods").glob("*.py")):
        tree = ast.parse(path.read_text())
        called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        for n in ast.walk(tree):
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Call) and id(n) not in called:
                of_super = isinstance(n.value.func, ast.Name) and n.value.func.id == "super"
                assert not of_super, f"{path.name}: super().{n.attr}"
