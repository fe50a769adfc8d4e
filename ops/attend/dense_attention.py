"""Attention of one query token over every token of the pool."""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import cdiv, chain, chained, sm_count, tl, triton
from torchsparsekv.ops.attend._split import Parts, load_query, softmax_attention, step, store_part, tile_of

SCHEMA = "(Tensor q, Tensor pool, Tensor length, Tensor? sinks, float scale, float softcap) -> Tensor"


def check(q, pool, length, sinks, scale, softcap) -> None:
    _check.rows(pool)
    _check.one_query(q, pool)
    _check.sinks(sinks, q)
    _check.same_dtype(q=q, pool=pool)
    _check.counters(q.shape[0], length=length)


def reference(q, pool, length, sinks, scale, softcap) -> Tensor:
    most = max(int(length.max()), 1)
    live = torch.arange(most, device=q.device) < length[:, None]
    rows = pool[:, :, :most].masked_fill(~live[:, None, :, None, None], 0)
    out = softmax_attention(q, rows[..., 0, :], rows[..., 1, :], live[:, None, None], sinks, scale, softcap)
    return torch.where((length < 0).view(-1, 1, 1, 1), torch.nan, out).contiguous()


@triton.jit
def _attend(
    q, pool, length, parts, tops, totals, q_b, q_h, heads, pool_rows, scale, softcap, splits,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    x = load_query(q, q_b, q_h, b, h, G, GP, D, DP)
    top = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DP), tl.float32)
    end = tl.load(length + b)
    # Contiguous shares, so that every program streams; a short context uses few of them.
    share = tl.cdiv(tl.cdiv(tl.maximum(end, 0), TILE), splits) * TILE
    for at in range(split * share, tl.minimum((split + 1) * share, end), TILE):
        pos = at + tl.arange(0, TILE)
        rows = pool + (bh * pool_rows + pos) * 2 * D
        top, total, acc = step(x, rows, pos < end, top, total, acc, scale, softcap, D, DP)
    store_part(parts, tops, totals, bh * splits + split, acc, top, total, GP, DP)


def cuda(q, pool, length, sinks, scale, softcap) -> Tensor:
    batch, heads, rows, _, d = pool.shape
    tile = tile_of(q)
    # Two programs an SM with three stages in flight each: 4.1 TB/s at 128K on an H200, the rate of a copy.
    splits = max(1, min(cdiv(rows, tile), cdiv(2 * sm_count(q.device), batch * heads)))
    parts = Parts(q, heads, splits)
    _attend[(batch * heads, splits)](
        q, pool, length, parts.acc, parts.top, parts.total, q.stride(0), q.stride(1), heads, rows, scale, softcap,
        splits, D=d, TILE=tile, **parts.shape(), num_stages=3, **chained(q.device, batch * heads * splits),
    )  # fmt: skip
    return parts.combine(q, length, sinks)


def fake(q: Tensor, *_) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


dense_attention = register("dense_attention", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
