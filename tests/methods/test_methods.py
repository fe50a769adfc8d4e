"""The methods themselves, on one layer and without a model: what they find, and that they choose as defined."""
import ast
import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest
import torch
from cases import IN_BLOCKS, METHODS
from hypothesis import given
from hypothesis import strategies as st
from world import DEVICE

import torchsparsekv
from torchsparsekv._methods.arkvale import VOLUMES
from torchsparsekv._methods.quest import Quest
from torchsparsekv.method import all_methods, make_method
from torchsparsekv.ops.store.rows import ring_positions
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.state import Geometry, LayerState, RowLengths

SINK, WINDOW, BLOCK = 8, 6, 4
SMALL = dict(sink=SINK, window=WINDOW)
PAGES = dict(SMALL, block_size=BLOCK)


def small(name: str, **hyper):
    """A method of small sizes; one of single tokens has no block size."""
    return make_method(name, **{**(PAGES if name in IN_BLOCKS else SMALL), **hyper})


class Layer:
    """One layer of one method, driven as the seam drives it."""

    def __init__(self, method, *, batch=1, heads=2, group=1, dim=16, rows=256, left_pad=None, device=DEVICE):
        self.method, self.attention = method, Attention(scale=dim**-0.5)
        self.device, self.row_lengths = device, RowLengths(method.ring_plan, batch, rows, device)
        self.row_lengths.left_pad.copy_(torch.tensor(left_pad or [0] * batch))
        buffers = method.buffers(Geometry(batch, heads, dim, rows, torch.float32, group))
        self.state = LayerState(buffers, self.row_lengths, device, pool_on_host=False)

    def feed(self, q, k, v):
        """New tokens; q [batch, query heads, tokens, dim]. One is a decode step, more are a prompt or part of one."""
        q, k, v = (t.to(self.device) for t in (q, k, v))
        self.row_lengths.advance(q.shape[2])
        if q.shape[2] == 1:
            return self.method.decode(self.state, q, k, v, self.attention)
        return self.method.prefill(self.state, q, k, v, self.attention, last=True)

    def feed_parts(self, q, k, v, sizes):
        assert sum(sizes) == q.shape[2]
        return [self.feed(*t) for t in zip(*(x.split(list(sizes), 2) for x in (q, k, v)))]

    def choose(self, q):
        """Ids of the blocks that it would attend to."""
        return self.method.choose(self.state, q.to(self.device), self.attention).ids.cpu()


