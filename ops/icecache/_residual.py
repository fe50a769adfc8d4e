"""Keys as what they differ by from their node, in 4 bits: what a tree's leaves keep of them.

Of every 16 channels the largest difference gives the scale, fp16; each channel is one of 16 levels between it and its
negative, half a level off zero. Channels j and j + 8 of a group share a byte, the lower one in its low bits. The node
is taken in the 8 bits that queries meet it in: its product with a query is known when leaves are looked at, so no
rotation is needed to make the rest of equal size in all channels, and the query stays as it is. A key that is a node
itself is taken to differ by nothing: its product is that of the node, and nobody has to read its codes.

80 bytes at head_dim 128, where ParisKV's codes take 96 without their ids and the key 256; docs/develop/lessons.md has
what they find.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv, tl, triton
from torchsparsekv.ops.icecache import _tree
from torchsparsekv.ops.icecache.views import Leaves, Tree

GROUP = 16  # channels of a scale
BYTES = GROUP // 2
LARGEST = 65504.0  # fp16
STEP = 1 / 7.5
_GROUP, _BYTES = tl.constexpr(GROUP), tl.constexpr(BYTES)
_LARGEST, _STEP = tl.constexpr(LARGEST), tl.constexpr(STEP)


def widths(dim: int, codes: bool) -> tuple[int, int]:
    """Of what leaves keep of a key, and how many scales."""
    groups = cdiv(dim, GROUP)
    return (groups * BYTES, groups) if codes else (dim, 0)


def check_leaves(leaves: Leaves, dim: int, dtype: torch.dtype) -> None:
    codes = leaves.key.dtype == torch.uint8
    got, want = (leaves.key.shape[3], leaves.scale.shape[3]), widths(dim, codes)
    if got != want or not (codes or leaves.key.dtype == dtype):
        raise ValueError(
            f"leaves of {dim} dimensions keep {want[0]} wide {'codes' if codes else f'keys of {dtype}'} and {want[1]} "
            f"scales, got {leaves.key.dtype} {got[0]} wide and {got[1]}"
        )


# ---------------------------------------------------------------- torch


def coded(difference: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of float32 [..., dim]."""
    x = torch.nn.functional.pad(difference, (0, -difference.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    scale = (x.abs().amax(-1) * STEP).clamp(max=LARGEST).half()
    s = scale.float()[..., None]
    level = (torch.where(s > 0, x / s, 0).floor() + 8).clamp(0, 15).to(torch.uint8)
    low, high = level.split(BYTES, -1)
    return (low | high << 4).flatten(-2), scale


def difference(codes: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Float32 [..., dim] behind codes."""
    byte = codes.unflatten(-1, (-1, BYTES))
    level = torch.cat([byte & 15, byte >> 4], -1).float() - 7.5
    return (level * scale.float()[..., None]).flatten(-2)[..., :dim]


def keep(leaves: Leaves, at: tuple, keys: Tensor, of: Tensor, tree: Tree) -> None:
    """Leaves `at` these indices are `keys`, children `of` these nodes of a head's tree, or nodes (Leaves.node)."""
    leaves.node[at] = of
    if leaves.key.dtype == torch.uint8:
        parent = of.clamp(min=0).long()
        nodes = _tree.decoded(tree.code[parent], tree.scale[parent])
        leaves.key[at], leaves.scale[at] = coded(torch.where(of[..., None] < 0, 0, keys.float() - nodes))
    else:
        leaves.key[at] = keys


# ---------------------------------------------------------------- Triton


# How kernels that call `keep_of` are launched: a node's code times its scale is rounded before it is subtracted, as it
# is in the reference; fused with that, the product would not be.
UNFUSED = {"enable_fp_fusion": False}


@triton.jit
def keep_of(
    x, of, row, live, code, scale, row_key, row_scale, row_node, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """`keep` for T keys [T, DP] in rows `row`, in a head whose nodes have these codes and scales; 0 GROUPS: leaves are
    keys."""
    tl.store(row_node + row, of, mask=live)
    d = tl.arange(0, DP)
    m = live[:, None] & (d < D)[None, :]
    if GROUPS == 0:
        tl.store(row_key + row[:, None] * D + d[None, :], x, mask=m)
    else:
        m = m & (of >= 0)[:, None]
        node = tl.load(code + of.to(tl.int64)[:, None] * D + d[None, :], mask=m, other=0).to(tl.float32)
        node *= tl.load(scale + of, mask=live & (of >= 0), other=0.0)[:, None]
        r = tl.where(m, x.to(tl.float32) - node, 0.0)
        r = tl.reshape(r, (T, DP // _GROUP, _GROUP))
        its = tl.minimum(tl.max(tl.abs(r), 2) * _STEP, _LARGEST).to(tl.float16)
        s = its.to(tl.float32)[:, :, None]
        level = tl.where(s > 0, tl.div_rn(r, tl.where(s > 0, s, 1.0) + tl.zeros_like(r)), 0.0)
        level = tl.minimum(tl.maximum(tl.floor(level) + 8.0, 0.0), 15.0).to(tl.int32)
        level = tl.reshape(level, (T, DP // _GROUP, 2, _BYTES))
        byte = tl.sum(level << (4 * tl.arange(0, 2))[None, None, :, None], 2)
        g, j = tl.arange(0, DP // _GROUP), tl.arange(0, _BYTES)
        there = live[:, None] & (g < GROUPS)[None, :]
        tl.store(row_scale + row[:, None] * GROUPS + g[None, :], its, mask=there)
        at = (row[:, None] * GROUPS + g[None, :])[:, :, None] * _BYTES + j[None, None, :]
        tl.store(row_key + at, byte.to(tl.uint8), mask=there[:, :, None] & (j < _BYTES)[None, None, :])


@triton.jit
def channel_of(j):
    """The channel in the low bits of byte `j`; that in the high bits is 8 behind it."""
    return j // _BYTES * _GROUP + j % _BYTES


@triton.jit
def differences_of(row_key, row_scale, row, live, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """What is behind the codes of rows: of the channels in low bits and of those in high bits, [rows, HALF]."""
    j = tl.arange(0, HALF)
    m = live[:, None] & (j < GROUPS * _BYTES)[None, :]
    byte = tl.load(row_key + row[:, None] * (GROUPS * _BYTES) + j[None, :], mask=m, other=0).to(tl.int32)
    s = tl.load(row_scale + row[:, None] * GROUPS + (j // _BYTES)[None, :], mask=m, other=0.0).to(tl.float32)
    return ((byte & 15).to(tl.float32) - 7.5) * s, ((byte >> 4).to(tl.float32) - 7.5) * s
