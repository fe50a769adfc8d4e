"""The cache by each of its names, and versions of transformers that nobody has tried."""
import warnings

import pytest
import torch
from models import prompts, tiny
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.utils import generic

import torchsparsekv
from torchsparsekv.patches import _names

SMALL = dict(max_length=128, budget=8, sink=8, window=6, skip_layers=1, block_size=4)
IDS, _ = prompts(2, 40, ragged=False)


@pytest.fixture
def strict(monkeypatch):
    """A warning of transformers is an error, from the logger too."""

    def refuse(text, *_):
        raise AssertionError(text)

    if hasattr(generic.logger, "warning_once"):
        monkeypatch.setattr(generic.logger, "warning_once", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        yield


@pytest.mark.parametrize("name", _names.NAMES)
def test_cache_by_each_name_is_filled_and_read_without_a_warning(name, strict):
    model = tiny()
    with torchsparsekv.patch(model, "quest", **SMALL) as handle, torch.no_grad():
        want = model.generate(IDS, max_new_tokens=8, do_sample=False)
        cache = handle.make_cache(2)
        assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False, **{name: cache}), want)
        assert int(cache.get_seq_length()) == 47
        cache.reset()
        logits = model(IDS, **{name: cache}).logits[:, -1]
        assert torch.equal(logits.argmax(-1), want[:, 40])
        model(want[:, 40:41], **{name: cache})
        model.model(want[:, 41:42], **{name: cache})
        assert int(cache.get_seq_length()) == 42
        assert all(r.steps for r in handle.report().layers)


def test_unknown_newer_version_is_tried(monkeypatch):
    monkeypatch.setattr(_names.transformers, "__version__", "5.99.1")
    model = tiny()
    with torchsparsekv.patch(model, "quest", **SMALL), torch.no_grad():
        assert model.generate(IDS, max_new_tokens=4, do_sample=False).shape == (2, 44)


def test_newer_version_that_does_not_fit_is_refused_by_its_name(monkeypatch):
    """Its attention takes the cache by a name that nobody has heard of."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, memory=None, **kwargs): ...

    model = tiny()
    monkeypatch.setattr(LlamaAttention, "forward", forward)
    with pytest.raises(NotImplementedError, match="attention modules") as told:
        torchsparsekv.patch(model, "quest", **SMALL)
    assert ("this is transformers" in str(told.value)) == bool(_names.blamed())
    monkeypatch.setattr(_names.transformers, "__version__", "5.99.1")
    with pytest.raises(NotImplementedError, match=rf"this is transformers 5\.99\.1, .*tested up to {_names.TESTED}"):
        torchsparsekv.patch(model, "quest", **SMALL)
