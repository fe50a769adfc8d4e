"""Hadamard matrices, in torch and in Triton. An entry is a function of its indices, so kernels need no table."""
import functools

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import tl, triton


@functools.cache
def hadamard(size: int) -> Tensor:
    """The symmetric Hadamard matrix of entries +-1; orthogonal after division by sqrt(size)."""
    i = torch.arange(size)
    x = i[:, None] & i
    for shift in (4, 2, 1):
        x ^= x >> shift
    return (1 - 2 * (x & 1)).float()


@triton.jit
def hadamard_odd(i, j):
    """Whether entry (i, j) of the Hadamard matrix is -1; indices below 256."""
    x = i & j
    for half in tl.static_range(2, -1, -1):
        x = x ^ (x >> (1 << half))
    return (x & 1) != 0
