"""The rotation of keys and queries (SRHT): seeded sign flips, then a Hadamard transform padded to a power of two.

    rotate(x) = H diag(signs) x        H has entries +-1; H / sqrt(size) is orthogonal

Signs are functions of indices, in torch and in Triton alike, so kernels need no table.
"""
import functools

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.hadamard import hadamard
from torchsparsekv.ops._machinery.hash import mix, mixed
from torchsparsekv.ops._machinery.triton import next_power_of_2, tl, triton

SEEDS = 1 << 20


@functools.cache
def signs(seed: int, size: int) -> Tensor:
    """+1 or -1 per channel, by the low bit of a hash of (seed, channel)."""
    return (1 - 2 * (mixed(torch.arange(size) + seed * 256 + 1) & 1)).float()


def rotate(x: Tensor, seed: int) -> Tensor:
    """sqrt(size) times the orthogonally rotated vectors: sums of +-x, so exact for small integers."""
    size = next_power_of_2(x.shape[-1])
    x = torch.nn.functional.pad(x.float(), (0, size - x.shape[-1]))
    return (x * signs(seed, size)) @ hadamard(size)


@triton.jit
def is_flipped(i, seed):
    """Whether the sign of channel `i` is flipped."""
    return (mix((i + seed * 256 + 1).to(tl.uint32)) & 1) != 0
