"""Interrupted and refused forwards of models whose linear layers keep states in the cache."""
import pytest
import torch
from models import greedy_logits, prompts
from supported import supported

import torchsparsekv

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe")
IDS, MASK = prompts(1, 40, ragged=False)
STEP = IDS[:, :1]
WHERE = ("model.layers.0.mlp", "model.layers.3.self_attn", "lm_head")


class Break(Exception):
    pass


def patched(family: str):
    model = supported(family)
    if family.startswith("lfm2"):  # what the others call mlp
        for layer in model.model.layers:
            layer.mlp = layer.feed_forward
    return model, torchsparsekv.patch(model, "full", max_length=128, skip_layers=0)


def broken_off(model, where: str, call) -> None:
    hook = model.get_submodule(where).register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Break()))
    with pytest.raises(Break):
        call()
    hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("where", WHERE)
@torch.no_grad()
def test_interrupted_forward_cannot_be_continued(family, where):
    model, handle = patched(family)
    with handle:
        cache = handle.make_cache(1)
        want = greedy_logits(model, IDS, MASK, 2, cache)
        for ids in (IDS, STEP):
            cache.reset()
            if ids is STEP:
                model(IDS, past_key_values=cache)
            broken_off(model, where, lambda ids=ids: model(ids, past_key_values=cache))
            with pytest.raises(RuntimeError, match=r"did not finish.*call cache.reset\(\)"):
                model(ids, past_key_values=cache)
        cache.reset()
        assert torch.equal(greedy_logits(model, IDS, MASK, 2, cache), want)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_interrupted_forward_of_the_inner_model_is_noticed(family):
    model, handle = patched(family)
    with handle:
        cache = handle.make_cache(1)
        for _ in range(2):
            model.model(IDS[:, :5], past_key_values=cache)
        model(IDS[:, :5], past_key_values=cache)
        broken_off(model, WHERE[0], lambda: model.model(STEP, past_key_values=cache))
        with pytest.raises(RuntimeError, match="did not finish"):
            model(STEP, past_key_values=cache)


@torch.no_grad()
def test_unpatching_leaves_no_hook():
    model, handle = patched("qwen3_next")
    handle.unpatch()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not any(hasattr(m, "_torchsparsekv_owner") for m in model.modules())


@torch.no_grad()
def test_refused_fork_allocates_nothing():
    model, handle = patched("qwen3_next")
    with handle:
        cache = handle.make_cache(1)
        model(IDS, past_key_values=cache)
        model(STEP, past_key_values=cache)
        said = str(handle.report())
        with pytest.raises(NotImplementedError, match="fork cannot copy the state of linear-attention layers"):
            handle.fork(cache)
        assert str(handle.report()) == said


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_plan_includes_states_kept_by_transformers(family, dtype):
    """Which it makes when a prompt comes; where nothing keeps anything but attention, there is no such line."""
    model = supported(family, dtype=dtype)
    ids, _ = prompts(3, 9, ragged=False)
    with torchsparsekv.patch(model, "full", max_length=64, skip_layers=0) as handle:
        planned, cache = handle.plan(3, 64), handle.make_cache(3)
        model(ids, past_key_values=cache)
        assert handle.report().device_bytes == planned.device_bytes
        own = sum(r.nbytes for r in planned.rows if r.name.endswith("(transformers)"))
        assert own == cache.own_bytes() > 0
    with torchsparsekv.patch(supported("llama"), "full", max_length=64) as handle:
        assert "transformers" not in str(handle.plan(1, 64))
