"""Attention of one query token over the ring (sinks and window) and the selected blocks in the hot buffer.

    out = softmax(scale * q.k, with the soft cap and the sink logit) v
          over the sinks, the ring from `frontier` up to `length`, and the first `fill` rows of each selected block;
          with `rest` also over what remains of each group of the pool (ops/rest/__init__.py);
          with `bias` the logits of the selected blocks have these numbers added, after the soft cap

Args:
    q [batch, q_heads, 1, dim]
    ring [batch, heads, ring_rows, 2, dim]
    hot: rows [batch, heads, slots, block_size, 2, dim]; chosen [batch, heads, n], the slots to attend to, -1 for none.
    selection: frontier [batch, heads] (None: lengths.ring_begin), fill [batch, heads, blocks] (None: all rows) and
        bias [batch, q_heads, n] (None: 0). Fetch has turned `ids` into hot.chosen. The CUDA kernel reads `ids` too if
        `rest` is `settled` and there is no `retrieve_now`.
    rest: sums [batch, heads, groups, 2, dim] or None. With `fill`, groups are whole blocks, and `frontier` is None.
        With tokens [batch, heads, groups] each row of sums is a mean, and stands for that number of tokens.
        With `settled` the CUDA kernel makes the products with the sums while the kernel before it still runs; if it
        reads `ids`, it also looks up the groups of the selected tokens then.
        In the CUDA kernel a logit of a group or of its tokens above 32,767 or below -32,767, ahead of the soft cap,
        makes the output NaN.

Returns: out [batch, q_heads, 1, dim]; zeros for a row without tokens, NaN for a row with length -1.
Launches: csrc/sparse_attention.cu, one launch in which a cluster of programs shares a kv head. Else Triton: about two
programs per multiprocessor, then one launch that combines their parts. `rest` adds no launch. With `rest` a program of
the CUDA kernel keeps a list of its tokens in shared memory, so Triton takes large budgets: on an H200 those above about
4,700 tokens with 8 query heads a kv head, 8,600 with 4.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, tl, triton, wait_for_previous
from torchsparsekv.ops.attend import _native
from torchsparsekv.ops.attend._split import (
    Parts,
    begun,
    fold_means,
    result_like,
    softmax_attention,
    step,
    store_part,
    tile_of,
)
from torchsparsekv.ops.rest._remaining import GROUPS, mean_tile, remaining, remaining_tile, tile_sizes
from torchsparsekv.ops.rest.views import NO_REST, Rest, check_groups
from torchsparsekv.ops.store.rows import ring_position_of, ring_positions, row_at
from torchsparsekv.ops.store.views import Attention, HotBuffer, Lengths, Query, Ring, Selection


def check(q, ring, hot, lengths, selection, attention, rest=NO_REST) -> None:
    _check.heads(q, ring)
    if rest.sums is None and rest.tokens is None:
        return
    check_groups(rest, hot.slot_of.shape[2] * hot.rows.shape[3])
    block_size = hot.rows.shape[3]
    if rest.group and selection.fill is not None and (selection.frontier is not None or rest.group % block_size):
        raise ValueError(
            "rest with selection.fill: selection.frontier must be None, and a group must be whole blocks of "
            f"{block_size} tokens, got groups of {rest.group}"
        )


def reference(
    q: Query, ring: Ring, hot: HotBuffer, lengths: Lengths, selection: Selection, attention: Attention,
    rest: Rest = NO_REST,
) -> Tensor:  # fmt: skip
    frontier, fill, added = selection[2:]
    begins = lengths.ring_begin[:, None].expand(ring.shape[:2]) if frontier is None else frontier
    rows, length = ring.shape[2], lengths.length
    in_ring = torch.stack([ring_positions(rows, length, x, lengths.sink) for x in begins.unbind(1)], 1) >= 0
    p = hot.rows.shape[3]
    at = hot.chosen.clamp(min=0).long()[..., None, None, None].expand(*hot.chosen.shape, *hot.rows.shape[3:])
    found = (hot.chosen >= 0)[..., None] & (torch.arange(p, device=q.device) < _filled(hot, fill)[..., None])
    rows = torch.cat([ring, hot.rows.gather(2, at).flatten(2, 3)], 2)
    live = torch.cat([in_ring, found.flatten(2)], -1)
    bias = torch.zeros_like(live, dtype=torch.float32)
    if rest.sums is not None:
        means, tokens = remaining(rest, ring, hot, lengths, begins, fill)
        rows, live = torch.cat([rows.float(), means], 2), torch.cat([live, tokens > 0], -1)
        bias = torch.cat([bias, tokens.clamp(min=1).float().log()], -1)
    rows = rows.masked_fill(~live[..., None, None], 0)
    live, bias = (x.repeat_interleave(q.shape[1] // rows.shape[1], 1).unsqueeze(2) for x in (live, bias))
    if added is not None:
        bias[..., ring.shape[2] : ring.shape[2] + at.shape[2] * p] += added.repeat_interleave(p, 2).unsqueeze(2)
    out = softmax_attention(q, rows, live, attention, bias)
    return torch.where((length < 0).view(-1, 1, 1, 1), torch.nan, out).contiguous()


def _filled(hot: HotBuffer, fill: Tensor | None) -> Tensor:
    """The rows of each chosen block that attention reads, [batch, heads, n]."""
    if fill is None:
        return torch.full_like(hot.chosen, hot.rows.shape[3])
    blocks = hot.block_of.gather(2, hot.chosen.clamp(min=0).long())
    return fill.gather(2, blocks.clamp(min=0).long())


@triton.jit
def _attend(
    q, ring, hot, chosen, block_of, fill, added, sums, counts, length, begins, ring_begin, parts, tops, totals, q_b,
    q_h, heads, ring_rows, slots, blocks, n, groups, sink, scale, softcap, splits, G: tl.constexpr, GP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, PER_HEAD: tl.constexpr,
    FILLED: tl.constexpr, ADDED: tl.constexpr, MEANS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    TOKENS: tl.constexpr, CHOSEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    x, top, total, acc = begun(q, q_b, q_h, b, h, G, GP, D, DP)
    i = tl.arange(0, TILE)
    end, begin = tl.load(length + b), tl.load(begins + (bh if PER_HEAD else b))
    ring_tiles = tl.cdiv(ring_rows, TILE)
    for tile in range(split, ring_tiles, splits):
        row = tile * TILE + i
        pos = ring_position_of(row, begin, sink, ring_rows - sink)
        live = (row < ring_rows) & (pos < tl.where(row < sink, tl.minimum(end, sink), end))
        rows = row_at(ring, bh, row, ring_rows, D)
        top, total, acc = step(x, rows, live, top, total, acc, scale, softcap, D, DP)
    first = (split - ring_tiles % splits + splits) % splits  # go on dealing out tiles where the ring ended
    for tile in range(first, tl.cdiv(n * P, TILE), splits):
        token = tile * TILE + i
        slot = tl.load(chosen + bh * n + token // P, mask=token < n * P, other=-1)
        rows = row_at(hot, bh, tl.maximum(slot, 0) * P + token % P, slots * P, D)
        live = slot >= 0
        if FILLED:
            block = tl.load(block_of + bh * slots + slot, mask=live, other=-1)
            live &= token % P < tl.load(fill + bh * blocks + block, mask=block >= 0, other=0)
        if ADDED:
            g = tl.arange(0, GP)[:, None]
            bias = tl.load(added + (bh * G + g) * n + (token // P)[None, :], mask=(g < G) & live[None, :], other=0.0)
            top, total, acc = step(x, rows, live, top, total, acc, scale, softcap, D, DP, bias)
        else:
            top, total, acc = step(x, rows, live, top, total, acc, scale, softcap, D, DP)
    first = (first - tl.cdiv(n * P, TILE) % splits + splits) % splits  # and again where the blocks ended
    if MEANS:
        for tile in range(first, tl.cdiv(groups, GROUPS), splits):
            key, value, count = mean_tile(sums, counts, bh, tile, groups, GROUPS, D, DP)
            top, total, acc = fold_means(x, key, value, count, top, total, acc, scale, softcap)
    if GROUP > 0:
        left = tl.load(ring_begin + b)
        if FILLED:
            begin, left = groups * GROUP, groups * GROUP
        for tile in range(first, tl.cdiv(left, GROUP * GROUPS), splits):
            key, value, count = remaining_tile(
                sums, ring, hot, chosen, block_of, fill, bh, tile, begin, left, sink, groups, ring_rows, slots, blocks,
                n, FILLED, GROUP, GROUPS, TOKENS, CHOSEN, P, D, DP,
            )  # fmt: skip
            top, total, acc = fold_means(x, key, value, count, top, total, acc, scale, softcap)
    store_part(parts, tops, totals, bh * splits + split, acc, top, total, GP, DP)


def _fits(q, ring, hot, lengths, selection, attention, rest) -> _native.Launch | str:
    if selection.bias is not None or rest.tokens is not None:
        return "selected blocks have a bias, or the rest is means of a method's own"
    page = hot.rows.shape[3]
    tiles = cdiv(ring.shape[2], _native.TILE) + cdiv(hot.chosen.shape[2] * page, _native.TILE)
    named = rest.group > 0 and rest.settled and selection.ids is not None and selection.retrieve_now is None
    return _native.fit(
        q, ring.shape[1], hot.rows, page, tiles, attention, ring, filled=selection.fill is not None, rest=rest,
        groups=0 if rest.sums is None else rest.sums.shape[2], named=named,
    )  # fmt: skip


def _launch_cuda(fitting, q, ring, hot, lengths, selection, attention, rest) -> Tensor:
    """csrc/sparse_attention.cu"""
    (kernels, warps, cluster, shared), (batch, heads, ring_rows) = fitting, ring.shape[:3]
    out, p = result_like(q), hot.rows.shape[3]
    begins, heads_per_begin = (lengths.ring_begin, heads) if selection.frontier is None else (selection.frontier, 1)
    kernels.launch(
        "attend", (batch * heads * cluster, 1, 1), 32 * warps, q, ring, hot.rows, hot.chosen, hot.block_of,
        selection.ids, selection.fill, lengths.length, begins, attention.sink_logits, rest.sums, None,
        lengths.ring_begin, out, q.stride(0), q.stride(1), heads, heads_per_begin, ring_rows, hot.rows.shape[2] * p,
        hot.slot_of.shape[2], hot.chosen.shape[2] * p, hot.chosen.shape[2],
        0 if rest.sums is None else rest.sums.shape[2], lengths.sink, float(attention.scale), float(attention.softcap),
        shared=shared,
    )  # fmt: skip
    return out


def _launch_triton(q, ring, hot, lengths, selection, attention, rest) -> Tensor:
    (batch, heads, ring_rows), (frontier, fill, added), sums = ring.shape[:3], selection[2:], rest.sums
    n, p, d = hot.chosen.shape[2], hot.rows.shape[3], q.shape[3]
    groups = 0 if sums is None else sums.shape[2]
    tile = tile_of(q)  # one tile per program at batch 1; two stages, as a program seldom has a third tile
    parts = Parts(q, heads, cdiv(ring_rows, tile) + cdiv(n * p, tile) + cdiv(groups, GROUPS))
    _attend[(batch * heads, parts.splits)](
        q, ring, hot.rows, hot.chosen, hot.block_of, hot.chosen if fill is None else fill,
        q if added is None else added, ring if sums is None else sums,
        lengths.length if rest.tokens is None else rest.tokens, lengths.length,
        lengths.ring_begin if frontier is None else frontier, lengths.ring_begin, parts.acc, parts.top, parts.total,
        q.stride(0), q.stride(1), heads, ring_rows, hot.rows.shape[2], hot.slot_of.shape[2], n, groups, lengths.sink,
        attention.scale, attention.softcap, parts.splits, D=d, P=p, TILE=tile, PER_HEAD=frontier is not None,
        FILLED=fill is not None, ADDED=added is not None, MEANS=rest.tokens is not None,
        **tile_sizes(rest.group, n), **parts.shape(), num_stages=2,
        **launch_early(q.device, batch * heads * parts.splits),
    )  # fmt: skip
    return parts.combine(q, lengths.length, attention.sink_logits)


sparse_attention = register(
    "sparse_attention", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=result_like,
    check=check,
)  # fmt: skip
