"""Triton, or a stand-in that lets kernels be *defined* (never launched) where Triton is absent."""
import functools
import os
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Absent:
        """Stands in for a kernel without Triton. It can be imported. A launch raises an error that says what is
        missing."""

        def __init__(self, fn):
            self.fn = fn

        def __getitem__(self, grid):
            raise RuntimeError(f"{self.fn.__name__} needs Triton on CUDA; `pip install triton` (Linux) provides it")

    def _jit(fn=None, **options):
        return _Absent(fn) if fn else _Absent

    triton = SimpleNamespace(jit=_jit, cdiv=lambda a, b: -(-a // b))
    tl = SimpleNamespace(constexpr=int)

__all__ = [
    "LANES",
    "cdiv",
    "compiles",
    "launch_early",
    "load_early",
    "next_power_of_2",
    "shared_bytes",
    "sm_count",
    "tl",
    "triton",
    "wait_for_previous",
]  # fmt: skip


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def compiles(device: torch.device) -> bool:
    """Whether kernels on that device are compiled, not interpreted. Inline PTX needs compiled kernels."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") != "1"


@functools.cache
def _hopper(device: torch.device) -> bool:
    return compiles(device) and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_early(device: torch.device, programs: int) -> dict[str, bool]:
    """Launch options of a kernel of the decode step: on Hopper a kernel may start while the one before it still runs.

    This is programmatic dependent launch. It hides 0.4 to 1 us between two small kernels, also in a CUDA graph. Such a
    kernel calls `wait_for_previous` before anything but `load_early`. Large grids are not launched early: they would
    crowd onto the multiprocessors that have room, and take longer (1024 programs of bound_scores: 10.4 instead of 9.1
    us).
    """
    early = _hopper(device) and programs <= 2 * sm_count(device)
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all earlier kernels are done, then let the next kernel start. Only `load_early` may come before it."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def load_early(at, mask=None, other=None):
    """Load ahead of `wait_for_previous` what the kernel directly before this one does not write, such as the lengths
    of a step. The load does not read the L1, which may have an older value."""
    return tl.load(at, mask=mask, other=other, cache_modifier=".cg")


LANES = 1 << 20  # most numbers in a tensor of a program
SMALLEST = 101_376  # most bytes of shared memory of a program on the smallest supported GPUs (capability 8.6, 8.9)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """The most bytes of shared memory of a program."""
    if device.type != "cuda":
        return SMALLEST
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def sm_count(device: torch.device) -> int:
    """The number of multiprocessors. On a CPU a small number, which keeps the loops of the interpreter short."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
