"""Extreme hyper-parameters act like the last useful value, or are refused."""
import pytest
import torch
from models import MAX_LENGTH, dense_logits, greedy_logits, prompts, tiny

import torchsparsekv

IN_RING = dict(sink=4, window=6)
ICE = dict(**IN_RING, budget=16, page_size=4)
SNAP = dict(**IN_RING, budget=12, observe=4)
# method, the far end, and what it is to act like
FAR = [
    ("snapkv", dict(**SNAP, kernel_size=(1 << 63) + 1), dict(**SNAP, kernel_size=2 * MAX_LENGTH + 1)),
    ("snapkv", dict(**SNAP, kernel_size=(1 << 31) + 1), dict(**SNAP, kernel_size=2 * MAX_LENGTH + 1)),
    ("icecache", dict(**ICE, least_view=1 << 63), dict(**ICE, least_view=MAX_LENGTH)),
    ("icecache", dict(**ICE, r=1e-20), dict(**ICE, r=1e-9)),
    ("icecache", dict(**ICE, r=5e-324), dict(**ICE, r=1e-9)),
]
HUGE = 1 << 62  # whole blocks of any size
BUDGETS = [name for name in torchsparsekv.methods() if name not in ("streaming", "full")]


def logits(model, method: str, steps: int = 20, **hyper):
    with torchsparsekv.patch(model, method, skip_layers=0, **hyper) as handle:
        return greedy_logits(model, *prompts(2, 60), steps, handle.make_cache(2, MAX_LENGTH))


@pytest.mark.parametrize(("method", "far", "like"), FAR)
def test_extreme_value_acts_like_the_last_useful_value(method, far, like):
    model = tiny()
    assert torch.equal(logits(model, method, **far), logits(model, method, **like))


@pytest.mark.parametrize("method", BUDGETS)
def test_huge_budget_is_dense(method):
    model, ids = tiny(), prompts(2, 60)
    more = dict(full_threshold=0) if method == "pariskv" else {}
    got = logits(model, method, budget=HUGE, sink=0, window=8, **more)
    torch.testing.assert_close(got, dense_logits(model, *ids, 20), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("size", ["window", "sink"])
def test_sizes_beyond_memory_are_refused_with_numbers(size):
    model = tiny()
    with pytest.raises(ValueError, match=rf"{size} 516 is above the 512 tokens that the model takes"):
        torchsparsekv.patch(model, "oracle", **{**IN_RING, size: 516}, budget=16)
    model.config.max_position_embeddings = 1 << 70
    for n in (1 << 62, 1 << 70):
        says = pytest.raises(MemoryError, match=r"^a cache of 128 tokens x batch 1 needs [\d.]+ GiB host")
        with torchsparsekv.patch(model, "oracle", **{**IN_RING, size: n}, budget=16) as handle, says:
            handle.make_cache(1, MAX_LENGTH)
