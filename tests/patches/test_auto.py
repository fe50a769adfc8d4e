"""`step="auto"` captures decode steps as CUDA graphs and compiles the steps that cannot be captured."""
import copy
import warnings

import pytest
import torch
from capturing import BREAKS, IDS, MASK, NEW, SMALL, said
from families import FAMILIES
from models import tiny
from supported import FULL, supported
from torch.nn.modules.module import register_module_forward_hook
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


def test_auto_is_the_default_and_captures(replays, compiled):
    model = tiny()
    with auto(model) as handle:
        assert (handle.step, handle.captures) == ("auto", True)
        assert "step" not in repr(handle)
        want = said(model, disable_compile=True)
        assert torch.equal(said(model), want)
        assert torch.equal(said(model), want)
        assert not any("compiled" in note for note in handle.report().notes)
    assert replays == {0: 2 * (NEW - 1) - _captured.WARM_UP_STEPS}
    assert not compiled


@pytest.mark.skipif(DEVICE.type == "cuda", reason="of a model on a CPU")
def test_generate_on_a_cpu_is_that_of_transformers():
    model = tiny()
    with auto(model) as handle:
        assert not handle.captures
        assert "get_compiled_call" not in vars(model)


WAITS = {why: act for why, act in BREAKS.items() if "waits" in why}


@pytest.mark.parametrize("why", WAITS)
def test_step_that_waits_for_the_device_is_compiled(why, replays, compiled):
    """The third step finds out, and comes to its end. Tokens are those of eager steps, also of the call that found out,
    and of one with a cache of its own."""
    model = tiny()
    model.model.layers[1].mlp = Acts(model.model.layers[1].mlp, WAITS[why])
    with auto(model) as handle:
        want = said(model, disable_compile=True)
        says = f"of this LlamaForCausalLM are compiled from now on.* be captured as a CUDA graph: {why}"
        with pytest.warns(UserWarning, match=says) as warned:
            assert torch.equal(said(model), want)
        assert len([w for w in warned if "from now on" in str(w.message)]) == 1
        assert len(compiled) == NEW - 1 - _captured.WARM_UP_STEPS
        assert not handle._recycled.graphs
        cache = handle.make_cache(3)
        assert torch.equal(said(model, past_key_values=cache), want)
        assert len(compiled) == 2 * (NEW - 1) - _captured.WARM_UP_STEPS
        (note,) = [note for note in handle.report().notes if "not captured" in note]
        assert note.startswith("decode steps are compiled, not captured: ")
        assert {r.steps for r in handle.report().layers} == {NEW - 1}
    assert not sum(replays.values())


def test_warning_raised_as_error_leaves_the_cache_usable(replays, compiled):
    model = tiny()
    model.model.layers[1].mlp = Acts(model.model.layers[1].mlp, lambda x: x.sum().item())
    with auto(model) as handle, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cache = handle.make_cache(3)
        with pytest.raises(UserWarning, match="compiled from now on"):
            said(model, past_key_values=cache)
        cache.use.check()


def test_interrupted_capture_is_refused(replays, compiled):
    """No mode sees that a module waits for its stream; and torch does not get over such a capture well."""
    model, (why,) = tiny(), BREAKS.keys() - WAITS.keys()
    inner = model.model.layers[1].mlp
    with auto(model):
        want = said(model)
        model.model.layers[1].mlp = Acts(inner, BREAKS[why])
        with pytest.raises(RuntimeError, match=f"step='auto': .*{why}; patch with step='compiled', or pass"):
            said(model)
        assert torch.equal(said(model, disable_compile=True), want)
        model.model.layers[1].mlp = inner
        assert torch.equal(said(model), want)
    assert not compiled


def test_interrupted_cache_is_refused_by_compiled_steps(replays, compiled):
    model = tiny()

    def interrupt(*_):
        raise KeyboardInterrupt

    with auto(model) as handle, torch.no_grad():
        cache, step, token = handle.make_cache(3), model.get_compiled_call(None), IDS[:, :1]
        model(IDS, attention_mask=MASK, past_key_values=cache)
        hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(token, past_key_values=cache)
        hook.remove()
        model.model.layers[2].register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match="did not finish"), pytest.warns(UserWarning, match="a hook"):
            step(token, position_ids=torch.full_like(token, 41), past_key_values=cache)


