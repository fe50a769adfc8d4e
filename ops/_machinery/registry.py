"""Register ops in `torch.ops.torchsparsekv`. No other module does.

`Library.define` + `impl` is used instead of `torch.library.custom_op`: the same compile behaviour and `opcheck`
results at a fraction of the cost per eager call.
"""
import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from torchsparsekv.ops._machinery.chain import Chain, Implementation
from torchsparsekv.ops._machinery.signature import Signature

_LIB = torch.library.Library("torchsparsekv", "DEF")


class Entry:
    """One op. `op` takes flat arguments, as the dispatcher passes them; `call` takes views; `chain` has the kernels."""

    def __init__(self, op: Callable, call: Callable, signature: Signature, chain: Chain):
        self.op, self.call, self.signature, self.chain = op, call, signature, chain
        self.reference = chain.reference
        self.choose = signature.grouped(chain.chosen)  # takes flat arguments, and compiles CUDA C++ that is chosen

    def run(self, kind: str, *things: Any) -> Any:
        """Run the implementation of a kind, on any device. Raises an error if it does not fit."""
        return self.reference(*things) if kind == "reference" else self.chain.run(things, kind)


OPS: dict[str, Entry] = {}


def register(
    name: str,
    reference: Callable,
    *,
    impls: tuple[Implementation, ...] = (),
    fake: Callable | None = None,
    check: Callable | None = None,
    capturable: bool = True,
) -> Callable:
    """Define an op and return the function to call.

    Before an implementation runs, shapes and types are checked against the annotations of the reference.

    Args:
        name: the name in `torch.ops.torchsparsekv`.
        reference: the specification. Its annotations are the signature of the op. It runs on a CPU, unless `impls` has
            a kernel of torch.
        impls: implementations for a GPU. The first that fits runs.
        fake: returns an empty tensor like the result. An op that returns something needs a fake.
        check: raises an error for arguments that annotations cannot refuse.
        capturable: False for an op that a CUDA graph cannot contain, such as an op that may wait for the device. Such
            an op splits CUDA graphs, and no decode step may contain one.
    """
    signature = Signature(name, reference)
    if name in OPS:
        raise ValueError(f"op {name!r} is registered twice: by {_place(OPS[name].reference)} and {_place(reference)}")
    if fake is None and signature.result is not type(None):
        raise TypeError(f"op {name!r} returns something: give register() a fake, which returns an empty tensor like it")
    tags = (torch.Tag.pt2_compliant_tag,) + (() if capturable else (torch.Tag.cudagraph_unsafe,))
    _LIB.define(name + signature.schema, tags=tags)
    chain = Chain(name, impls, reference)
    verified = functools.partial(_verified, signature, check)
    _LIB.impl(name, verified(chain.on_cpu), "CPU")
    _LIB.impl(name, _on_device(verified(chain.on_cuda)), "CUDA")
    torch.library.register_fake(f"torchsparsekv::{name}", signature.grouped(fake or (lambda *_: None)), lib=_LIB)
    op = getattr(torch.ops.torchsparsekv, name).default
    call = signature.caller(op, reference.__doc__)
    OPS[name] = Entry(op, call, signature, chain)
    return call


def _place(reference: Callable) -> str:
    return f"{reference.__module__}.{reference.__qualname__}"


def _verified(signature: Signature, check: Callable | None, fn: Callable) -> Callable:
    """`fn` of views as a function of flat arguments, after the checks."""
    verify, run = signature.verifier(), signature.grouped(fn, check)

    def verified(*args):
        verify(*args)
        return run(*args)

    return verified


def _on_device(fn: Callable) -> Callable:
    """`fn` on the device of the tensors. Kernels are launched on the current device, which may be another one."""

    def run(*args):
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        if device.index == torch.cuda.current_device():
            return fn(*args)
        with torch.cuda.device(device):
            return fn(*args)

    return run


def load_all() -> dict[str, Entry]:
    """Import the files of all ops, for tests and tools. Methods import the ops that they use."""
    from torchsparsekv import ops

    for m in pkgutil.walk_packages(ops.__path__, "torchsparsekv.ops."):
        importlib.import_module(m.name)
    return OPS
