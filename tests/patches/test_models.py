"""At full budget every method on every family is dense attention, for every batch."""
import gc
import weakref

import pytest
import torch
from cases import METHODS, SEVERAL
from families import FAMILIES, WITH_EVERY_METHOD
from models import MAX_LENGTH, dense_logits, greedy_logits, prompts, tiny
from torch._dynamo.utils import ReinplaceCounters, counters

import torchsparsekv
from torchsparsekv.patches import all_families

FULL = dict(max_length=MAX_LENGTH, skip_layers=1, sink=8, window=6)


def full_budget(method: str) -> dict:
    hyper = {**FULL, "budget": MAX_LENGTH, **METHODS[method]}
    return {**hyper, "window": MAX_LENGTH} if method == "streaming" else hyper


def test_every_method_and_family_has_a_case():
    assert set(torchsparsekv.methods()) == set(METHODS)
    assert set(FAMILIES) <= set(all_families())


# What a method does and what a family does is independent.
CELLS = [(m, "llama", 4) for m in METHODS]
CELLS += [("quest", f, rows) for f in WITH_EVERY_METHOD for rows in (1, 4) if ("quest", f, rows) not in CELLS]


@pytest.mark.parametrize(("method", "family", "rows"), CELLS)
def test_full_budget_is_dense(method, family, rows):
    model = tiny(family)
    ids, mask = prompts(rows, 41)
    want = dense_logits(model, ids, mask, 30)
    with torchsparsekv.patch(model, method, **full_budget(method)) as handle:
        got = greedy_logits(model, ids, mask, 30, handle.make_cache(rows))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_each_row_of_a_padded_batch_is_that_prompt_alone(method):
    """At a small budget, so that pages and choices must fall alike, not only the sum of everything."""
    model = tiny()
    ids, mask = prompts(3, 67)
    small = {**FULL, "budget": 16, **METHODS[method]}
    with torchsparsekv.patch(model, method, **small) as handle:
        together = greedy_logits(model, ids, mask, 20, handle.make_cache(3))
        for b in range(3):
            pad = int((mask[b] == 0).sum())
            feed_like = ids[b : b + 1, pad:].expand(3, -1)  # the continuation is drawn per row: keep its shape
            alone = greedy_logits(model, feed_like, torch.ones_like(feed_like), 20, handle.make_cache(3))
            torch.testing.assert_close(together[b], alone[b], atol=1e-4, rtol=1e-4)


# Each is ten seconds of a compiler. With a GPU SEVERAL is every method.
COMPILED = [(m, "llama", 4) for m in SEVERAL] + [("quest", f, 1) for f in WITH_EVERY_METHOD if f != "llama"]


@pytest.mark.parametrize(("method", "family", "rows"), COMPILED)
def test_compiled_decode_is_dense_and_compiles_once(method, family, rows):
    torch._dynamo.utils.counters.clear()
    ReinplaceCounters.clear()
    model = tiny(family, num_hidden_layers=2)
    ids, mask = prompts(rows, 41)
    want = dense_logits(model, ids, mask, 20)
    with torchsparsekv.patch(model, method, **full_budget(method)) as handle:
        cache = handle.make_cache(rows)
        step = torch.compile(model.forward, fullgraph=True)
        got = greedy_logits(model, ids, mask, 20, cache, step)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    assert ReinplaceCounters.get_total_missed_bytes() == 0, "state is copied in the compiled step"


@pytest.mark.parametrize("method", SEVERAL if torch.cuda.is_available() else ("quest",))
def test_compiled_prompts_are_dense_and_share_a_graph(method):
    """Prompt and decode through one compiled forward: a third prompt length needs no third graph; a bad mask is NaN."""
    counters.clear()
    model = tiny(num_hidden_layers=2)
    graphs = []
    with torchsparsekv.patch(model, method, **full_budget(method)) as handle:
        # Through inductor for one: to the others it adds nothing but time.
        forward = torch.compile(model.forward, fullgraph=True, backend="inductor" if method == "quest" else "eager")
        for length in (41, 38, 45):
            ids, mask = prompts(3, length)
            cache = handle.make_cache(3)
            got = [prompt_then_step(forward, ids, mask, cache)]
            graphs.append(counters["stats"]["unique_graphs"])
            got.append(prompt_then_step(model, ids, mask, handle.make_cache(3)))
            torch.testing.assert_close(*got, atol=1e-4, rtol=1e-4)
        mask[0, -1] = 0
        wrong = prompt_then_step(forward, ids, mask, handle.make_cache(3))
    assert graphs == [2, 3, 3]
    assert wrong.isnan().any(-1).any(-1).tolist() == [True, False, False]


