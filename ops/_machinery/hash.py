"""The hash of seeded draws: the 32-bit finaliser of MurmurHash3, equal in torch and in Triton.

A draw is a function of a seed and of indices. So there is no table and no state of a generator, and every device draws
the same.
"""
from torch import Tensor

from torchsparsekv.ops._machinery.triton import tl, triton

LOW = (1 << 32) - 1


def mixed(x: Tensor) -> Tensor:
    """The hash of the lower 32 bits of 64-bit integers: at least 0, below 2^32."""
    x = x & LOW
    x = (x ^ (x >> 16)) * 0x85EBCA6B & LOW
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & LOW
    return x ^ (x >> 16)


@triton.jit
def mix(x):
    """The hash of the lower 32 bits of integers, as uint32."""
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
