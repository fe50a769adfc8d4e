"""At full budget every way to call generate() answers as the unpatched model does."""
import pytest
import torch
from cases import METHODS, SEVERAL, hyper_of
from generating import FULL, GREEDY, IDS, MASK, WAYS, auto_compiled, tokenizer
from models import MAX_LENGTH, tiny
from torch._dynamo.utils import counters
from transformers import pipeline
from world import DEVICE

import torchsparsekv


def check_ran(handle):
    report = handle.report()
    assert not report.warnings
    assert all(r.blocks_selected > 0 for r in report.layers[1:]), "nothing was retrieved: this proves nothing"


@pytest.mark.parametrize("way", WAYS)
def test_generate_as_unpatched(way):
    model = tiny()
    want = WAYS[way](model)
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        kept = handle.cache_for_generate  # a cache that the caller drops would take its counts along
        caches = []
        handle.cache_for_generate = lambda *a, **k: caches.append(kept(*a, **k)) or caches[-1]
        got = WAYS[way](model)
        check_ran(handle)
    assert caches, "generate() did not ask for our cache"
    assert torch.equal(got, want) if isinstance(got, torch.Tensor) else got == want


@pytest.mark.parametrize("method", METHODS)
def test_greedy_as_unpatched_for_every_method(method):
    model = tiny()
    want = WAYS["greedy, padded batch"](model)
    window = {"window": MAX_LENGTH} if method == "streaming" else {}
    with torchsparsekv.patch(model, method, **{**hyper_of(method, **FULL), **window}) as handle:
        assert torch.equal(WAYS["greedy, padded batch"](model), want)
        assert not handle.report().warnings


def test_small_budget_changes_the_answer():
    """Else the tests above would compare the model with itself."""
    model = tiny()
    want = WAYS["greedy, padded batch"](model)
    with torchsparsekv.patch(model, "streaming", **{**FULL, "budget": 4}):
        assert not torch.equal(WAYS["greedy, padded batch"](model), want)


# ---------------------------------------------------------------- the cache of generate()


def test_calls_of_different_lengths_use_one_cache():
    model = tiny()
    long, short = (IDS, MASK), (IDS[:, 9:], MASK[:, 9:])
    want = [model.generate(input_ids=i, attention_mask=m, **GREEDY) for i, m in (long, short, long)]
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        got, used, addresses = [], [], []
        for i, m in (long, short, long):
            got.append(model.generate(input_ids=i, attention_mask=m, **GREEDY))
            used.append(handle._recycled)
            addresses.append([t.data_ptr() for layer in handle._recycled.layers for t in state_of(layer)])
    assert all(torch.equal(g, w) for g, w in zip(got, want))
    assert used[0] is used[1] is used[2]
    assert addresses[0] == addresses[1] == addresses[2]


def state_of(layer):
    return [t for _, t in layer.state.tensors()]


def test_returned_cache_is_not_recycled():
    model = tiny()
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        first = model.generate(input_ids=IDS, attention_mask=MASK, return_dict_in_generate=True, **GREEDY)
        kept = [t.clone() for layer in first.past_key_values.layers for t in state_of(layer)]
        second = model.generate(input_ids=IDS, attention_mask=MASK, return_dict_in_generate=True, **GREEDY)
        model.generate(input_ids=IDS, attention_mask=MASK, **GREEDY)
        now = [t for layer in first.past_key_values.layers for t in state_of(layer)]
        assert len({id(c) for c in (first.past_key_values, second.past_key_values, handle._recycled)}) == 3
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(kept, now))


def test_report_covers_the_given_cache():
    model = tiny()
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        cache = handle.make_cache(3)
        model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=3, do_sample=False)
        model.generate(input_ids=IDS, attention_mask=MASK, past_key_values=cache, **GREEDY)
        assert {r.steps for r in handle.report().layers} == {15}


def test_caches_without_max_length_grow():
    model = tiny()
    with torchsparsekv.patch(model, "quest", **{**FULL, "max_length": None}) as handle:
        model.generate(input_ids=IDS, attention_mask=MASK, **GREEDY)
        assert handle._recycled.max_length == 512, "buckets stop at the model's own limit"
        assert not handle.report().warnings


# ---------------------------------------------------------------- pipeline


def test_pipeline_as_unpatched():
    model = tiny()
    texts = [" ".join(f"w{i}" for i in range(3, n)) for n in (40, 22, 61)]

    def run():
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer(), device=DEVICE)
        return pipe(texts, batch_size=3, max_new_tokens=12, do_sample=False)

    want = run()
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        assert run() == want
        check_ran(handle)
    said = [w[0]["generated_text"] for w in want]
    assert all(s.startswith(t) and len(s) > len(t) for s, t in zip(said, texts))


# ---------------------------------------------------------------- compiled


def test_generate_of_a_compiled_model_as_unpatched():
    """torch.compile(model).generate() is the original's generate(), on a patched model too."""
    model = tiny()
    want = WAYS["greedy, padded batch"](model)
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        assert torch.equal(WAYS["greedy, padded batch"](torch.compile(model, backend="eager")), want)
        check_ran(handle)


# One of each kind: the others differ before the first step.
COMPILED = ("greedy, padded batch", "prompt of one token", "prompt in chunks")


@pytest.mark.parametrize("way", COMPILED)
def test_auto_compiled_generate_as_unpatched(way):
    model = tiny(num_hidden_layers=2)
    want = WAYS[way](model)
    with torchsparsekv.patch(model, "quest", **FULL):
        got = WAYS[way](model, **auto_compiled())
    assert torch.equal(got, want) if isinstance(got, torch.Tensor) else got == want


@pytest.mark.parametrize("method", SEVERAL)
def test_auto_compiled_generate_is_one_graph(method):
    """Over two prompts of different length: no break (fullgraph), no second graph."""
    model = tiny(num_hidden_layers=2)
    calls = [(IDS, MASK), (IDS[:, 9:], MASK[:, 9:])]
    want = [model.generate(input_ids=i, attention_mask=m, **GREEDY) for i, m in calls]
    window = {"window": MAX_LENGTH} if method == "streaming" else {}
    with torchsparsekv.patch(model, method, **{**hyper_of(method, **FULL), **window}) as handle:
        counters.clear()
        compiled = auto_compiled()
        got = [model.generate(input_ids=i, attention_mask=m, **GREEDY, **compiled) for i, m in calls]
        assert not handle.report().warnings
    assert all(torch.equal(g, w) for g, w in zip(got, want))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
