"""Attention of one query token over every token of the pool.

    out = softmax(scale * q.k, with the soft cap and the sink logit) v    over positions 0 .. length - 1

Args:
    q [batch, q_heads, 1, dim]
    pool [batch, heads, rows, 2, dim], or packed.

Returns: out [batch, q_heads, 1, dim]; NaN for a row with length -1.
Launches: programs over contiguous shares of the pool, then one launch that combines their parts. Over a packed pool the
programs are those of csrc/dense_attention.cu, if it takes the shapes, else of Triton.
"""
import math

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import (
    cdiv,
    launch_early,
    shared_bytes,
    sm_count,
    tl,
    triton,
    wait_for_previous,
)
from torchsparsekv.ops.attend import _native
from torchsparsekv.ops.attend._split import Parts, begun, result_like, softmax_attention, step, store_part, tile_of
from torchsparsekv.ops.store.rows import PACKED, as_numbers, row_at, row_shape
from torchsparsekv.ops.store.views import Attention, Lengths, Pool, Query

RESIDENT, WAVES = 2, 8  # programs on a multiprocessor, at most; rounds of programs of a large batch
STAGES = 4  # tiles in the queue of a warp, at most


def check(q, pool, lengths, attention) -> None:
    _check.heads(q, pool)


def reference(q: Query, pool: Pool, lengths: Lengths, attention: Attention) -> Tensor:
    length = lengths.length
    most = max(int(length.max()), 1)
    live = torch.arange(most, device=q.device) < length[:, None]
    rows = as_numbers(pool[:, :, :most], q.dtype).masked_fill(~live[:, None, :, None, None], 0)
    out = softmax_attention(q, rows, live[:, None, None], attention)
    return torch.where((length < 0).view(-1, 1, 1, 1), torch.nan, out).contiguous()


@triton.jit
def _attend(
    q, pool, length, parts, tops, totals, q_b, q_h, heads, pool_rows, scale, softcap, splits,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    x, top, total, acc = begun(q, q_b, q_h, b, h, G, GP, D, DP)
    end = tl.load(length + b)
    # Contiguous shares, so that every program streams. A short row uses few programs.
    share = tl.cdiv(tl.cdiv(tl.maximum(end, 0), TILE), splits) * TILE
    for at in range(split * share, tl.minimum((split + 1) * share, end), TILE):
        pos = at + tl.arange(0, TILE)
        rows = row_at(pool, bh, pos, pool_rows, D)
        top, total, acc = step(x, rows, pos < end, top, total, acc, scale, softcap, D, DP)
    store_part(parts, tops, totals, bh * splits + split, acc, top, total, GP, DP)


def _splits(device: torch.device, heads: int, resident: int = RESIDENT) -> int:
    """Shares of a kv head: as many as run at once; if that is few, so many more that the last ones are a small part."""
    at_once = resident * sm_count(device)
    return at_once // heads if at_once // heads >= WAVES else cdiv(WAVES * at_once, heads)


def reads_packed(dim: int, group: int) -> bool:
    """Whether csrc/dense_attention.cu takes heads of `dim` channels, `group` query heads a kv head. For other heads
    Triton runs, and is slower over a packed pool than over one in 16 bits."""
    return dim in _native.DIMS and group <= _native.MOST_HEADS


def constants(dim: int, group: int, dtype: torch.dtype, resident: int, stages: int) -> dict[str, int]:
    """The constants with which csrc/dense_attention.cu is compiled."""
    bf16 = int(dtype == torch.bfloat16)
    return dict(D=dim, G=group, BF16=bf16, WARPS=_native.WARPS, RESIDENT=resident, STAGES=stages)


def _tile_bytes(dim: int) -> int:
    """Bytes of a tile for each warp of a program."""
    return _native.WARPS * _native.TILE * math.prod(row_shape(dim, PACKED))


def _queue(device: torch.device, dim: int) -> tuple[int, int]:
    """Programs on a multiprocessor, and tiles that wait in the queue of each warp."""
    static = (64 + 8 * STAGES) * _native.WARPS  # tops and totals of the query heads, and a barrier for each tile
    own, tile = shared_bytes(device), _tile_bytes(dim)
    for resident in (RESIDENT, 1) if dim <= 128 else (1,):  # wide heads take all registers
        room = (own + _native.RESERVED) // resident - _native.RESERVED - static
        if (stages := room // tile) > 1:
            break
    return resident, min(stages, STAGES)


def _is_packed(q, pool, lengths, attention) -> bool:
    return pool.dtype is PACKED


def _fits(q, pool, lengths, attention) -> _cuda.Module | str:
    dim, group = q.shape[3], q.shape[1] // pool.shape[1]
    if why := _native.refused(q, pool.shape[1], None, pool):  # the kernel does not read sink logits
        return why
    return _cuda.load("dense_attention", q.device, **constants(dim, group, q.dtype, *_queue(q.device, dim)))


def _launch_cuda(kernels, q, pool, lengths, attention) -> Tensor:
    """csrc/dense_attention.cu"""
    (batch, heads, rows), d = pool.shape[:3], q.shape[3]
    tiles, (resident, stages) = cdiv(rows, _native.TILE * _native.WARPS), _queue(q.device, d)
    parts = Parts(q, heads, tiles, _splits(q.device, batch * heads, resident))
    sums = _native.dynamic_bytes(d, parts.group, _native.WARPS, cluster=1, tiles=tiles, groups=0)
    kernels.launch(
        "attend", (batch * heads, parts.splits, 1), 32 * _native.WARPS, q, pool, lengths.length, parts.acc, parts.top,
        parts.total, q.stride(0), q.stride(1), heads, rows, parts.gp, float(attention.scale), float(attention.softcap),
        shared=max(sums, stages * _tile_bytes(d)), percent=100,
    )  # fmt: skip
    return parts.combine(q, lengths.length, attention.sink_logits)


def _launch_triton(q, pool, lengths, attention) -> Tensor:
    (batch, heads, rows), d = pool.shape[:3], q.shape[3]
    tile = tile_of(q)
    parts = Parts(q, heads, cdiv(rows, tile))
    # Three stages in flight per program read 4.1 TB/s at 128K tokens on an H200, the rate of a copy.
    _attend[(batch * heads, parts.splits)](
        q, pool, lengths.length, parts.acc, parts.top, parts.total, q.stride(0), q.stride(1), heads, rows,
        attention.scale, attention.softcap, parts.splits, D=d, TILE=tile, **parts.shape(), num_stages=3,
        **launch_early(q.device, batch * heads * parts.splits),
    )  # fmt: skip
    return parts.combine(q, lengths.length, attention.sink_logits)


dense_attention = register(
    "dense_attention", reference, impls=(by_cuda(_fits, _launch_cuda, _is_packed), by_triton(_launch_triton)),
    fake=result_like, check=check,
)  # fmt: skip
