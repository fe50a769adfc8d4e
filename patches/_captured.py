"""Decode steps as CUDA graphs of eager ops: what generate() gets for torch.compile, which takes a minute at first.

With `patch(..., step="captured")` what cannot be captured is refused; with "auto" it is compiled, and a line says why.
What is found out by a capture that breaks off is refused either way: torch does not get over it well enough to compile.
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
EAGER = 3  # steps of the answer that run as they are first: what they compile and allocate must not be in the graph
KINDS = 4  # of inputs for which a cache keeps graphs; more in one generate() are inputs that change at every step
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
PUTS = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
OURS = ("torchsparsekv.", "transformers.")  # modules whose hooks a replay can do without
GLOBAL = torch.nn.modules.module
_one_at_a_time = threading.Lock()  # captures in a process, says torch
_stream = functools.cache(lambda device: torch.cuda.Stream(device))  # on which they are made


class Refused(RuntimeError):
    """A step that cannot be captured, and why."""

    def __init__(self, model, why: str):
        self.why = why
        super().__init__(
            f"step={model._torchsparsekv.step!r}: a decode step of {type(model).__name__} cannot be captured as a CUDA "
            f"graph, {why}; patch it with step='compiled', or pass disable_compile=True to generate()"
        )


class Steps:
    """What a generate() calls for its steps. Bound to the patched instance, the class is its get_compiled_call()."""

    def __init__(self, model, compile_config):
        self.model, self.compile_config, self.handle = model, compile_config, model._torchsparsekv
        self.kinds: weakref.WeakKeyDictionary[SparseCache, int] = weakref.WeakKeyDictionary()  # seen by this call
        self.begun: weakref.WeakKeyDictionary[SparseCache, int] = weakref.WeakKeyDictionary()  # when it last looked

    @property
    def auto(self) -> bool:
        return self.handle.step == "auto"

    def __call__(self, *args, **kwargs):
        cache = cache_in(kwargs)
        if cache is None and not self.auto:
            raise ValueError(f"step='captured' needs its cache by name: {NAME}=handle.make_cache(...)")
        if not isinstance(cache, SparseCache):  # the user asked for another cache, and gets what goes with it
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
        waits: list[str] = []  # of a step that runs as it is and so comes to its end, what a capture could not have
        out = step.run(self.model, forward, leaves, cache, waits.append if self.auto else self._refuse)
        self.begun[cache] = cache.use.begun
        if waits:
            self._compile_instead(cache, waits[0])
        return out

    def _compiled(self, *args, **kwargs):
        """What the class has generate() call."""
        return type(self.model).get_compiled_call(self.model, self.compile_config)(*args, **kwargs)

    def _compile_instead(self, cache: SparseCache, why: str) -> None:
        cache.graphs = []  # and their memory
        self.handle.compile_instead(why)

    def _refuse(self, why: str) -> None:
        raise Refused(self.model, why)

    def _taken_apart(self, args: tuple, kwargs: dict, cache: SparseCache) -> tuple[list, Callable, tuple]:
        """The inputs in a row; the model as a function of these; and what kind of inputs they are."""
        named = {name: x for name, x in sorted(kwargs.items()) if x is not cache}
        leaves, spec = pytree.tree_flatten((args, named))

        def forward(leaves):
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return self.model(*args, **kwargs, **{NAME: cache})

        return leaves, forward, (spec, [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves])

    def _step(self, cache: SparseCache, kind: tuple) -> "Step":
        if any(layer.state.on_step for layer in cache.stored.values()):
            raise RuntimeError(EAGER_ONLY)
        if self.begun.get(cache) != cache.use.begun:  # a prompt came, and before it whatever may have come
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
        if self.auto and (found := code_of_yours(self.model)):
            raise Refused(self.model, found)
        now = fixed(self.model, cache)
        if now != cache.fixed:
            cache.graphs, cache.fixed = [], now


class Step:
    """A step with inputs of one kind: eager, then captured, then replayed. It belongs to a cache, whose addresses never
    change, and holds neither that nor the model."""

    def __init__(self, kind: tuple):
        self.kind, self.eager = kind, EAGER
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, model, forward, leaves: list, cache: SparseCache, tell: Callable[[str], None]):
        if self.eager:
            with NoWaits(model.device, tell) if self.eager == 1 else contextlib.nullcontext():
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
        self.graph, out = self._recorded(model, forward)
        outputs, self.spec = pytree.tree_flatten(out)
        self.outputs = [SparseCache if x is cache else x for x in outputs]
        return self.graph

    def _recorded(self, model, forward):
        """A graph of the step on `inputs`, and what it puts out."""
        graph, side, broken = torch.cuda.CUDAGraph(), _stream(model.device), None
        # The outer stream too: where a capture fails, torch's own `with` does not go back to the stream before.
        with _one_at_a_time, torch.cuda.stream(side):
            torch._C._cuda_clearCublasWorkspaces()  # the graph's is to be its own: inductor frees all there are
            try:
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    try:
                        out = forward(self.inputs)
                    except Exception as e:  # what the end of a broken capture says hides it
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


class NoWaits(TorchDispatchMode):
    """Tell of what waits for the device before a capture does: broken off, one leaves torch's generator capturing."""

    def __init__(self, device: torch.device, tell: Callable[[str], None]):
        super().__init__()
        self.device, self.tell = device, tell

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What the model has compiled itself stays so in here, as without this mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in given}
        waits = WAITS.intersection(func.tags) and self.device.type in devices
        if func is aten.index.Tensor:  # only masks have shapes that must be found out
            waits = waits and any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
        if func in PUTS:  # by a mask too, but for one number, which fills
            masked = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
            waits = masked and args[2].numel() > 1 and self.device.type in devices
        asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if func in (aten._to_copy.default, aten.copy_.default) and not asynchronous:
            waits = len(devices | {torch.device(kwargs.get("device") or given[0].device).type}) > 1
        if waits:
            self.tell(f"{func} waits for the device")
        return func(*args, **kwargs)


