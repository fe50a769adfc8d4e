"""Write the new tokens of a prompt, a chunk of a prompt or a later turn into the pool and the ring.

    pool[start : length] = rows of the new tokens
    ring[ring_row(p)]    = row of p, for new p below sink or from ring_begin on

After this call the pool holds every token of the row (flush_ring copied the ring before), and the ring holds the sinks
and the newest tokens. Rows of the batch are ragged: the new tokens of a row are the last `length - start` columns of
`k` and `v`; the columns before them are left padding.

Args:
    k, v [batch, heads, tokens, dim]
    store: both are changed. A pool without rows takes nothing.
    order [batch, heads, tokens]: if given, the pool row of a column takes the token of column `order[column]`. Methods
        that retrieve groups of tokens write each group side by side. `order` permutes only new tokens that do not stay
        in the ring; the ring keeps the order of positions.
    join: whether the copy into the pool runs on the current stream. Otherwise it runs beside the next layer
        (ops/_machinery/side_stream.py).

Launches: one for the ring, one for the pool. The launch for the pool has at most COPIERS programs, unless `join`.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.store.rows import as_stored, ring_row, ring_row_of, row_at, rows_of, store_key, store_value
from torchsparsekv.ops.store.views import I32, KVStore, Lengths, NewKeys

Order = Annotated[Tensor, Of("batch heads tokens", I32)]
TILE = 16
# Few programs with large tiles: they saturate the host link and leave the multiprocessors to the next layer.
COPIERS, COPY_TILE = 8, 64


def reference(
    k: NewKeys, v: NewKeys, store: Changed[KVStore], lengths: Lengths, order: Order | None, join: bool
) -> None:
    (ring, pool), sink = store, lengths.sink
    for b in range(k.shape[0]):
        n0, n, new = (int(t[b]) for t in (lengths.start, lengths.length, lengths.ring_begin))
        if n <= 0:
            continue
        first = k.shape[2] - (n - n0)
        rows = rows_of(k[b], v[b])
        moved = rows if order is None else rows.gather(1, order[b].long()[..., None, None].expand_as(rows))
        if pool.shape[2]:
            pool[b, :, n0:n] = as_stored(moved[:, first:], pool)
        pos = torch.arange(n0, n)
        pos = pos[(pos < sink) | (pos >= new)]
        ring[b][:, ring_row(pos, sink, ring.shape[2])] = rows[:, first:][:, pos - n0]


@triton.jit(do_not_specialize=["tokens", "out_rows", "tiles"])
def _write(
    k, v, out, start, length, ring_begin, order, k_b, k_h, k_s, v_b, v_h, v_s, heads, tokens, out_rows, sink, tiles,
    TO_RING: tl.constexpr, ORDERED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid-stride loop over (row, head, tile of columns). `out` is the pool or, with TO_RING, the ring."""
    per_head = tl.cdiv(tokens, TILE)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        bh = (tile // per_head).to(tl.int64)
        b, h = bh // heads, bh % heads
        n0, n, new = tl.load(start + b), tl.load(length + b), tl.load(ring_begin + b)
        col = (tile % per_head) * TILE + tl.arange(0, TILE)
        pos = n - tokens + col
        keep = (col < tokens) & (pos >= n0)
        at = pos
        if TO_RING:
            keep = keep & ((pos < sink) | (pos >= new))
            at = ring_row_of(pos, sink, out_rows - sink)
        if (n > 0) & (tl.max(keep.to(tl.int32), 0) > 0):
            d = tl.arange(0, DP)[None, :]
            live, there = keep[:, None], d < D
            m = live & there
            if ORDERED:
                col = tl.load(order + bh * tokens + col, mask=keep, other=0)
            column = col.to(tl.int64)[:, None]
            rows_k = tl.load(k + b * k_b + h * k_h + column * k_s + d, mask=m, other=0.0)  # [TILE, DP]
            rows_v = tl.load(v + b * v_b + h * v_h + column * v_s + d, mask=m, other=0.0)  # [TILE, DP]
            to = row_at(out, bh, at[:, None], out_rows, D)
            store_key(to, d, rows_k, live, there, D)
            store_value(to, d, rows_v, live, there, D)


def launch(k, v, store, lengths, order, join) -> None:
    ring, pool = store
    batch, heads, tokens, d = k.shape
    pool_rows = pool.shape[2]
    times = lengths.start, lengths.length, lengths.ring_begin
    strides = (*k.stride()[:3], *v.stride()[:3])

    def write(out, rows, programs, tile, to_ring):
        tiles = batch * heads * cdiv(tokens, tile)
        ordered = order is not None and not to_ring
        args = (k, v, out, *times, order if ordered else lengths.length, *strides, heads, tokens, rows, lengths.sink)
        wide = dict(D=d, DP=next_power_of_2(d), TILE=tile, num_warps=8 if tile > TILE else 4)
        _write[(min(tiles, programs),)](*args, tiles, TO_RING=to_ring, ORDERED=ordered, **wide)

    write(ring, ring.shape[2], 4096, TILE, True)
    with on_side_stream(join, k, v, pool, *times, *(() if order is None else (order,))):
        if pool_rows:
            write(pool, pool_rows, 4096 if join else COPIERS, COPY_TILE, False)


store_prompt = register("store_prompt", reference, impls=(by_triton(launch),), capturable=False)
