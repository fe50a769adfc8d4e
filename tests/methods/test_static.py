"""Static sets equal their definition on raw queries and keys, and no token is lost when they move."""
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer import BLOCK, SINK, WINDOW, Layer, frontier
from models import MAX_LENGTH, greedy_logits, prompts, tiny
from static_story import DIM, HEADS, Story, small
from world import DEVICE

import torchsparsekv
from torchsparsekv.ops._machinery.chain import tensors
from torchsparsekv.ops.index.block_bounds import VOLUMES, bounds
from torchsparsekv.ops.index.copy_keys import as_copied
from torchsparsekv.ops.prkv.choose_static import window_scores
from torchsparsekv.ops.prkv.relocate import gathered, moves
from torchsparsekv.ops.store.rows import keys_of, values_of
from torchsparsekv.ops.store.views import Attention


def positions(layer: Layer, b: int, h: int, rows=None) -> list[int]:
    """Which tokens are in these rows of the pool."""
    found = values_of(layer.state.store.pool[b, h])[:, 0]
    return sorted(int(x) for x in (found if rows is None else found[rows]))


def static_of(layer: Layer, b: int, h: int) -> list[int]:
    """The static tokens, wherever the method keeps them."""
    s = layer.state.static
    count = int(s.count[b, h])
    if layer.method.name == "prkv_static":
        return s.ids[b, h, :count].tolist()
    return positions(layer, b, h, slice(SINK, SINK + count))


def digest(layer: Layer, b: int, h: int, page: int, dtype=torch.float32):
    """Of the tokens on a page that are at home; of all, where none is."""
    rows = range(page * BLOCK, (page + 1) * BLOCK)
    token = values_of(layer.state.store.pool[b, h])[:, 0]
    native = [r for r in rows if token[r] == r] or list(rows)
    s = layer.state
    keys, origin = keys_of(s.store.pool[b, h]).cpu()[native], s.digests.origin[b, h].cpu()
    return bounds(keys, origin, VOLUMES.index("mean-box"), dtype)


# ---------------------------------------------------------------- the set

METHODS = [("prkv_static", 20, {}), ("prkv", 20, dict(static_ratio=1.0)), ("prkv", 40, dict(static_ratio=0.5))]


@pytest.mark.parametrize(("name", "budget", "more"), METHODS)
@given(seed=st.integers(0, 999), observe=st.sampled_from([None, 1, 4]), group=st.sampled_from([1, 2, 3]))
def test_static_set_equals_the_definition_at_every_update(name, budget, more, seed, observe, group):
    story = Story(110, group, seed=seed)
    method = small(name, budget=budget, observe=observe, update_every=10, **more)
    layer = story.layer(method)
    story.feed(layer, 0, 70, whole=True)
    for at in range(71, 104):
        story.feed(layer, at - 1, at)
        last = at - (at - 71) % 10
        for b, h in story.heads():
            want = story.wanted(b, h, last, observe or WINDOW, 20, method.block_size)
            assert static_of(layer, b, h) == want, at
    assert (layer.state.static.updates == 4).all()


@pytest.mark.parametrize("name", ["prkv_static", "prkv"])
def test_static_set_without_an_interval_lasts_until_the_next_prompt(name):
    story = Story(130)
    more = dict(static_ratio=1.0) if name == "prkv" else {}
    layer = story.layer(small(name, budget=20, update_every=None, **more))
    story.feed(layer, 0, 70, whole=True)
    story.feed(layer, 70, 90)
    assert static_of(layer, 0, 0) == story.wanted(0, 0, 71, WINDOW, 20, layer.method.block_size)
    story.feed(layer, 90, 110, whole=True)
    story.feed(layer, 110, 111)
    assert static_of(layer, 0, 0) == story.wanted(0, 0, 111, WINDOW, 20, layer.method.block_size)
    assert story.wanted(0, 0, 111, WINDOW, 20, BLOCK) != story.wanted(0, 0, 71, WINDOW, 20, BLOCK)


def test_mean_query_would_give_another_set():
    """Two heads of a group want opposite things: their mean query wants neither, each of them its own key."""
    want = torch.nn.functional.normalize(torch.randn(DIM, generator=torch.Generator().manual_seed(0)), dim=0)
    keys = 0.05 * torch.randn(40, DIM, generator=torch.Generator().manual_seed(1))
    keys[7], keys[31] = 6 * want, -6 * want
    queries = torch.stack([8 * want, -8 * want]).expand(4, 2, DIM)
    a = Attention(DIM**-0.5)
    by_scores = window_scores(queries, keys, a).topk(2).indices.sort().values.tolist()
    by_queries = window_scores(queries.mean((0, 1), keepdim=True), keys, a).topk(2).indices.sort().values.tolist()
    assert by_scores == [7, 31] != by_queries


