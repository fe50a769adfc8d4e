"""Decode steps as CUDA graphs of eager ops. generate() uses them instead of torch.compile, which first takes a minute.

`patch(..., step="captured")` refuses a step that cannot be captured. `step="auto"` compiles such a step and reports the
reason. If the capture itself fails, both refuse the step: after a failed capture torch cannot compile reliably.
"""
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchsparsekv.patches._cache import SparseCache, check_active
from torchsparsekv.patches._names import NAME, cache_in
from torchsparsekv.state import EAGER_ONLY

aten = torch.ops.aten
# The first steps of an answer run eagerly, so that what they compile and allocate is not in the graph.
WARM_UP_STEPS = 3
KINDS = 4  # kinds of inputs for which a cache keeps graphs; more kinds mean that inputs change at every step
SYNC_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
PUTS = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
OURS = ("torchsparsekv.", "transformers.")  # a replay may skip the hooks of these modules
GLOBAL = torch.nn.modules.module
_one_at_a_time = threading.Lock()  # torch allows one capture at a time in a process
_stream = functools.cache(lambda device: torch.cuda.Stream(device))  # captures run on this stream


class Refused(RuntimeError):
    """The step cannot be captured; `why` is the reason."""

    def __init__(self, model, why: str):
        self.why = why
        super().__init__(
            f"step={model._torchsparsekv.step!r}: a decode step of {type(model).__name__} cannot be captured as a CUDA "
            f"graph: {why}; patch with step='compiled', or pass disable_compile=True to generate()"
        )


class Steps:
    """The callable that generate() runs for every step. The patched model has this class as its get_compiled_call()."""

    def __init__(self, model, compile_config):
        self.model, self.compile_config, self.handle = model, compile_config, model._torchsparsekv
        # For each cache: the kinds of inputs in this call, and `use.begun` at the last step.
        self.kinds: weakref.WeakKeyDictionary[SparseCache, int] = weakref.WeakKeyDictionary()
        self.begun: weakref.WeakKeyDictionary[SparseCache, int] = weakref.WeakKeyDictionary()

    @property
    def auto(self) -> bool:
        return self.handle.step == "auto"

    def __call__(self, *args, **kwargs):
        cache = cache_in(kwargs)
        if cache is None and not self.auto:
            raise ValueError(f"step='captured' needs the cache by keyword: {NAME}=handle.make_cache(...)")
        if not isinstance(cache, SparseCache):  # the user chose another cache, and transformers' step for it
            return self._compiled(*args, **kwargs)
        check_active(cache.owner)
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None or ids.shape[1] != 1:  # a chunk of the prompt
            return self.model(*args, **kwargs)
        if self.auto and (self.compile_config is not None or self.handle.not_captured):
            return self._compiled(*args, **kwargs)
        leaves, forward, kind = self._taken_apart(args, kwargs, cache)
        try:
            step = self._step(cache, kind)
        except Refused as e:
            if not self.auto:
                raise
            self._compile_instead(cache, e.why)
            return self._compiled(*args, **kwargs)
        sync_ops: list[str] = []  # ops of an eager step that wait for the device, which a capture cannot contain
        out = step.run(self.model, forward, leaves, cache, sync_ops.append if self.auto else self._refuse)
        self.begun[cache] = cache.use.begun
        if sync_ops:
            self._compile_instead(cache, sync_ops[0])
        return out

    def _compiled(self, *args, **kwargs):
        """The step that the model's class gives generate()."""
        return type(self.model).get_compiled_call(self.model, self.compile_config)(*args, **kwargs)

    def _compile_instead(self, cache: SparseCache, why: str) -> None:
        cache.graphs = []  # this frees their memory
        self.handle.compile_instead(why)

    def _refuse(self, why: str) -> None:
        raise Refused(self.model, why)

    def _taken_apart(self, args: tuple, kwargs: dict, cache: SparseCache) -> tuple[list, Callable, tuple]:
        """The inputs as a flat list, the model as a function of this list, and the kind of the inputs."""
        named = {name: x for name, x in sorted(kwargs.items()) if x is not cache}
        leaves, spec = pytree.tree_flatten((args, named))

        def forward(leaves):
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return self.model(*args, **kwargs, **{NAME: cache})

        return leaves, forward, (spec, [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves])

    def _step(self, cache: SparseCache, kind: tuple) -> "Step":
        if any(layer.state.on_step for layer in cache.stored.values()):
            raise RuntimeError(EAGER_ONLY)
        if self.begun.get(cache) != cache.use.begun:  # a prompt came since the last step
            self._look_again(cache)
        for step in cache.graphs:
            if step.kind == kind:
                return step
        self.kinds[cache] = self.kinds.get(cache, 0) + 1
        if self.kinds[cache] > KINDS:
            raise Refused(self.model, f"its inputs change from step to step: {changes(cache.graphs[-1].kind, kind)}")
        cache.graphs = [*cache.graphs[1 - KINDS :], Step(kind)]
        return cache.graphs[-1]

    def _look_again(self, cache: SparseCache) -> None:
        if self.auto and (found := user_hooks(self.model)):
            raise Refused(self.model, found)
        now = fixed(self.model, cache)
        if now != cache.fixed:
            cache.graphs, cache.fixed = [], now


