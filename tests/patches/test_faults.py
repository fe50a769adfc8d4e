"""After refused memory, Ctrl-C or an error inside a step nothing leaks and the next call is right.

Errors inside the modules of a model are in tests/patches/test_use.py.
"""
import gc
import weakref
from functools import partial

import pytest
import torch
from cases import hyper_of
from generating import GREEDY
from models import prompts, tiny
from snapshot import snapshot

import torchsparsekv
from torchsparsekv.method import all_methods
from torchsparsekv.patches import _switch
from torchsparsekv.state import LayerState, each

SMALL = dict(max_length=128, budget=8, sink=4, window=6, skip_layers=1, block_size=4)
IDS, MASK = prompts(2, 40)
DEVICE_FULL, HOST_FULL, CTRL_C, ERROR = torch.OutOfMemoryError, MemoryError, KeyboardInterrupt, ZeroDivisionError


def patch(model, method="quest", **changes):
    return torchsparsekv.patch(model, method, **hyper_of(method, **{**SMALL, **changes}))


def generate(model, **options):
    return model.generate(input_ids=IDS, attention_mask=MASK, disable_compile=True, **GREEDY, **options)


def raised(act, kind: type[BaseException]) -> None:
    """As a user's own `try` has it: no traceback is kept, whose frames would hold what was made."""
    try:
        act()
    except kind:
        return
    pytest.fail("nothing was raised")


# ---------------------------------------------------------------- allocation refused midway


class Allocator:
    """In the place of LayerState's: the allocation of that number raises, and what was made before it is known."""

    def __init__(self, monkeypatch, at: int, error: type[BaseException], pools: bool):
        self.made: list[weakref.ref] = []
        self.left, self.error, self.pools = at, error, pools
        self.real = LayerState._allocated
        self.patch = monkeypatch
        monkeypatch.setattr(LayerState, "_allocated", lambda state, b, device: self(state, b, device))

    def __call__(self, state, buffer, device):
        if buffer.home == "pool" or not self.pools:
            self.left -= 1
        if self.left < 0:
            raise self.error("refused")
        t = self.real(state, buffer, device)
        self.made.append(weakref.ref(t))
        return t

    def stop(self) -> None:
        self.patch.setattr(LayerState, "_allocated", self.real)

    def alive(self) -> int:
        gc.collect()
        return sum(r() is not None for r in self.made)


def buffers(handle) -> int:
    """So many tensors has a cache."""
    state = handle.make_cache(2).layers
    return sum(len([*each(layer.state.buffers)]) for layer in state)


@pytest.mark.parametrize(
    ("where", "fault"),
    [("the first", DEVICE_FULL), ("in the middle", CTRL_C), ("the last", DEVICE_FULL), ("the second pool", HOST_FULL)],
)
@pytest.mark.parametrize("way", ["make_cache", "generate", "fork"])
def test_allocation_failure_in_make_cache_leaves_nothing(monkeypatch, where, fault, way):
    model = tiny(num_hidden_layers=2)
    before, plain = snapshot(model), generate(model)
    with patch(model) as handle:
        want, count = generate(model), buffers(handle)
        handle._recycled = None  # else generate() would not allocate
        mine = handle.make_cache(2)
        at = {"the first": 0, "in the middle": count // 2, "the last": count - 1, "the second pool": 1}[where]
        allocator = Allocator(monkeypatch, at, fault, pools="pool" in where)
        acts = {"make_cache": lambda: handle.make_cache(2), "generate": lambda: generate(model),
                "fork": lambda: handle.fork(mine)}  # fmt: skip
        raised(acts[way], fault)
        assert allocator.alive() == 0
        assert len(allocator.made) >= at
        allocator.stop()
        assert torch.equal(generate(model), want)
        assert torch.equal(generate(model, past_key_values=mine), want), "a cache of before is as it was"
    assert snapshot(model) == before
    assert torch.equal(generate(model), plain), "and dense again"


# ---------------------------------------------------------------- within a step of ours


@pytest.mark.parametrize("method", ["quest", "louiskv"])
@pytest.mark.parametrize(("verb", "fault"), [("prompt", DEVICE_FULL), ("step", ERROR), ("choose", CTRL_C)])
def test_error_between_two_hooks_breaks_the_cache(monkeypatch, verb, fault, method):
    """append has stored the token, the index has not: such a cache may not be gone on with."""
    model = tiny(num_hidden_layers=2)
    before, plain = snapshot(model), generate(model)
    cls, calls = all_methods()[method], []
    real = getattr(cls, verb)

    def breaks(self, *args, **kwargs):
        calls.append(verb)
        if len(calls) == (1 if verb == "prompt" else 3):
            raise fault
        return real(self, *args, **kwargs)

    with patch(model, method) as handle:
        want = generate(model)
        mine = handle.make_cache(2)
        for given in ({}, {"past_key_values": mine}):
            calls.clear()
            with monkeypatch.context() as m:
                m.setattr(cls, verb, breaks)
                raised(partial(generate, model, **given), fault)
            assert torch.equal(generate(model), want)
        with pytest.raises(RuntimeError, match=r"did not finish.*call cache.reset\(\)"):
            generate(model, past_key_values=mine)
        mine.reset()
        assert torch.equal(generate(model, past_key_values=mine), want)
        gone = weakref.ref(mine)
        del mine, given
        generate(model)
        gc.collect()
        assert gone() is None
    assert snapshot(model) == before
    assert torch.equal(generate(model), plain)


# ---------------------------------------------------------------- while the patch is put on


@pytest.mark.parametrize(("where", "fault"), [("hook", CTRL_C), ("implementation", ERROR), ("end", CTRL_C)])
def test_interrupted_patch_is_undone(monkeypatch, where, fault):
    model = tiny()
    before, plain, limit = snapshot(model), generate(model), torch._dynamo.config.recompile_limit
    count = []

    def breaks(*args, **kwargs):
        count.append(0)
        if len(count) == (2 if where == "hook" else 1):
            raise fault
        return real(*args, **kwargs)

    owner, name = {
        "hook": (torch.nn.Module, "register_forward_pre_hook"), "implementation": (_switch, "register_over"),
        "end": (_switch, "forget_compiled"),
    }[where]  # fmt: skip
    real = getattr(owner, name)
    with monkeypatch.context() as m:
        m.setattr(owner, name, breaks)
        raised(partial(patch, model), fault)
    assert snapshot(model) == before
    assert torch._dynamo.config.recompile_limit == limit
    assert torch.equal(generate(model), plain)
    with patch(model) as handle:
        assert torch.equal(generate(model, past_key_values=handle.make_cache(2)), generate(model))
    assert snapshot(model) == before


def test_repeated_faults_leak_no_memory(monkeypatch):
    """What one fault holds is little; a hundred show it."""
    model = tiny(num_hidden_layers=2)

    def breaks(*args, **kwargs):
        raise KeyboardInterrupt

    with patch(model) as handle, torch.no_grad():
        want, alive = generate(model), []
        for i in range(60):
            cache = handle.make_cache(2, 64)
            alive.append(weakref.ref(cache.layers[-1].state.store.pool))
            with monkeypatch.context() as m:
                m.setattr(all_methods()["quest"], ("prompt", "choose")[i % 2], breaks)
                if i % 2:
                    model(IDS, past_key_values=cache)
                raised(partial(model, IDS[:, : 1 if i % 2 else 40], past_key_values=cache), KeyboardInterrupt)
            del cache
        gc.collect()
        assert not [r for r in alive if r() is not None]
        assert torch.equal(generate(model), want)