def test_steps_without_an_update_change_only_the_window():
    story = Story(100)
    layer = story.layer(small("prkv", budget=40, static_ratio=0.5, update_every=50))
    story.feed(layer, 0, 70, whole=True)
    story.feed(layer, 70, 72)
    s = layer.state
    pool, static = s.store.pool.clone(), [t.clone() for t in tensors(s.static)]
    queries = s.observed.queries.clone()
    story.feed(layer, 72, 73)
    names = [name for name, x in zip(s.static._fields, s.static) if isinstance(x, torch.Tensor)]
    changed = [n for n, a, b in zip(names, static, tensors(s.static), strict=True) if not torch.equal(a, b)]
    assert changed == []
    assert torch.equal(pool[:, :, :64], s.store.pool[:, :, :64])
    assert not torch.equal(queries, s.observed.queries)


def test_rows_within_the_budget_stay_complete():
    """Between two updates too: all tokens that can be retrieved are in the set as long as there is room."""
    story = Story(60, pads=(0,))
    layer = story.layer(small("prkv_static", budget=40))
    story.feed(layer, 0, 20, whole=True)
    for at in range(21, SINK + WINDOW + 41):
        story.feed(layer, at - 1, at)
        assert static_of(layer, 0, 0) == list(range(SINK, frontier(at, block=1)))


# ---------------------------------------------------------------- both ends


@pytest.mark.parametrize("hyper", [dict(static_ratio=0.0), dict(static_ratio=0.05)])
def test_static_ratio_0_equals_arkvale(hyper):
    """The same sinks, window, pages and digest: the same choices and the same bits, whole models too."""
    story = Story(110, seed=5)
    both = [small("prkv", budget=6 * BLOCK, **hyper), small("arkvale", budget=6 * BLOCK)]
    layers = [story.layer(m) for m in both]
    for layer in layers:
        story.feed(layer, 0, 70, whole=True)
    for at in range(70, 100):
        one, two = (story.feed(layer, at, at + 1) for layer in layers)
        assert torch.equal(one, two)
    one, two = (layer.choose(story.q[:, :, -1:]) for layer in layers)
    assert torch.equal(one, two)
    ids, mask = prompts(2, 60)
    logits = []
    for name, more in (("prkv", hyper), ("arkvale", {})):
        model = tiny()
        sizes = dict(max_length=MAX_LENGTH, skip_layers=1, sink=8, window=6, budget=24, block_size=4)
        with torchsparsekv.patch(model, name, **sizes, **more) as handle:
            logits.append(greedy_logits(model, ids, mask, 20, handle.make_cache(2)))
    assert torch.equal(*logits)


def test_static_ratio_1_equals_prkv_static():
    """Answers equal those of brute force: attention over the sinks, the set of the first step, and the ring."""
    story = Story(110, seed=2)
    layers = [story.layer(small(n, budget=20, update_every=None, **more)) for n, more in
              (("prkv_static", {}), ("prkv", dict(static_ratio=1.0)))]  # fmt: skip
    for layer in layers:
        story.feed(layer, 0, 70, whole=True)
    for at in range(71, 80):
        outs = [story.feed(layer, at - 1, at).cpu() for layer in layers]
        for b, h in story.heads():
            pad = story.pads[b]
            for layer, out in zip(layers, outs):
                block = layer.method.block_size
                seen = [*range(SINK), *story.wanted(b, h, 71, WINDOW, 20, block)]
                seen += range(frontier(at - pad, block=block), at - pad)
                rows = torch.tensor(seen) + pad
                q = story.q[b, h * 2 : h * 2 + 2, at - 1]
                w = (q @ story.k[b, h, rows].T * DIM**-0.5).softmax(-1)
                torch.testing.assert_close(out[b, h * 2 : h * 2 + 2, 0], w @ story.v[b, h, rows], atol=2e-4, rtol=1e-4)


