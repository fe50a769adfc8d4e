"""Layers of IceCache that reuse the selection of an earlier layer have its page layout and attend to its pages."""
import dataclasses

import pytest
import torch
from layer import Layer
from models import MAX_LENGTH, dense_logits, greedy_logits, prompts, tiny
from torch._dynamo.utils import counters
from world import DEVICE

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.ops.icecache.share_step import head_numbers
from torchsparsekv.ops.store.rows import keys_of, values_of
from torchsparsekv.probe import tapped
from torchsparsekv.state import Geometry, LayerState

OWN = dict(page_size=4, r=0.25, least_view=2, reuse_every=3)
FULL = dict(max_length=MAX_LENGTH, budget=MAX_LENGTH, sink=8, window=6, skip_layers=1, **OWN)
SMALL = {**FULL, "budget": 16}


class Follower(Layer):
    """A layer behind `anchor`: the same row lengths, which that one moves."""

    def __init__(self, anchor: Layer):
        self.__dict__.update(anchor.__dict__)
        batch, heads, _, _, dim = anchor.state.store.pool.shape
        g = Geometry(batch, heads, dim, 256, torch.float32, follows=True)
        self.state = LayerState(
            self.method.buffers(g), self.row_lengths, DEVICE, pool_on_host=False, anchor=anchor.state
        )

    def feed(self, q, k, v):
        q, k, v = (t.to(DEVICE) for t in (q, k, v))
        if q.shape[2] == 1:
            return self.method.decode(self.state, q, k, v, self.attention)
        return self.method.prefill(self.state, q, k, v, self.attention, last=True)


