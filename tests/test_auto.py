"""`patch(..., step="auto")`, the default: steps are captured, and compiled where they cannot be, which a line says."""
import pytest
import torch
from models import tiny
from test_captured import IDS, MASK, NEW, SMALL, said
from test_captured_refused import BREAKS
from transformers import CompileConfig
from world import DEVICE

import torchsparsekv
from torchsparsekv.patches import _captured


def auto(model, **changes):
    return torchsparsekv.patch(model, "quest", **{**SMALL, **changes})


@pytest.fixture
def compiled(monkeypatch):
    """In the place of torch.compile: how many steps of each model go there."""
    calls = []

    def get_compiled_call(self, config):
        def call(*args, **kwargs):
            calls.append(config)
            return self(*args, **kwargs)

        return call

    monkeypatch.setattr(type(tiny()), "get_compiled_call", get_compiled_call)
    return calls


class Acts(torch.nn.Module):
    """A module whose own code does something in every decode step."""

    def __init__(self, inner, act):
        super().__init__()
        self.inner, self.act = inner, act

    def forward(self, x):
        if x.shape[1] == 1:
            self.act(x)
        return self.inner(x)


def test_it_is_the_default_and_captures(replays, compiled):
    model = tiny()
    with auto(model) as handle:
        assert (handle.step, handle.captures) == ("auto", True)
        assert "step" not in repr(handle)
        want = said(model, disable_compile=True)
        assert torch.equal(said(model), want)
        assert torch.equal(said(model), want)
        assert not any("compiled" in note for note in handle.report().notes)
    assert replays == {0: 2 * (NEW - 1) - _captured.EAGER}
    assert not compiled


@pytest.mark.skipif(DEVICE.type == "cuda", reason="of a model on a CPU")
def test_on_a_cpu_generate_is_transformers_own():
    model = tiny()
    with auto(model) as handle:
        assert not handle.captures
        assert "get_compiled_call" not in vars(model)


@pytest.mark.parametrize("why", BREAKS)
def test_what_cannot_be_captured_is_compiled(why, replays, compiled):
    """What waits is found by the third step, which comes to its end; other breaks by the capture, in which nothing
    happens. Tokens are those of eager steps, also of the call that found out, and of one with a cache of its own."""
    model = tiny()
    model.model.layers[1].mlp = Acts(model.model.layers[1].mlp, BREAKS[why])
    with auto(model) as handle:
        want = said(model, disable_compile=True)
        with pytest.warns(UserWarning, match=f"compiled from now on.* be captured as a CUDA graph: {why}") as warned:
            assert torch.equal(said(model), want)
        assert len([w for w in warned if "from now on" in str(w.message)]) == 1
        found = len(compiled)
        assert found in (NEW - 1 - _captured.EAGER, NEW - _captured.EAGER)
        cache = handle.make_cache(3)
        assert torch.equal(said(model, past_key_values=cache), want)
        assert len(compiled) == found + NEW - 1
        (note,) = [note for note in handle.report().notes if "not captured" in note]
        assert note.startswith("decode steps are compiled, not captured: ")
        assert {r.steps for r in handle.report().layers} == {NEW - 1}
        torch.rand(1, device=DEVICE)  # torch's generator is not left capturing
    assert not sum(replays.values())


def test_hooks_of_yours_run_at_every_step(replays, compiled):
    model, seen = tiny(), []
    hook = model.model.layers[2].register_forward_hook(lambda *_: seen.append(1))
    with auto(model):
        with pytest.warns(UserWarning, match=r"module 'model.layers.2' has a hook, which a replay would leave out"):
            said(model)
        assert len(seen) == NEW
        assert len(compiled) == NEW - 1
    hook.remove()
    with auto(model):
        said(model)
    assert sum(replays.values())


def test_hooks_of_transformers_are_none_of_yours(replays, compiled):
    model = tiny()
    told = dict(return_dict_in_generate=True, output_hidden_states=True)
    with auto(model) as handle:
        for _ in range(2):
            said(model, past_key_values=handle.make_cache(3), **told)
    assert len(replays) == 2
    assert not compiled


def test_options_of_the_compiler_ask_for_it(replays, compiled):
    model, config = tiny(), CompileConfig()
    with auto(model):
        want = said(model, disable_compile=True)
        assert torch.equal(said(model, compile_config=config), want)
        assert compiled == [config] * (NEW - 1)
        assert torch.equal(said(model), want)
    assert sum(replays.values())


def test_a_loop_whose_inputs_change_is_compiled(replays, compiled):
    model = tiny()
    with auto(model) as handle, torch.no_grad():
        cache, step = handle.make_cache(3), model.get_compiled_call(None)
        step(input_ids=IDS, attention_mask=MASK, past_key_values=cache)
        for n in range(1, 7):
            mask = torch.cat([MASK, MASK[:, -n:]], 1)
            step(input_ids=IDS[:, :1], attention_mask=mask, past_key_values=cache)
    assert handle.not_captured.startswith("its inputs change from step to step: attention_mask is ")
    assert len(compiled) == 2
    assert not replays


def test_what_a_copy_cannot_do_the_original_can(replays, compiled):
    import copy

    model = tiny()
    with auto(model) as handle:
        other = copy.deepcopy(model)
        other.model.layers[1].mlp = Acts(other.model.layers[1].mlp, lambda x: x.sum().item())
        with pytest.warns(UserWarning, match="waits for the device"):
            said(other)
        assert not handle.not_captured
        said(model)
    assert sum(replays.values())