@torch.no_grad()
def prompt_then_step(forward, ids, mask, cache):
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    first = forward(ids, attention_mask=mask, position_ids=position, past_key_values=cache).logits[:, -1:]
    at = position[:, -1:] + 1
    return torch.cat([first, forward(ids[:, :1].contiguous(), position_ids=at, past_key_values=cache).logits], 1)


def test_long_run_keeps_graph_and_addresses():
    """200 steps and a second prompt of another length: one graph, no state tensor moved."""
    counters.clear()
    model = tiny(num_hidden_layers=2)
    hyper = {"budget": 32, "sink": 8, "window": 6, "skip_layers": 1, "block_size": 4}
    with torchsparsekv.patch(model, "quest", max_length=384, **hyper) as h:
        cache = h.make_cache(2)
        states = [layer.state for layer in cache.layers]
        tensors = lambda: [t.data_ptr() for s in states for _, t in s.tensors()]  # noqa: E731
        before = tensors()
        step = torch.compile(model.forward, fullgraph=True)
        greedy_logits(model, *prompts(2, 41), 200, cache, step)
        assert counters["stats"]["unique_graphs"] == 1
        cache.reset()
        again = greedy_logits(model, *prompts(2, 57), 10, cache, step)
        assert counters["stats"]["unique_graphs"] == 1
        assert tensors() == before
        fresh = greedy_logits(model, *prompts(2, 57), 10, h.make_cache(2))
        torch.testing.assert_close(again, fresh, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_prompt_in_chunks_and_second_turn_are_dense(method):
    """However the prompt arrives, in one run or in pieces, with decoding between: attention over it is exact."""
    model = tiny()
    ids, mask = prompts(2, 60)
    with torchsparsekv.patch(model, method, **full_budget(method)) as handle, torch.no_grad():
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        whole = model(ids, attention_mask=mask, position_ids=position, past_key_values=handle.make_cache(2)).logits
        cache, parts = handle.make_cache(2), []
        for a, b in ((0, 23), (23, 24), (24, 25), (25, 55), (55, 60)):
            out = model(ids[:, a:b], attention_mask=mask[:, :b], position_ids=position[:, a:b], past_key_values=cache)
            parts.append(out.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_mask_of_the_new_tokens_alone_does_not_move_the_padding():
    """Loops in the wild pass the whole mask, none, or one for the new tokens: the rows began where they began."""
    model = tiny()
    ids, mask = prompts(2, 41)
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    with torchsparsekv.patch(model, "quest", **full_budget("quest")) as handle:
        logits = []
        for later in (None, torch.ones(2, 1).long(), torch.ones(2, 42).long()):
            cache = handle.make_cache(2)
            model(ids, attention_mask=mask, position_ids=position, past_key_values=cache)
            if later is not None:
                later = later.to(ids.device) if later.shape[1] == 1 else torch.cat([mask, mask[:, -1:]], 1)
            at = position[:, -1:] + 1
            out = model(ids[:, -1:], attention_mask=later, position_ids=at, past_key_values=cache)
            turn = model(ids[:, :5], attention_mask=torch.ones_like(ids[:, :5]), past_key_values=cache)
            logits.append(torch.cat([out.logits, turn.logits], 1))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_old_cache_is_freed_before_a_new_one_is_made(monkeypatch):
    model = tiny()
    ids, mask = prompts(2, 20)
    with torchsparsekv.patch(model, "quest", **full_budget("quest")) as handle:
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2)
        old = weakref.ref(handle._recycled.layers[0].state.store.pool)
        make, alive = handle.make_cache, []
        monkeypatch.setattr(handle, "make_cache", lambda *a: (gc.collect(), alive.append(old()), make(*a))[-1])
        model.generate(input_ids=ids[:1], attention_mask=mask[:1], max_new_tokens=2)
    assert alive == [None]


def test_decode_step_on_a_foreign_cache_is_refused():
    model = tiny()
    ids, _ = prompts(1, 12)
    with torchsparsekv.patch(model, "quest", **full_budget("quest")), torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with pytest.warns(UserWarning, match="this decode step is dense"):
            model(ids[:, :1], past_key_values=cache)


def test_unpatched_caches_still_work():
    model = tiny()
    ids, mask = prompts(2, 30)
    want = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    from transformers import DynamicCache

    with torchsparsekv.patch(model, "quest", **full_budget("quest")):
        cache = DynamicCache(config=model.config)
        options = {"max_new_tokens": 8, "do_sample": False, "past_key_values": cache}
        got = model.generate(input_ids=ids, attention_mask=mask, **options)
        scored = model(ids, attention_mask=mask).logits
    assert torch.equal(got, want)
    assert torch.equal(scored, model(ids, attention_mask=mask).logits)
