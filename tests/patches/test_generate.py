"""Stock transformers on a patched model with a full budget: every way of generating says the same as unpatched."""
import pytest
import torch
from cases import METHODS, SEVERAL, hyper_of
from models import MAX_LENGTH, prompts, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch._dynamo.utils import counters
from transformers import CompileConfig, PreTrainedTokenizerFast, pipeline
from world import DEVICE

import torchsparsekv

FULL = dict(max_length=MAX_LENGTH, budget=MAX_LENGTH, sink=8, window=6, skip_layers=1, block_size=4)
IDS, MASK = prompts(3, 41)
GREEDY = dict(max_new_tokens=16, do_sample=False)
LONGER = dict(max_new_tokens=40, do_sample=False)  # so that pages are retrieved after a prompt of nothing


def seeded(model, **options):
    torch.manual_seed(3)
    return model.generate(do_sample=True, top_k=20, max_new_tokens=16, **options)


class Streamer:
    """What TextStreamer is to generate()."""

    def __init__(self):
        self.seen = []

    def put(self, ids):
        self.seen.append(ids.flatten().tolist())

    def end(self):
        self.seen.append("end")


def padded(model, **options):
    return model.generate(input_ids=IDS, attention_mask=MASK, **options)


def streamed(model, **options):
    streamer = Streamer()
    out = model.generate(input_ids=IDS[2:], attention_mask=MASK[2:], streamer=streamer, **GREEDY, **options)
    assert streamer.seen[-1] == "end"
    assert [t for some in streamer.seen[:-1] for t in some] == out.flatten().tolist()
    return streamer.seen


def embedded(model, **options):
    return model.generate(inputs_embeds=model.get_input_embeddings()(IDS), attention_mask=MASK, **GREEDY, **options)


def two_turns(model, **options):
    """A second call with the cache of the first, and another generation in between that must not disturb it."""
    first = model.generate(input_ids=IDS, attention_mask=MASK, return_dict_in_generate=True, **GREEDY, **options)
    model.generate(input_ids=IDS + 1, attention_mask=MASK, **GREEDY, **options)
    said, _ = prompts(3, 7, seed=5, ragged=False)
    ids = torch.cat([first.sequences, said], 1)
    mask = torch.cat([MASK, torch.ones_like(ids[:, MASK.shape[1] :])], 1)
    cache = first.past_key_values
    return model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **GREEDY, **options)


def scores(model, **options):
    out = model.generate(
        input_ids=IDS, attention_mask=MASK, return_dict_in_generate=True, output_scores=True, **GREEDY, **options
    )
    return out.sequences


def in_inference_mode(model, **options):
    with torch.inference_mode():
        return model.generate(input_ids=IDS, attention_mask=MASK, **GREEDY, **options)


WAYS = {
    "greedy, padded batch": lambda m, **o: m.generate(input_ids=IDS, attention_mask=MASK, **GREEDY, **o),
    "one row, no mask": lambda m, **o: m.generate(input_ids=IDS[2:], **GREEDY, **o),
    "sampling": lambda m, **o: seeded(m, input_ids=IDS, attention_mask=MASK, **o),
    "num_return_sequences": lambda m, **o: seeded(m, input_ids=IDS, attention_mask=MASK, num_return_sequences=2, **o),
    "streamer": streamed,
    "eos": lambda m, **o: padded(m, eos_token_id=list(range(3, 12)), **GREEDY, **o),
    "prompt of one token": lambda m, **o: m.generate(input_ids=IDS[:, -1:], attention_mask=MASK[:, -1:], **LONGER, **o),
    "prompt of two tokens": lambda m, **o: m.generate(IDS[:, -2:], attention_mask=MASK[:, -2:], **LONGER, **o),
    "prompt in chunks": lambda m, **o: padded(m, prefill_chunk_size=16, **GREEDY, **o),
    "inputs_embeds": embedded,
    "two turns": two_turns,
    "scores": scores,
    "inference mode": in_inference_mode,
    "repetition penalty": lambda m, **o: padded(m, repetition_penalty=1.5, **GREEDY, **o),
}  # fmt: skip


def auto_compiled() -> dict:
    """generate() compiles the decode step by itself on a GPU; this makes it do so anywhere, and fail on a break."""
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    return {"compile_config": config}


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
def test_greedy_for_every_method(method):
    model = tiny()
    want = WAYS["greedy, padded batch"](model)
    window = {"window": MAX_LENGTH} if method == "streaming" else {}
    with torchsparsekv.patch(model, method, **{**hyper_of(method, **FULL), **window}) as handle:
        assert torch.equal(WAYS["greedy, padded batch"](model), want)
        assert not handle.report().warnings


def test_a_small_budget_is_not_the_same():
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


def test_a_cache_handed_out_is_not_used_again():
    model = tiny()
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        first = model.generate(input_ids=IDS, attention_mask=MASK, return_dict_in_generate=True, **GREEDY)
        kept = [t.clone() for layer in first.past_key_values.layers for t in state_of(layer)]
        second = model.generate(input_ids=IDS, attention_mask=MASK, return_dict_in_generate=True, **GREEDY)
        model.generate(input_ids=IDS, attention_mask=MASK, **GREEDY)
        now = [t for layer in first.past_key_values.layers for t in state_of(layer)]
        assert len({id(c) for c in (first.past_key_values, second.past_key_values, handle._recycled)}) == 3
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(kept, now))


def test_report_is_about_the_cache_given():
    model = tiny()
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        cache = handle.make_cache(3)
        model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=3, do_sample=False)
        model.generate(input_ids=IDS, attention_mask=MASK, past_key_values=cache, **GREEDY)
        assert {r.steps for r in handle.report().layers} == {15}


def test_caches_grow_where_no_length_was_given():
    model = tiny()
    with torchsparsekv.patch(model, "quest", **{**FULL, "max_length": None}) as handle:
        model.generate(input_ids=IDS, attention_mask=MASK, **GREEDY)
        assert handle._recycled.max_length == 512, "buckets stop at the model's own limit"
        assert not handle.report().warnings


# ---------------------------------------------------------------- pipeline


def tokenizer():
    words = {"<pad>": 0, "<s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 97)}
    plain = Tokenizer(WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", padding_side="left"
    )


def test_pipeline():
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


def test_generate_of_a_compiled_model():
    """torch.compile(model).generate() is the original's generate(), on a patched model too."""
    model = tiny()
    want = WAYS["greedy, padded batch"](model)
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        assert torch.equal(WAYS["greedy, padded batch"](torch.compile(model, backend="aot_eager")), want)
        check_ran(handle)


@pytest.mark.parametrize("way", WAYS)
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
