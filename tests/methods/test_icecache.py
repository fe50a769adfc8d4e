"""IceCache on one layer grows the tree of its paper and searches it as the plain Python of support/dci_tree.py does."""
import math

import pytest
import torch
from dci_tree import ROOT, DciTree, page_select
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from layer import Layer
from models import tiny
from world import DEVICE

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.ops._machinery.chain import use_kernels
from torchsparsekv.ops.icecache._residual import decode
from torchsparsekv.ops.icecache._tree import EMPTY_SPAN, NODES_ONLY_SPAN, decode_nodes, levels_of, self_mark
from torchsparsekv.ops.icecache.insert_page import insert_page
from torchsparsekv.ops.icecache.views import FieldOfView, Promotion
from torchsparsekv.ops.icecache.visit_nodes import MOST_NODES
from torchsparsekv.ops.store.rows import keys_of, ring_row, rows_of, values_of
from torchsparsekv.ops.store.views import Leaving
from torchsparsekv.state import Geometry

SINK, WINDOW, PAGE, DIM = 8, 6, 4, 16
SIZES = dict(sink=SINK, window=WINDOW, page_size=PAGE, budget=32, r=0.25, least_view=2, rank_from="keys")
SLACK = 2e-3  # in the lifted space: the root of a rounding error of fp32 at the longest key