def frontier(length: int, sink=SINK, window=WINDOW, block=BLOCK) -> int:
    """Tokens in [sink, frontier) are retrievable: whole pages that leave `window` tokens behind them."""
    return sink + max(0, (length - sink - window) // block) * block


# ---------------------------------------------------------------- (a) a planted key is found

LENGTH = 160
LAST = frontier(LENGTH) - 1
# where the key is planted, and how many of the LENGTH tokens are prompt (the others are decoded one by one)
PLANTED = {
    "first page": (SINK, 120),
    "end of the first page": (SINK + BLOCK - 1, 120),
    "middle": (70, 120),
    "last page of the prompt": (frontier(120) - 1, 120),
    "in the ring when the prompt ended": (118, 120),
    "decoded": (131, 120),
    "last page of all": (LAST, 120),
    "everything in one prompt": (LAST, LENGTH - 1),
    "everything decoded": (70, 1),
}


def finds(method, position: int, prompt: int) -> bool:
    """Of 160 tokens one has a key along the last query and a value unlike the others': does the output show it?"""
    g = torch.Generator().manual_seed(position)
    dim, heads, group = 32, 2, 2
    noise = lambda h: torch.randn(1, h, LENGTH, dim, generator=g)  # noqa: E731
    q, k, v = noise(heads * group), 0.5 * noise(heads), 0.1 * noise(heads)
    wanted = torch.nn.functional.normalize(torch.randn(1, heads, dim, generator=g), dim=-1)
    k[:, :, position], v[:, :, position] = 12 * wanted, 5.0
    q[:, :, -1] = 12 * wanted.repeat_interleave(group, 1)  # its logit is 25, those of the others are below 10
    layer = Layer(method, heads=heads, group=group, dim=dim)
    out = layer.feed_parts(q, k, v, [prompt] + [1] * (LENGTH - prompt))[-1]
    assert int(layer.state.lengths.ring_begin[0]) > position, "still in the ring, where no method could miss it"
    return bool((out > 4.9).all())


FINDERS = [("quest", {}), ("oracle", {}), *(("arkvale", dict(volume=volume)) for volume in VOLUMES)]


@pytest.mark.parametrize("where", PLANTED)
@pytest.mark.parametrize(("name", "more"), FINDERS)
def test_a_planted_key_is_found(name, more, where):
    assert finds(small(name, budget=2 * BLOCK, **more), *PLANTED[where])


@pytest.mark.parametrize("where", PLANTED)
def test_streaming_does_not_find_it(where):
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
def test_a_forgotten_update_is_noticed(where):
    """(An index of nothing scores every page alike, and the two first win the tie: there it would go unseen.)"""
    assert not finds(Forgetful(**PAGES, budget=2 * BLOCK), *PLANTED[where])


WHERE = ["in the ring when the prompt ended", "decoded", "last page of all", "everything decoded"]


@pytest.mark.parametrize("where", WHERE)
def test_a_forgotten_update_in_decode_is_noticed(where):
    assert not finds(Delayed(**PAGES, budget=2 * BLOCK), *PLANTED[where])


# ---------------------------------------------------------------- (b) the choice is the paper's


@dataclass
class Past:
    """Random tokens of two rows, the first padded; `sizes` says how they come in."""

    length: int
    pad: int
    group: int
    sizes: list
    seed: int
    whole: bool  # whole numbers: every sum is exact whatever its order, and there are many ties

    heads = 2
    dim = 16

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)
        draw = lambda h, n: torch.randn(2, h, n, self.dim, generator=g)  # noqa: E731
        few = lambda t: (2 * t).round().clamp(-2, 2) if self.whole else t  # noqa: E731
        self.q = few(draw(self.heads * self.group, self.length))
        self.k, self.v = few(draw(self.heads, self.length)), draw(self.heads, self.length)
        self.query = few(draw(self.heads * self.group, 1))

    def fill(self, method) -> Layer:
        layer = Layer(method, batch=2, heads=self.heads, group=self.group, dim=self.dim, left_pad=[self.pad, 0])
        layer.feed_parts(self.q, self.k, self.v, self.sizes)
        return layer

    def heads_of_rows(self):
        """(row, kv head, its real keys [tokens, dim], the group's queries [group, dim]) in double precision."""
        for b, first in enumerate((self.pad, 0)):
            for h in range(self.heads):
                mine = slice(h * self.group, (h + 1) * self.group)
                yield b, h, self.k[b, h, first:].double(), self.query[b, mine, 0].double()


@st.composite
def pasts(draw, whole=False, most=90):
    sizes = draw(st.lists(st.one_of(st.just(1), st.integers(2, 40)), min_size=1, max_size=12))
    while sum(sizes) > most:
        sizes.pop()
    sizes = sizes or [most]
    length = sum(sizes)
    prompt, group = draw(st.integers(0, length - 1)), draw(st.sampled_from([1, 2, 3, 4]))
    return Past(length, prompt, group, sizes, draw(st.integers(0, 999)), whole)


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


def check_choice(chosen, scores: dict, n: int, slack: float):
    """Distinct retrievable pages, as many as may be, in order, none left out that is better (by more than rounding)."""
    ids = chosen[chosen >= 0].tolist()
    assert chosen.tolist() == ids + [-1] * (len(chosen) - len(ids)), "unused places stand at the end"
    assert ids == sorted(set(ids))
    assert set(ids) <= set(scores)
    assert len(ids) == min(n, len(scores))
    left = [scores[p] for p in scores if p not in ids]
    if left:
        assert min(scores[p] for p in ids) >= max(left) - slack


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


