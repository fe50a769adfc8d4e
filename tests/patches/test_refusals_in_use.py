"""What is refused of a patched model in use: the table of tests/patches/test_refusals.py, gone on with."""
# ruff: noqa: E501 (in the table a row is a line)
import contextlib
import pickle

import pytest
import torch
from models import tiny
from snapshot import snapshot
from test_refusals import IDS, MASK, SMALL, Row, generate, patch, used
from test_refusals import ROWS as OTHERS
from world import DEVICE

import torchsparsekv


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


LONGER = torch.cat([MASK, MASK[:, -2:]], 1)
A_HOLE = LONGER.index_fill(1, torch.tensor([15], device=DEVICE), 0)

ROWS = [
    # hyper-parameters of single methods
    Row("subspaces of five dimensions", patch("pariskv", m=5), ValueError, r"m must be one of .*, got 5"),
    Row("heads that choose by their sum", patch("pariskv", group="sum"), ValueError, r"group must be one of mean, max, got 'sum'"),
    Row("rho above one", patch("pariskv", rho=2), ValueError, r"rho must be None or in \(0, 1\], got 2"),
    Row("beta zero", patch("pariskv", beta=0), ValueError, r"beta must be None or in \(0, 1\], got 0"),
    Row("beta above rho", patch("pariskv", beta=0.5, rho=0.2), ValueError, r"rho 0.2 is below beta 0.5: too few keys would get votes"),
    Row("full_threshold negative", patch("pariskv", full_threshold=-1), ValueError, r"full_threshold must be at least 0, got -1"),
    Row("pages of any size in icecache", patch("icecache", page_size=12), ValueError, r"page_size must be a power of two, got 12"),
    Row("no promotion", patch("icecache", r=0.0), ValueError, r"r must be between 0 and 1, both excluded, got 0.0"),
    Row("promotion a string", patch("icecache", r="0.1"), ValueError, r"r must be between 0 and 1, both excluded, got '0.1'"),
    Row("a view of more than all", patch("icecache", field_of_view=1.5), ValueError, r"field_of_view must be from 0 to 1, got 1.5"),
    Row("growth a string", patch("icecache", growth="much"), ValueError, r"growth must be from 0 to 1, got 'much'"),
    Row("promotion unknown", patch("icecache", promotion="luck"), ValueError, r"promotion must be one of .*quota.*, got 'luck'"),
    Row("a tree of one level", patch("icecache", levels=1), ValueError, r"levels must be from 2 to \d+, got 1"),
    Row("more than all static", patch("prkv", static_ratio=1.5), ValueError, r'static_ratio must be in \[0, 1\] or "auto", got 1.5'),
    Row("observed before the window", patch("prkv", observe=7), ValueError, r"observe 7 is above window 6: tokens would be scored by"),
    Row("scores from nowhere", patch("prkv_static", update_from="values"), ValueError, r"update_from must be one of .*, got 'values'"),
    Row("updates never", patch("prkv", update_every=0), ValueError, r"update_every must be from 1 to \d+, got 0"),
    Row("a digest of another method", patch("pariskv", digest="float8"), TypeError, r"'pariskv' has no hyper-parameter digest"),
    # models refused by name, before a module of them is looked at
    Row("MLA", patch(), NotImplementedError, r"model_type 'deepseek_v3' is not supported: its cache holds latents", called("deepseek_v3")),
    Row("attention in chunks", patch(), NotImplementedError, r"model_type 'llama4' is not supported: some of its layers attend within chunks", called("llama4")),
    Row("a state space", patch(), NotImplementedError, r"model_type 'jamba' is not supported: its state spaces", called("jamba")),
    # what a cache would take
    Row("plan of no rows", used(lambda m, h: h.plan(0)), ValueError, r"batch_size must be at least 1, got 0"),
    Row("plan above the limit", used(lambda m, h: h.plan(1, 65)), ValueError, r"max_length 65 is above the limit of this patch, 64"),
    # generate() and calls
    Row("assistant", used(assisting), ValueError, r"a patched model cannot assist another.*unpatch it"),
    Row("attentions from generate", generate(output_attentions=True, return_dict_in_generate=True), ValueError, r"no attention weights to return"),
    Row("attentions from a call without the head", used(lambda m, h: m.model(IDS, past_key_values=h.make_cache(2), output_attentions=True)), ValueError, r"no attention weights to return"),
    Row("attentions from a call", used(lambda m, h: m(IDS, past_key_values=h.make_cache(2), output_attentions=True)), ValueError, r"no attention weights to return"),
    Row("a row of padding, in chunks", generate(mask=MASK * MASK.new_tensor([[0], [1]]), prefill_chunk_size=6), ValueError, r"a row of the batch is nothing but padding"),
    Row("two calls on one cache", used(two_at_once), RuntimeError, r"another generate\(\) is running on this SparseCache: give each call a cache of its own"),
    # models changed under the patch
    Row("implementation changed", restored(implementation("eager"), lambda m: None), RuntimeError, r"was set to 'eager' after patch: unpatch, set it, and patch again"),
    Row("implementation changed, in generate", used(lambda m, h: (m.set_attn_implementation("eager"), m.generate(IDS, max_new_tokens=2))), RuntimeError, r"was set to 'eager' after patch"),
    Row("dtype changed", restored(lambda m: m.half(), lambda m: m.float()), TypeError, r"cache is in torch.float32 on .*computes in torch.float16.*patch again"),
    Row("autocast", used(with_autocast), TypeError, r"cache is in torch.float32 on .*computes in torch.bfloat16.*autocast"),
    Row("pickle", used(lambda m, h: pickle.dumps(m)), TypeError, r"a patched model cannot be pickled: call unpatch\(\) first"),
    # forwards that broke off, forks
    Row("going on after a broken forward", used(retried), RuntimeError, r"did not come to its end.*Call reset\(\) on it"),
    Row("fork of a broken cache", fork(broken_off), RuntimeError, r"did not come to its end"),
    Row("fork into fewer rows", fork(lambda m, h: h.make_cache(2), 1), ValueError, r"a cache of 2 rows cannot be forked into 1; one row can"),
    Row("fork into no rows", fork(lambda m, h: h.make_cache(1), 0), ValueError, r"batch_size must be at least 1, got 0"),
    Row("fork of another patch's", fork(of_elsewhere), ValueError, r"fork takes a SparseCache of this patch, got SparseCache"),
    Row("fork of no cache", fork(lambda m, h: None), ValueError, r"fork takes a SparseCache of this patch, got NoneType"),
    # other people's caches and masks
    Row("mask too narrow", masked(LONGER[:, 1:]), ValueError, r"of 21 columns does not fit: the cache holds 20 tokens and 2 are new, so it needs 22 columns, or 2"),
    Row("mask hides a stored token", masked(A_HOLE), ValueError, r"contradicts the cache: it hides tokens that are stored or new"),
    Row("mask hides a new token", masked(torch.cat([MASK, MASK[:, :1] * 0, MASK[:, -1:]], 1)), ValueError, r"contradicts the cache"),
    Row("mask of fewer rows", masked(LONGER[:1]), ValueError, r"made for batch size 2, the attention mask has 1 rows"),
]  # fmt: skip


def test_no_two_rows_have_one_name_and_there_are_enough():
    names = [row.id for row in (*OTHERS, *ROWS)]
    assert len(set(names)) == len(names) >= 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_refused_and_untouched(row):
    model = row.model()
    before = snapshot(model)
    with pytest.raises(row.error, match=row.says):
        row.act(model)
    assert snapshot(model) == before


def test_decode_past_the_end_is_never_an_answer():
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


def test_compiled_decode_past_the_end_is_nan():
    """No check is left in a compiled step: what the row lengths do there is seen on a CPU as well."""
    model = tiny(num_hidden_layers=2)
    with torch.no_grad(), torchsparsekv.patch(model, "quest", **{**SMALL, "max_length": 22, "budget": 8}) as handle:
        cache = handle.make_cache(2)
        model(IDS, past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        out = [step(IDS[:, :1].clone(), past_key_values=cache).logits for _ in range(4)]
    assert [(bool(x.isfinite().all()), bool(x.isnan().all())) for x in out] == 2 * [(True, False)] + 2 * [(False, True)]


@pytest.mark.parametrize("right", [True, False])
def test_a_second_turn_of_a_padded_batch_wants_its_mask(right):
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
