"""The public names: what they are, and what objects say of themselves."""
import inspect
import re

import torch
from models import prompts, tiny

import torchsparsekv
from torchsparsekv import extension
from torchsparsekv.method import COMMON, OF_PATCH


def test_every_public_name_can_be_imported():
    for module in (torchsparsekv, extension):
        for name in module.__all__:
            assert getattr(module, name) is not None, name


def test_arguments_that_a_misspelled_word_may_mean_are_those_of_patch():
    named = set(inspect.signature(torchsparsekv.patch).parameters) - {"model", "method", "hyper", *COMMON}
    assert named == set(OF_PATCH)


def test_patch_returns_a_handle_and_a_handle_makes_caches():
    with torchsparsekv.patch(tiny(), "quest", max_length=64, budget=16, sink=4, window=8, block_size=4) as handle:
        assert isinstance(handle, torchsparsekv.Handle)
        assert isinstance(handle.make_cache(), torchsparsekv.SparseCache)
        assert isinstance(handle.report(), torchsparsekv.Report)


def test_a_cache_says_its_methods_tokens_and_bytes():
    model, (ids, mask) = tiny(), prompts(2, 40)
    with torchsparsekv.patch(model, "quest", max_length=64, budget=16, sink=4, window=8, block_size=4) as handle:
        cache = handle.make_cache(2)
        with torch.inference_mode():
            model(ids, attention_mask=mask, past_key_values=cache)
        host, device = cache.nbytes()
        assert (host, device) == (handle.report().host_bytes, handle.report().device_bytes)
        words = r"<SparseCache full, quest: 2 rows, 40 of 64 tokens in the longest, 0 B host, [\d.]+ KiB device>"
        assert re.fullmatch(words, repr(cache))
        assert f"{device / 1024:.2f} KiB" in repr(cache)
