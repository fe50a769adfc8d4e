"""The cosine between the query heads of one decode step and those of another, in torch and in Triton.

    cos(x, y) = <x, y> / (|x| |y|), and 0 where x or y is zero
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import tl, triton


def cosines(x: Tensor, y: Tensor) -> Tensor:
    """Cosines along the last dimension, computed in fp32: x, y [..., dim] -> [...]."""
    x, y = x.float(), y.float()
    size = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return torch.where(size > 0, (x * y).sum(-1) / torch.where(size > 0, size, 1.0), 0.0)


@triton.jit
def mean_cosine(new, old, in_group, PER_HEAD: tl.constexpr, G: tl.constexpr, Q: tl.constexpr):
    """The mean cosine of `new` and `old` [heads, dim] over Q heads; with PER_HEAD over the G heads `in_group`."""
    size = tl.sqrt(tl.sum(new * new, 1) * tl.sum(old * old, 1))  # [heads]
    cosine = tl.where(size > 0, tl.sum(new * old, 1) / tl.where(size > 0, size, 1.0), 0.0)
    if PER_HEAD:
        return tl.sum(tl.where(in_group, cosine, 0.0), 0) / G
    return tl.sum(cosine, 0) / Q