class Step:
    """A step with inputs of one kind: first eager, then captured, then replayed. The step belongs to one cache, whose
    addresses never change. The step keeps no reference to the cache or the model."""

    def __init__(self, kind: tuple):
        self.kind, self.eager = kind, WARM_UP_STEPS
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, model, forward, leaves: list, cache: SparseCache, report: Callable[[str], None]):
        if self.eager:
            with SyncOps(model.device, report) if self.eager == 1 else contextlib.nullcontext():
                out = forward(leaves)
            self.eager -= 1
            return out
        cache.use.check()
        graph = self.graph or self._capture(model, forward, leaves, cache)
        for mine, given in zip(self.inputs, leaves):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        graph.replay()
        # Return copies: the next replay overwrites the outputs, and users may keep them.
        given = [x.clone() if isinstance(x, Tensor) else cache if x is SparseCache else x for x in self.outputs]
        return pytree.tree_unflatten(given, self.spec)

    def _capture(self, model, forward, leaves: list, cache: SparseCache) -> torch.cuda.CUDAGraph:
        with torch.inference_mode(False):  # inference tensors could not be written outside inference mode
            self.inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        self.graph, out = self._recorded(model, forward)
        outputs, self.spec = pytree.tree_flatten(out)
        self.outputs = [SparseCache if x is cache else x for x in outputs]
        return self.graph

    def _recorded(self, model, forward):
        """A graph of the step on `inputs`, and the outputs of the step."""
        graph, side, broken = torch.cuda.CUDAGraph(), _stream(model.device), None
        # The outer `with` sets the stream too: after a failed capture torch's own `with` does not restore the stream.
        with _one_at_a_time, torch.cuda.stream(side):
            torch._C._cuda_clearCublasWorkspaces()  # the graph gets a workspace of its own: inductor frees all others
            try:
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    try:
                        out = forward(self.inputs)
                    except Exception as e:  # the error at the end of a failed capture would hide this one
                        broken = e
                        raise
            except Exception as e:
                cause = broken or e
                if isinstance(cause, torch.OutOfMemoryError) or not isinstance(cause, RuntimeError):
                    raise cause from None
                raise Refused(model, str(cause).partition("\n")[0]) from e
            finally:
                torch._C._cuda_clearCublasWorkspaces()
        return graph, out


class SyncOps(TorchDispatchMode):
    """Report ops that wait for the device, before a capture meets them: a failed capture leaves torch's random
    generator in capture mode."""

    def __init__(self, device: torch.device, report: Callable[[str], None]):
        super().__init__()
        self.device, self.report = device, report

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Parts of the model that the user compiled stay compiled under this mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in given}
        waits = SYNC_TAGS.intersection(func.tags) and self.device.type in devices
        if func is aten.index.Tensor:  # indexing by a mask: the host must read the number of set elements
            waits = waits and any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
        if func in PUTS:  # writing through a mask too, except filling it with one number
            masked = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
            waits = masked and args[2].numel() > 1 and self.device.type in devices
        asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if func in (aten._to_copy.default, aten.copy_.default) and not asynchronous:
            waits = len(devices | {torch.device(kwargs.get("device") or given[0].device).type}) > 1
        if waits:
            self.report(f"{func} waits for the device")
        return func(*args, **kwargs)


def user_hooks(model) -> str:
    """The first sign of user code that must run at every step, which a replay would skip; "" if there is none."""
    if model._compiled_call_impl is not None:
        return "model.compile() was called, whose graphs a replay would skip"
    if GLOBAL._global_forward_hooks or GLOBAL._global_forward_pre_hooks:
        return "there are hooks on all modules, which a replay would skip"
    for name, m in model.named_modules():
        if "forward" in vars(m):
            return f"module {name!r} has a forward of its own, which a replay would skip"
        hooks = (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
        if any(not (getattr(hook, "__module__", None) or "").startswith(OURS) for hook in hooks):
            return f"module {name!r} has a hook, which a replay would skip"
    return ""


def changes(before: tuple, now: tuple) -> str:
    """The inputs that differ between two kinds, with both values."""
    if before[0] != now[0]:
        return "other arguments each time"
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(len(now[1])), now[0]))
    names = (pytree.keystr(path[1:]).strip("[']") for path, _ in paths)
    return ", ".join(f"{name} is {a}, then {b}" for name, a, b in zip(names, before[1], now[1]) if a != b)


def fixed(model, cache: SparseCache) -> list:
    """Everything that a graph fixes at capture. A change of this list needs a new graph.

    The list has the addresses of weights, of other tensors of modules and of the states of transformers' own layers,
    the hooks that override queries, and the switches of modules (adapters have some).
    """
    found: list = [_address(x) for x in cache.own_tensors()]
    steering = ("override_query", "override_ids")
    found += [id(getattr(layer.state, name)) for layer in cache.stored.values() for name in steering]
    for m in model.modules():
        weights = [_address(x) for x in (*m._parameters.values(), *m._buffers.values()) if x is not None]
        own = {name: _address(x) if isinstance(x, Tensor) else repr(x) for name, x in vars(m).items() if _compared(x)}
        found.append((id(m), weights, own))
    return found


def _compared(x) -> bool:
    """True for tensors and for values as small as a switch."""
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple, set)) else (x,)
    return isinstance(x, Tensor) or all(isinstance(y, (bool, int, float, str)) for y in parts)


def _address(x: Tensor) -> int:
    try:
        return x.data_ptr()
    except RuntimeError:  # x wraps several tensors
        return id(x)
