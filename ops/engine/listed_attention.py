"""Attention of one query token of every request of an engine over the blocks listed for it, wherever these are.

`at` are the blocks' places in `rows`, which are of all requests, -1 for none; of a block the first `fill` rows count.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, tl, triton, wait_for_previous
from torchsparsekv.ops.attend._split import Parts, begun, result_like, softmax_attention, step, store_part, tile_of
from torchsparsekv.ops.engine.tables import check_one
from torchsparsekv.ops.engine.views import Listed, OneQuery, Requests
from torchsparsekv.ops.store.rows import as_numbers, row_at
from torchsparsekv.ops.store.views import Attention, Pool


def check(q, pool, at, fill, requests, block_size, attention) -> None:
    _check.heads(q, pool)
    check_one(pool)
    if at.shape != fill.shape:
        raise ValueError(f"{tuple(at.shape)} blocks are listed, with {tuple(fill.shape)} fills")
    if pool.shape[2] % block_size:
        raise ValueError(f"{pool.shape[2]} rows are not blocks of {block_size}")


def reference(
    q: OneQuery, pool: Pool, at: Listed, fill: Listed, requests: Requests, block_size: int, attention: Attention
) -> Tensor:
    heads = torch.arange(pool.shape[1], device=q.device)
    live = (at >= 0)[..., None] & (torch.arange(block_size, device=q.device) < fill[..., None])
    blocks = pool[0].unflatten(1, (-1, block_size))
    rows = as_numbers(blocks[heads[None, :, None], at.clamp(min=0).long()], q.dtype)
    rows = rows.masked_fill(~live[..., None, None], 0).flatten(2, 3)
    live = live.flatten(2).repeat_interleave(q.shape[1] // rows.shape[1], 1).unsqueeze(2)
    return softmax_attention(q, rows, live, attention).contiguous()


@triton.jit
def _attend(
    q, rows, at, fill, parts, tops, totals, q_b, q_h, heads, all_rows, n, scale, softcap, splits, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    x, top, total, acc = begun(q, q_b, q_h, b, h, G, GP, D, DP)
    for tile in range(split, tl.cdiv(n * P, TILE), splits):
        token = tile * TILE + tl.arange(0, TILE)
        place = bh * n + token // P
        block = tl.load(at + place, mask=token < n * P, other=-1)
        live = (block >= 0) & (token % P < tl.load(fill + place, mask=token < n * P, other=0))
        row = row_at(rows, h, tl.maximum(block, 0).to(tl.int64) * P + token % P, all_rows, D)
        top, total, acc = step(x, row, live, top, total, acc, scale, softcap, D, DP)
    store_part(parts, tops, totals, bh * splits + split, acc, top, total, GP, DP)


def launch(q, pool, at, fill, requests, block_size, attention) -> Tensor:
    rows, (count, heads, n) = pool, at.shape
    tile = tile_of(q)
    parts = Parts(q, heads, cdiv(n * block_size, tile))
    _attend[(count * heads, parts.splits)](
        q, rows, at, fill, parts.acc, parts.top, parts.total, q.stride(0), q.stride(1), heads, rows.shape[2], n,
        attention.scale, attention.softcap, parts.splits, D=q.shape[3], P=block_size, TILE=tile, **parts.shape(),
        num_stages=2, **launch_early(q.device, count * heads * parts.splits),
    )  # fmt: skip
    return parts.combine(q, requests.length, attention.sink_logits)


listed_attention = register("listed_attention", reference, impls=(by_triton(launch),), fake=result_like, check=check)
