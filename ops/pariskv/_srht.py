"""The rotation that makes keys isotropic, SRHT: seeded sign flips, then a Hadamard transform, padded to a power of two.

Both are functions of indices, in torch and in Triton alike, so no table of them exists anywhere.
"""
import functools

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.hash import mix, mixed
from torchsparsekv.ops._machinery.triton import next_power_of_2, tl, triton

SEEDS = 1 << 20


@functools.cache
def flips(seed: int, size: int) -> Tensor:
    """+-1 per channel from the low bit of a hash of (seed, channel)."""
    return (1 - 2 * (mixed(torch.arange(size) + seed * 256 + 1) & 1)).float()


@functools.cache
def hadamard(size: int) -> Tensor:
    """The symmetric +-1 matrix; orthogonal after division by sqrt(size)."""
    i = torch.arange(size)
    x = i[:, None] & i
    for shift in (4, 2, 1):
        x ^= x >> shift
    return (1 - 2 * (x & 1)).float()


def turned(x: Tensor, seed: int) -> Tensor:
    """sqrt(size) times the rotated vectors: sums of +-x, so exact where the entries are small integers."""
    size = next_power_of_2(x.shape[-1])
    x = torch.nn.functional.pad(x.float(), (0, size - x.shape[-1]))
    return (x * flips(seed, size)) @ hadamard(size)


@triton.jit
def flipped(i, seed):
    """Whether channel `i` changes its sign."""
    return (mix((i + seed * 256 + 1).to(tl.uint32)) & 1) != 0


@triton.jit
def hadamard_odd(i, j):
    """Whether entry (i, j) of the Hadamard matrix is -1; indices below 256."""
    x = i & j
    x = x ^ (x >> 4)
    x = x ^ (x >> 2)
    x = x ^ (x >> 1)
    return (x & 1) != 0
