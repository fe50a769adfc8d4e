"""The chain of implementations of an op. The first implementation that fits runs; the chain keeps the reasons of the
others.

On a CUDA device the order is CUDA C++ (if the op has it), then Triton; an op without kernels is refused. On a CPU the
reference runs. An op with an implementation by torch's own kernels runs it on both. `use_kernels` forces one kind for
every op. An op that cannot run as forced is refused with the reason. With "cuda" forced, an op without CUDA C++ for its
arguments runs the next implementation of its chain. Torch's kernels count as "cuda" and as "triton".
"""
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

KINDS = ("cuda", "triton", "reference")  # that can be forced
TORCH = "torch"
VARIABLE = "TORCHSPARSEKV_KERNELS"


class Implementation(NamedTuple):
    """`fits` gets the arguments of the op. It returns the first argument of `launch`, or the reason (a string) why the
    implementation cannot run. `serves` says whether the implementation is meant for the arguments; None: for all."""

    kind: str
    launch: Callable
    fits: Callable | None = None
    serves: Callable | None = None


def cuda(fits: Callable, launch: Callable, serves: Callable | None = None) -> Implementation:
    """CUDA C++ of csrc/. `fits` returns the compiled kernels."""
    return Implementation("cuda", launch, fits, serves)


def triton(launch: Callable) -> Implementation:
    return Implementation("triton", launch)


def torch_kernels(launch: Callable) -> Implementation:
    """An implementation by torch's own kernels, also on a CPU."""
    return Implementation(TORCH, launch)


def _known(kind: str | None, where: str) -> str | None:
    if kind not in (None, *KINDS):
        raise ValueError(f"{where} must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind


_forced: str | None = _known(os.environ.get(VARIABLE) or None, VARIABLE)


class _Before(contextlib.AbstractContextManager):
    """Restores the kind that was forced before, at the end of a `with`."""

    def __init__(self, kind: str | None):
        self.kind = kind

    def __exit__(self, *exc: object) -> None:
        use_kernels(self.kind)


def use_kernels(kind: str | None) -> contextlib.AbstractContextManager:
    """Force one kind of kernel for every op, until the next call or the end of a `with`.

    A step that was captured in a CUDA graph keeps its kernels.

    Args:
        kind: "cuda", "triton" or "reference". None: each op takes the first kind that fits.
    """
    global _forced
    before, _forced = _Before(_forced), _known(kind, "kernels")
    return before


def forced() -> str | None:
    return _forced


class Chain:
    """The implementations of one op."""

    def __init__(self, name: str, chain: tuple[Implementation, ...], reference: Callable):
        self.name, self.chain, self.reference = name, chain, reference
        self.kinds = tuple(i.kind for i in chain)
        self.unforced_on_cpu = next((i.launch for i in chain if i.kind == TORCH), reference)

    def candidates(self, kind: str | None, things: tuple) -> tuple[Implementation, ...]:
        """The implementations that may run with these arguments if `kind` is forced."""
        if kind == "reference":
            return ()
        serving = tuple(i for i in self.chain if i.serves is None or i.serves(*things))
        if kind is None or (kind == "cuda" and all(i.kind != "cuda" for i in serving)):
            return serving
        return tuple(i for i in serving if i.kind in (kind, TORCH))

    def run(self, things: tuple, kind: str | None) -> Any:
        """Run the first implementation that fits, on a CUDA device or in the interpreter."""
        one, found, _ = self._first(things, kind)
        return one.launch(found, *things) if one.fits else one.launch(*things)

    def chosen(self, *things: Any) -> tuple[str, dict[str, str]]:
        """The kind that would run on a CUDA device, and the reasons why the kinds before it cannot."""
        if _forced == "reference":
            return _forced, {}
        one, _, reasons = self._first(things, _forced)
        return one.kind, reasons

    def _first(self, things: tuple, kind: str | None) -> tuple[Implementation, Any, dict[str, str]]:
        """The first implementation that fits, its first argument, and the reasons why those before it cannot run."""
        reasons: dict[str, str] = {}
        for one in self.candidates(kind, things):
            found = one.fits(*things) if one.fits else None
            if not isinstance(found, str):
                return one, found, reasons
            reasons[one.kind] = found
        why = "; ".join(f"{one}: {reason}" for one, reason in reasons.items())
        none = "it has no such kernel" if self.chain else "it has only a reference, which kernels='reference' runs"
        raise RuntimeError(f"{self.name}: kernels={kind!r} cannot run here: {why or none}")

    # ---- what the dispatcher calls

    def on_cpu(self, *things: Any) -> Any:
        if _forced is None:
            return self.unforced_on_cpu(*things)
        if _forced == "reference":
            return self.reference(*things)
        if _forced == "cuda":
            raise RuntimeError(f"{self.name}: kernels='cuda' cannot run here: these tensors are on the CPU")
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                f"{self.name}: kernels='triton' cannot run here: these tensors are on the CPU, where Triton only runs "
                "in its interpreter: set TRITON_INTERPRET=1 before the import"
            )
        return self.run(things, "triton")

    def on_cuda(self, *things: Any) -> Any:
        if _forced == "reference":
            return self._reference_of_cuda(things)
        return self.run(things, _forced)

    def _reference_of_cuda(self, things: tuple) -> Any:
        """Run the reference on the CPU, with copies in both directions. It waits for the device, so it cannot be
        captured."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name}: kernels='reference' cannot run here: the reference waits for the device, and this step "
                "is being captured in a CUDA graph; decode eagerly (generate(..., disable_compile=True))"
            )
        (device,) = {t.device for t in tensors(things)}
        copies = mapped(things, lambda t: t.cpu())
        found = self.reference(*copies)
        for t, copy in zip(tensors(things), tensors(copies)):
            t.copy_(copy)
        return mapped(found, lambda t: t.to(device))


def tensors(x: Any) -> Iterator[Tensor]:
    """All tensors in tuples of tuples."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for part in x:
            yield from tensors(part)


def mapped(x: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """The same tuples of tuples with other tensors."""
    if isinstance(x, Tensor):
        return fn(x)
    if isinstance(x, tuple):
        parts = [mapped(part, fn) for part in x]
        return x._make(parts) if hasattr(x, "_make") else tuple(parts)
    return x
