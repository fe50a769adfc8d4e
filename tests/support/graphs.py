"""CUDA graphs where there are none: what is captured does not happen, and happens at every replay, on the same tensors.

On a GPU the true ones, counted.
"""
import contextlib
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationMixin
from world import DEVICE

from torchsparsekv.patches import _install
from torchsparsekv.patches._cache import SparseCache
from torchsparsekv.patches._names import cache_in


def tensors(x) -> list[torch.Tensor]:
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def places(x) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors(x)}


NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing\nand more"


class Counted:
    """Every graph, and how often it was replayed."""

    replays: dict[int, int]

    def __new__(cls, *args):
        made = super().__new__(cls, *args)
        cls.replays[len(cls.replays)] = 0
        made.number = len(cls.replays) - 1
        return made

    def replay(self):
        self.replays[self.number] += 1
        super().replay()


class Graph:
    """In the place of torch.cuda.CUDAGraph. A replay calls the captured ops again, into the tensors they made then."""

    def __init__(self):
        self.calls: list[tuple] = []

    def replay(self):
        with torch.inference_mode():
            for func, args, kwargs, made in self.calls:
                for old, new in zip(made, tensors(func(*args, **kwargs))):
                    if old is not None:
                        old.copy_(new)


class Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph):
        super().__init__()
        self.graph, self.before = graph, []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(NOT_PERMITTED)
        for at, said in enumerate(func._schema.arguments):
            if said.alias_info is not None and said.alias_info.is_write:
                written = tensors(args[at] if at < len(args) else kwargs.get(said.name))
                self.before += [(t, t.clone()) for t in written]
        out = func(*args, **kwargs)
        had = places((args, kwargs))
        made = [t if t.untyped_storage().data_ptr() not in had else None for t in tensors(out)]
        self.graph.calls.append((func, args, kwargs, made))
        return out


@contextlib.contextmanager
def capture(graph: Graph, stream=None, capture_error_mode="global"):
    assert capture_error_mode == "thread_local"
    Stream.here.capturing = True
    recorder = Recorder(graph)
    try:
        with recorder:
            yield
    except Exception as e:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from e
    finally:
        Stream.here.capturing = False
        for t, was in reversed(recorder.before):
            t.copy_(was)
    for t in tensors([made for *_, made in graph.calls]):
        if t.is_floating_point():
            t.fill_(torch.nan)


class Stream:
    here = threading.local()

    def wait_stream(self, other): ...

    def synchronize(self):
        if getattr(self.here, "capturing", False):
            raise RuntimeError(NOT_PERMITTED)


def asked_for(model, model_kwargs, config) -> bool:
    """generate() asks for its steps on a CPU as it does on a GPU."""
    return not config.disable_compile and isinstance(cache_in(model_kwargs), SparseCache)


def pretend(monkeypatch) -> dict[int, int]:
    """The replays of each graph that is made from now on."""
    replays: dict[int, int] = {}
    if DEVICE.type == "cuda":
        base = torch.cuda.CUDAGraph
    else:
        main, base = Stream(), Graph
        for name, stands_for in (
            ("Stream", lambda device: Stream()), ("current_stream", lambda device=None: main), ("graph", capture),
            ("stream", lambda s: contextlib.nullcontext()),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, stands_for)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr(SparseCache, "check_room", lambda self, tokens: None)  # as of a step on CUDA
        monkeypatch.setattr(_install, "why_not_captured", lambda model: None)
        monkeypatch.setattr(GenerationMixin, "_valid_auto_compile_criteria", asked_for)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CountedGraph", (Counted, base), {"replays": replays}))
    return replays
