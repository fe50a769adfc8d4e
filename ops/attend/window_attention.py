"""Exact attention of the new tokens of a prompt in a layer with a sliding window.

    out of position p = softmax(scale * q.k, with soft cap and sink logit) v    over positions p - window + 1 .. p

Keys and values before the new tokens are in the ring alone, so this op runs before the new tokens are stored. Rows are
ragged: the new tokens of a row are the last `length - start` columns; the padding before them gets zeros.

Args:
    q [batch, q_heads, tokens, dim]; k, v [batch, heads, tokens, dim]
    ring [batch, heads, ring_rows, 2, dim]; the layer keeps no sinks.
    window: the tokens that a query sees, itself included.

Returns: out [batch, q_heads, tokens, dim], with tokens before heads in memory, as models read it next; NaN for a row
with length -1.
Launches: one program per (row, query head, 64 or 32 columns).
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.attend._split import QUERIES, empty_result, fold, over_nothing, softmax_attention, tile_of
from torchsparsekv.ops.store.rows import ring_row, ring_row_of, row_at, rows_of, value_at
from torchsparsekv.ops.store.views import Attention, Lengths, NewKeys, Queries, Ring


def check(q, k, v, ring, lengths, attention, window) -> None:
    _check.heads(q, ring)
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if lengths.sink:
        raise ValueError(f"sink must be 0 in a layer with a sliding window, got {lengths.sink}")


def reference(
    q: Queries, k: NewKeys, v: NewKeys, ring: Ring, lengths: Lengths, attention: Attention, window: int
) -> Tensor:
    out = empty_result(q).zero_()
    for b in range(q.shape[0]):
        n0, n, begin = (int(t[b]) for t in (lengths.start, lengths.length, lengths.previous_ring_begin))
        if n < 0:
            out[b] = torch.nan
            continue
        first = q.shape[2] - (n - n0)
        past = ring[b][:, ring_row(torch.arange(begin, max(n0, begin)), 0, ring.shape[2])]
        rows = torch.cat([past, rows_of(k[b], v[b])[:, first:]], 1)[None]
        for i in range(n0, n, QUERIES):
            at = torch.arange(i, min(i + QUERIES, n))
            seen = torch.arange(max(begin, i - window + 1), int(at[-1]) + 1)
            live = (seen <= at[:, None]) & (seen > at[:, None] - window)
            here = slice(first + i - n0, first + i - n0 + len(at))
            out[b, :, here] = softmax_attention(q[b : b + 1, :, here], rows[:, :, seen - begin], live, attention)[0]
    return out


@triton.jit
def _over_ring(
    x, at, real, ring, head, low, n0, ring_rows, window, scale, softcap,
    D: tl.constexpr, DP: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The running softmax of the queries x over the tokens from `low` up to `n0`, which are in the ring."""
    d, i = tl.arange(0, DP), tl.arange(0, TILE)
    top, total, acc = over_nothing(COLUMNS, DP)
    for tile in range(low, n0, TILE):
        pos = tile + i
        m = (pos < n0)[:, None] & (d < D)[None, :]
        rows = row_at(ring, head, ring_row_of(pos, 0, ring_rows), ring_rows, D)[:, None] + d[None, :]
        keys, values = tl.load(rows, mask=m, other=0.0), tl.load(value_at(rows, D), mask=m, other=0.0)
        live = (pos < n0)[None, :] & (pos[None, :] > at[:, None] - window) & real[:, None]
        top, total, acc = fold(x, keys, values, live, top, total, acc, scale, softcap)
    return top, total, acc


@triton.jit
def _attend(
    q, k, v, ring, sink_logits, out, start, length, previous_ring_begin, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    o_b, o_h, o_s, q_heads, tokens, ring_rows, window, scale, softcap,
    SINKS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """COLUMNS queries of a query head: first over the part of their window in the ring, then over the new tokens."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // q_heads, bh % q_heads
    head = b * (q_heads // G) + h // G
    n0, n = tl.load(start + b), tl.load(length + b)
    col = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    first = n - tokens + tl.program_id(0) * COLUMNS  # the position of the first column
    at, end = first + tl.arange(0, COLUMNS), tl.minimum(first + COLUMNS, n)
    real = (col < tokens) & (at >= n0)
    d, i = tl.arange(0, DP), tl.arange(0, TILE)
    m = (col < tokens)[:, None] & (d < D)[None, :]
    x = tl.load(q + b * q_b + h * q_h + col[:, None] * q_s + d[None, :], mask=m, other=0.0)
    low = tl.maximum(tl.maximum(first, n0) - window + 1, tl.load(previous_ring_begin + b))
    past = tl.where(end > n0, n0, 0)
    top, total, acc = _over_ring(
        x, at, real, ring, head, low, past, ring_rows, window, scale, softcap, D, DP, COLUMNS, TILE
    )
    k += b * k_b + h // G * k_h
    v += b * v_b + h // G * v_h
    for tile in range(tl.maximum(low, n0), end, TILE):
        pos = tile + i
        seen = (pos < end)[:, None] & (d < D)[None, :]
        c = (pos - n + tokens).to(tl.int64)[:, None]
        keys = tl.load(k + c * k_s + d[None, :], mask=seen, other=0.0)
        values = tl.load(v + c * v_s + d[None, :], mask=seen, other=0.0)
        live = (pos[None, :] <= at[:, None]) & (pos[None, :] > at[:, None] - window) & real[:, None]
        top, total, acc = fold(x, keys, values, live, top, total, acc, scale, softcap)
    if SINKS:
        logit = tl.load(sink_logits + h).to(tl.float32)
        peak = tl.maximum(top, logit)
        total = total * tl.exp(top - peak) + tl.exp(logit - peak)
        acc = acc * tl.exp(top - peak)[:, None]
    acc = tl.where(n < 0, float("nan"), acc / tl.where(total > 0, total, 1.0)[:, None])
    tl.store(out + b * o_b + h * o_h + col[:, None] * o_s + d[None, :], acc.to(out.dtype.element_ty), mask=m)


def launch(q, k, v, ring, lengths, attention, window) -> Tensor:
    out, sinks = empty_result(q), attention.sink_logits
    batch, q_heads, tokens, d = q.shape
    dp = next_power_of_2(d)
    columns = 64 if dp * q.element_size() <= 256 else 32
    _attend[(cdiv(tokens, columns), batch * q_heads)](
        q, k, v, ring, out if sinks is None else sinks, out, lengths.start, lengths.length,
        lengths.previous_ring_begin, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], q_heads,
        tokens, ring.shape[2], window, attention.scale, attention.softcap, SINKS=sinks is not None,
        G=q_heads // ring.shape[1], D=d, DP=dp, COLUMNS=columns, TILE=tile_of(q), num_stages=2,
    )  # fmt: skip
    return out


window_attention = register("window_attention", reference, impls=(by_triton(launch),), fake=empty_result, check=check)