class Life:
    """A layer, all that it was fed, and the tree that algorithms 1 and 2 of the paper make of it. The first number of a
    value is the number of its token, so that copies can be told apart."""

    def __init__(self, *, heads=1, group=1, rows=512, seed=0, **hyper):
        self.method = make_method("icecache", **{**SIZES, **hyper})
        self.layer = Layer(self.method, heads=heads, group=group, dim=DIM, rows=rows)
        self.heads, self.group, self.rows = heads, group, rows
        self.g = torch.Generator().manual_seed(seed)
        self.keys = torch.zeros(heads, 0, DIM)
        self.trees = [DciTree() for _ in range(heads)]

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    @property
    def begin(self) -> int:
        return int(self.layer.state.lengths.ring_begin[0])

    def queries(self, tokens: int = 1) -> torch.Tensor:
        return torch.randn(1, self.heads * self.group, tokens, DIM, generator=self.g)

    def feed(self, tokens: int, length: float = 1.0, *, follow: bool = True) -> None:
        """New tokens with keys `length` times as long; then what left the ring is looked for in the tree."""
        tokens = min(tokens, self.rows - self.length)
        if tokens == 0:
            return
        k = torch.randn(1, self.heads, tokens, DIM, generator=self.g) * length
        v = torch.zeros_like(k)
        v[..., 0] = torch.arange(self.length, self.length + tokens)
        before = self.begin if self.length else SINK
        self.keys = torch.cat([self.keys, k[0]], 1)
        self.layer.feed(self.queries(tokens), k, v)
        if follow and self.begin > before:
            self.follow(range(before, self.begin), together=tokens > 1)

    def follow(self, tokens: range, *, together: bool) -> None:
        """Into the plain trees: the tokens of a prompt at once, otherwise one after the other. The parents that the
        layer gave them must be nearest, and are taken over."""
        levels = levels_of(torch.tensor(list(tokens), dtype=torch.long), self.method.promoted(self.rows)).tolist()
        for h, tree in enumerate(self.trees):
            given = self.parents(h, tokens)
            for t in tokens:  # c is that of all tokens of a page or a prompt
                tree.add(t, self.keys[h, t])
            if together:
                tree.level.update(zip(tokens, levels))
            for t, level in zip(tokens, levels):
                tree.level[t] = level
                distances = tree.distances(t)
                assert (given[t] == ROOT) == (not distances)
                assert given[t] == ROOT or distances[given[t]] <= min(distances.values()) + SLACK
                tree.parent[t] = given[t]

    # ---- what the layer says

    def tokens_of_rows(self, h: int) -> dict[int, int]:
        """The token in each pool row that the index knows."""
        s = self.layer.state
        number = values_of(s.store.pool)[0, h, :, 0]
        return {row: int(number[row]) for row in (s.leaves.node[0, h] != -1).nonzero()[:, 0].tolist()}

    def parents(self, h: int, tokens: range) -> dict[int, int]:
        """The parents of these tokens, as tokens."""
        s, found = self.layer.state, dict[int, int]()
        for row, t in self.tokens_of_rows(h).items():
            if t in tokens:
                node = int(s.leaves.node[0, h, row])
                node = int(s.tree.parent[0, h, self_mark(node)]) if node < -1 else node
                same = (self.keys[h].to(DEVICE) == s.tree.key[0, h, node]).all(-1).nonzero()
                found[t] = int(same[0, 0]) if node else ROOT
        return found

    def pages(self, h: int) -> dict[int, int]:
        return {t: row // PAGE for row, t in self.tokens_of_rows(h).items()}


class Structure(RuleBasedStateMachine):
    """Prompts, single tokens and second turns in any order, with keys that grow, and few pages to overflow into."""

    @initialize(
        seed=st.integers(0, 99), growth=st.sampled_from([0.0, 0.05, 0.5]), levels=st.integers(2, 4),
        promotion=st.sampled_from(["quota", "random"]), rank_from=st.sampled_from(["codes", "keys"]),
    )  # fmt: skip
    def begin(self, seed, growth, levels, promotion, rank_from):
        torch.manual_seed(0)
        hyper = dict(growth=growth, levels=levels, promotion=promotion, seed=seed, rank_from=rank_from)
        self.life = Life(heads=2, group=2, rows=256, **hyper)

    @rule(tokens=st.integers(1, 60), length=st.sampled_from([1.0, 0.2, 3.0]))
    def many(self, tokens, length):
        self.life.feed(tokens, length)

    @rule(tokens=st.integers(1, 12), length=st.sampled_from([1.0, 4.0]))
    def one_by_one(self, tokens, length):
        for _ in range(tokens):
            self.life.feed(1, length)

    @invariant()
    def every_token_is_in_one_page(self):
        life, s = self.life, self.life.layer.state
        for h in range(life.heads):
            held = life.tokens_of_rows(h)
            assert sorted(held.values()) == list(range(SINK, max(life.begin, SINK)))
            for row, t in held.items():
                assert torch.equal(keys_of(s.store.pool)[0, h, row].cpu(), life.keys[h, t])
                self.check_leaf(h, row, life.keys[h, t])

    def check_leaf(self, h, row, key):
        s = self.life.layer.state
        if self.life.method.rank_from == "keys":
            assert torch.equal(s.leaves.key[0, h, row].cpu(), key)
            return
        # Within half a level of the largest difference, and what fp16 rounds of that; a node itself differs by nothing.
        node = int(s.leaves.node[0, h, row])
        base = self_mark(node) if node < -1 else node
        assert base == node or torch.equal(s.tree.key[0, h, base].cpu(), key)
        of = decode_nodes(s.tree.code[0, h, base], s.tree.scale[0, h, base]).cpu()
        want = key if base == node else of
        kept = of + decode(s.leaves.key[0, h, row], s.leaves.scale[0, h, row], DIM).cpu()
        assert (kept - want).abs().max() <= (want - of).abs().max() * (0.5 / 7.5 + 2e-3) + 1e-6

    @invariant()
    def fills_are_what_is_there(self):
        s = self.life.layer.state
        held = (s.leaves.node != -1).unflatten(2, (-1, PAGE))
        assert torch.equal(held.sum(-1).int(), s.leaves.fill)
        assert torch.equal(held, torch.arange(PAGE, device=DEVICE) < s.leaves.fill[..., None])

    @invariant()
    def spans_are_of_all_nodes_of_a_page(self):
        """Those of its children; with a token that is a node itself, whose parent may be any, from the root on."""
        leaves = self.life.layer.state.leaves
        for nodes, span in zip(leaves.node.view(-1, PAGE).tolist(), leaves.span.flatten().tolist()):
            of = [u for u in nodes if u >= 0] + [0] * (min(nodes) < -1)
            assert span == (min(of) | max(of) << 16 if max(nodes) >= 0 else NODES_ONLY_SPAN if of else EMPTY_SPAN)

    @invariant()
    def copies_are_as_the_pool(self):
        s = self.life.layer.state
        pages = s.store.pool.unflatten(2, (-1, PAGE))
        for b, h, slot in (s.hot.block_of >= 0).nonzero().tolist():
            page = int(s.hot.block_of[b, h, slot])
            n = int(s.leaves.fill[b, h, page])
            assert torch.equal(s.hot.rows[b, h, slot, :n], pages[b, h, page, :n])


TestStructure = Structure.TestCase
TestStructure.settings = settings(max_examples=6, stateful_step_count=8, deadline=None)


def a_page_leaves(layer: Layer, keys: torch.Tensor, old: int, region: int) -> None:
    """What a decode step does to the index when the tokens from `old` on leave; keys [1, heads, tokens, dim]."""
    s, page = layer.state, layer.method.block_size
    at = torch.arange(old, old + page)
    new = keys[:, :, at].to(DEVICE)
    s.store.ring[:, :, ring_row(at, s.lengths.sink, s.store.ring.shape[2])] = rows_of(new, new)
    s.store.pool[:, :, at] = rows_of(new, new)
    for t, n in zip(s.lengths, (old, old + page + WINDOW, old, old + page)):
        t.fill_(n)
    insert_page(s.store, s.hot, s.tree, s.leaves, s.lengths, layer.method.promoted(region), region)


def test_no_token_is_lost_over_many_insertions():
    """10,000 of them, with keys that grow longer; more pages overflow than there are, and the rest stay as they were
    generated."""
    sizes = dict(growth=0.1, r=1 / 16, rank_from="codes", page_size=16, sink=16)
    method = make_method("icecache", **{**SIZES, **sizes})
    page, end = method.block_size, 16 + 640 * 16
    layer = Layer(method, heads=1, dim=DIM, rows=end)
    keys = torch.randn(1, 1, end, DIM, generator=torch.Generator().manual_seed(0))
    keys *= torch.linspace(1, 9, end)[:, None]
    s = layer.state
    for old in range(method.sink, end, page):
        a_page_leaves(layer, keys, old, end)
    free = s.leaves.fill.shape[2] - end // page - int(s.tree.page_count)
    assert 0 <= free < page  # there were not enough
    assert int((s.leaves.fill[0, 0, : end // page] == page).sum()) > 500  # the rest
    held = s.leaves.node[0, 0] != -1
    assert torch.equal(held.unflatten(0, (-1, page)).sum(-1).int(), s.leaves.fill[0, 0])
    got, want = keys_of(s.store.pool)[0, 0, held].cpu(), keys[0, 0, method.sink :]
    assert torch.equal(got[got[:, 0].argsort()], want[want[:, 0].argsort()])
    assert float(s.tree.max_norm2) == pytest.approx(float(want.square().sum(-1).max()), rel=1e-5)


@pytest.mark.parametrize("promotion", ["quota", "random"])
def test_same_seed_grows_the_same_tree(promotion):
    def state(seed):
        life = Life(promotion=promotion)
        life.method = make_method("icecache", **SIZES, promotion=promotion, seed=seed)
        life.layer.method = life.method
        life.feed(100)
        for _ in range(20):
            life.feed(1)
        return life.layer.state

    one, again, other = state(3), state(3), state(4)
    for view in ("tree", "leaves"):
        for x, y in zip(getattr(one, view), getattr(again, view)):
            assert torch.equal(x, y)
    assert not torch.equal(one.leaves.node, other.leaves.node)


@pytest.mark.parametrize("rank_from", ["codes", "keys"])
def test_kernels_grow_the_same_tree_as_references(rank_from):
    """A prompt and pages that leave, by the references and by the kernels. With integer keys no rounding tells them
    apart."""
    keys = (torch.randn(1, 1, 120, DIM, generator=torch.Generator().manual_seed(0)) * 8).round()
    states = []
    for kind in ("reference", "triton"):
        method = make_method("icecache", **{**SIZES, "rank_from": rank_from, "seed": 1})
        layer = Layer(method, heads=1, dim=DIM, rows=120)
        layer.row_lengths.advance(60)
        with use_kernels(kind):
            leaving = Leaving(keys[:, :, :60].to(DEVICE), layer.state.store.pool)
            method.prompt(layer.state, keys[:, :, :60], leaving, join=True)
            for old in range(60 - WINDOW - 2, 100, PAGE):
                a_page_leaves(layer, keys * 1.5, old, 120)
        states.append(layer.state)
    for view in ("tree", "leaves", "store"):
        for field, x, y in zip(getattr(states[0], view)._fields, *(getattr(s, view) for s in states)):
            assert torch.equal(x, y), f"{view}.{field}"
    assert int(states[0].tree.page_count) > 2


@given(every=st.integers(2, 40), seed=st.integers(0, 99))
def test_promotion_by_quota_promotes_one_of_every_group(every, seed):
    level = levels_of(torch.arange(every * every * 3), Promotion(every, 0, 3, seed))
    assert ((level > 1).unflatten(0, (-1, every)).sum(-1) == 1).all()
    assert ((level > 2).unflatten(0, (-1, every * every)).sum(-1) == 1).all()


def test_promotion_by_chance_promotes_its_share():
    level = levels_of(torch.arange(100_000), Promotion(0, (1 << 31) // 5, 3, 7))
    assert abs(float((level > 1).float().mean()) - 0.2) < 0.01
    assert abs(float((level > 2).float().mean()) - 0.04) < 0.005


# ---------------------------------------------------------------- choice


def lived(group: int, view: float, **hyper) -> Life:
    life = Life(heads=2, group=group, field_of_view=view, **hyper)
    life.feed(150)
    for _ in range(40):
        life.feed(1)
    life.feed(30)
    for _ in range(5):
        life.feed(1)
    return life


def check_choice(life: Life, expanded) -> None:
    shown = [tree.in_four_bits() if life.method.rank_from == "codes" else None for tree in life.trees]
    for _ in range(5):
        q = life.queries()
        got = life.layer.choose(q)[0]
        for h in range(life.heads):
            heads = q[0, h * life.group : (h + 1) * life.group, 0].double()
            tree, nodes = life.trees[h], life.trees[h].nodes_in_eight_bits()
            ranked = [tree.exact_search(x, expanded(tree), shown[h], nodes, life.method.view.min_nodes) for x in heads]
            want = page_select(ranked, life.pages(h), life.method.budget // PAGE)
            ids = [x for x in got[h].tolist() if x >= 0]
            assert sorted(ids) == sorted(want)


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("levels", [2, 3])
def test_visiting_all_nodes_equals_brute_force(group, levels):
    """Of all tokens that left the ring the best by q.k, whatever the tree."""
    life = lived(group, 1.0, levels=levels)

    def everything(tree):
        assert len(tree.exact_search(torch.zeros(DIM).double(), None)) == life.begin - SINK
        return None

    check_choice(life, everything)


@pytest.mark.parametrize("rank_from", ["codes", "keys"])
@pytest.mark.parametrize(("group", "levels"), [(1, 2), (8, 2), (8, 3)])
def test_visiting_some_nodes_equals_an_exact_search_of_each_level(group, levels, rank_from):
    life = lived(group, 0.2, levels=levels, rank_from=rank_from, least_view=4)

    def some(tree):
        count = {at: sum(level == at for level in tree.level.values()) for at in range(2, levels + 1)}
        return {at: max(4, math.ceil(0.2 * n)) for at, n in count.items()}

    seen = life.trees[0].exact_search(torch.ones(DIM).double(), some(life.trees[0]))
    assert 0 < len(seen) < (life.begin - SINK) / 2  # else the test would say nothing
    check_choice(life, some)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("hyper", "says"),
    [
        (dict(r=0.0), "r must be between 0 and 1"),
        (dict(r=1.0), "r must be between 0 and 1"),
        (dict(budget=0), "budget must be at least"),
        (dict(budget=2, page_size=4), "budget must be at least 4"),
        (dict(r=-0.5), "r must be between 0 and 1"),
        (dict(r=2), "r must be between 0 and 1"),
        (dict(levels=1), "levels must be from 2"),
        (dict(levels=0), "levels must be from 2"),
        (dict(rank_from="bits"), "rank_from must be one of codes, keys"),
        (dict(reuse_every=0), "reuse_every must be at least 1"),
        (dict(page_size=12), "page_size must be a power of two"),
        (dict(page_size=128, budget=128), "page_size must be from 1 to 64"),
        (dict(field_of_view=1.5), "field_of_view must be from 0 to 1"),
        (dict(growth=-0.1), "growth must be from 0 to 1"),
        (dict(promotion="none"), "promotion must be one of quota, random"),
        (dict(seed=1 << 16), "seed must be from 0"),
    ],
)
def test_wrong_hyper_parameters_are_refused(hyper, says):
    with pytest.raises(ValueError, match=says):
        make_method("icecache", **hyper)


def test_short_prompt_is_dense():
    """Less than a page beyond window and sinks: nothing can be retrieved, and all of it is attended to."""
    life = Life()
    life.feed(SINK + WINDOW + PAGE - 2)
    life.feed(1)
    assert (life.layer.choose(life.queries()) == -1).all()
    assert life.begin == SINK


def test_number_of_pages_follows_the_budget():
    found = {b: make_method("icecache", budget=b).block_size for b in (16, 32, 64, 128, 256, 512, 1024)}
    assert found == {16: 1, 32: 2, 64: 4, 128: 4, 256: 8, 512: 16, 1024: 16}


def test_numbers_of_expanded_nodes_are_pinned():
    """A tenth of the nodes; where that is more than 640 these, or those with eight times the budget in children."""
    for budget, most in ((64, 640), (256, 640), (1024, 640), (4096, 2048)):
        assert make_method("icecache", budget=budget).view == FieldOfView(100_000, 32, most, 2)
    assert make_method("icecache", budget=1024, r=0.25).view.max_nodes == 2048
    assert make_method("icecache", least_view=700).view == FieldOfView(100_000, 700, 700, 2)
    assert make_method("icecache", field_of_view=0.1).view == FieldOfView(100_000, 32, MOST_NODES, 2), "as it was given"
    assert make_method("icecache", field_of_view=1.0, least_view=1).view == FieldOfView(1_000_000, 1, MOST_NODES, 2)
    beyond = FieldOfView(100_000, MOST_NODES, MOST_NODES, 2)
    assert make_method("icecache", field_of_view=0.1, least_view=2 * MOST_NODES).view == beyond
    assert make_method("icecache", budget=MOST_NODES * 16).view.max_nodes == MOST_NODES


@pytest.mark.parametrize("length", [1000, 1007, 1008])
@torch.no_grad()
def test_full_budget_is_exact_at_any_length(length):
    """The default one is lowered to whole pages of what the cache holds, and is enough still."""
    model = tiny(max_position_embeddings=2048)
    for name, p in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            p.mul_(6)  # attention that is not flat
    ids = torch.randint(3, 97, (1, 740), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    want = model(ids, use_cache=False).logits[:, 700:]
    few = dict(field_of_view=0.0, least_view=1)
    with torchsparsekv.patch(model, "icecache", max_length=length, skip_layers=0, **few) as handle:
        cache = handle.make_cache(1)
        model(ids[:, :700], past_key_values=cache)
        steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(700, 740)]
    torch.testing.assert_close(torch.cat(steps, 1), want, atol=1e-4, rtol=1e-4)


def test_full_budget_is_the_number_of_retrievable_tokens():
    """Beside sink and window; a page less is a budget like any other."""
    g = Geometry(1, 1, 16, 1024, torch.float32)
    for budget, pages in ((1024 - 64 - 256, 1024 // 16 * 5 // 4), (1024 - 64 - 256 - 16, (1024 - 64 - 256 - 16) // 16)):
        assert make_method("icecache", budget=budget).buffers(g)["hot"].chosen.shape[2] == pages


def test_row_in_a_batch_has_the_bits_of_the_row_alone_with_an_int8_pool():
    """Given equal inputs. Models give a row inputs that differ in the last bit, and int8 may round these to another
    number."""
    g, prompt, steps = torch.Generator().manual_seed(1), 90, 12
    q, k, v = (torch.randn(3, heads, prompt + steps, 16, generator=g) for heads in (4, 2, 2))
    parts, hyper = [1] * steps, dict(sink=4, window=8, budget=16, page_size=4)
    sizes, pads = dict(heads=2, group=2, rows=192, pool_dtype=torch.int8), [0, 23, 57]
    batch = Layer(make_method("icecache", **hyper), batch=3, left_pad=pads, **sizes)
    together = batch.feed_parts(q, k, v, [prompt, *parts])
    for b, pad in enumerate(pads):
        own = (x[b : b + 1, :, pad:] for x in (q, k, v))
        alone = Layer(make_method("icecache", **hyper), **sizes).feed_parts(*own, [prompt - pad, *parts])
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(together[1:], alone[1:]))
