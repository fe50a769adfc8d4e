"""`step="captured"` on a GPU, or with a stand-in for CUDA graphs (support/graphs.py)."""
import copy
import gc
import threading
import weakref

import pytest
import torch
import transformers
from capturing import IDS, MASK, NEW, OTHERS, SMALL, captured, said
from cases import METHODS
from generating import WAYS
from models import MAX_LENGTH, prompts, tiny
from packaging.version import Version
from snapshot import snapshot
from world import DEVICE

import torchsparsekv
from torchsparsekv.patches import _captured, all_families
from torchsparsekv.probe import probe

FULL = dict(max_length=MAX_LENGTH, budget=MAX_LENGTH, sink=8, window=6, skip_layers=1, block_size=4)


@pytest.mark.parametrize("way", WAYS)
def test_generate_as_unpatched(way, replays):
    model = tiny()
    want = WAYS[way](model)
    with torchsparsekv.patch(model, "quest", step="captured", **FULL):
        got = WAYS[way](model)
    assert torch.equal(got, want) if isinstance(got, torch.Tensor) else got == want
    assert sum(replays.values()) > 1


@pytest.mark.parametrize("method", METHODS)
def test_a_second_generate_replays_the_graph_of_the_first(method, replays):
    model = tiny()
    with captured(model, method) as handle:
        want = [said(model, *x, disable_compile=True) for x in ((IDS, MASK), OTHERS)]
        assert not replays, "disable_compile means eager steps"
        steps = [r.steps for r in handle.report().layers]
        assert torch.equal(said(model), want[0])
        assert replays == {0: NEW - 1 - _captured.WARM_UP_STEPS}
        assert torch.equal(said(model, *OTHERS), want[1])
        assert replays == {0: 2 * (NEW - 1) - _captured.WARM_UP_STEPS}
        assert [r.steps for r in handle.report().layers] == steps == [NEW - 1] * len(steps)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "lfm2"])
def test_every_kind_of_layer_is_captured(family, replays):
    """Windows, and the states of linear layers, which are transformers' own."""
    if Version(transformers.__version__) < Version(all_families()[family].since or "0"):
        pytest.skip("this transformers does not have it, or not as we need it")
    model = tiny(family)
    with captured(model):
        want = [said(model, *x, disable_compile=True) for x in ((IDS, MASK), OTHERS)]
        assert torch.equal(said(model), want[0])
        assert torch.equal(said(model, *OTHERS), want[1])
        assert len(replays) == 1


def test_outputs_are_not_overwritten_by_later_replays(replays):
    model = tiny()
    told = dict(return_dict_in_generate=True, output_logits=True, output_scores=True, output_hidden_states=True)
    with captured(model) as handle:
        want = said(model, disable_compile=True, past_key_values=handle.make_cache(3), **told)
        cache = handle.make_cache(3)
        got = said(model, past_key_values=cache, **told)
        assert got.past_key_values is cache
    assert len(replays) == 1
    for name in ("sequences", "logits", "scores", "hidden_states"):
        for a, b in zip(torch.utils._pytree.tree_leaves(got[name]), torch.utils._pytree.tree_leaves(want[name])):
            torch.testing.assert_close(a, b)
    assert len({x.data_ptr() for x in got.logits}) == NEW


def test_other_shapes_and_outputs_get_other_graphs(replays):
    model = tiny()
    with captured(model) as handle:
        said(model)
        two = said(model, IDS[1:], MASK[1:])
        assert len(replays) == 2
        assert torch.equal(two, said(model, IDS[1:], MASK[1:], disable_compile=True))
        said(model, IDS[1:], MASK[1:])
        assert len(replays) == 2
        cache = handle.make_cache(2)
        for _ in range(2):
            cache.reset()
            said(model, IDS[1:], MASK[1:], past_key_values=cache)
        assert len(replays) == 3
        told = dict(past_key_values=cache, return_dict_in_generate=True, output_hidden_states=True)
        said(model, IDS[1:], MASK[1:], **{**told, "past_key_values": handle.make_cache(2)})
        assert len(replays) == 4
        for options in (told, {"past_key_values": cache}) * 3:  # transformers' own hooks are there by now, and stay
            cache.reset()
            said(model, IDS[1:], MASK[1:], **options)
        assert len(cache.graphs) == 2
        assert len(replays) == 6


def test_fork_captures_its_own_graph(replays):
    model = tiny()
    more, ones = prompts(3, 5, seed=8, ragged=False)
    with captured(model) as handle:
        cache = handle.make_cache(3)
        ids = said(model, past_key_values=cache)
        told = dict(ids=torch.cat([ids, more], 1), mask=torch.cat([MASK, ones, torch.ones_like(ids[:, 41:])], 1))
        told["mask"] = told["mask"][:, : told["ids"].shape[1]]
        twin = handle.fork(cache)
        want = said(model, **told, past_key_values=handle.fork(cache), disable_compile=True)
        assert torch.equal(said(model, **told, past_key_values=twin), want)
        assert torch.equal(said(model, **told, past_key_values=cache), want)
        assert len(replays) == 2


def test_graphs_are_freed_with_their_cache(replays):
    model = tiny()
    handle = captured(model)
    said(model)
    cache = weakref.ref(handle._recycled)
    graph = weakref.ref(cache().graphs[0])
    gc.collect()
    gc.disable()  # they do not wait for it
    try:
        said(model, IDS[1:], MASK[1:])
        assert cache() is graph() is None
        graph = weakref.ref(handle._recycled.graphs[0])
        handle.unpatch()
        assert graph() is None
    finally:
        gc.enable()


