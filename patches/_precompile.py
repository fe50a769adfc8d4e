"""A thread compiles the CUDA C++ of the decode steps while a prompt runs. This takes about two seconds, once."""
import contextlib
import functools
import threading
from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchsparsekv.method import Method
from torchsparsekv.ops._machinery.precompile import Ahead
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.patches._cache import SparseLayer
from torchsparsekv.patches._family import Layer
from torchsparsekv.state import LayerState

Kind = tuple[Method, Layer, bool, torch.Size, tuple[int, ...], torch.dtype, torch.device]
NAME = "torchsparsekv: compile ahead"
_begun: set[Kind] = set()  # kinds of layers whose compilation began in this process


def precompile(layers: Iterable[SparseLayer]) -> threading.Thread | None:
    """Start to compile what a step of these layers calls. Returns None if there is nothing to do."""
    kinds = {kind: layer for kind, layer in by_kind(layers).items() if layer.state.store.ring.is_cuda}
    new = [layer for kind, layer in kinds.items() if kind not in _begun]
    if not new:
        return None
    _begun.update(kinds)
    mode = FakeTensorMode()
    # The thread gets no tensor of the cache. Otherwise it would keep the memory of a cache that is gone.
    steps = [(layer.method, layer.shape, layer.state.mapped(mode.from_tensor)) for layer in new]
    thread = threading.Thread(target=_compile, args=(mode, steps), name=NAME)
    thread.start()
    return thread


def by_kind(layers: Iterable[SparseLayer]) -> dict[Kind, SparseLayer]:
    """One layer of each kind. Layers of a kind take the same kernels."""
    return {_kind(layer): layer for layer in layers}


def _kind(layer: SparseLayer) -> Kind:
    ring, follows = layer.state.store.ring, layer.state.anchor is not None
    hot = layer.state.buffers["hot"].rows.shape if "hot" in layer.state.buffers else ()
    return layer.method, layer.shape, follows, layer.state.store.pool.shape, hot, ring.dtype, ring.device


def _compile(mode: FakeTensorMode, steps: list[tuple[Method, Layer, LayerState]]) -> None:
    with torch.no_grad(), mode:
        for method, shape, state in steps:
            # What fails with fake tensors is compiled at its first real call, and may fail there.
            with contextlib.suppress(Exception):
                step(method, shape, state)


def step(method: Method, shape: Layer, state: LayerState) -> None:
    """A decode step of one layer, under the mode of the fake tensors in its state."""
    ring = state.store.ring
    make = functools.partial(torch.empty, dtype=ring.dtype, device=ring.device)
    q, k, v = (make(ring.shape[0], heads, 1, shape.head_dim) for heads in (shape.heads, *2 * [shape.kv_heads]))
    logits = make(shape.heads) if shape.sink_logits else None
    with Ahead():
        method.decode(state, q, k, v, Attention(1.0, shape.softcap, logits))
