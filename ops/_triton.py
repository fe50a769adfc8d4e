"""Triton, or a stand-in that lets kernels be *defined* (never launched) where Triton is absent."""
import functools
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Absent:
        """What a kernel becomes without Triton: importable, and clear about what is missing when launched."""

        def __init__(self, fn):
            self.fn = fn

        def __getitem__(self, grid):
            raise RuntimeError(f"{self.fn.__name__} needs Triton on CUDA; `pip install triton` (Linux) provides it")

    triton = SimpleNamespace(jit=_Absent, cdiv=lambda a, b: -(-a // b))
    tl = SimpleNamespace(constexpr=int)

__all__ = ["cdiv", "next_power_of_2", "sm_count", "tl", "triton"]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors to spread over; the interpreter (CPU) gets a small number to keep its loops short."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
