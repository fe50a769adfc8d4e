"""Layers with a sliding window keep a ring and attend within their window at any length."""
import pytest
import torch
from cases import METHODS, hyper_of
from models import MAX_LENGTH, dense_logits, greedy_logits, prompts, tiny
from snapshot import snapshot
from supported import supported
from torch._dynamo.utils import ReinplaceCounters, counters

import torchsparsekv
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.probe import probe
from torchsparsekv.state import total_bytes

FULL = dict(max_length=MAX_LENGTH, budget=MAX_LENGTH, skip_layers=0, sink=8, window=6, block_size=4)
WINDOW = 13  # of all models with windows here, see families.py
PATTERN = ["window", "quest", "window", "quest"]


@pytest.mark.parametrize("family", ["ministral", "mistral", "mixtral", "phi3", "starcoder2"])
def test_models_with_only_windows_are_dense_and_repr_says_so(family):
    model = tiny(family, sliding_window=WINDOW)
    ids, mask = prompts(3, 41)
    want = dense_logits(model, ids, mask, 20)
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        got = greedy_logits(model, ids, mask, 20, cache := handle.make_cache(3))
        report = handle.report()
        assert cache.row_lengths.keys() == {cache.layers[0].method.ring_plan}
        assert "quest runs in no layer: 3 of 3 attend to a sliding window" in repr(handle)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert [r.method for r in report.layers] == ["window"] * 3
    assert report.layers[0].attended_per_step == pytest.approx(WINDOW, abs=1.5), "rows may begin within the window"
    assert "quest runs in no layer" in str(report)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])  # a soft cap, sinks
@pytest.mark.parametrize("cuts", [(7, 12, 13, 14, 27, 28, 60), (13, 26, 60), (41, 42, 43, 44, 60), (60,)])
def test_chunks_and_turns_attend_within_their_window(family, cuts):
    """Chunks shorter and longer than the window, and single tokens between them."""
    model = tiny(family)
    ids, mask = prompts(2, 60)
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        want = model(ids, attention_mask=mask, position_ids=position).logits
        with torchsparsekv.patch(model, "quest", **FULL) as handle:
            cache, parts = handle.make_cache(2), []
            for a, b in zip((0, *cuts), cuts):
                given = dict(attention_mask=mask[:, :b], position_ids=position[:, a:b], past_key_values=cache)
                parts.append(model(ids[:, a:b], **given).logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], want[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_works_beside_window_layers(method):
    model = tiny("gemma2")
    ids, mask = prompts(2, 41)
    want = dense_logits(model, ids, mask, 20)
    options = hyper_of(method, **FULL) | ({"window": MAX_LENGTH} if method == "streaming" else {})
    with torchsparsekv.patch(model, method, **options) as handle:
        got = greedy_logits(model, ids, mask, 20, cache := handle.make_cache(2))
        first = "omnikv_filter" if method == "omnikv" else method
        assert [layer.method.name for layer in cache.layers] == ["window", first, "window", method]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_window_steps_compile_without_copies():
    counters.clear()
    ReinplaceCounters.clear()
    model = tiny("gpt_oss", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    ids, mask = prompts(3, 41)
    want = dense_logits(model, ids, mask, 20)
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        step = torch.compile(model.forward, fullgraph=True)
        got = greedy_logits(model, ids, mask, 20, handle.make_cache(3), step)
        assert counters["stats"]["unique_graphs"] == 1
        assert ReinplaceCounters.get_total_missed_bytes() == 0, "state is copied in the compiled step"
        whole = torch.compile(model.forward, fullgraph=True, backend="eager")
        other = greedy_logits(whole, ids, mask, 20, handle.make_cache(3))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(other, want, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize("length", [MAX_LENGTH, 9])
def test_a_window_keeps_a_ring_and_no_pool(length):
    with torchsparsekv.patch(tiny("gemma2"), "quest", **{**FULL, "offload": "host"}) as handle:
        cache, plan = handle.make_cache(2, length), handle.planned
        assert [m.name for m in plan.methods] == PATTERN
        assert len(cache.row_lengths) == 2, "layers of one window share lengths"
        for i in (0, 2):
            state = cache.layers[i].state
            assert state.store.pool.shape[2] == 0
            assert state.store.ring.shape[2] == min(WINDOW, length) + 1
            assert plan.layer_bytes(i, 2, length, pool_on_host=True) == (0, sum(t.nbytes for _, t in state.tensors()))
            assert total_bytes(state.buffers, pool_on_host=True)[0] == 0


def test_cache_as_short_as_the_window_is_sparse_in_all_layers():
    model = tiny("gemma2")
    with torchsparsekv.patch(model, "quest", **{**FULL, "max_length": WINDOW, "budget": 8}) as handle:
        assert [m.name for m in handle.planned.methods] == ["quest"] * 4
    with torchsparsekv.patch(model, "quest", **{**FULL, "max_length": WINDOW + 1, "budget": 8}) as handle:
        assert [m.name for m in handle.planned.methods] == PATTERN


@torch.no_grad()
def test_probe_sees_the_whole_window():
    model = tiny("gemma2")
    ids, mask = prompts(2, 41)
    with torchsparsekv.patch(model, "quest", **{**FULL, "budget": 8}) as handle:
        cache = handle.make_cache(2)
        with probe(cache) as seen:
            greedy_logits(model, ids, mask, 3, cache)
    assert seen.sparse() == [1, 3]
    mass, error = seen.mass(), seen.error()
    torch.testing.assert_close(mass[[0, 2]], torch.ones_like(mass[[0, 2]]))
    assert error[[0, 2]].max() < 1e-4
    assert mass[[1, 3]].min() < 0.99


@torch.no_grad()
def test_decode_past_the_capacity_is_refused_or_nan():
    model = tiny("mistral", sliding_window=WINDOW)
    ids, _ = prompts(1, 30, ragged=False)
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        cache = handle.make_cache(1, 32)
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="3 tokens after 30 overrun this cache of max_length 32"):
            model(ids[:, :3], past_key_values=cache)
        layer = cache.layers[0]
        layer.state.row_lengths.advance(3)
        x = torch.ones(1, 4, 3, 16, device=ids.device)
        out = layer.method.prefill(layer.state, x, x[:, :2], x[:, :2], Attention(1.0), last=True)
        assert out.isnan().all()


# ---------------------------------------------------------------- what is refused


def test_method_window_cannot_be_chosen():
    assert "window" not in torchsparsekv.methods()
    model = tiny("gemma2")
    before = snapshot(model)
    with pytest.raises(ValueError, match="unknown method 'window'"):
        torchsparsekv.patch(model, "window", **FULL)
    says = r"layers\[2\]: this layer attends to a sliding window of 13 tokens, so no method can run there"
    for entry in ("full", {"budget": 64}, "window"):
        with pytest.raises(ValueError, match=says):
            torchsparsekv.patch(model, "quest", **FULL, layers={2: entry})
    assert snapshot(model) == before


def test_method_of_a_linear_layer_cannot_be_chosen():
    model = supported("qwen3_next")
    with pytest.raises(ValueError, match=r"layers\[0\]: this layer has no keys and values, so no method can run there"):
        torchsparsekv.patch(model, "quest", **FULL, layers={0: "full"})
