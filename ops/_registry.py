"""The one door through which an operator enters `torch.ops.torchsparsekv`.

`Library.define` + `impl` is used instead of `torch.library.custom_op`: the same compile behaviour and `opcheck`
results at a fraction of the cost per eager call.
"""
import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

import torch

_LIB = torch.library.Library("torchsparsekv", "DEF")


class Entry(NamedTuple):
    op: Callable
    reference: Callable
    cuda: Callable


OPS: dict[str, Entry] = {}


def register(
    name: str,
    schema: str,
    *,
    reference: Callable,
    fake: Callable,
    cuda: Callable,
    check: Callable | None = None,
    capturable: bool = True,
) -> Callable:
    """Define `name` with `schema` and return the overload (calling it costs one dispatch).

    `reference` is the specification and the CPU kernel; `cuda` launches the device kernels; `check` sees the
    arguments first, on both. An op that is not `capturable` syncs with the host and splits CUDA graphs instead of
    breaking them; no op of the decode step may be one.
    """
    tags = (torch.Tag.pt2_compliant_tag,) + (() if capturable else (torch.Tag.cudagraph_unsafe,))
    _LIB.define(name + schema, tags=tags)
    reference, cuda = _checked(reference, check), _on_device(_checked(cuda, check))
    _LIB.impl(name, reference, "CPU")
    _LIB.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"torchsparsekv::{name}", fake, lib=_LIB)
    op = getattr(torch.ops.torchsparsekv, name).default
    OPS[name] = Entry(op, reference, cuda)
    return op


def _checked(fn: Callable, check: Callable | None) -> Callable:
    if check is None:
        return fn

    @functools.wraps(fn)
    def run(*args):
        check(*args)
        return fn(*args)

    return run


def _on_device(fn: Callable) -> Callable:
    """Triton launches on the current device, which need not be the one that the tensors are on."""

    @functools.wraps(fn)
    def run(*args):
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return fn(*args)
        with torch.cuda.device(device):
            return fn(*args)

    return run


def load_all() -> dict[str, Entry]:
    """Import every operator file (for tests and tools; methods import the ones they use)."""
    from torchsparsekv import ops

    for m in pkgutil.walk_packages(ops.__path__, "torchsparsekv.ops."):
        importlib.import_module(m.name)
    return OPS
