"""`bench host-loop`, whose steps do nothing but what generate() and a patch do around a forward."""
import pytest
import torch
from transformers import DynamicCache, StaticCache

from torchsparsekv.patches import _captured
from torchsparsekv.patches._cache import SparseCache
from torchsparsekv.patches._names import cache_in
from torchsparsekv_benchmarks.speed import host_loop


def test_a_row_of_each_cache_and_what_it_is_patched_with_is_gone(monkeypatch):
    seen: dict[str, list] = {"forward": [], "replayed": []}
    quick = host_loop.quick

    def watched():
        model = quick()
        step = model.forward

        def forward(self, *args, **kwargs):
            seen["forward"].append(type(cache_in(kwargs)))
            return step(*args, **kwargs)

        model.forward = forward.__get__(model)
        return model

    real = _captured.Step.run

    def run(self, *args):
        out = real(self, *args)
        seen["replayed"].append(self.graph is not None)
        return out

    monkeypatch.setattr(host_loop, "quick", watched)
    monkeypatch.setattr(host_loop, "SHORT", 4)
    monkeypatch.setattr(host_loop, "REPEATS", 1)
    monkeypatch.setattr(_captured.Step, "run", run)
    found = host_loop.run(host_loop.Options(tokens=3))["rows"]
    assert [r["cache"] for r in found] == ["dynamic", "static", "captured"]
    assert set(seen["forward"]) == {DynamicCache, StaticCache, SparseCache}
    generated = 3 + 3 + 6  # tokens after the first of each of three answers
    assert seen["replayed"] == [True] * generated, "every step of the patched model is a replay"
    assert _captured.Step is not host_loop.Replayed


def test_refused():
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        host_loop.run(host_loop.Options(tokens=0))


def test_a_token_is_the_difference_of_two_answers(monkeypatch):
    """By a clock that goes on by a second a prompt and two a token."""
    clock = [0.0]

    class Model:
        def generate(self, ids, max_new_tokens, **given):
            clock[0] += 1 + 2 * max_new_tokens
            return torch.zeros(1, ids.shape[1] + max_new_tokens)

    monkeypatch.setattr(host_loop.time, "perf_counter", lambda: clock[0])
    assert host_loop.per_token(Model(), tokens=50) == 2e6
