"""The hot buffer is as large as `hot_budgets`, `hot_gib` or free memory say."""
import numpy as np
import pytest
import torch
from models import prompts, tiny

from torchsparsekv import patch
from torchsparsekv.patches import _memory

SMALL = dict(block_size=4, budget=8, sink=4, window=8, max_length=256)
GIB = 2**30


def slots(cache) -> set[int]:
    return {layer.state.hot.block_of.shape[2] for layer in cache.layers if layer.method.name == "quest"}


def on_gpu(handle, monkeypatch, free):
    """Plan as on a GPU with so many free bytes."""
    handle.planned.device = torch.device("cuda")
    monkeypatch.setattr(_memory, "free_device_bytes", lambda _: free)


def test_auto_takes_a_share_of_free_memory(monkeypatch):
    with patch(tiny(), "quest", **SMALL, offload="host") as handle:
        plan = handle.planned
        size = lambda n: plan.bytes(2, 256, pool_on_host=True, hot_budgets=n)[1]  # noqa: E731
        monkeypatch.setattr(_memory, "prompt_bytes", lambda *_: 0)
        found = []
        for free in range(size(1), 2 * size(32) + 4096, 2048):
            on_gpu(handle, monkeypatch, free)
            place = _memory.placed(plan, "host", 2, 256)
            assert place.pool_on_host
            n = place.hot_budgets
            assert size(n) <= free
            assert n <= 2 or size(n) <= free / 2
            assert n == 32 or n == 1 or size(n + 1) > free / 2
            found.append(n)
    assert found == sorted(found)
    assert found[0] == 1
    assert found[-1] == 32, "every block has a slot"
    assert set(found) >= set(range(1, 33))


def test_auto_leaves_room_for_a_prompt(monkeypatch):
    """In one piece, if that fits beside two budgets; else prompts come in chunks, which need little."""
    with patch(tiny(), "quest", **SMALL, offload="host") as handle:
        plan = handle.planned
        size = lambda n: plan.bytes(2, 256, pool_on_host=True, hot_budgets=n)[1]  # noqa: E731
        prompt = _memory.prompt_bytes(plan, 2, 256)
        assert prompt == 2 * 256 * 4 * (4 * plan.config.hidden_size + 3 * plan.config.intermediate_size)
        monkeypatch.setattr(_memory, "prompt_bytes", lambda *_: 9 * size(32))
        for free, budgets in ((9 * size(32) + size(5), 5), (10 * size(32), 32), (9 * size(32) + size(2) - 1, 32)):
            on_gpu(handle, monkeypatch, free)
            assert _memory.placed(plan, "host", 2, 256).hot_budgets == budgets


def test_auto_offload_keeps_a_pool_that_fits_on_the_device(monkeypatch):
    with patch(tiny(), "quest", **SMALL) as handle:
        on_gpu(handle, monkeypatch, 1 << 40)
        assert _memory.placed(handle.planned, "auto", 1, 256) == _memory.Placement(False, 2)
        assert "nothing crosses the link" in str(handle.plan())
        monkeypatch.setattr(_memory, "prompt_bytes", lambda *_: 0)
        on_gpu(handle, monkeypatch, handle.planned.bytes(1, 256, pool_on_host=True)[1] * 2)
        assert '"auto" (50% of free memory): the hot buffers have room for 2 of the 32' in str(handle.plan())


def test_budgets_that_are_given_stay_whatever_is_free(monkeypatch):
    with patch(tiny(), "quest", **SMALL, hot_budgets=3, offload="host") as handle:
        on_gpu(handle, monkeypatch, 1 << 40)
        assert handle.planned.buffers(2, 1, 256, 9)["hot"].block_of.shape[2] == 6
        assert "hot buffers" not in str(handle.plan())


