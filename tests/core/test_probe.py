"""The probe equals brute force on one layer and on patched models."""
import contextlib

import pytest
import torch
from cases import METHODS
from hypothesis import given
from layer import BLOCK, SINK, frontier, small
from models import MAX_LENGTH, greedy_logits, prompts, tiny
from past import Past, pasts

import torchsparsekv
from torchsparsekv.probe import LayerProbe, probe, tapped

BUDGET = 2 * BLOCK
PATCH = dict(max_length=MAX_LENGTH, skip_layers=1, sink=8, window=6)


def step_of(past: Past, method):
    """One more token after `past` through a probed method: (the probe of it, its choice, all keys and values)."""
    layer = past.fill(method)
    p = layer.state.on_step = LayerProbe(method)
    g = torch.Generator().manual_seed(past.seed + 1)
    k, v = (torch.randn(2, past.heads, 1, past.dim, generator=g) for _ in "kv")
    out = layer.feed(past.query, k, v)
    chosen = layer.choose(past.query) if method.traits.attends == "selected" else None
    return p, chosen, torch.cat([past.k, k], 2), torch.cat([past.v, v], 2), out.cpu()


@pytest.mark.parametrize("name", ["quest", "oracle", "random", "streaming"])
@given(past=pasts())
def test_mass_and_error_equal_their_definitions(name, past):
    block = {"oracle": 1}.get(name, BLOCK)
    method = small(name, block_size=block, budget=BUDGET)
    p, chosen, keys, values, out = step_of(past, method)
    for b, first in enumerate((past.pad, 0)):
        for head in range(past.heads * past.group):
            h = head // past.group
            k, v = keys[b, h, first:].double(), values[b, h, first:].double()
            weights = torch.softmax(k @ past.query[b, head, 0].double() * past.dim**-0.5, -1)
            n, end = len(k), frontier(len(k), block=block)
            seen = {*range(min(SINK, n)), *range(end, n)}
            if chosen is not None:
                seen |= {x * block + i for x in chosen[b, h].tolist() if x >= 0 for i in range(block)}
            mass = weights[sorted(seen)].sum()
            assert float(p.mass[0][b, head]) == pytest.approx(float(mass), abs=1e-5)
            dense = weights @ v
            error = (out[b, head, 0].double() - dense).norm() / dense.norm()
            assert float(p.error[0][b, head]) == pytest.approx(float(error), abs=1e-3, rel=1e-3)


def decode(method: str, steps: int, **hyper):
    """Logits of a padded batch, without and with a probe, and what the probe saw."""
    model = tiny()
    ids, mask = prompts(2, 60)
    with torchsparsekv.patch(model, method, **{**PATCH, **METHODS[method], **hyper}) as handle:
        plain = greedy_logits(model, ids, mask, steps, handle.make_cache(2))
        cache = handle.make_cache(2)
        methods = [layer.method for layer in cache.layers]
        with probe(cache) as seen:
            probed = greedy_logits(model, ids, mask, steps, cache)
        assert [layer.method for layer in cache.layers] == methods
        assert all(type(layer.method) is type(m) for layer, m in zip(cache.layers, methods))
        assert [layer.state.on_step for layer in cache.layers] == [None] * len(methods)
    return plain, probed, seen


@pytest.mark.parametrize("method", METHODS)
def test_a_probe_changes_nothing(method):
    plain, probed, seen = decode(method, 5, budget=16)
    assert torch.equal(plain, probed)
    assert seen.mass().shape == seen.error().shape == (3, 5, 2, 4)
    assert seen.sparse() == {"full": [], "omnikv": [2]}.get(method, [1, 2])  # layer 1 of omnikv is a filter layer


@pytest.mark.parametrize("method", METHODS)
def test_full_budget_keeps_all_mass(method):
    _, _, seen = decode(method, 5, budget=MAX_LENGTH, **({"window": MAX_LENGTH} if method == "streaming" else {}))
    torch.testing.assert_close(seen.mass(), torch.ones(3, 5, 2, 4), atol=1e-5, rtol=0)
    assert seen.error().max() < 1e-4


def test_oracle_keeps_most_mass_and_random_its_share():
    mass = {}
    for name in ("oracle", "random", "streaming"):
        _, _, seen = decode(name, 30, budget=16, block_size=1)
        mass[name] = float(seen.mass()[seen.sparse()].mean())
    assert mass["oracle"] > mass["random"] > mass["streaming"] > 0


def test_counting_starts_at_the_last_clear():
    model = tiny()
    ids, mask = prompts(1, 40)
    with torchsparsekv.patch(model, "quest", **PATCH, **METHODS["quest"], budget=16) as handle:
        cache = handle.make_cache(1)
        with probe(cache) as seen:
            greedy_logits(model, ids, mask, 3, cache)
            seen.clear()
            with pytest.raises(RuntimeError, match="nothing was measured"):
                seen.mass()
            cache.reset()
            greedy_logits(model, ids, mask, 2, cache)
            assert seen.mass().shape == (3, 2, 1, 4)


def test_a_compiled_step_is_refused():
    model = tiny(num_hidden_layers=2)
    ids, mask = prompts(1, 40)
    with torchsparsekv.patch(model, "quest", **PATCH, **METHODS["quest"], budget=16) as handle:
        cache = handle.make_cache(1)
        with probe(cache), pytest.raises(Exception, match="a probe works in eager decode only"):
            greedy_logits(model, ids, mask, 2, cache, torch.compile(model.forward, fullgraph=True))


def test_hooks_are_restored_after_an_error():
    model = tiny(num_hidden_layers=2)
    ids, mask = prompts(1, 40)
    with torchsparsekv.patch(model, "quest", **PATCH, **METHODS["quest"], budget=16) as handle:
        cache, steps = handle.make_cache(1), []
        taps = [lambda s, q, a, choice, out, i=i: steps.append((i, choice.ids is None)) for i in range(2)]
        with tapped(cache, taps):
            with contextlib.suppress(KeyError), probe(cache) as seen:
                greedy_logits(model, ids, mask, 2, cache)
                raise KeyError
            assert [layer.state.on_step for layer in cache.layers] == taps
            assert (len(seen.layers[0].mass), steps) == (2, [])
            cache.reset()
            greedy_logits(model, ids, mask, 1, cache)
        assert steps == [(0, True), (1, False)], "a dense layer chooses nothing"
        assert [layer.state.on_step for layer in cache.layers] == [None, None]
