"""What is refused of a patched model in use: the table of tests/test_refusals.py, gone on with."""
# ruff: noqa: E501 (in the table a row is a line)
import contextlib
import pickle

import pytest
import torch
from models import tiny
from snapshot import snapshot
from test_refusals import IDS, MASK, SMALL, Row, generate, used
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


LONGER = torch.cat([MASK, MASK[:, -2:]], 1)
A_HOLE = LONGER.index_fill(1, torch.tensor([15], device=DEVICE), 0)

ROWS = [
    # generate() and calls
    Row("assistant", used(assisting), ValueError, r"a patched model cannot assist another.*unpatch it"),
    Row("attentions from generate", generate(output_attentions=True, return_dict_in_generate=True), ValueError, r"no attention weights to return"),
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
