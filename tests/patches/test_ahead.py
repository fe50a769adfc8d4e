"""The kernels of decode steps are compiled while the prompt runs, and no others."""
from types import SimpleNamespace

import pytest
import torch
from cases import METHODS, hyper_of
from models import tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from world import DEVICE

import torchsparsekv
from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.registry import OPS
from torchsparsekv.ops.pariskv import _lloyd_max
from torchsparsekv.patches import _precompile

ON_GPU = DEVICE.type == "cuda"
GPU = torch.device("cuda", 0 if ON_GPU else 5)  # if there is none, one whose properties nobody has asked for before
SHAPE = dict(head_dim=128, hidden_size=512)
PACKED = {"pool_dtype": "int8"}
# What the CUDA C++ of an op is not for: a bias of the selected blocks, and means of clusters.
BY_TRITON = {"magicpig": {"sparse_attention"}, "retroinfer": {"sparse_attention"}}


class Called(TorchDispatchMode):
    """The ops of ours that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torchsparsekv":
            self.names.add(func.name().partition("::")[2])
        return func(*args, **(kwargs or {}))


def layers_of(method, dtype=torch.bfloat16, **more):
    model = tiny(**SHAPE, dtype=dtype, num_hidden_layers=4)
    hyper = {name: x for name, x in hyper_of(method).items() if name != "block_size"} | more
    handle = torchsparsekv.patch(model, method, max_length=256, budget=64, sink=32, window=32, skip_layers=1, **hyper)
    return model, handle, handle.make_cache(2).stored


def on_gpu(x):
    """A fake of the same on a GPU."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=GPU)


@pytest.mark.parametrize(
    ("method", "more"),
    [*((m, {}) for m in METHODS), ("icecache", {"reuse_every": 3}), *((m, PACKED) for m in ("full", "quest"))],
    ids=lambda x: str(x),
)
def test_every_op_with_a_cuda_kernel_is_compiled_ahead(method, more, monkeypatch):
    """The names that a step calls, with DEVICE as it is, against what is loaded for the layers that are rehearsed."""
    if not ON_GPU:
        properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)  # not without CUDA, even of fake tensors
    for table in (_lloyd_max.quantiser, _lloyd_max.polynomial):  # as in a process that has not made them yet
        table.cache_clear()
    loaded = {}
    monkeypatch.setattr(_cuda, "load", lambda name, device, **defines: loaded.setdefault(name, "seen"))
    *_, stored = layers_of(method, **more)
    rehearsed = _precompile.by_kind(stored.values()).values()
    assert len(rehearsed) <= 3 < len(stored), "no two that take the same kernels"
    with FakeTensorMode():
        for layer in rehearsed:
            _precompile.step(layer.method, layer.shape, layer.state.mapped(on_gpu))
    model, handle, _ = layers_of(method, torch.float32, **more)
    ids = torch.randint(3, 97, (2, 200), device=DEVICE)
    monkeypatch.undo()
    with torch.no_grad():
        cache = handle.make_cache(2)
        model(ids, past_key_values=cache)
        with Called() as called:
            model(ids[:, :1], past_key_values=cache)
    have = {name for name in called.names if "cuda" in OPS[name].chain.kinds}
    if more is not PACKED:  # Triton attends to whole pools in 16 bits
        have -= {"dense_attention"}
    assert set(loaded) == have - BY_TRITON.get(method, set())
    assert have or method in ("full", "streaming")


def test_nothing_is_compiled_on_a_cpu():
    if not ON_GPU:
        *_, stored = layers_of("quest")
        assert _precompile.precompile(stored.values()) is None


def test_ops_that_fail_on_fake_tensors_are_compiled_later():
    *_, stored = layers_of("quest")
    layer = stored[1]

    class Broken:
        def decode(self, *things):
            raise ValueError("no")

    mode, seen = FakeTensorMode(), []

    class Fine:
        def decode(self, state, q, k, v, a):
            seen.append((q.shape, k.shape))

    _precompile._compile(mode, [(Broken(), layer.shape, layer.state), (Fine(), layer.shape, layer.state)])
    assert seen == [((2, 4, 1, 128), (2, 2, 1, 128))]


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_step_compiles_no_kernel_itself(method):
    _cuda._loaded.clear(), _precompile._begun.clear()
    model, handle, stored = layers_of(method)
    thread = _precompile.precompile(stored.values())  # make_cache has begun already
    assert thread is None
    for running in _precompile.threading.enumerate():
        if running.name == _precompile.NAME:
            running.join()
    before = set(_cuda._loaded)
    ids = torch.randint(3, 97, (2, 200), device=DEVICE)
    with torch.no_grad():
        cache = handle.make_cache(2)
        model(ids, past_key_values=cache)
        of_prompt = set(_cuda._loaded) - before  # raas scores the pages of a prompt
        model(ids[:, :1], past_key_values=cache)
    assert {name for name, *_ in of_prompt} == ({"bound_scores"} if method == "raas" else set())
    assert set(_cuda._loaded) == before | of_prompt
