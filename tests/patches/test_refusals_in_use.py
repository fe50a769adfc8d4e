"""Refusals of a patched model in use: a second table like that of test_refusals.py."""
# ruff: noqa: E501 (in the table a row is a line)
import contextlib
import pickle
import sys
import warnings
from unittest import mock

import pytest
import torch
from cases import hyper_of
from models import tiny
from refusing import IDS, MASK, SMALL, Row, generate, patch, used
from snapshot import snapshot
from transformers.models.llama.modeling_llama import LlamaAttention
from world import DEVICE

import torchsparsekv
from torchsparsekv.patches import _names


def restored(change, back):
    """Use a patched model that was changed, and undo that before the patch is taken off."""

    def act(model, handle):
        try:
            change(model)
            model(IDS, past_key_values=handle.make_cache(2))
        finally:
            back(model)

    return used(act)


def implementation(name):
    return lambda model: model.set_attn_implementation(name)


def with_autocast(model, handle):
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        model(IDS, past_key_values=handle.make_cache(2))


def assisting(model, handle):
    tiny().generate(IDS[1:], assistant_model=model, max_new_tokens=4, do_sample=False)


def broken_off(model, handle):
    cache = handle.make_cache(2)
    hook = model.lm_head.register_forward_pre_hook(lambda *_: 1 // 0)
    with contextlib.suppress(ZeroDivisionError):
        model(IDS, past_key_values=cache)
    hook.remove()
    return cache


def retried(model, handle):
    model(IDS, past_key_values=broken_off(model, handle))


def fork(of, *rows):
    return used(lambda model, handle: handle.fork(of(model, handle), *rows))


def of_elsewhere(model, handle):
    return torchsparsekv.patch(tiny(), "quest", **SMALL).make_cache()


def two_at_once(model, handle):
    cache = handle.make_cache(2)
    ask = dict(input_ids=IDS, past_key_values=cache, max_new_tokens=4, do_sample=False)
    model.generate(**ask, stopping_criteria=[lambda *_: model.generate(**ask)])


def masked(mask, tokens=2):
    """A second prompt with this mask."""

    def act(model, handle):
        cache = handle.make_cache(2)
        model(IDS, attention_mask=MASK, past_key_values=cache)
        model(IDS[:, :tokens], attention_mask=mask, past_key_values=cache)

    return used(act)


def called(model_type):
    """A model that says it is of this type."""

    def model():
        made = tiny()
        made.config.model_type = model_type
        return made

    return model


def crop(length, method="quest"):
    """Crop a cache that holds a padded prompt."""

    def act(model):
        hyper = hyper_of(method, **SMALL)
        with torch.no_grad(), torchsparsekv.patch(model, method, **hyper) as handle:
            cache = handle.make_cache(2)
            model(IDS, attention_mask=MASK, past_key_values=cache)
            cache.crop(length)

    return act


def another_conversation(model, handle):
    cache = handle.make_cache(2)
    ids = torch.cat([model.generate(IDS, past_key_values=cache, max_new_tokens=2), IDS], 1)
    ids[1, 3] = 7 if ids[1, 3] != 7 else 8
    model.generate(ids, past_key_values=cache, max_new_tokens=2)


def cropped_after_unpatch(model, handle):
    cache = handle.make_cache(2)
    handle.unpatch()
    cache.crop(1)


def cropped_while_generating(model, handle):
    cache = handle.make_cache(2)
    now = dict(stopping_criteria=[lambda *_: cache.crop(4)], max_new_tokens=4, do_sample=False)
    model.generate(IDS, past_key_values=cache, **now)


def second_cache(*method, **options):
    return used(lambda model, handle: torchsparsekv.SparseCache(model, *method, **options))


def compiled():
    model = tiny()
    model.compile(backend="eager")
    return model


def without_transformers(model):
    ours = [name for name in sys.modules if name.startswith("torchsparsekv.patches")]
    with mock.patch.dict(sys.modules, {"transformers": None}):
        for name in ours:
            del sys.modules[name]
        torchsparsekv.patch(model)


def unknown_seam(model):
    """A newer transformers, whose attention takes the cache by a name that nobody knows."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, memory=None, **kwargs): ...

    newer = mock.patch.object(_names.transformers, "__version__", "5.99.1")
    with newer, mock.patch.object(LlamaAttention, "forward", forward):
        patch()(model)


def warned(act):
    """The first warning of ours as an error."""

    def run(model):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "(torchsparsekv: |make_cache)", UserWarning)
            act(model)

    return run


LONGER = torch.cat([MASK, MASK[:, -2:]], 1)
A_HOLE = LONGER.index_fill(1, torch.tensor([15], device=DEVICE), 0)

ROWS = [
    # hyper-parameters of single methods
    Row("m does not divide head_dim", patch("pariskv", m=5), ValueError, r"m must be one of .*, got 5"),
    Row("group unknown", patch("pariskv", group="sum"), ValueError, r"group must be one of mean, max, got 'sum'"),
    Row("rho above one", patch("pariskv", rho=2), ValueError, r"rho must be None or in \(0, 1\], got 2"),
    Row("beta zero", patch("pariskv", beta=0), ValueError, r"beta must be None or in \(0, 1\], got 0"),
    Row("beta above rho", patch("pariskv", beta=0.5, rho=0.2), ValueError, r"rho 0.2 is below beta 0.5: too few keys would get votes"),
    Row("full_threshold negative", patch("pariskv", full_threshold=-1), ValueError, r"full_threshold must be at least 0, got -1"),
    Row("page_size not a power of two", patch("icecache", page_size=12), ValueError, r"page_size must be a power of two, got 12"),
    Row("r zero", patch("icecache", r=0.0), ValueError, r"r must be between 0 and 1, both excluded, got 0.0"),
    Row("r a string", patch("icecache", r="0.1"), ValueError, r"r must be between 0 and 1, both excluded, got '0.1'"),
    Row("field_of_view above one", patch("icecache", field_of_view=1.5), ValueError, r"field_of_view must be from 0 to 1, got 1.5"),
    Row("growth a string", patch("icecache", growth="much"), ValueError, r"growth must be from 0 to 1, got 'much'"),
    Row("promotion unknown", patch("icecache", promotion="luck"), ValueError, r"promotion must be one of .*quota.*, got 'luck'"),
    Row("levels one", patch("icecache", levels=1), ValueError, r"levels must be from 2 to \d+, got 1"),
    Row("static_ratio above one", patch("prkv", static_ratio=1.5), ValueError, r'static_ratio must be in \[0, 1\] or "auto", got 1.5'),
    Row("observe above window", patch("prkv", observe=7), ValueError, r"observe 7 is above window 6: tokens would be scored by"),
    Row("update_from unknown", patch("prkv_static", update_from="values"), ValueError, r"update_from must be one of .*, got 'values'"),
    Row("update_every zero", patch("prkv", update_every=0), ValueError, r"update_every must be from 1 to \d+, got 0"),
    Row("digest for pariskv", patch("pariskv", digest="float8"), TypeError, r"'pariskv' has no hyper-parameter digest"),
    # models refused by name, before a module of them is looked at
    Row("model type with latent attention", patch(), NotImplementedError, r"model_type 'deepseek_v3' is not supported: its cache holds latents", called("deepseek_v3")),
    Row("model type with chunked attention", patch(), NotImplementedError, r"model_type 'llama4' is not supported: some of its layers attend within chunks", called("llama4")),
    Row("model type with a state space", patch(), NotImplementedError, r"model_type 'jamba' is not supported: its state-space", called("jamba")),
    # what a cache would take
    Row("plan with batch size zero", used(lambda m, h: h.plan(0)), ValueError, r"batch_size must be at least 1, got 0"),
    Row("plan above the limit", used(lambda m, h: h.plan(1, 65)), ValueError, r"max_length 65 is above the limit of this patch, 64"),
    # generate() and calls
    Row("patched model as an assistant", used(assisting), ValueError, r"a patched model cannot assist another.*unpatch it"),
    Row("attentions from generate", generate(output_attentions=True, return_dict_in_generate=True), ValueError, r"no attention weights to return"),
    Row("attentions from a call without the head", used(lambda m, h: m.model(IDS, past_key_values=h.make_cache(2), output_attentions=True)), ValueError, r"no attention weights to return"),
    Row("attentions from a call", used(lambda m, h: m(IDS, past_key_values=h.make_cache(2), output_attentions=True)), ValueError, r"no attention weights to return"),
    Row("row with only padding, in chunks", generate(mask=MASK * MASK.new_tensor([[0], [1]]), prefill_chunk_size=6), ValueError, r"a row of the batch is nothing but padding"),
    Row("two concurrent calls on one cache", used(two_at_once), RuntimeError, r"another generate\(\) is running on this SparseCache: give each call a cache of its own"),
    # models changed under the patch
    Row("attention implementation changed", restored(implementation("eager"), lambda m: None), RuntimeError, r"was set to 'eager' after patch: unpatch, set it, and patch again"),
    Row("attention implementation changed, in generate", used(lambda m, h: (m.set_attn_implementation("eager"), m.generate(IDS, max_new_tokens=2))), RuntimeError, r"was set to 'eager' after patch"),
    Row("dtype changed", restored(lambda m: m.half(), lambda m: m.float()), TypeError, r"cache is in torch.float32 on .*computes in torch.float16.*patch again"),
    Row("autocast", used(with_autocast), TypeError, r"cache is in torch.float32 on .*computes in torch.bfloat16.*autocast"),
    Row("pickle", used(lambda m, h: pickle.dumps(m)), TypeError, r"a patched model cannot be pickled: call unpatch\(\) first"),
    # forwards that broke off, forks
    Row("forward after an interrupted forward", used(retried), RuntimeError, r"did not finish.*call cache.reset\(\)"),
    Row("fork of an interrupted cache", fork(broken_off), RuntimeError, r"did not finish"),
    Row("fork into fewer rows", fork(lambda m, h: h.make_cache(2), 1), ValueError, r"a cache of 2 sequences cannot be forked into 1 sequences; a cache of one sequence can"),
    Row("fork into no rows", fork(lambda m, h: h.make_cache(1), 0), ValueError, r"batch_size must be at least 1, got 0"),
    Row("fork of a cache of another patch", fork(of_elsewhere), ValueError, r"fork takes a SparseCache of this patch, got SparseCache"),
    Row("fork of None", fork(lambda m, h: None), ValueError, r"fork takes a SparseCache of this patch, got NoneType"),
    # other people's caches and masks
    Row("mask too narrow", masked(LONGER[:, 1:]), ValueError, r"of 21 columns does not fit: the cache holds 20 tokens and 2 are new, so it needs 22 columns, or 2"),
    Row("mask hides a stored token", masked(A_HOLE), ValueError, r"contradicts the cache: it hides tokens that are stored or new"),
    Row("mask hides a new token", masked(torch.cat([MASK, MASK[:, :1] * 0, MASK[:, -1:]], 1)), ValueError, r"contradicts the cache"),
    # chat
    Row("crop of a fraction", crop(1.5), ValueError, r"crop takes a number of tokens, from -20 to 20 here, got 1.5"),
    Row("crop of True", crop(True), ValueError, r"crop takes a number of tokens, from -20 to 20 here, got True"),
    Row("crop below the begin", crop(-21), ValueError, r"from -20 to 20 here, got -21"),
    Row("crop into the padding of a row", crop(2), ValueError, r"crop\(2\) would leave a row of the batch with nothing but padding"),
    Row("crop of snapkv", crop(15, "snapkv"), NotImplementedError, r"crop: snapkv selects by the queries of the latest tokens.*Handle\.fork"),
    Row("crop of icecache", crop(15, "icecache"), NotImplementedError, r"crop: icecache stores tokens in the order of its tree; make a copy before the turn \(Handle\.fork\)"),
    Row("crop of a window that dropped tokens", crop(15), NotImplementedError, r"crop: layer \d has a sliding window of 13 tokens and has dropped the tokens before it; make a copy", lambda: tiny("gemma2")),
    Row("crop after unpatch", used(cropped_after_unpatch), RuntimeError, r"the patch that made this SparseCache is off"),
    Row("crop in a running generate", used(cropped_while_generating), RuntimeError, r"crop: a generate\(\) is running on this SparseCache"),
    Row("crop of an interrupted cache", used(lambda m, h: broken_off(m, h).crop(5)), RuntimeError, r"did not finish.*call cache.reset\(\)"),
    Row("crop of one layer", used(lambda m, h: h.make_cache(2).layers[1].crop(3)), NotImplementedError, r"cropped.*cache.crop\(length\)"),
    Row("second cache with options", second_cache("quest", budget=8), ValueError, r"patched already with Quest\(.*without options"),
    Row("cache with an unknown option", lambda m: torchsparsekv.SparseCache(m, "quest", bugdet=8), TypeError, r"'quest' has no hyper-parameter bugdet"),
    Row("prefill chunk size a float", generate(prefill_chunk_size=8.0), ValueError, r"prefill_chunk_size must be a positive int, got 8.0"),
    Row("as many tokens as the cache holds", used(lambda m, h: [m.generate(IDS, past_key_values=c, max_new_tokens=1) for c in 2 * [h.make_cache(2)]]), ValueError, r"this call has 20 tokens and the SparseCache holds 20: pass the token ids of the whole conversation"),
    Row("another conversation on a used cache", used(another_conversation), ValueError, r"token 3 of row 1 has id 7 here and \d+ in the cache. cache.crop\(3\) keeps the tokens before it, cache.reset\(\) begins"),
    # warnings, which a filter turns into errors
    Row("answer beyond the positions", warned(generate(max_new_tokens=50)), UserWarning, r"max_new_tokens is 45 instead of 50, because the prompt has 20 tokens and max_position_embeddings of the model is 64", lambda: tiny(max_position_embeddings=64)),
    Row("max_length that saves nothing", warned(patch(budget=56)), UserWarning, r"nothing will be saved: quest attends to every token of a sequence of up to 66 tokens \(sink 4, window 6, budget 56\), and max_length is 64"),
    Row("dynamic cache", warned(generate(cache_implementation="dynamic")), UserWarning, r"this decode step is dense, because its cache is not from this patch"),
    Row("cache of all positions", warned(used(lambda m, h: h.make_cache(2), max_length=None)), UserWarning, r"a cache without max_length has room for 512 tokens, all positions of the model"),
    # versions and wrappers
    Row("compiled model", patch(), RuntimeError, r"this model is compiled already.*: patch first, then compile\(\)", compiled),
    Row("no transformers", without_transformers, ImportError, r"^patch needs transformers, which is not installed: pip install 'torchsparsekv\[hf\]'$"),
    Row("transformers whose seam does not fit", unknown_seam, NotImplementedError, r"LlamaForCausalLM has 0 attention modules.*; this is transformers 5\.99\.1, and torchsparsekv is tested up to \d+\.\d+: install"),
    Row("mask of fewer rows", masked(LONGER[:1]), ValueError, r"made for batch size 2, the attention mask has 1 rows"),
]  # fmt: skip


def test_no_two_rows_have_one_name():
    assert len({row.id for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_call_is_refused_and_the_model_unchanged(row):
    model = row.model()
    before = snapshot(model)
    with pytest.raises(row.error, match=row.says):
        row.act(model)
    assert snapshot(model) == before


def test_decode_past_the_capacity_gives_no_answer():
    """Where a check costs nothing it raises; on a GPU it would stall every step, so there the row turns into NaN."""
    model = tiny()
    with torch.no_grad(), torchsparsekv.patch(model, "quest", **{**SMALL, "max_length": 22, "budget": 8}) as handle:
        cache = handle.make_cache(2)
        model(IDS, past_key_values=cache)
        for _ in range(2):  # tokens 21 and 22 still fit
            assert model(IDS[:, :1], past_key_values=cache).logits.isfinite().all()
        kept = [layer.state.store.pool.clone() for layer in cache.layers]
        if DEVICE.type == "cpu":
            with pytest.raises(ValueError, match="1 tokens after 22 overrun this cache of max_length 22"):
                model(IDS[:, :1], past_key_values=cache)
        else:
            assert model(IDS[:, :1], past_key_values=cache).logits.isnan().all()
        assert all(torch.equal(layer.state.store.pool, old) for layer, old in zip(cache.layers, kept)), "overwritten"


def test_compiled_decode_past_the_capacity_is_nan():
    """No check is left in a compiled step: what the row lengths do there is seen on a CPU as well."""
    model = tiny(num_hidden_layers=2)
    with torch.no_grad(), torchsparsekv.patch(model, "quest", **{**SMALL, "max_length": 22, "budget": 8}) as handle:
        cache = handle.make_cache(2)
        model(IDS, past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, backend="eager")
        out = [step(IDS[:, :1].clone(), past_key_values=cache).logits for _ in range(4)]
    assert [(bool(x.isfinite().all()), bool(x.isnan().all())) for x in out] == 2 * [(True, False)] + 2 * [(False, True)]


@pytest.mark.parametrize("right", [True, False])
def test_second_turn_of_a_padded_batch_needs_its_mask(right):
    """Without it generate() would count positions from the padding on; and it hands on no mask that hides nothing."""
    model = tiny()
    more = torch.cat([IDS, IDS[:, :5]], 1).clamp(min=1)  # of a token for padding transformers makes a mask
    masks = [torch.cat([MASK, torch.ones_like(IDS[:, :5])], 1)] if right else [None, torch.ones_like(more)]
    with torchsparsekv.patch(model, "quest", **SMALL) as handle:
        cache = handle.make_cache(2)
        model.generate(IDS, attention_mask=MASK, past_key_values=cache, max_new_tokens=1)
        for mask in masks:
            with contextlib.nullcontext() if right else pytest.raises(ValueError, match="pass the mask of all tokens so far"):
                model.generate(more, attention_mask=mask, past_key_values=cache, max_new_tokens=2)
        cache.reset()  # and what was refused is left as it was
        model.generate(IDS, attention_mask=torch.ones_like(IDS), past_key_values=cache, max_new_tokens=2)