def test_unpatch_leaves_nothing(replays):
    model = tiny()
    before = snapshot(model)
    captured(model).unpatch()
    assert snapshot(model) == before
    with captured(model):
        said(model)
    with torchsparsekv.patch(model, "quest", step="compiled", **SMALL):
        assert "get_compiled_call" not in vars(model)
    with captured(model) as handle:
        said(model)
        assert ", step='captured'" in repr(handle)
    assert snapshot(model) == before
    assert len(replays) == 2


def test_deepcopy_captures_its_own_graph(replays):
    model = tiny()
    with captured(model):
        want = said(model)
        other = copy.deepcopy(model)
        other.lm_head.weight.data.neg_()
        got = said(other)
        assert torch.equal(got, said(other, disable_compile=True))
        assert not torch.equal(got, want)
        assert torch.equal(said(model), want)
        assert len(replays) == 2


def test_other_weights_and_switches_are_captured_anew(replays):
    """What load_adapter and set_adapter do. Weights that change in their place are read where they are."""
    model = tiny()
    norm = type(model.model.norm)

    class Switched(norm):
        on = True

        def forward(self, x):
            return super().forward(x) * self.scales["default"] * self.sign * (1 if self.on else -1)

    model.model.norm.__class__ = Switched
    model.model.norm.scales, model.model.norm.sign = {"default": 1.0}, torch.ones(1, device=DEVICE)
    with captured(model):
        said(model)
        model.lm_head.weight.data.mul_(-1)
        assert torch.equal(said(model), said(model, disable_compile=True))
        assert len(replays) == 1
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
        assert torch.equal(said(model), said(model, disable_compile=True))
        assert len(replays) == 2
        for n, (name, value) in enumerate(
            (("on", False), ("scales", {"default": -2.0}), ("sign", -model.model.norm.sign)), 3
        ):  # fmt: skip
            setattr(model.model.norm, name, value)
            for _ in range(2):
                assert torch.equal(said(model), said(model, disable_compile=True))
            assert len(replays) == n


def fed(model, step, cache, steps=5):
    """A prompt, and steps in a loop of one's own: the last logits."""
    cache.reset()
    model(IDS, attention_mask=MASK, past_key_values=cache)
    told = lambda at: dict(position_ids=torch.full_like(IDS[:, :1], 41 + at), past_key_values=cache)  # noqa: E731
    return [step(IDS[:, :1], **told(at)).logits for at in range(steps)][-1]


def test_kept_step_sees_new_weights_and_ends_with_the_patch(replays):
    model = tiny()
    with captured(model) as handle, torch.no_grad():
        cache, step = handle.make_cache(3), model.get_compiled_call(None)
        for graphs in (1, 2):
            assert torch.equal(fed(model, step, cache), fed(model, model, handle.make_cache(3)))
            fed(model, step, cache)
            assert len(replays) == graphs
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
        with pytest.raises(ValueError, match=r"the cache by keyword: (cache|past_key_values)=handle.make_cache\("):
            step(IDS[:, :1])
    with pytest.raises(RuntimeError, match="the patch that made this SparseCache is off"):
        step(IDS[:, :1], position_ids=torch.full_like(IDS[:, :1], 46), past_key_values=cache)


def test_probe_needs_eager_steps(replays):
    model = tiny()
    with captured(model) as handle:
        cache = handle.make_cache(3)
        for _ in range(2):  # without a graph, and with one
            with probe(cache) as seen, pytest.raises(RuntimeError, match="a probe works in eager decode only"):
                said(model, past_key_values=cache)
            cache.reset()
            said(model, past_key_values=cache)
            cache.reset()
        with probe(cache) as seen:
            said(model, past_key_values=cache, disable_compile=True)
        assert seen.mass().shape[1] == NEW - 1
        assert len(replays) == 1


def test_graphs_work_in_and_out_of_inference_mode(replays):
    model = tiny()
    with captured(model):
        want = said(model, disable_compile=True)
        with torch.inference_mode():
            assert torch.equal(said(model), want)
        assert torch.equal(said(model), want)
        assert len(replays) == 1


def test_threads_have_their_own_graphs(replays):
    model, got = tiny(), {}
    with captured(model):
        want = [said(model, disable_compile=True), said(model, *OTHERS, disable_compile=True)]

        def run(i, *prompt):
            got[i] = said(model, *prompt)

        threads = [threading.Thread(target=run, args=x) for x in ((0, IDS, MASK), (1, *OTHERS))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert all(torch.equal(got[i], want[i]) for i in range(2))
    assert 1 <= len(replays) <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["quest", "pariskv", "louiskv"])
def test_captured_bf16_steps_equal_eager_steps_on_a_gpu(method, replays):
    """bf16, and nothing waits: neither a replay nor what is around it."""
    model = tiny(dtype=torch.bfloat16)
    with captured(model, method) as handle, torch.no_grad():
        want = said(model, new=40, disable_compile=True)
        assert torch.equal(said(model, new=40), want)
        assert torch.equal(said(model, new=40), want)
        assert replays == {0: 2 * 39 - _captured.WARM_UP_STEPS}
        cache, step = handle._recycled, model.get_compiled_call(None)
        at = torch.full_like(IDS[:, :1], 90)
        told = dict(input_ids=IDS[:, :1], past_key_values=cache, logits_to_keep=1, use_cache=True, return_dict=True)
        step(**told, position_ids=at)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                step(**told, position_ids=at)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(replays) == 1
