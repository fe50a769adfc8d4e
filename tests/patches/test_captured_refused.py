"""`step="captured"` refuses steps that cannot be captured, and says why."""
from types import SimpleNamespace

import pytest
import torch
from capturing import BREAKS, IDS, MASK, captured, said
from models import tiny
from snapshot import snapshot
from transformers import CompileConfig, DynamicCache
from world import DEVICE

import torchsparsekv
from torchsparsekv.patches import _install


def breaks(model, act):
    """`act` in every decode step, as a model's own code would do it."""

    def hook(module, args, output):
        if output.shape[1] == 1:
            act(output)

    return model.model.layers[1].mlp.register_forward_hook(hook)


@pytest.mark.parametrize("why", BREAKS)
def test_a_step_that_cannot_be_captured_says_why(why, replays):
    model = tiny()
    with captured(model) as handle:
        want = said(model, disable_compile=True)
        hook, cache = breaks(model, BREAKS[why]), handle.make_cache(3)
        says = rf"step='captured': a decode step of LlamaForCausalLM cannot be captured as a CUDA graph: {why}; patch"
        for options in ({}, {"past_key_values": cache}):
            with pytest.raises(RuntimeError, match=says):
                said(model, **options)
        assert torch.equal(said(model, disable_compile=True), want), "generate() begins afresh"
        with pytest.raises(RuntimeError, match="did not finish"):
            said(model, past_key_values=cache)
        hook.remove()
        cache.reset()
        assert torch.equal(said(model, past_key_values=cache), want)
        assert torch.equal(said(model), want)
        torch.rand(1, device=DEVICE)  # torch's generator is not left capturing


def test_error_of_a_module_is_raised_unchanged(replays):
    def act(x):
        if handle._recycled.graphs[0].eager == 0:
            try:
                {}["x"]
            except KeyError as e:
                raise ValueError("its own reason") from e

    model = tiny()
    with captured(model) as handle:
        hook = breaks(model, act)
        with pytest.raises(ValueError, match="its own reason"):
            said(model)
        hook.remove()
        assert torch.equal(said(model), said(model, disable_compile=True))


def test_interrupted_cache_is_not_replayed(replays):
    model = tiny()

    def interrupt(module, args, output):
        raise KeyboardInterrupt

    with captured(model) as handle, torch.no_grad():
        cache, step, token = handle.make_cache(3), model.get_compiled_call(None), IDS[:, :1]
        model(IDS, attention_mask=MASK, past_key_values=cache)
        for at in range(5):
            step(token, position_ids=torch.full_like(token, 41 + at), past_key_values=cache)
        assert replays == {0: 2}
        hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(IDS[:, :3], past_key_values=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="did not finish"):
            step(token, position_ids=torch.full_like(token, 49), past_key_values=cache)


def test_inputs_that_change_at_every_step_are_named(replays):
    model = tiny()
    with captured(model) as handle, torch.no_grad():
        cache, step = handle.make_cache(3), model.get_compiled_call(None)
        step(input_ids=IDS, attention_mask=MASK, past_key_values=cache)
        masks = [torch.cat([MASK, MASK[:, -n:]], 1) for n in range(1, 6)]
        for mask in masks[:4]:
            step(input_ids=IDS[:, :1], attention_mask=mask, past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"to step: attention_mask is \(.*\[3, 45\].*\), then \(.*\[3, 46\]"):
            step(input_ids=IDS[:, :1], attention_mask=masks[4], past_key_values=cache)
    assert not replays


def test_foreign_cache_is_compiled(replays, monkeypatch):
    model = tiny()
    monkeypatch.setattr(type(model), "get_compiled_call", lambda self, config: lambda *args, **kwargs: "compiled")
    with captured(model):
        assert model.get_compiled_call(None)(IDS, past_key_values=DynamicCache()) == "compiled"


def test_compile_options_are_refused(replays):
    model = tiny()
    with captured(model) as handle:
        with pytest.raises(ValueError, match="compile_config is for the compiler, which a patch with step='captured'"):
            said(model, compile_config=CompileConfig())
        assert handle._recycled is None
        said(model, compile_config=CompileConfig(), disable_compile=True)


def test_captured_is_refused_where_it_cannot_work():
    model = tiny().cpu()
    before = snapshot(model)
    with pytest.raises(ValueError, match="step='captured' needs a model on one CUDA device, this one is on cpu"):
        captured(model)
    with pytest.raises(ValueError, match="step must be one of auto, captured, compiled, got 'graph'"):
        torchsparsekv.patch(model, "quest", step="graph")
    assert snapshot(model) == before
    assert _install.STEPS == ("auto", "captured", "compiled")


def like(**what) -> SimpleNamespace:
    return SimpleNamespace(parameters=lambda: [SimpleNamespace(device="cuda:0")], **what)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (like(_tp_size=2), "this one is split over several ranks"),
        (like(get_compiled_call=None), "this model has one of its own"),
        (like(hf_quantizer=SimpleNamespace(is_compileable=False)), "runs a model quantised by SimpleNamespace eagerly"),
    ],
)
def test_generation_modes_without_capture_are_refused(model, says):
    with pytest.raises((NotImplementedError, RuntimeError), match=says):
        _install.captures_steps(model, "captured")
    assert not _install.captures_steps(model, "compiled")
    assert not _install.captures_steps(model, "auto")
    assert _install.captures_steps(like(), "captured")
    assert _install.captures_steps(like(), "auto")
    assert not _install.captures_steps(like(), "compiled")
