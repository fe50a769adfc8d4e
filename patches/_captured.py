"""Decode steps as CUDA graphs of eager ops: what `patch(..., step="captured")` gives generate() for torch.compile."""
import contextlib
import functools
import threading
import weakref

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchsparsekv.patches._cache import SparseCache

aten = torch.ops.aten
EAGER = 3  # steps of the answer that run as they are first: what they compile and allocate must not be in the graph
KINDS = 4  # of inputs for which a cache keeps graphs; more in one generate() are inputs that change at every step
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_one_at_a_time = threading.Lock()  # captures in a process, says torch
_stream = functools.cache(lambda device: torch.cuda.Stream(device))  # on which they are made


class Steps:
    """What a generate() calls for its steps. Bound to the patched instance, the class is its get_compiled_call()."""

    def __init__(self, model, compile_config):
        self.model, self.compile_config = model, compile_config
        self.kinds: weakref.WeakKeyDictionary[SparseCache, int] = weakref.WeakKeyDictionary()  # seen by this call

    def __call__(self, *args, **kwargs):
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, SparseCache):  # the user asked for another cache, and gets what goes with it
            return type(self.model).get_compiled_call(self.model, self.compile_config)(*args, **kwargs)
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None or ids.shape[1] != 1:  # a chunk of the prompt
            return self.model(*args, **kwargs)
        named = {name: x for name, x in sorted(kwargs.items()) if x is not cache}
        leaves, spec = pytree.tree_flatten((args, named))

        def forward(leaves):
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return self.model(*args, **kwargs, past_key_values=cache)

        kind = (spec, [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves])
        return self._step(cache, kind).run(self.model, forward, leaves, cache)

    def _step(self, cache: SparseCache, kind: tuple) -> "Step":
        if cache not in self.kinds:
            self.kinds[cache], now = 0, fixed(self.model, cache)
            if now != cache.fixed:
                cache.graphs, cache.fixed = [], now
        for step in cache.graphs:
            if step.kind == kind:
                return step
        self.kinds[cache] += 1
        if self.kinds[cache] > KINDS:
            raise refusal(self.model, f"its inputs change from step to step: {cache.graphs[-1].kind[1]}, {kind[1]}")
        cache.graphs = [*cache.graphs[1 - KINDS :], Step(kind)]
        return cache.graphs[-1]


class Step:
    """A step with inputs of one kind: eager, then captured, then replayed. It belongs to a cache, whose addresses never
    change, and holds neither that nor the model."""

    def __init__(self, kind: tuple):
        self.kind, self.eager = kind, EAGER
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, model, forward, leaves: list, cache: SparseCache):
        if self.eager:
            with NoWaits(model) if self.eager == 1 else contextlib.nullcontext():
                out = forward(leaves)
            self.eager -= 1
            return out
        cache.use.check()
        graph = self.graph or self._capture(model, forward, leaves, cache)
        for mine, given in zip(self.inputs, leaves):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        graph.replay()
        # Copies: the next replay writes over what this one wrote, and the user may keep what he gets.
        given = [x.clone() if isinstance(x, Tensor) else cache if x is SparseCache else x for x in self.outputs]
        return pytree.tree_unflatten(given, self.spec)

    def _capture(self, model, forward, leaves: list, cache: SparseCache) -> torch.cuda.CUDAGraph:
        with torch.inference_mode(False):  # else no one outside inference mode could write to them
            self.inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        graph, side = torch.cuda.CUDAGraph(), _stream(model.device)
        # The outer stream too: where a capture fails, torch's own `with` does not go back to the stream before.
        with _one_at_a_time, torch.cuda.stream(side):
            torch._C._cuda_clearCublasWorkspaces()  # the graph's is to be its own: inductor frees all there are
            try:
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    out = forward(self.inputs)
            except torch.OutOfMemoryError:
                raise
            except Exception as e:
                raise refusal(model, str(e.__context__ or e).partition("\n")[0]) from e
            finally:
                torch._C._cuda_clearCublasWorkspaces()
        outputs, self.spec = pytree.tree_flatten(out)
        self.graph, self.outputs = graph, [SparseCache if x is cache else x for x in outputs]
        return graph


class NoWaits(TorchDispatchMode):
    """Refuse what waits for the device before a capture does: broken off, one leaves torch's generator capturing."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in given}
        waits = WAITS.intersection(func.tags) and self.model.device.type in devices
        if func is aten.index.Tensor:  # only masks have shapes that must be found out
            waits = waits and any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
        asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if func in (aten._to_copy.default, aten.copy_.default) and not asynchronous:
            waits = len(devices | {torch.device(kwargs.get("device") or given[0].device).type}) > 1
        if waits:
            raise refusal(self.model, f"{func} waits for the device")
        return func(*args, **kwargs)


def refusal(model, why: str) -> RuntimeError:
    return RuntimeError(
        f"step='captured': a decode step of {type(model).__name__} cannot be captured as a CUDA graph, {why}; "
        "patch it with step='compiled', or pass disable_compile=True to generate()"
    )


def fixed(model, cache: SparseCache) -> list:
    """What a graph does not look at again: where weights and the states of transformers' own layers lie, and what the
    switches of modules say, of which adapters have some."""
    found: list = [_address(x) for x in cache.own_tensors()]
    for m in model.modules():
        weights = [_address(x) for x in (*m._parameters.values(), *m._buffers.values()) if x is not None]
        found.append((id(m), weights, {name: repr(x) for name, x in vars(m).items() if _is_switch(x)}))
    return found


def _is_switch(x) -> bool:
    return isinstance(x, (bool, int, float, str)) or (isinstance(x, list) and all(isinstance(y, str) for y in x))


def _address(x: Tensor) -> int:
    try:
        return x.data_ptr()
    except RuntimeError:  # a wrapper of several tensors
        return id(x)