def numbered(g: torch.Generator, first: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """q, k, v of two heads; the first number of a value is that of its token."""
    q, k, v = (torch.randn(1, 2, tokens, 16, generator=g) for _ in range(3))
    v[..., 0] = torch.arange(first, first + tokens)
    return q, k, v


def heads_of(layer: Layer) -> torch.Tensor:
    """Of a follower, the head that each of its own follows."""
    return head_numbers(layer.state.shared.source_heads)[0]


def test_pages_of_a_follower_hold_the_same_tokens():
    """Through two prompts and single tokens, in the pool and in what was fetched of it."""
    g = torch.Generator().manual_seed(0)
    anchor = Layer(make_method("icecache", sink=8, window=6, budget=32, **OWN))
    layers, keys = [anchor, Follower(anchor)], [[], []]
    first = 0
    for tokens in (70, *[1] * 30, 40, *[1] * 20):
        for layer, own in zip(layers, keys):
            q, k, v = numbered(g, first, tokens)
            layer.feed(q, k, v)
            own.append(k)
        first += tokens
    s = anchor.state
    all_held = s.leaves.node[0] != -1
    assert int(all_held.sum()) == 2 * (int(s.lengths.ring_begin[0]) - 8)
    assert int(s.tree.page_count.min()) > 3
    for layer, own, of in zip(layers, keys, (torch.arange(2, device=DEVICE), heads_of(layers[1]))):
        rows, k, held = layer.state.store.pool[0], torch.cat(own, 2)[0].to(DEVICE), all_held[of]
        for h in range(2):
            token = values_of(rows)[h, held[h], 0].long()
            assert torch.equal(token, values_of(s.store.pool)[0, of[h], held[h], 0].long())
            assert torch.equal(keys_of(rows)[h, held[h]], k[h, token])
        hot, pages, fill = layer.state.hot, rows.unflatten(1, (-1, 4)), s.leaves.fill[0, of]
        for h, slot in (hot.block_of[0] >= 0).nonzero().tolist():
            page = int(hot.block_of[0, h, slot])
            n = int(fill[h, page])
            assert torch.equal(hot.rows[0, h, slot, :n], pages[h, page, :n])
    assert torch.equal(layers[1].state.shared.fill[0], fill)


def test_a_follower_has_no_index():
    method = make_method("icecache", **{**OWN, "budget": 64})
    g = Geometry(1, 2, 64, 4096, torch.bfloat16)
    own, follows = method.buffers(g), method.buffers(dataclasses.replace(g, follows=True))
    assert set(own) - set(follows) == {"tree", "leaves", "selected_pages"}
    assert set(follows) - set(own) == {"shared"}


@pytest.mark.parametrize("matched", [True, False])
def test_head_follows_the_head_with_the_most_shared_tokens(matched):
    """The follower is its anchor with the heads the other way round. A second prompt, whose heads are as they were,
    changes nothing: what is in the pool lies as those say."""
    g = torch.Generator().manual_seed(0)
    anchor = Layer(make_method("icecache", sink=8, window=6, budget=32, match_heads=matched, **OWN))
    follower = Follower(anchor)
    for turned in (True, False):
        q, k, v = numbered(g, 0, 70)
        anchor.feed(q, k, v)
        follower.feed(*((t.flip(1) for t in (q, k, v)) if turned else (q, k, v)))
        assert heads_of(follower).tolist() == ([1, 0] if matched else [0, 1])
    q, k, v = numbered(g, 140, 1)
    anchor.feed(q, k, v), follower.feed(q, k, v)
    pages = anchor.state.selected_pages[0]
    assert not torch.equal(pages[0], pages[1])
    assert torch.equal(follower.state.shared.pages[0], pages.flip(0) if matched else pages)


def test_heads_follow_their_own_number_without_a_prompt_in_the_pool():
    """A prompt that stays in the ring says nothing of a head, and later ones find pages laid out."""
    g = torch.Generator().manual_seed(0)
    anchor = Layer(make_method("icecache", sink=8, window=6, budget=32, **OWN))
    follower = Follower(anchor)
    for tokens in (12, *[1] * 20, 70):
        q, k, v = numbered(g, 0, tokens)
        anchor.feed(q, k, v), follower.feed(q.flip(1), k.flip(1), v)
    assert follower.state.shared.source_heads.tolist() == [[-1, -1]]


def test_follower_before_its_anchor_is_refused():
    anchor = Layer(make_method("icecache", sink=8, window=6, budget=32, **OWN))
    follower = Follower(anchor)
    with pytest.raises(RuntimeError, match="a sharing layer took a prompt before its selecting layer"):
        follower.feed(*numbered(torch.Generator(), 0, 20))


CHOOSERS = dict(reuse_every=1, selecting_layers=(1, 2, 6))


@torch.no_grad()
@pytest.mark.parametrize(
    ("more", "anchors"),
    [
        ({}, {2: 1, 3: 1, 5: 4, 6: 4}),
        (dict(layers={4: dict(budget=32)}), {2: 1, 3: 1, 6: 5, 7: 5}),
        (CHOOSERS, {3: 2, 4: 2, 5: 2, 7: 6}),
    ],
)
def test_followers_attend_to_the_ids_of_their_anchor(more, anchors):
    """Layers 1 to 7: 1 and 4 query, or where layer 4 is another method, it and 5; or those that are named."""
    model, (ids, mask) = tiny(num_hidden_layers=8), prompts(2, 67)
    with torchsparsekv.patch(model, "icecache", **SMALL | more) as handle:
        assert handle.planned.anchors == anchors
        cache, chosen = handle.make_cache(2), [[] for _ in range(8)]
        copied = lambda ids: None if ids is None else ids.clone()  # noqa: E731
        taps = [lambda s, q, a, choice, out, i=i: chosen[i].append(copied(choice.ids)) for i in range(8)]
        with tapped(cache, taps):
            greedy_logits(model, ids, mask, 12, cache)
        said = str(handle.report())
        heads = {i: head_numbers(cache.stored[i].state.shared.source_heads)[..., None] for i in anchors}
    for i, anchor in anchors.items():
        wanted = [y.gather(1, heads[i].expand_as(y)) for y in chosen[anchor]]
        assert all(torch.equal(x, y) for x, y in zip(chosen[i], wanted, strict=True))
        assert int((chosen[i][-1] >= 0).sum()) > 0
    queried = [chosen[i][-1] for i in range(1, 8) if i not in anchors]
    assert not all(torch.equal(queried[0], x) for x in queried[1:] if x.shape == queried[0].shape)
    followers = {a: [str(i) for i in anchors if anchors[i] == a] for a in anchors.values()}
    for a, others in followers.items():
        assert f"layer {', '.join(others)}: shares the selection of layer {a}" in said


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        (dict(selecting_layers=(1, 3)), ValueError, r"selecting_layers or reuse_every, not both: got \(1, 3\) and 3"),
        (dict(reuse_every=1, selecting_layers=(2, 4)), ValueError, r"must be \(1, 2, 4\) here, got \(2, 4\)"),
        (dict(reuse_every=1, selecting_layers=(0, 1)), ValueError, r"must be \(1,\) here, got \(0, 1\)"),
        (dict(reuse_every=1, selecting_layers=(1, 9)), ValueError, r"must be \(1,\) here, got \(1, 9\)"),
        (dict(reuse_every=1, selecting_layers=(3, 1)), ValueError, r"ascending order.*got \(3, 1\)"),
        (dict(reuse_every=1, selecting_layers=()), ValueError, r"ascending order.*got \(\)"),
        (dict(reuse_every=1, selecting_layers=(1, True)), ValueError, r"ascending order.*got \(1, True\)"),
        (dict(reuse_every=1, selecting_layers=3), ValueError, r"ascending order.*got 3"),
        (dict(reuse_every=1, selecting_layers="none.json"), ValueError, "none.json is not a file of `torchsparsekv"),
        (dict(CHOOSERS, layers={4: dict(budget=32)}), ValueError, r"must be \(1, 2, 4, 6\) here, got \(1, 2, 6\)"),
    ],
)
def test_wrong_selecting_layers_are_refused(more, error, said):
    model = tiny(num_hidden_layers=8)
    with pytest.raises(error, match=said):
        torchsparsekv.patch(model, "icecache", **SMALL | more)
    assert model.config._attn_implementation == "sdpa"  # untouched


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_full_budget_is_dense(backend):
    counters.clear()
    model, (ids, mask) = tiny(num_hidden_layers=4), prompts(3, 41)
    want = dense_logits(model, ids, mask, 20)
    with torchsparsekv.patch(model, "icecache", **FULL) as handle:
        cache = handle.make_cache(3)
        step = backend and torch.compile(model.forward, fullgraph=True, backend=backend)
        got = greedy_logits(model, ids, mask, 20, cache, step)
        assert all(layer.state._handed is None for layer in cache.stored.values())
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    if backend:
        assert counters["stats"]["unique_graphs"] == 1