@pytest.mark.parametrize("volume", ["cuboid-mean", "cuboid"])
@given(past=pasts(whole=True), n=st.integers(1, 12))
def test_arkvale_chooses_exactly_by_its_definition(volume, past, n):
    method = small("arkvale", budget=n * BLOCK, digest="float32", volume=volume)
    check_exactly(method, lambda page, queries: arkvale_score(page, queries, volume), past)


@pytest.mark.parametrize("volume", VOLUMES)
@given(past=pasts(), n=st.integers(1, 12))
def test_arkvale_chooses_by_its_definition(volume, past, n):
    chosen = past.fill(small("arkvale", budget=n * BLOCK, digest="float32", volume=volume)).choose(past.query)
    for b, h, keys, queries in past.heads_of_rows():
        scores = {p: arkvale_score(page, queries, volume) for p, page in pages(keys).items()}
        check_choice(chosen[b, h], scores, n, slack=1e-4)  # scores are below 60: eight bits over their fp32 rounding


@given(past=pasts(), n=st.integers(1, 12))
def test_the_cuboid_of_arkvale_is_the_box_of_quest(past, n):
    hyper = dict(budget=n * BLOCK, digest="float32")
    of_quest = past.fill(small("quest", **hyper)).choose(past.query)
    assert torch.equal(past.fill(small("arkvale", volume="cuboid", **hyper)).choose(past.query), of_quest)


def test_every_volume_has_a_choice_of_its_own():
    past = Past(90, 0, 1, [90], 0, False)
    hyper = dict(budget=4 * BLOCK, digest="float32")
    chosen = [past.fill(small("arkvale", volume=v, **hyper)).choose(past.query) for v in VOLUMES]
    assert not any(torch.equal(x, y) for x, y in combinations(chosen, 2))


def test_the_volume_is_the_published_one_by_default():
    method = make_method("arkvale")
    assert (method.volume, method.shape, method.block_size) == ("cuboid-mean", "mean-box", 32)
    assert tuple(VOLUMES) == ("cuboid-mean", "cuboid", "ball")


@pytest.mark.parametrize("volume", ["sphere", "mean-box", "", None])
def test_another_volume_is_refused(volume):
    says = f"arkvale: volume must be one of cuboid-mean, cuboid, ball, got {volume!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        make_method("arkvale", volume=volume)


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
def test_one_page_of_the_definition_is_not_another(past):
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
    index = {n: getattr(s.digests, n).float() for n in ("centre", "spread")} if "digests" in s.buffers else {}
    lengths = {"seq_len": layer.row_lengths.seq_len, "length": at.length, "ring_begin": at.ring_begin}
    return {"ring": kept(near, s.store.ring), "pool": kept(far, s.store.pool), **index, **lengths}


@pytest.mark.parametrize("name", [name for name in METHODS if not all_methods()[name].regroups])
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
        if method.retrieves:
            states[-1]["chosen"] = layer.choose(past.query)
    for state in states[1:]:
        for part, value in states[0].items():
            assert torch.equal(state[part], value), part


def test_different_tokens_leave_a_different_state():
    """The comparison above can fail, in every part."""
    one, two = (lives(Past(80, 3, 2, [80], seed, False).fill(small("quest"))) for seed in (1, 2))
    assert [part for part in one if torch.equal(one[part], two[part])] == ["seq_len", "length", "ring_begin"]


def test_what_a_step_reads_is_no_property_of_super():
    """torch 2.11 cannot trace one, and what the CPU has can. `least_capability` is read by `patch`."""
    for path in sorted((Path(torchsparsekv.__file__).parent / "_methods").glob("*.py")):
        tree = ast.parse(path.read_text())
        called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        for n in ast.walk(tree):
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Call) and id(n) not in called:
                of_super = isinstance(n.value.func, ast.Name) and n.value.func.id == "super"
                assert not of_super or n.attr == "least_capability", f"{path.name}: super().{n.attr}"