def test_gib_are_filled_and_not_exceeded():
    model = tiny()
    ids, mask = prompts(2, 120, ragged=False)
    told, fetched, sizes = [], [], []
    with patch(model, "quest", **SMALL) as handle:
        bound = handle.planned.hot_bytes(2, 256, pool_on_host=False, hot_budgets=4) / GIB
    for gib in (bound, 1.5 * bound, 1.0):
        with patch(model, "quest", **SMALL, hot_gib=gib) as handle:
            told.append(model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False))
            report, (n,) = handle.report(), {handle._latest().place.hot_budgets}
            fetched.append(sum(r.blocks_fetched for r in report.layers))
            sizes.append(n)
            assert slots(handle._latest()) == {min(2 * n, 64)}
            hot = lambda n, plan=handle.planned: plan.hot_bytes(2, 256, pool_on_host=False, hot_budgets=n)  # noqa: E731
            assert hot(n) <= gib * GIB
            assert n == 32 or hot(n + 1) > gib * GIB
            assert f"hot_gib {gib}: the hot buffers have room for" in str(report)
            assert f"hot_gib={gib}" in repr(handle)
    assert all(torch.equal(told[0], x) for x in told[1:])
    assert (sizes[0], sizes[2]) == (4, 32)
    assert 4 < sizes[1] < 32
    assert fetched[0] > fetched[1] >= fetched[2]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (dict(hot_gib=-1), ValueError, r"hot_gib must be finite, > 0, got -1"),
        (dict(hot_gib=0.0), ValueError, r"hot_gib must be finite, > 0, got 0\.0"),
        (dict(hot_gib=float("nan")), ValueError, r"hot_gib must be finite, > 0, got nan"),
        (dict(hot_gib=float("inf")), ValueError, r"hot_gib must be finite, > 0, got inf"),
        (dict(hot_gib="4"), TypeError, r"hot_gib must be a number of GiB, got '4'"),
        (dict(hot_gib=True), TypeError, r"hot_gib must be a number of GiB, got True"),
        (dict(hot_gib=2.0, hot_budgets=4), ValueError, r"give hot_budgets or hot_gib, not both: got 4 and 2\.0"),
        (dict(hot_gib=1e-6), ValueError, r"hot_gib 1e-06 is below the [1-9][.e\d-]+ GiB that one budget takes in a"),
        (dict(hot_budgets="all"), TypeError, r"hot_budgets must be an int or 'auto', got 'all'"),
        (dict(hot_budgets=-2), ValueError, r"hot_budgets must be at least 1, got -2"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_are_refused(given, error, said):
    model = tiny()
    with pytest.raises(error, match=said):
        patch(model, "quest", **SMALL, **given)
    assert not hasattr(model, "_torchsparsekv")


@pytest.mark.parametrize("one", [1, np.int64(1), np.float32(1)])
def test_gib_are_any_real_number(one):
    with patch(tiny(), "quest", **SMALL, hot_gib=one) as handle:
        assert handle.hot_gib == 1.0


def test_more_gib_than_are_free_are_refused(monkeypatch):
    monkeypatch.setattr(_memory, "free_device_bytes", lambda _: GIB)
    with patch(tiny(), "quest", **SMALL) as handle:
        method = handle.planned.method
    with pytest.raises(MemoryError, match=r"hot_gib 1\.5 is above the 1\.00 GiB of free device memory"):
        _memory.check_hot_gib(1.5, method, torch.device("cuda"))


@pytest.mark.parametrize(
    ("name", "more"),
    [("quest", {}), ("louiskv", {}), ("pariskv", dict(update_interval=4, full_threshold=0)),
     ("quest", dict(prefetch_async=0.0))],
)  # fmt: skip
@torch.no_grad()
def test_fork_into_a_smaller_buffer_decodes_the_same(name, more):
    """One row has room for more budgets than three rows have in as many GiB."""
    small = {k: v for k, v in SMALL.items() if k != "block_size" or name == "quest"}
    small |= dict(budget=32) if name == "louiskv" else {}
    model = tiny()
    ids = prompts(1, 100, ragged=False)[0]
    with patch(model, name, **small, **more, hot_gib=100 / 2**20) as handle:
        cache = handle.make_cache(1)
        last = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        for _ in range(6):
            last = model(last, past_key_values=cache).logits[:, -1:].argmax(-1)
        twin = handle.fork(cache, 3)
        assert twin.place.hot_budgets < cache.place.hot_budgets
        one, three = last, last.expand(3, 1)
        for _ in range(6):
            one, three = (model(x, past_key_values=c).logits[:, -1:] for x, c in ((one, cache), (three, twin)))
            torch.testing.assert_close(three, one.expand_as(three), rtol=1e-4, atol=1e-4)
            one, three = one.argmax(-1), three.argmax(-1)


@pytest.mark.parametrize("pool_dtype", [None, "int8"])
@pytest.mark.parametrize(
    ("name", "more"),
    [("quest", dict(block_size=4)), ("pariskv", dict(update_interval=4, full_threshold=0)),
     ("icecache", dict(page_size=2)), ("quest", dict(block_size=4, prefetch_async=0.0)),
     ("louiskv", dict(budget=32)), ("prkv", dict(block_size=4, static_ratio=0.5))],
)  # fmt: skip
def test_prompt_fills_the_hot_buffer(name, more, pool_dtype):
    """Only a pool in host memory needs that. Answers stay, and with a slot for every block steps read only what came
    behind the prompt."""
    model = tiny()
    ids, mask = prompts(2, 150)
    hyper = {**dict(budget=8, sink=4, window=8, max_length=256, pool_dtype=pool_dtype), **more}
    told, fetched, selected = [], [], []
    for offload, hot_budgets in (("device", 32), ("host", 2), ("host", 32)):
        with patch(model, name, **hyper, offload=offload, hot_budgets=hot_budgets) as handle:
            told.append(model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False))
            layers = [r for r in handle.report().layers if r.method == name]
            fetched.append(sum(r.blocks_fetched for r in layers))
            selected.append(sum(r.blocks_selected for r in layers))
    assert all(torch.equal(told[0], x) for x in told[1:])
    assert len(set(selected)) == 1
    if name == "louiskv":  # it keeps what an earlier step selected: nothing is brought behind its back
        assert fetched[2] == fetched[0]
    else:
        assert fetched[2] < fetched[0] / 2


@torch.no_grad()
def test_chunks_and_turns_bring_the_newest_blocks():
    model = tiny()
    ids = prompts(1, 100, ragged=False)[0]
    with patch(model, "quest", **SMALL, offload="host", hot_budgets=5) as handle:
        cache = handle.make_cache(1)
        for chunk in ids.split([60, 13, 27], 1):
            model(chunk, past_key_values=cache)
            state = cache.layers[2].state
            end = int(state.lengths.ring_begin[0]) // 4
            for held in state.hot.block_of[0]:
                assert set(range(max(1, end - 10), end)) == {x for x in held.tolist() if x >= 0}
        assert not state.stats.counts[..., 3:].any(), "no step has selected anything"
