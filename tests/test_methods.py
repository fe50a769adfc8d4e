"""The methods themselves, on one layer and without a model: what they find, and that they choose as defined."""
from dataclasses import dataclass

import pytest
import torch
from cases import METHODS
from hypothesis import given
from hypothesis import strategies as st
from world import DEVICE

from torchsparsekv.method import Attention, all_methods, make_method
from torchsparsekv.ops.attend._rows import ring_positions
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.state import Clock, Geometry, LayerState
from torchsparsekv.zoo.quest import Quest

SINK, WINDOW, BLOCK = 8, 6, 4
SMALL = dict(sink=SINK, window=WINDOW, block_size=BLOCK)


class Layer:
    """One layer of one method, driven as the seam drives it."""

    def __init__(self, method, *, batch=1, heads=2, group=1, dim=16, rows=256, left_pad=None, device=DEVICE):
        self.method, self.attention = method, Attention(scale=dim**-0.5)
        self.device, self.clock = device, Clock(method.timeline, batch, rows, device)
        self.clock.left_pad.copy_(torch.tensor(left_pad or [0] * batch))
        buffers = method.buffers(Geometry(batch, heads, dim, rows, torch.float32, group))
        self.state = LayerState(buffers, self.clock, device, pool_on_host=False)

    def feed(self, q, k, v):
        """New tokens; q [batch, query heads, tokens, dim]. One is a decode step, more are a prompt or part of one."""
        q, k, v = (t.to(self.device) for t in (q, k, v))
        self.clock.advance(q.shape[2])
        if q.shape[2] == 1:
            return self.method.decode(self.state, q, k, v, self.attention)
        return self.method.prefill(self.state, q, k, v, self.attention, last=True)

    def feed_parts(self, q, k, v, sizes):
        assert sum(sizes) == q.shape[2]
        return [self.feed(*t) for t in zip(*(x.split(list(sizes), 2) for x in (q, k, v)))]

    def select(self, q):
        return self.method.select(self.state, q.to(self.device), self.attention).cpu()


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
    assert int(layer.clock.retired[0]) > position, "still in the ring, where no method could miss it"
    return bool((out > 4.9).all())


def budget_of_two_pages(name):
    return make_method(name, **SMALL, budget=2 * BLOCK)


@pytest.mark.parametrize("where", PLANTED)
@pytest.mark.parametrize("name", ["quest", "arkvale", "oracle"])
def test_a_planted_key_is_found(name, where):
    assert finds(budget_of_two_pages(name), *PLANTED[where])


@pytest.mark.parametrize("where", PLANTED)
def test_streaming_does_not_find_it(where):
    assert not finds(budget_of_two_pages("streaming"), *PLANTED[where])


@dataclass(frozen=True, kw_only=True)
class Forgetful(Quest):
    """Quest that never updates its index."""

    def update(self, s, k) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Delayed(Quest):
    """Quest that indexes prompts only."""

    def update(self, s, k) -> None:
        if k.shape[2] > 1:
            super().update(s, k)


@pytest.mark.parametrize("where", [w for w, (position, _) in PLANTED.items() if position >= SINK + 2 * BLOCK])
def test_a_forgotten_update_is_noticed(where):
    """(An index of nothing scores every page alike, and the two first win the tie: there it would go unseen.)"""
    assert not finds(Forgetful(**SMALL, budget=2 * BLOCK), *PLANTED[where])


WHERE = ["in the ring when the prompt ended", "decoded", "last page of all", "everything decoded"]


@pytest.mark.parametrize("where", WHERE)
def test_a_forgotten_update_in_decode_is_noticed(where):
    assert not finds(Delayed(**SMALL, budget=2 * BLOCK), *PLANTED[where])


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


def arkvale_score(page, queries):
    centre = page.mean(0)
    radius = max(float((key - centre).norm()) for key in page)
    return max(float(q @ centre + q.norm() * radius) for q in queries)


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


@given(past=pasts(whole=True), n=st.integers(1, 12))
def test_quest_chooses_by_its_definition(past, n):
    method = make_method("quest", **SMALL, budget=n * BLOCK, digest="float32")
    chosen = past.fill(method).select(past.query)
    for b, h, keys, queries in past.heads_of_rows():
        want = best({p: quest_score(page, queries) for p, page in pages(keys).items()}, n)
        got = chosen[b, h]
        assert got[: len(want)].tolist() == want
        assert (got[len(want) :] == -1).all()


@given(past=pasts(), n=st.integers(1, 12))
def test_arkvale_chooses_by_its_definition(past, n):
    method = make_method("arkvale", **SMALL, budget=n * BLOCK, digest="float32")
    chosen = past.fill(method).select(past.query)
    for b, h, keys, queries in past.heads_of_rows():
        scores = {p: arkvale_score(page, queries) for p, page in pages(keys).items()}
        check_choice(chosen[b, h], scores, n, slack=1e-4)  # scores are below 60: eight bits over their fp32 rounding


@pytest.mark.parametrize("block", [1, BLOCK])
@given(past=pasts(), n=st.integers(1, 12))
def test_oracle_chooses_by_true_weights(block, past, n):
    method = make_method("oracle", sink=SINK, window=WINDOW, block_size=block, budget=n * block)
    chosen = past.fill(method).select(past.query)
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


# ---------------------------------------------------------------- (c) small digests are looser, never wrong

OUTLIERS = torch.tensor([0.0, 1e-3, 0.02, 1.0, 7.0, 30.0, 447.0, 449.0, 600.0])


