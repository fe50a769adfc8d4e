"""Attention of one query of every request over the blocks that are listed for it.

    out[r] = softmax(scale * q[r] . K) . V,  K, V: the first fill[r, h, i] rows of every block ids[r, h, i] >= 0;
             with `rest` also over what remains of each block of the request (ops/rest/__init__.py)

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
from torchsparsekv.ops.attend._split import Parts, begun, fold_means, softmax_attention, step, store_part, tile_of
from torchsparsekv.ops.engine._remaining import block_tile, remaining_of_blocks
from torchsparsekv.ops.engine.tables import check_one
from torchsparsekv.ops.engine.views import NO_BLOCK_REST, BlockRest, Listing
from torchsparsekv.ops.rest._remaining import GROUPS, tile_sizes
from torchsparsekv.ops.rest.views import Rest
from torchsparsekv.ops.store.rows import as_numbers, row_at
from torchsparsekv.ops.store.views import Attention, Lengths

OneQuery = Annotated[Tensor, Of("requests q_heads 1 dim", "kv", strided=True)]
Result = Annotated[Tensor, Of("requests q_heads 1 dim", "kv")]
UnitsOfPool = Annotated[Tensor, Of("pools heads units unit 2 dim", "kv")]


def check(q, pool, listing, lengths, attention, out, rest=NO_BLOCK_REST) -> None:
    _check.heads(q, pool)
    check_one(pool)
    if lengths.length.shape[0] != q.shape[0]:
        raise ValueError(f"need a length of each request, got {lengths.length.shape[0]} for {q.shape[0]} requests")
    sums, group, table, selected = rest
    if sums is None:
        return
    if table is None or selected is None or selected.shape[2] > listing.ids.shape[2]:
        raise ValueError("rest needs a table, and the selected units, which stand last in the list")
    if group % pool.shape[3] or group & (group - 1) or lengths.sink % group or lengths.interval % group:
        raise ValueError(
            f"rest needs blocks of whole units of {pool.shape[3]} tokens, and sink {lengths.sink} and interval "
            f"{lengths.interval} in whole blocks, got blocks of {group}"
        )


def reference(
    q: OneQuery, pool: UnitsOfPool, listing: Listing, lengths: Lengths, attention: Attention, out: Changed[Result],
    rest: BlockRest = NO_BLOCK_REST,
) -> None:  # fmt: skip
    """Attention of one query of every request over the units that are listed for it.

    Args:
        q: [requests, q_heads, 1, dim].
        pool: the rows of all units [1, heads, units, unit, 2, dim]: the engine's pool, or the hot buffer.
        listing: the units of each request in `pool`.
        lengths: of each request (ops/engine/tables.py); a request of length 0 gets zeros.
        attention: scale, soft cap and extra logits of the model.
        out: [requests, q_heads, 1, dim], the memory that the engine gave for the result.
        rest: what stands for the tokens that are not listed. The CUDA kernel reads sums, table, lengths and the query
            while the kernel directly before it still runs, so that kernel must not write them.

    Launches:
        csrc/sparse_attention.cu, one launch in which a cluster of programs shares a kv head of a request. Else Triton:
        one kernel of requests * heads x splits programs, and one that combines the splits of each query head. With
        `rest` a program of the CUDA kernel keeps numbers of all blocks of a request in shared memory, so Triton takes
        wide tables: on an H200 those above about 9,000 blocks with 4 query heads a kv head, 4,000 with 8.
    """
    (ids, fill), unit = listing, pool.shape[3]
    heads = torch.arange(pool.shape[1], device=q.device)
    live = (ids >= 0)[..., None] & (torch.arange(unit, device=q.device) < fill[..., None])
    rows = as_numbers(pool[0][heads[None, :, None], ids.clamp(min=0).long()], q.dtype)
    rows, live = rows.masked_fill(~live[..., None, None], 0).flatten(2, 3), live.flatten(2)
    bias = torch.zeros_like(live, dtype=torch.float32)
    if rest.sums is not None:
        means, tokens = remaining_of_blocks(rest, pool, listing, lengths)
        rows, live = torch.cat([rows.float(), means], 2), torch.cat([live, tokens > 0], -1)
        bias = torch.cat([bias, tokens.clamp(min=1).float().log()], -1)
    live, bias = (x.repeat_interleave(q.shape[1] // rows.shape[1], 1).unsqueeze(2) for x in (live, bias))
    out.copy_(softmax_attention(q, rows, live, attention, bias))


@triton.jit
def _attend(
    q, rows, ids, fill, sums, selected, table, ring_begin, accs, tops, totals, q_b, q_h, heads, all_rows, n, k, blocks,
    places, sink, scale, softcap, splits, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    P: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr,
    CHOSEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    x, top, total, acc = begun(q, q_b, q_h, b, h, G, GP, D, DP)
    tiles = tl.cdiv(n * P, TILE)
    for tile in range(split, tiles, splits):
        token = tile * TILE + tl.arange(0, TILE)
        place = bh * n + token // P
        block = tl.load(ids + place, mask=token < n * P, other=-1)
        live = (block >= 0) & (token % P < tl.load(fill + place, mask=token < n * P, other=0))
        row = row_at(rows, h, tl.maximum(block, 0).to(tl.int64) * P + token % P, all_rows, D)
        top, total, acc = step(x, row, live, top, total, acc, scale, softcap, D, DP)
    if GROUP > 0:
        end = tl.load(ring_begin + b)
        first = (split - tiles % splits + splits) % splits  # go on dealing out tiles where the units ended
        for tile in range(first, tl.cdiv(end, GROUP * GROUPS), splits):
            key, value, count = block_tile(
                sums, rows, ids + bh * n + n - k, selected + bh * k, table + b * places, bh, h, tile, end, sink, blocks,
                places, all_rows, k, GROUP, GROUPS, TOKENS, CHOSEN, P, D, DP,
            )  # fmt: skip
            top, total, acc = fold_means(x, key, value, count, top, total, acc, scale, softcap)
    store_part(accs, tops, totals, bh * splits + split, acc, top, total, GP, DP)


def _fits(q, pool, listing, lengths, attention, out, rest) -> _native.Launch | str:
    unit, (sums, group, table, _) = pool.shape[3], rest
    tiles = cdiv(listing.ids.shape[2] * unit, _native.TILE)
    if sums is None or table is None:
        return _native.fit(q, pool.shape[1], pool, unit, tiles, attention, filled=True, listed=True)
    # list_units and fetch_shared do not write what the kernel reads early.
    settled, groups = Rest(sums, group, settled=True), table.shape[1]
    return _native.fit(
        q, pool.shape[1], pool, unit, tiles, attention, filled=True, listed=True, rest=settled, groups=groups
    )


def _launch_cuda(fitting, q, pool, listing, lengths, attention, out, rest) -> None:
    """csrc/sparse_attention.cu"""
    (kernels, warps, cluster, shared), (requests, heads, n) = fitting, listing.ids.shape
    (sums, _, table, selected), (units, unit) = rest, pool.shape[2:4]
    kernels.launch(
        "attend", (requests * heads * cluster, 1, 1), 32 * warps, q, None, pool, listing.ids, None, selected,
        listing.fill, lengths.length, lengths.ring_begin, attention.sink_logits, sums, table, lengths.ring_begin, out,
        q.stride(0), q.stride(1), heads, heads, 0, units * unit, 0 if sums is None else sums.shape[2], n * unit,
        0 if selected is None else selected.shape[2], 0 if table is None else table.shape[1], lengths.sink,
        float(attention.scale), float(attention.softcap), shared=shared,
    )  # fmt: skip


def _launch_triton(q, pool, listing, lengths, attention, out, rest) -> None:
    (ids, fill), (sums, group, table, selected), unit = listing, rest, pool.shape[3]
    (requests, heads, n), tile = ids.shape, tile_of(q)
    places, k = (0, 0) if table is None or selected is None else (table.shape[1], selected.shape[2])
    parts = Parts(q, heads, cdiv(n * unit, tile) + cdiv(places, GROUPS))
    _attend[(requests * heads, parts.splits)](
        q, pool, ids, fill, pool if sums is None else sums, ids if selected is None else selected,
        ids if table is None else table, lengths.ring_begin, parts.acc, parts.top, parts.total, *q.stride()[:2], heads,
        pool.shape[2] * unit, n, k, 0 if sums is None else sums.shape[2], places, lengths.sink, attention.scale,
        attention.softcap, parts.splits, D=q.shape[3], P=unit, TILE=tile, **tile_sizes(group, k), **parts.shape(),
        num_stages=2, **launch_early(q.device, requests * heads * parts.splits),
    )  # fmt: skip
    parts.combine(q, lengths.length, attention.sink_logits, out)


listed_attention = register(
    "listed_attention", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), check=check
)
