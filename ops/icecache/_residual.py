"""4-bit codes of the difference between a key and its node: what the leaves of the tree keep of a key.

    r = k - decode(node of k)                            per group of 16 channels:
    scale = max |r| / 7.5                                fp16
    level = clamp(floor(r / scale) + 8, 0, 15)           decoded as (level - 7.5) * scale

Channels j and j + 8 of a group share a byte; channel j is in the low 4 bits. The node is taken in its 8-bit code,
since visit_nodes multiplies queries with that code: q.k = q.node + q.r, and q.node is known when leaves are read. A
token that is a node itself has r = 0, and its codes are not read. A key of 128 channels takes 80 bytes.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv, tl, triton
from torchsparsekv.ops.icecache import _tree
from torchsparsekv.ops.icecache.views import Leaves, Tree

GROUP = 16  # channels that share a scale
BYTES = GROUP // 2
LARGEST = 65504.0  # the largest fp16 number
STEP = 1 / 7.5
_GROUP, _BYTES = tl.constexpr(GROUP), tl.constexpr(BYTES)
_LARGEST, _STEP = tl.constexpr(LARGEST), tl.constexpr(STEP)
# Options of kernels that call `store_leaves_tl`. The reference rounds code * scale before it subtracts; a fused
# multiply-add would not round.
UNFUSED = {"enable_fp_fusion": False}


def widths(dim: int, codes: bool) -> tuple[int, int]:
    """The widths of Leaves.key and Leaves.scale for keys of `dim` channels."""
    groups = cdiv(dim, GROUP)
    return (groups * BYTES, groups) if codes else (dim, 0)


def check_leaves(leaves: Leaves, dim: int, dtype: torch.dtype) -> None:
    codes = leaves.key.dtype == torch.uint8
    got, want = (leaves.key.shape[3], leaves.scale.shape[3]), widths(dim, codes)
    if got != want or not (codes or leaves.key.dtype == dtype):
        raise ValueError(
            f"leaves of {dim} dimensions need {'codes' if codes else f'keys of {dtype}'} of width {want[0]} and "
            f"{want[1]} scales, got {leaves.key.dtype} of width {got[0]} and {got[1]} scales"
        )


# ---------------------------------------------------------------- torch


def encode(residual: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of residuals, float32 [..., dim]."""
    x = torch.nn.functional.pad(residual, (0, -residual.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    scale = (x.abs().amax(-1) * STEP).clamp(max=LARGEST).half()
    s = scale.float()[..., None]
    level = (torch.where(s > 0, x / s, 0).floor() + 8).clamp(0, 15).to(torch.uint8)
    low, high = level.split(BYTES, -1)
    return (low | high << 4).flatten(-2), scale


def decode(codes: Tensor, scale: Tensor, dim: int) -> Tensor:
    """The residuals of codes, float32 [..., dim]."""
    byte = codes.unflatten(-1, (-1, BYTES))
    level = torch.cat([byte & 15, byte >> 4], -1).float() - 7.5
    return (level * scale.float()[..., None]).flatten(-2)[..., :dim]


def store_leaves(leaves: Leaves, index: tuple, keys: Tensor, mark: Tensor, tree: Tree) -> None:
    """Store keys at an index of `leaves`. `mark` is their Leaves.node; `tree` is the tree of the kv head."""
    leaves.node[index] = mark
    if leaves.key.dtype == torch.uint8:
        parent = mark.clamp(min=0).long()
        nodes = _tree.decode_nodes(tree.code[parent], tree.scale[parent])
        leaves.key[index], leaves.scale[index] = encode(torch.where(mark[..., None] < 0, 0, keys.float() - nodes))
    else:
        leaves.key[index] = keys


# ---------------------------------------------------------------- Triton


@triton.jit
def store_leaves_tl(
    x, mark, row, live, code, scale, row_key, row_scale, row_node, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """`store_leaves` of T keys x [T, DP] into rows [T]. `code` and `scale` belong to the nodes of the kv head. GROUPS
    is 0 where leaves are keys."""
    tl.store(row_node + row, mark, mask=live)
    d = tl.arange(0, DP)
    m = live[:, None] & (d < D)[None, :]
    if GROUPS == 0:
        tl.store(row_key + row[:, None] * D + d[None, :], x, mask=m)
    else:
        m = m & (mark >= 0)[:, None]
        node = tl.load(code + mark.to(tl.int64)[:, None] * D + d[None, :], mask=m, other=0).to(tl.float32)  # [T, DP]
        node *= tl.load(scale + mark, mask=live & (mark >= 0), other=0.0)[:, None]
        r = tl.where(m, x.to(tl.float32) - node, 0.0)
        r = tl.reshape(r, (T, DP // _GROUP, _GROUP))
        half_scale = tl.minimum(tl.max(tl.abs(r), 2) * _STEP, _LARGEST).to(tl.float16)  # [T, groups]
        s = half_scale.to(tl.float32)[:, :, None]
        level = tl.where(s > 0, tl.div_rn(r, tl.where(s > 0, s, 1.0) + tl.zeros_like(r)), 0.0)
        level = tl.minimum(tl.maximum(tl.floor(level) + 8.0, 0.0), 15.0).to(tl.int32)
        level = tl.reshape(level, (T, DP // _GROUP, 2, _BYTES))
        byte = tl.sum(level << (4 * tl.arange(0, 2))[None, None, :, None], 2)  # [T, groups, _BYTES]
        g, j = tl.arange(0, DP // _GROUP), tl.arange(0, _BYTES)
        stored = live[:, None] & (g < GROUPS)[None, :]
        tl.store(row_scale + row[:, None] * GROUPS + g[None, :], half_scale, mask=stored)
        to = (row[:, None] * GROUPS + g[None, :])[:, :, None] * _BYTES + j[None, None, :]
        tl.store(row_key + to, byte.to(tl.uint8), mask=stored[:, :, None] & (j < _BYTES)[None, None, :])


@triton.jit
def low_channel_tl(j):
    """The channel in the low 4 bits of byte `j`. The channel in the high 4 bits is 8 further."""
    return j // _BYTES * _GROUP + j % _BYTES


@triton.jit
def decode_tl(row_key, row_scale, row, live, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """The residuals of rows: (those of the channels in low bits, those in high bits), each [rows, HALF]."""
    j = tl.arange(0, HALF)
    m = live[:, None] & (j < GROUPS * _BYTES)[None, :]
    byte = tl.load(row_key + row[:, None] * (GROUPS * _BYTES) + j[None, :], mask=m, other=0).to(tl.int32)
    s = tl.load(row_scale + row[:, None] * GROUPS + (j // _BYTES)[None, :], mask=m, other=0.0).to(tl.float32)
    return ((byte & 15).to(tl.float32) - 7.5) * s, ((byte >> 4).to(tl.float32) - 7.5) * s
