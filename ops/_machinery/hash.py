"""The hash that seeded draws are made with, equal in torch and in Triton.

The 32-bit finaliser of MurmurHash3, in torch and in Triton.

What is drawn is a function of a seed and of indices, so no table and no state of a generator exists anywhere, and a run
draws the same on every device.
"""
from torch import Tensor

from torchsparsekv.ops._machinery.triton import tl, triton

LOW = (1 << 32) - 1


def mixed(x: Tensor) -> Tensor:
    """Of the lower 32 bits of 64-bit integers; from 0 up to 2^32."""
    x = x & LOW
    x = (x ^ (x >> 16)) * 0x85EBCA6B & LOW
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & LOW
    return x ^ (x >> 16)


@triton.jit
def mix(x):
    """Of the lower 32 bits of integers, as uint32."""
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
