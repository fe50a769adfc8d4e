"""Models with SnapKV equal dense models that cannot see the evicted tokens."""
import pytest
import torch
from literal import chosen
from models import MAX_LENGTH, dense_logits, greedy_logits, prompts, tiny
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

import torchsparsekv
from torchsparsekv_benchmarks.speed import decode


class ByHand:
    """An attention function for transformers: dense, and behind the prompt without what SnapKV evicts. It sees whole
    prompts of one row. `skip`: layers that are dense."""

    name = "snapkv_by_hand"

    def __init__(self, skip: int, observe: int, budget: int, kernel: int, pooling: str):
        self.skip, self.observe, self.budget, self.rule = skip, observe, budget, (kernel, pooling)
        self.evicted: dict[int, list[set[int]]] = {}

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        group, tokens, layer = query.shape[1] // key.shape[1], query.shape[2], module.layer_idx
        k, v = (t.repeat_interleave(group, 1) for t in (key, value))
        z = query @ k.transpose(2, 3) * scaling
        z += torch.full(z.shape[2:], -torch.inf, device=z.device).triu(1 + z.shape[3] - tokens)
        weights = z.softmax(-1)
        if tokens > 1:
            votes = weights[0, :, -self.observe :, : -self.observe].sum(1).unflatten(0, (-1, group)).sum(1)
            keeps = [set(chosen(x, self.budget, *self.rule)) for x in votes.cpu()]
            self.evicted[layer] = [set(range(tokens - self.observe)) - x for x in keeps]
        elif layer >= self.skip:
            for h, gone in enumerate(self.evicted[layer]):
                z[0, h * group : (h + 1) * group, :, sorted(gone)] = -torch.inf
            weights = z.softmax(-1)
        return (weights @ v).transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def logits(self, model, ids, mask, steps: int):
        AttentionInterface.register(self.name, self)
        AttentionMaskInterface.register(self.name, lambda *args, **kwargs: None)
        before = model.config._attn_implementation
        model.set_attn_implementation(self.name)
        found = greedy_logits(model, ids, mask, steps, DynamicCache())
        model.set_attn_implementation(before)
        return found


@torch.no_grad()
def in_chunks(model, ids, steps: int, cache, sizes):
    """As greedy_logits, of a prompt in chunks."""
    feed = torch.randint(3, 97, (len(ids), steps), generator=torch.Generator().manual_seed(9)).to(ids.device)
    logits = []
    for part in (*ids.split(list(sizes), 1), *feed.split(1, 1)):
        logits.append(model(part, past_key_values=cache).logits[:, -1])
    return torch.stack(logits[len(sizes) - 1 :], 1)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("kernel", "pooling"), [(5, "avgpool"), (7, "maxpool")])
def test_logits_equal_dense_attention_without_the_evicted_tokens(kv_heads, kernel, pooling):
    """Where the window holds the observation window and all that is generated: the answers of an eager dense model
    that hides, by layer and head, what brute force evicts; of whole prompts and of prompts in chunks."""
    model = tiny(num_key_value_heads=kv_heads)
    ids, mask = prompts(1, 70, ragged=False)
    how = dict(observe=8, budget=12, kernel_size=kernel, pooling=pooling)
    by_hand = ByHand(1, 8, 12, kernel, pooling)
    want = by_hand.logits(model, ids, mask, 20)
    assert all(len(gone) == 70 - 8 - 12 for heads in by_hand.evicted.values() for gone in heads)
    with torchsparsekv.patch(model, "snapkv", max_length=MAX_LENGTH, skip_layers=1, window=28, **how) as handle:
        got = greedy_logits(model, ids, mask, 20, handle.make_cache(1))
        parts = in_chunks(model, ids, 20, handle.make_cache(1), (33, 33, 4))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(parts, want, atol=1e-4, rtol=1e-4)
    assert (got - dense_logits(model, ids, mask, 20)).abs().max() > 1e-2, "which would be other answers"


def test_full_budget_is_dense():
    model = tiny()
    ids, mask = prompts(3, 50)
    want = dense_logits(model, ids, mask, 30)
    for window in (40, 6):  # all that is generated is in the window; or joins what is kept
        with torchsparsekv.patch(model, "snapkv", max_length=MAX_LENGTH, window=window, budget=100) as handle:
            got = greedy_logits(model, ids, mask, 30, handle.make_cache(3))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_report_counts_attended_and_lost_tokens():
    model = tiny()
    ids, mask = prompts(1, 70, ragged=False)
    sizes = dict(max_length=MAX_LENGTH, skip_layers=1, observe=4, budget=12)
    for window, lost in ((14, 0), (9, 5)):
        with torchsparsekv.patch(model, "snapkv", window=window, **sizes) as handle:
            cache = handle.make_cache(1)
            greedy_logits(model, ids, mask, 10, cache)
            report = handle.report()
        near = [4 + n if n <= window - 4 else window for n in range(1, 11)]
        assert [r.attended_per_step for r in report.layers[1:]] == [12 + sum(near) / 10] * 2
        assert [r.retrieval_rate for r in report.layers[1:]] == [0.1] * 2
        assert "selected anew at 10.0% of the steps" in str(report)
        said = [line for line in str(report).splitlines() if " are lost" in line]
        assert len(said) == (lost > 0)
        assert all(f" {lost} tokens left the window of {window} " in line for line in said)


def test_fork_keeps_the_same_tokens():
    model, (ids, _) = tiny(), prompts(1, 50, ragged=False)
    sizes = dict(max_length=MAX_LENGTH, skip_layers=1, window=20, observe=4, budget=6)
    with torch.no_grad(), torchsparsekv.patch(model, "snapkv", **sizes) as handle:
        cache = handle.make_cache(1)
        model(ids, past_key_values=cache)
        other = handle.fork(cache)
        for a, b in zip(cache.layers[1].state.kept, other.layers[1].state.kept):
            assert torch.equal(a, b)
        one, two = (model(ids[:, :1], past_key_values=c).logits for c in (cache, other))
        assert torch.equal(one, two)


def test_store_filled_by_a_benchmark_has_a_set(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = tiny(dtype=torch.bfloat16)
    with torchsparsekv.patch(model, "snapkv", max_length=MAX_LENGTH, skip_layers=1, window=20, budget=12) as handle:
        cache = handle.make_cache(1)
        decode.fill(cache, decode.topics_of(model.config, 100, 12), 0, 100, cache.layers[1].state.store.ring.device)
        assert [int(x) for layer in cache.layers[1:] for x in layer.state.kept.count.flatten()] == [12] * 4