def bounds(name: str, digest: str, past: Past) -> torch.Tensor:
    """What the index says of every retrievable page, [row, head, page]."""
    layer = past.fill(make_method(name, **SMALL, budget=256, digest=digest))
    s = layer.state
    scores, _ = bound_scores(past.query.to(DEVICE), s.centre, s.spread, s.clock.retired, SINK, BLOCK)
    return scores[..., SINK // BLOCK : frontier(past.length) // BLOCK].cpu().double()


def products(past: Past) -> torch.Tensor:
    """q.k of every key of every retrievable page, [row, head, page, token], in double precision."""
    keys = past.k[:, :, SINK : frontier(past.length)].double().unflatten(2, (-1, BLOCK))
    return (keys @ past.query.double()[:, :, None].transpose(-1, -2)).squeeze(-1)


def tighten(past: Past, name: str) -> None:
    """Give every page a key for which its exact bound is reached, so that anything short of the bound is seen."""
    q = past.query  # of one head a group
    for p in range(SINK, frontier(past.length), BLOCK):
        page = past.k[:, :, p : p + BLOCK]
        if name == "quest":  # a corner of the box
            page[:, :, 0] = page.abs().amax(2) * q[:, :, 0].sign()
        else:  # the ball's pole in the direction of the query, and its opposite, so that the mean stays
            centre, radius = page[:, :, 2].clone(), page[:, :, 3].norm(dim=-1, keepdim=True)
            pole = radius * torch.nn.functional.normalize(q[:, :, 0], dim=-1)
            page[:, :, 0], page[:, :, 1], page[:, :, 3] = centre + pole, centre - pole, centre


def size(past: Past) -> torch.Tensor:
    """The largest sum of |q_d k_d| of any key: what the rounding of fp32 products and sums is relative to."""
    return (past.k.double().abs() @ past.query.double().abs().transpose(-1, -2)).amax()


@pytest.mark.parametrize("digest", ["float8", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["quest", "arkvale"])
@given(seed=st.integers(0, 999), outliers=st.booleans())
def test_bounds_hold_for_every_key(name, digest, seed, outliers):
    past = Past(80, 0, 1, [71] + [1] * 9, seed, False)
    if outliers:
        g = torch.Generator().manual_seed(seed)
        sign = torch.randint(0, 2, past.k.shape, generator=g) * 2 - 1
        past.k = OUTLIERS[torch.randint(0, len(OUTLIERS), past.k.shape, generator=g)] * sign
    tighten(past, name)
    rounding = 1e-6 * size(past)  # 16 products and sums of fp32, each to 6e-8
    assert (bounds(name, digest, past)[..., None] >= products(past) - rounding).all()


@pytest.mark.parametrize("name", ["quest", "arkvale"])
@given(seed=st.integers(0, 999))
def test_small_digests_are_not_much_looser(name, seed):
    """Else a bound of infinity would pass. Rounding the centre moves it by 1/16, the spread grows by that and 1/8."""
    past = Past(80, 0, 1, [71] + [1] * 9, seed, False)
    exact, small = (bounds(name, digest, past) for digest in ("float32", "float8"))
    assert (small <= exact + 0.3 * size(past)).all()


def test_a_spread_beyond_fp8_is_still_a_bound():
    """+600 and -600 in one page: half the range does not fit, and clamped it would promise less than there is."""
    past = Past(80, 0, 1, [80], 0, False)
    past.k[:, :, 20] = 600 * past.query[:, :, 0].sign()
    past.k[:, :, 21] = -past.k[:, :, 20]
    assert (bounds("quest", "float8", past)[..., None] >= products(past)).all()


# ---------------------------------------------------------------- (d) how tokens come in makes no difference


def lives(layer: Layer) -> dict:
    """Everything that counts: the index, the ring rows and the pool rows that hold a token, the clock."""
    t, c = layer.method.timeline, layer.clock
    near = ring_positions(t.ring_rows, c.length, c.retired, t.sink) >= 0
    row = torch.arange(layer.state.pool.shape[2], device=DEVICE)
    far = (row >= t.sink) & (row < c.retired[:, None])
    spread = lambda m, x: x.masked_fill(~m[:, None, :, None, None], 0)  # noqa: E731
    index = {n: getattr(layer.state, n).float() for n in ("centre", "spread") if n in layer.state.buffers}
    clock = {n: getattr(c, n) for n in ("seq_len", "length", "retired")}
    return {"ring": spread(near, layer.state.ring), "pool": spread(far, layer.state.pool), **index, **clock}


@pytest.mark.parametrize("name", [name for name in METHODS if not all_methods()[name].regroups])
@given(past=pasts(), other=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_pieces_and_single_tokens_leave_the_same_state(name, past, other):
    """The same tokens as one prompt, as drawn, one by one, and in another cut."""
    method = make_method(name, **{**SMALL, **METHODS[name], "sink": SINK}, budget=16)
    cut = []
    while sum(cut) < past.length:
        cut.append(min(other[len(cut) % len(other)], past.length - sum(cut)))
    states = []
    for sizes in ([past.length], past.sizes, [1] * past.length, cut):
        past.sizes = sizes
        layer = past.fill(method)
        states.append(lives(layer))
        if method.retrieves:
            states[-1]["chosen"] = layer.select(past.query)
    for state in states[1:]:
        for part, value in states[0].items():
            assert torch.equal(state[part], value), part


def test_different_tokens_leave_a_different_state():
    """The comparison above can fail, in every part."""
    one, two = (lives(Past(80, 3, 2, [80], seed, False).fill(make_method("quest", **SMALL))) for seed in (1, 2))
    assert [part for part in one if torch.equal(one[part], two[part])] == ["seq_len", "length", "retired"]