def test_static_pages_and_the_best_others_are_chosen():
    """Static pages are always among those chosen, the others are the best of the rest by their digests."""
    story = Story(110)
    layer = story.layer(small("prkv", budget=6 * BLOCK, static_ratio=0.5, digest="float32", group="max"))
    story.feed(layer, 0, 90, whole=True)
    story.feed(layer, 90, 91)
    ids = layer.choose(story.q[:, :, 90:91])
    first = SINK // BLOCK
    for b, h in story.heads():
        chosen = ids[b, h].tolist()
        assert chosen[:3] == [first, first + 1, first + 2]
        assert len(set(chosen)) == 6
        pages = range(first + 3, int(layer.state.lengths.ring_begin[b]) // BLOCK)
        queries = story.q[b, h * 2 : h * 2 + 2, 90]
        scores = {}
        for p in pages:
            centre, spread = digest(layer, b, h, p)
            scores[p] = float((queries @ centre + queries.abs() @ spread).max())
        left = [scores[p] for p in pages if p not in chosen]
        assert min(scores[p] for p in chosen[3:]) >= max(left) - 1e-4


# ---------------------------------------------------------------- rows that move


@given(data=st.data(), fronts=st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_relocation_puts_the_set_in_front_and_others_at_home(data, fronts):
    """Set after set, of any sizes: nothing is lost, nothing is there twice; a token is away only if it or the one in
    its place is in the set; and no more pairs change places than twice the larger front."""
    rows, away, before = torch.arange(70), torch.full((60,), -1, dtype=torch.int32), 0
    for n in fronts:
        tokens = data.draw(st.permutations(range(5, 65)))[:n]
        ids = torch.isin(rows, torch.tensor(tokens, dtype=torch.int64)).nonzero()[:, 0].to(torch.int32)
        back, forth, stay = moves(ids, away, 5)
        for pairs in (back, forth):
            assert len({x for pair in pairs for x in pair}) == 2 * len(pairs), "the pairs are apart"
            for r, p in pairs:
                rows[[r, p]] = rows[[p, r]]
        away.fill_(-1)
        for r, p in (*forth, *stay):
            away[r - 5] = p
        assert sorted(rows.tolist()) == list(range(70))
        assert sorted(rows[5 : 5 + n].tolist()) == sorted(tokens)
        for r, token in enumerate(rows.tolist()):
            if r != token:
                assert rows[token] == r, "they have changed places"
                assert (r < 5 + n) != (token < 5 + n), "one of them is of the front,"
                assert (token if r < 5 + n else r) in tokens, "and the other one in the set"
        assert len(back) <= before
        assert len(forth) <= n
        before = n


@given(data=st.data(), front=st.integers(0, 60))
def test_relocation_of_the_paper_is_a_permutation(data, front):
    ids = torch.tensor(sorted(data.draw(st.permutations(range(5, 65)))[:front]), dtype=torch.int32)
    literal = gathered(ids, 5, 65).tolist()
    assert sorted(literal) == list(range(5, 65))
    assert sorted(literal[:front]) == ids.tolist()
    assert literal[front:] == sorted(literal[front:]), "those behind keep their order"


def test_no_token_is_lost_over_a_hundred_updates():
    """And digests are those of the tokens at home, and what is in the hot buffer is what is in the pool."""
    story = Story(250, pads=(0,), seed=3)
    layer = story.layer(small("prkv", budget=8 * BLOCK, static_ratio=0.5, update_every=1, digest="bfloat16"))
    story.feed(layer, 0, 120, whole=True)
    s = layer.state
    for at in range(120, 225):
        story.feed(layer, at, at + 1)
        end = int(s.lengths.ring_begin[0])
        for h in range(HEADS):
            assert positions(layer, 0, h, slice(SINK, end)) == list(range(SINK, end))
            order = values_of(s.store.pool[0, h])[SINK:end, 0].long().cpu()
            keys = keys_of(s.store.pool[0, h])[SINK:end].cpu()
            torch.testing.assert_close(keys, story.k[0, h, order], rtol=0, atol=0)
            for page in range(SINK // BLOCK, end // BLOCK):
                for got, want in zip(s.digests, digest(layer, 0, h, page, torch.bfloat16)):
                    torch.testing.assert_close(got[0, h, page].cpu(), want, rtol=0.01, atol=1e-6)
        for h in range(HEADS):
            for slot, block in enumerate(s.hot.block_of[0, h].tolist()):
                if block >= 0:
                    assert int(s.hot.slot_of[0, h, block]) == slot
                    pool = s.store.pool[0, h, block * BLOCK : (block + 1) * BLOCK]
                    assert torch.equal(s.hot.rows[0, h, slot], pool)
    assert (s.static.updates == 105).all()


@pytest.mark.parametrize("bias", [0.0, 100.0, 600.0])
@pytest.mark.parametrize("name", ["prkv", "prkv_static"])
def test_update_from_codes_chooses_nearly_the_same_set(name, bias):
    """It moves with the rows, and the sets hold nearly all of what the exact ones hold. Two channels may be far from 0
    at every token."""
    story = Story(220, pads=(0,), seed=7)
    story.k[..., 3:5] += bias
    story.q = story.q[:, :, :1] + 0.3 * story.q
    more = dict(static_ratio=0.5) if name == "prkv" else {}
    budget = 80 if name == "prkv" else 40
    layer = story.layer(small(name, budget=budget, update_every=1, update_from="codes", **more))
    story.feed(layer, 0, 150, whole=True)
    overlap, held = [], []
    for at in range(151, 200):
        story.feed(layer, at - 1, at)
        s, end = layer.state, int(layer.state.lengths.ring_begin[0])
        copied = as_copied(keys_of(s.store.pool), layer.method.origin(s)[:, :, None])
        assert torch.equal(s.coarse[:, :, SINK:end], copied[:, :, SINK:end])
        for h in range(HEADS):
            got, want = set(static_of(layer, 0, h)), story.wanted(0, h, at, WINDOW, 40, layer.method.block_size)
            queries = story.q[0, 2 * h : 2 * h + 2, at - WINDOW : at]
            score = window_scores(queries, story.k[0, h, : frontier(at, block=layer.method.block_size)],
                                  Attention(DIM**-0.5))  # fmt: skip
            overlap.append(len(got & set(want)) / 40)
            held.append(float(score[list(got)].sum() / score[want].sum()))
    assert sum(overlap) / len(overlap) > 0.95
    assert min(held) > 0.99


@pytest.mark.parametrize("name", ["prkv", "prkv_static"])
def test_second_turn_over_moved_rows_is_exact(name):
    """A prompt attends to everything, wherever it stands by then."""
    story = Story(150)
    layer = story.layer(small(name, budget=24, update_every=5))
    story.feed(layer, 0, 80, whole=True)
    story.feed(layer, 80, 110)
    out = story.feed(layer, 110, 140, whole=True).cpu()
    for b, h in story.heads():
        pad = story.pads[b]
        q = story.q[b, h * 2, 139]
        w = (q @ story.k[b, h, pad:140].T * DIM**-0.5).softmax(-1)
        torch.testing.assert_close(out[b, h * 2, -1], w @ story.v[b, h, pad:140], atol=2e-4, rtol=1e-4)


# ---------------------------------------------------------------- by itself


@pytest.mark.parametrize("per_head", [False, True])
@given(seed=st.integers(0, 999), observe=st.sampled_from([1, 3, 6]), budget=st.sampled_from([8, 20, 400]))
def test_automatic_share_is_the_overlap_of_two_queries(per_head, seed, observe, budget):
    story = Story(75, 2, seed=seed)
    story.q = story.q[:, :, :1] + 0.2 * story.q  # the queries of a window are alike
    hyper = dict(static_ratio="auto", per_head=per_head, observe=observe)
    layer = story.layer(small("prkv", budget=budget, **hyper))
    story.feed(layer, 0, 70, whole=True)
    story.feed(layer, 70, 71)
    for b, pad in enumerate(story.pads):
        both, end = [], frontier(71 - pad)
        for g in range(HEADS * 2):
            keys = story.k[b, g // 2, pad + SINK : pad + end].double()
            tops = [set((keys @ story.q[b, g, at].double()).topk(min(budget, len(keys))).indices.tolist())
                    for at in (71 - observe, 70)]  # fmt: skip
            both.append(len(tops[0] & tops[1]))
        for h in range(HEADS):
            mine = both[2 * h : 2 * h + 2] if per_head else both
            assert int(layer.state.static.target[b, h]) == BLOCK * int(sum(mine) / len(mine) / BLOCK)
            assert static_of(layer, b, h) == story.wanted(
                b, h, 71, observe, int(layer.state.static.target[b, h]), BLOCK
            )


def test_block_that_leaves_at_the_first_step_counts_for_the_share():
    """It is in the copy of the keys by then: all queries look at its tokens alone."""
    story = Story(66, pads=(0,))
    old, new = frontier(65), frontier(66)
    assert new == old + BLOCK
    story.q, story.k[:, :, old:new] = story.q.abs(), 8
    layer = story.layer(small("prkv", budget=BLOCK, static_ratio="auto", update_from="codes"))
    story.feed(layer, 0, 65, whole=True)
    story.feed(layer, 65, 66)
    assert (layer.state.static.target == BLOCK).all()
    assert all(static_of(layer, b, h) == list(range(old, new)) for b, h in story.heads())


def test_a_row_past_its_capacity_is_nan_and_nothing_moves():
    story = Story(80, pads=(0,))
    layer = Layer(small("prkv", budget=8, update_every=1), heads=HEADS, group=2, dim=DIM, rows=64, device=DEVICE)
    story.feed(layer, 0, 60, whole=True)
    story.feed(layer, 60, 64)
    pool = layer.state.store.pool.clone()
    out = story.feed(layer, 64, 66)
    assert out.isnan().all()
    assert torch.equal(pool, layer.state.store.pool)