def code_of_yours(model) -> str:
    """Where Python code of the user's has to run at every step, as far as it can be told from the model's own."""
    if model._compiled_call_impl is not None:
        return "model.compile() was called, and may have graphs of its own"
    if GLOBAL._global_forward_hooks or GLOBAL._global_forward_pre_hooks:
        return "there are hooks on all modules, which a replay would leave out"
    for name, m in model.named_modules():
        if "forward" in vars(m):
            return f"module {name!r} has a forward of its own, which a replay would leave out"
        hooks = (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
        if any(not (getattr(hook, "__module__", None) or "").startswith(OURS) for hook in hooks):
            return f"module {name!r} has a hook, which a replay would leave out"
    return ""


def changes(before: tuple, now: tuple) -> str:
    """Which inputs differ between two kinds, and what they were."""
    if before[0] != now[0]:
        return "other arguments each time"
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(len(now[1])), now[0]))
    names = (pytree.keystr(path[1:]).strip("[']") for path, _ in paths)
    return ", ".join(f"{name} is {a}, then {b}" for name, a, b in zip(names, before[1], now[1]) if a != b)


def fixed(model, cache: SparseCache) -> list:
    """What a graph does not look at again: where weights, other tensors of modules and the states of transformers' own
    layers lie, what steers queries, and what the switches of modules say, of which adapters have some."""
    found: list = [_address(x) for x in cache.own_tensors()]
    found += [id(layer.state.override_query) for layer in cache.stored.values()]
    for m in model.modules():
        weights = [_address(x) for x in (*m._parameters.values(), *m._buffers.values()) if x is not None]
        own = {name: _address(x) if isinstance(x, Tensor) else repr(x) for name, x in vars(m).items() if _told(x)}
        found.append((id(m), weights, own))
    return found


def _told(x) -> bool:
    """Tensors, and what is as short as a switch."""
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple, set)) else (x,)
    return isinstance(x, Tensor) or all(isinstance(y, (bool, int, float, str)) for y in parts)


def _address(x: Tensor) -> int:
    try:
        return x.data_ptr()
    except RuntimeError:  # a wrapper of several tensors
        return id(x)