def test_modules_compiled_by_the_user_stay_compiled(replays, compiled):
    model, seen = tiny(), []

    def backend(graph, inputs):
        return lambda *args: seen.append(1) or graph.forward(*args)

    model.model.layers[1].mlp.compile(fullgraph=True, backend=backend)
    with auto(model):
        want = said(model, disable_compile=True)
        assert torch.equal(said(model), want)
    assert seen
    assert sum(replays.values())
    assert not compiled


def wrapped(model):
    module, inner = model.model.layers[2], model.model.layers[2].forward
    module.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    return lambda: delattr(module, "forward")


def compiled_already(model):
    model.compile(backend="eager")
    return lambda: setattr(model, "_compiled_call_impl", None)


LEFT_OUT = "which a replay would skip"
CODE = {
    r"model.compile\(\) was called, whose graphs a replay would skip": compiled_already,
    f"there are hooks on all modules, {LEFT_OUT}": lambda _: register_module_forward_hook(lambda *_: None).remove,
    f"module 'model.layers.2' has a forward of its own, {LEFT_OUT}": wrapped,
    f"module 'lm_head' has a hook, {LEFT_OUT}": lambda m: m.lm_head.register_forward_pre_hook(lambda *_: None).remove,
}


@pytest.mark.parametrize("what", CODE)
def test_user_hooks_prevent_capture(what, replays, compiled):
    model = tiny()
    with auto(model):
        undo = CODE[what](model)
        try:
            with pytest.warns(UserWarning, match=what):
                said(model)
        finally:
            undo()
    assert len(compiled) == NEW - 1
    with auto(model):
        said(model)
    assert sum(replays.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_captured(family, replays, monkeypatch):
    """Beyond the windows of those that have some; experts are chosen without waiting."""
    if DEVICE.type == "cuda" and family == "phimoe":
        pytest.skip("its steps wait for the host there, and are compiled")
    model = supported(family)
    if not getattr(model, "_can_compile_fullgraph", True):
        pytest.skip("in this transformers its steps read numbers on the host, and are compiled")
    monkeypatch.setattr(type(model), "get_compiled_call", lambda self, config: pytest.fail("compiled"))
    want = said(model, disable_compile=True)
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        assert torch.equal(said(model), want)
        assert not handle.not_captured
    assert replays == {0: NEW - 1 - _captured.WARM_UP_STEPS}


def test_user_hooks_run_at_every_step(replays, compiled):
    model, seen = tiny(), []
    hook = model.model.layers[2].register_forward_hook(lambda *_: seen.append(1))
    with auto(model):
        with pytest.warns(UserWarning, match=r"module 'model.layers.2' has a hook, which a replay would skip"):
            said(model)
        assert len(seen) == NEW
        assert len(compiled) == NEW - 1
    hook.remove()
    with auto(model):
        said(model)
    assert sum(replays.values())


def test_hooks_of_transformers_do_not_count_as_user_hooks(replays, compiled):
    model = tiny()
    told = dict(return_dict_in_generate=True, output_hidden_states=True)
    with auto(model) as handle:
        for _ in range(2):
            said(model, past_key_values=handle.make_cache(3), **told)
    assert len(replays) == 2
    assert not compiled


def test_compile_options_select_the_compiler(replays, compiled):
    model, config = tiny(), CompileConfig()
    with auto(model):
        want = said(model, disable_compile=True)
        assert torch.equal(said(model, compile_config=config), want)
        assert compiled == [config] * (NEW - 1)
        assert torch.equal(said(model), want)
    assert sum(replays.values())


def test_loop_with_changing_inputs_is_compiled(replays, compiled):
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


def test_deepcopy_that_cannot_be_captured_leaves_the_original_captured(replays, compiled):
    model = tiny()
    with auto(model) as handle:
        other = copy.deepcopy(model)
        other.model.layers[1].mlp = Acts(other.model.layers[1].mlp, lambda x: x.sum().item())
        with pytest.warns(UserWarning, match="waits for the device"):
            said(other)
        assert not handle.not_captured
        said(model)
    assert sum(replays.values())
