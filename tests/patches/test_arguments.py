"""patch() accepts integers of other libraries, lowers defaults that do not fit, and restores global settings."""
import copy
import gc

import numpy as np
import pytest
import torch
from models import tiny

import torchsparsekv

SMALL = dict(max_length=64, budget=8, sink=4, window=6, skip_layers=1, block_size=4)


def patch(model, method="quest", **changes):
    return torchsparsekv.patch(model, method, **{**SMALL, **changes})


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
def test_integers_of_numpy_and_torch_are_accepted(kind):
    hyper = {name: kind(value) for name, value in SMALL.items()}
    with patch(tiny(), **hyper, layers={kind(2): dict(budget=kind(16))}) as handle, patch(tiny()) as plain:
        assert handle.planned.method == plain.planned.method
        assert [m.budget for m in handle.planned.methods[1:]] == [8, 16]
        assert type(handle.planned.methods[2].budget) is int
        cache = handle.make_cache(kind(2), kind(48))
        assert (cache.batch, cache.max_length) == (2, 48)


def test_default_budget_above_the_capacity_is_lowered_and_reported():
    with torchsparsekv.patch(tiny(), "quest", max_length=100) as handle:
        assert [m.name for m in handle.planned.methods] == ["full", "full", "quest"]
        assert handle.planned.method.budget == 96, "whole blocks of 16"
        said = "quest has budget 96: its default of 1024 is above the 100 tokens of a cache"
        assert said in repr(handle)
        assert said in str(handle.report())
        saves = (
            "nothing will be saved: quest attends to every token of a sequence of up to 416 tokens (sink 64, "
            "window 256, budget 96), and max_length is 100"
        )
        assert handle.report().as_dict()["notes"] == (said, saves)
    with torchsparsekv.patch(tiny(), "louiskv", max_length=24) as handle:
        assert "louiskv keeps its default budget of 1024" in repr(handle)
    with patch(tiny()) as handle:
        assert handle.report().notes == ()


def test_default_method_is_the_recommended_one():
    """README: which method should I take. It has to be one that the demo finds right."""
    with torchsparsekv.patch(tiny()) as handle:
        assert handle.planned.method.name == "pariskv"


@pytest.mark.parametrize("layers", [1, 2])
def test_small_models_keep_one_sparse_layer(layers):
    with patch(tiny(num_hidden_layers=layers), skip_layers=None) as handle:
        assert [m.name for m in handle.planned.methods] == ["full"] * (layers - 1) + ["quest"]
        assert f"skip_layers {layers - 1}: the default of 2 would skip all {layers} layers" in repr(handle)
        assert f"skip_layers={layers - 1}" in repr(handle)


def test_recompile_limit_is_restored_by_the_last_unpatch():
    gc.collect()  # models of other tests that are gone but for this
    config = torch._dynamo.config
    with config.patch(recompile_limit=8):
        first, second = patch(tiny()), patch(tiny())
        twin = copy.deepcopy(first.model)._torchsparsekv
        for handle in (second, first):
            handle.unpatch()
            assert config.recompile_limit == 64
        twin.unpatch()
        assert config.recompile_limit == 8
        with patch(tiny()):
            config.recompile_limit = 100  # the user's wish
        assert config.recompile_limit == 100
        with patch(tiny()):
            assert config.recompile_limit == 100, "more than enough is left alone"
        assert config.recompile_limit == 100