@torch.no_grad()
def test_second_turn_and_fork_are_exact():
    """The second prompt attends to the pool, whose order the followers were handed."""
    model, (ids, _) = tiny(num_hidden_layers=4), prompts(1, 90, ragged=False)
    want = model(ids).logits[:, -1]
    with torchsparsekv.patch(model, "icecache", **SMALL) as handle:
        cache = handle.make_cache(1)
        model(ids[:, :50], past_key_values=cache)
        twin = handle.fork(cache)
        for c in (cache, twin):
            got = model(ids[:, 50:], past_key_values=c).logits[:, -1]
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_followers_take_no_memory_for_an_index():
    model = tiny(num_hidden_layers=7)
    sizes = {}
    for every in (1, 3):
        with torchsparsekv.patch(model, "icecache", **{**SMALL, "reuse_every": every}) as handle:
            memory = handle.plan(1)
            sizes[every] = {r.name: r for r in memory.rows}
            cache = handle.make_cache(1)
            assert handle.report().device_bytes == memory.device_bytes
            del cache
    assert (sizes[1]["leaves.key"].layers, sizes[3]["leaves.key"].layers) == (6, 2)
    assert sizes[3]["leaves.key"].nbytes * 3 == sizes[1]["leaves.key"].nbytes


def test_short_prompt_is_dense_and_reported():
    model, (ids, mask) = tiny(num_hidden_layers=3), prompts(1, 12, ragged=False)
    want = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    with torchsparsekv.patch(model, "icecache", **SMALL) as handle:
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False), want)
        report = handle.report()
    assert all(r.density == 1 and r.blocks_selected == 0 for r in report.layers)
    assert "sequences of up to 17 tokens are always attended to in full" in str(report)
