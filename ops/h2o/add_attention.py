"""Add the attention that a decode step paid to each token that it attended to: tokens in the ring, and kept tokens.

    w[g, j]      = softmax over the attended tokens j of (scale * q[g] . key[j]),  soft-capped where the model does that
    received[j] += sum of w[g, j] over the query heads g of the kv head

An extra logit of the model takes its part of the softmax. Rows with length -1 or 0 change nothing.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.attend._split import capped, load_query, soft_capped
from torchsparsekv.ops.h2o.views import Received
from torchsparsekv.ops.select._products import grouped
from torchsparsekv.ops.store.rows import keys_of, load_key, ring_position_of, ring_positions, row_at
from torchsparsekv.ops.store.views import Attention, HotBuffer, Lengths, Query, Ring

TILE = 64  # tokens of a program


def check(q, ring, hot, received, lengths, attention) -> None:
    _check.heads(q, ring)
    if hot.rows.shape[3] != 1 or hot.slot_of.shape[2] > received.shape[2]:
        raise ValueError(
            f"blocks must be single tokens, each with a place in received, got {hot.slot_of.shape[2]} blocks of "
            f"{hot.rows.shape[3]} tokens, and {received.shape[2]} places"
        )


def attended_positions(ring: Tensor, hot: HotBuffer, lengths: Lengths) -> Tensor:
    """The position of every token in ring and chosen slots, [batch, heads, ring_rows + chosen]; -1 for none."""
    near = ring_positions(ring.shape[2], lengths.length, lengths.ring_begin, lengths.sink)
    far = torch.where(hot.chosen < 0, -1, hot.block_of.gather(2, hot.chosen.clamp(min=0).long()))
    position = torch.cat([near[:, None].expand(-1, ring.shape[1], -1).to(far.dtype), far], 2)
    return position.masked_fill((lengths.length <= 0)[:, None, None], -1)


def reference(
    q: Query, ring: Ring, hot: HotBuffer, received: Changed[Received], lengths: Lengths, attention: Attention
) -> None:
    """Add the attention that a decode step paid to each token that it attended to.

    Args:
        q: [batch, q_heads, 1, dim].
        ring: [batch, heads, ring_rows, 2, dim].
        hot: the hot buffer with the kept tokens. rows, block_of and chosen are read, as attention reads them.
        received: [batch, heads, rows], by position.
        attention: scale, soft cap and extra logit of the model.

    Launches: logits, then weights; two kernels of batch * heads * (cdiv(ring_rows, TILE) + cdiv(chosen, TILE))
    programs.
    """
    heads, slot = ring.shape[1], hot.chosen.clamp(min=0).long()
    kept = keys_of(hot.rows.squeeze(3)).gather(2, slot[..., None].expand(-1, -1, -1, ring.shape[4]))
    position = attended_positions(ring, hot, lengths)[:, :, None]
    keys = torch.cat([keys_of(ring), kept], 2).float()
    z = soft_capped(grouped(q, heads) @ keys.transpose(-1, -2) * attention.scale, attention.softcap)
    z = z.masked_fill(position < 0, -torch.inf)
    total = z.logsumexp(-1, keepdim=True)
    if attention.sink_logits is not None:
        total = torch.logaddexp(total, attention.sink_logits.float().view(1, heads, -1, 1))
    w = torch.where(position < 0, 0.0, (z - total).exp()).sum(2)
    received.scatter_add_(2, position[:, :, 0].clamp(min=0).long(), w)


@triton.jit
def _positions(
    part, chosen, block_of, bh, n, begin, ring_rows, near, slots, kept, sink, TILE: tl.constexpr,
):  # fmt: skip
    """(position, row of the ring, slot) of the TILE tokens of program `part`, -1 for none. The first `near` programs
    have the ring, the others what was chosen."""
    row = part * TILE + tl.arange(0, TILE)
    position = ring_position_of(row, begin, sink, ring_rows - sink)
    row = tl.where((row < ring_rows) & (position < n), row, -1)
    i = (part - near) * TILE + tl.arange(0, TILE)  # below 0 for the programs of the ring
    slot = tl.load(chosen + bh * kept + i, mask=(i >= 0) & (i < kept), other=-1)
    of_slot = tl.load(block_of + bh * slots + slot, mask=slot >= 0, other=-1)
    position = tl.where(row >= 0, position, of_slot)
    return tl.where(n > 0, position, -1), row, slot


@triton.jit
def _logits(
    q, ring, hot, chosen, block_of, z, tops, totals, length, ring_begin, q_b, q_h, heads, ring_rows, near, slots, kept,
    sink, scale, softcap, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b, h = bh // heads, bh % heads
    n, begin = tl.load(length + b), tl.load(ring_begin + b)
    position, row, slot = _positions(part, chosen, block_of, bh, n, begin, ring_rows, near, slots, kept, sink, TILE)
    live, g, d = position >= 0, tl.arange(0, GP), tl.arange(0, DP)
    x = load_query(q, q_b, q_h, b, h, G, GP, D, DP)
    there = (d < D)[:, None]
    k = load_key(row_at(ring, bh, row[None, :], ring_rows, D), d[:, None], (live & (row >= 0))[None, :], there, D)
    k += load_key(row_at(hot, bh, slot[None, :], slots, D), d[:, None], (live & (slot >= 0))[None, :], there, D)
    s = capped(tl.dot(x, k.to(x.dtype), input_precision="ieee") * scale, softcap)
    s = tl.where(live[None, :], s, float("-inf"))
    top = tl.max(s, 1)
    total = tl.sum(tl.exp(s - tl.where(top == float("-inf"), 0.0, top)[:, None]), 1)
    at = bh * parts + part
    tl.store(z + (at * G + g[:, None]) * TILE + tl.arange(0, TILE)[None, :], s, mask=(g < G)[:, None])
    tl.store(tops + at * GP + g, top)
    tl.store(totals + at * GP + g, total)


@triton.jit
def _weights(
    chosen, block_of, z, tops, totals, sink_logits, received, length, ring_begin, heads, ring_rows, near, slots, kept,
    rows, sink, SINKS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b, h = bh // heads, bh % heads
    n, begin = tl.load(length + b), tl.load(ring_begin + b)
    position, _, _ = _positions(part, chosen, block_of, bh, n, begin, ring_rows, near, slots, kept, sink, TILE)
    g, p = tl.arange(0, GP), tl.arange(0, PARTS)
    at = (bh * parts + p)[:, None] * GP + g[None, :]
    m = (p < parts)[:, None] & (g < G)[None, :]
    top = tl.load(tops + at, mask=m, other=float("-inf"))  # [PARTS, GP]
    peak = tl.max(top, 0)
    if SINKS:
        logit = tl.load(sink_logits + h * G + g, mask=g < G, other=float("-inf")).to(tl.float32)
        peak = tl.maximum(peak, logit)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(top - safe[None, :]) * tl.load(totals + at, mask=m, other=0.0), 0)
    if SINKS:
        total += tl.exp(logit - safe)
    total = tl.where(total > 0, total, 1.0)
    s = z + ((bh * parts + part) * G + g[:, None]) * TILE + tl.arange(0, TILE)[None, :]
    w = tl.exp(tl.load(s, mask=(g < G)[:, None], other=float("-inf")) - safe[:, None]) / total[:, None]
    to = received + bh * rows + position
    live = position >= 0
    tl.store(to, tl.load(to, mask=live, other=0.0) + tl.sum(w, 0), mask=live)


def launch(q, ring, hot, received, lengths, attention) -> None:
    batch, heads, ring_rows, _, d = ring.shape
    slots, kept, group, extra = hot.rows.shape[2], hot.chosen.shape[2], q.shape[1] // heads, attention.sink_logits
    near = cdiv(ring_rows, TILE)
    parts, gp = near + cdiv(kept, TILE), max(16, next_power_of_2(group))
    z = torch.empty(batch * heads * parts * group * TILE, dtype=torch.float32, device=q.device)
    tops, totals = torch.empty((2, batch * heads * parts * gp), dtype=torch.float32, device=q.device)
    early = launch_early(q.device, batch * heads * parts)
    _logits[(batch * heads, parts)](
        q, ring, hot.rows, hot.chosen, hot.block_of, z, tops, totals, lengths.length, lengths.ring_begin, q.stride(0),
        q.stride(1), heads, ring_rows, near, slots, kept, lengths.sink, attention.scale, attention.softcap, G=group,
        GP=gp, D=d, DP=next_power_of_2(d), TILE=TILE, **early,
    )  # fmt: skip
    _weights[(batch * heads, parts)](
        hot.chosen, hot.block_of, z, tops, totals, tops if extra is None else extra, received, lengths.length,
        lengths.ring_begin, heads, ring_rows, near, slots, kept, received.shape[2], lengths.sink,
        SINKS=extra is not None, G=group, GP=gp, PARTS=next_power_of_2(parts), TILE=TILE, **early,
    )  # fmt: skip


add_attention = register("add_attention", reference, impls=(by_triton(launch),), check=check)
