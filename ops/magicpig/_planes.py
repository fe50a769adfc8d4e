"""The planes that keys and queries are hashed by, in torch and in Triton.

    entry (channel, column) = sum of the eight hexadecimal digits of a hash of (seed, column, channel), less 60
    code of a table         = sum over j of 2^j * (x . plane_j > noise)
    noise                   = 60 * NOISE * |x|_1            fp32 cannot tell such a product from 0

The paper's entries are normal. An entry here is a sum of eight uniform draws, which is nearly normal. Entries are
integers from -60 to 60, which every type holds exactly. They are computed from their indices, so no table of them is
stored.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.hash import LOW, mix, mixed
from torchsparsekv.ops._machinery.triton import tl, triton

SEED = 0x9E3779B1
CHANNELS = 512  # indices of one column: head_dim is at most as large
NOISE = 2.0**-23  # a product in fp32 below this share of 60 * |x|_1 counts as 0


def planes(dim: int, tables: int, bits: int, seed: int, device: torch.device | None = None) -> Tensor:
    """The planes [dim, tables * bits], in fp32."""
    column = torch.arange(tables * bits, device=device)
    index = column * CHANNELS + torch.arange(dim, device=device)[:, None] + (seed * SEED & LOW)
    x = mixed(index)
    x = (x & 0x0F0F0F0F) + ((x >> 4) & 0x0F0F0F0F)
    return (((x * 0x01010101 & LOW) >> 24) - 60).float()


def hashes(x: Tensor, centre: Tensor | None, tables: int, bits: int, seed: int) -> Tensor:
    """The codes [..., tables] of vectors [..., dim] minus `centre`, which broadcasts to them."""
    plane = planes(x.shape[-1], tables, bits, seed, x.device)
    y, size = x.float() @ plane, x.float().abs().sum(-1, keepdim=True)
    if centre is not None:
        y, size = y - centre @ plane, size + centre.abs().sum(-1, keepdim=True)
    positive = (y > 60 * NOISE * size).unflatten(-1, (tables, bits)).int()
    return (positive << torch.arange(bits, device=x.device)).sum(-1).to(torch.int16)


@triton.jit
def plane_of(table, seed, D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr):
    """The planes of a table, [DP, 16], in fp32, with 0 for channels and planes that do not exist."""
    d, j = tl.arange(0, DP)[:, None], tl.arange(0, 16)[None, :]
    index = (table * BITS + j) * 512 + d
    x = mix(index.to(tl.uint32) + seed.to(tl.uint32) * 0x9E3779B1)
    x = (x & 0x0F0F0F0F) + ((x >> 4) & 0x0F0F0F0F)
    digits = (x * 0x01010101) >> 24
    return tl.where((d < D) & (j < BITS), digits.to(tl.int32) - 60, 0).to(tl.float32)


@triton.jit
def codes_of(x, centre, plane, NOISE: tl.constexpr):
    """The codes [n] of vectors x [n, DP] minus `centre` [DP], in one table."""
    y = tl.dot(x, plane.to(x.dtype), input_precision="ieee") - tl.sum(centre[:, None] * plane, 0)[None, :]
    noise = (tl.sum(tl.abs(x.to(tl.float32)), 1) + tl.sum(tl.abs(centre), 0)) * (60 * NOISE)
    bit = (y > noise[:, None]).to(tl.int32) << tl.arange(0, 16)[None, :]
    return tl.sum(bit, 1)
