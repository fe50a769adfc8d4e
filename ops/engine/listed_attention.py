"""Attention of one query of every request over the blocks that are listed for it.

    out[r] = softmax(scale * q[r] . K) . V,  K, V: the first fill[r, h, i] rows of every block ids[r, h, i] >= 0

Blocks lie in the engine's pool, or in the hot buffer: then `ids` are slots.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, tl, triton, wait_for_previous
from torchsparsekv.ops.attend import _native
from torchsparsekv.ops.attend._split import Parts, begun, softmax_attention, step, store_part, tile_of
from torchsparsekv.ops.engine.tables import check_one
from torchsparsekv.ops.engine.views import Listed
from torchsparsekv.ops.store.rows import as_numbers, row_at
from torchsparsekv.ops.store.views import I32, Attention, Pool

OneQuery = Annotated[Tensor, Of("requests q_heads 1 dim", "kv", strided=True)]
Result = Annotated[Tensor, Of("requests q_heads 1 dim", "kv")]
Length = Annotated[Tensor, Of("requests", I32)]


def check(q, pool, ids, fill, length, block_size, attention, out) -> None:
    _check.heads(q, pool)
    check_one(pool)
    if ids.shape != fill.shape:
        raise ValueError(f"ids and fill must have one shape, got {tuple(ids.shape)} and {tuple(fill.shape)}")
    if pool.shape[2] % block_size:
        raise ValueError(f"{pool.shape[2]} rows are not blocks of {block_size}")


def reference(
    q: OneQuery, pool: Pool, ids: Listed, fill: Listed, length: Length, block_size: int, attention: Attention,
    out: Changed[Result],
) -> None:  # fmt: skip
    """Attention of one query of every request over the blocks that are listed for it.

    Args:
        q: [requests, q_heads, 1, dim].
        pool: the rows of all blocks [1, heads, rows, 2, dim]: the engine's pool, or the rows of the hot buffer.
        ids: the blocks of each request in `pool` [requests, heads, listed], -1 for none.
        fill: of each listed block, how many of its first rows hold a token.
        length: tokens of each request; a request of length 0 gets zeros.
        block_size: tokens of a listed block, or of a part of one.
        attention: scale, soft cap and extra logits of the model.
        out: [requests, q_heads, 1, dim], the memory that the engine gave for the result.

    Launches:
        csrc/sparse_attention.cu, one launch in which a cluster of programs shares a kv head of a request. Else Triton:
        one kernel of requests * heads x splits programs, and one that combines the splits of each query head.
    """
    heads = torch.arange(pool.shape[1], device=q.device)
    live = (ids >= 0)[..., None] & (torch.arange(block_size, device=q.device) < fill[..., None])
    blocks = pool[0].unflatten(1, (-1, block_size))
    rows = as_numbers(blocks[heads[None, :, None], ids.clamp(min=0).long()], q.dtype)
    rows = rows.masked_fill(~live[..., None, None], 0).flatten(2, 3)
    live = live.flatten(2).repeat_interleave(q.shape[1] // rows.shape[1], 1).unsqueeze(2)
    out.copy_(softmax_attention(q, rows, live, attention))


@triton.jit
def _attend(
    q, rows, ids, fill, accs, tops, totals, q_b, q_h, heads, all_rows, n, scale, softcap, splits, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    x, top, total, acc = begun(q, q_b, q_h, b, h, G, GP, D, DP)
    for tile in range(split, tl.cdiv(n * P, TILE), splits):
        token = tile * TILE + tl.arange(0, TILE)
        place = bh * n + token // P
        block = tl.load(ids + place, mask=token < n * P, other=-1)
        live = (block >= 0) & (token % P < tl.load(fill + place, mask=token < n * P, other=0))
        row = row_at(rows, h, tl.maximum(block, 0).to(tl.int64) * P + token % P, all_rows, D)
        top, total, acc = step(x, row, live, top, total, acc, scale, softcap, D, DP)
    store_part(accs, tops, totals, bh * splits + split, acc, top, total, GP, DP)


def _fits(q, pool, ids, fill, length, block_size, attention, out) -> _native.Launch | str:
    tiles = cdiv(ids.shape[2] * block_size, _native.TILE)
    return _native.fit(q, pool.shape[1], pool, block_size, tiles, attention, filled=True, listed=True)


def _launch_cuda(fitting, q, pool, ids, fill, length, block_size, attention, out) -> None:
    """csrc/sparse_attention.cu"""
    (kernels, warps, cluster, shared), (requests, heads, n) = fitting, ids.shape
    kernels.launch(
        "attend", (requests * heads * cluster, 1, 1), 32 * warps, q, None, pool, ids, None, None, fill, length, length,
        attention.sink_logits, None, None, out, q.stride(0), q.stride(1), heads, heads, 0, pool.shape[2], 0,
        n * block_size, 0, 0, float(attention.scale), float(attention.softcap), shared=shared,
    )  # fmt: skip


def _launch_triton(q, pool, ids, fill, length, block_size, attention, out) -> None:
    requests, heads, n = ids.shape
    tile = tile_of(q)
    parts = Parts(q, heads, cdiv(n * block_size, tile))
    _attend[(requests * heads, parts.splits)](
        q, pool, ids, fill, parts.acc, parts.top, parts.total, q.stride(0), q.stride(1), heads, pool.shape[2], n,
        attention.scale, attention.softcap, parts.splits, D=q.shape[3], P=block_size, TILE=tile, **parts.shape(),
        num_stages=2, **launch_early(q.device, requests * heads * parts.splits),
    )  # fmt: skip
    parts.combine(q, length, attention.sink_logits, out)


listed_attention = register(
    "listed_attention", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), check=check
)
