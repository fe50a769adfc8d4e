"""A page of tokens leaves the ring while decoding: put its tokens into the rows of the pool that another layer gave its
own, so that pages of this layer are the same tokens.

`placed` says which row each token of the page has (ops/index/insert_page.py). Those that are in the hot buffer are
written there too. Where nothing leaves, nothing is done.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._impl import triton as by_triton
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._signature import Changed, Of
from torchsparsekv.ops._triton import chain, chained, next_power_of_2, tl, triton
from torchsparsekv.ops.store.forget import check_blocks
from torchsparsekv.ops.store.rows import (
    as_numbers,
    as_stored,
    in_row,
    ring_row,
    ring_row_of,
    row_at,
    row_width,
    store_row,
)  # fmt: skip
from torchsparsekv.ops.store.views import I32, Hot, Lengths, Store

Placed = Annotated[Tensor, Of("batch heads page", I32)]


def check(store, hot, placed, lengths) -> None:
    check_blocks(store.pool, hot)
    if {placed.shape[2], lengths.interval} != {hot.rows.shape[3]}:
        raise ValueError(
            f"one page leaves at a time: rows for {placed.shape[2]} tokens, blocks of {hot.rows.shape[3]}, interval "
            f"{lengths.interval}"
        )


def put(token: Tensor, row: int, pool: Tensor, hot: Hot) -> None:
    """Into a row of the pool, and into its copy if the hot buffer has one; all of one head."""
    block, at = divmod(row, hot.rows.shape[1])
    pool[row] = as_stored(token, pool)
    slot = int(hot.slot_of[block])
    if slot >= 0:
        hot.rows[slot, at] = as_numbers(pool[row], hot.rows.dtype)


def reference(store: Changed[Store], hot: Changed[Hot], placed: Placed, lengths: Lengths) -> None:
    (ring, pool), page = store, placed.shape[2]
    for b, (_, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= 0 or new <= old:
            continue
        position = torch.arange(old, old + page, device=placed.device)
        tokens = ring[b][:, ring_row(position, lengths.sink, ring.shape[2])]
        for h, rows in enumerate(placed[b].tolist()):
            for row, token in zip(rows, tokens[h]):
                put(token, row, pool[b, h], Hot(*(t[b, h] for t in hot)))


@triton.jit
def _place(
    ring, pool, hot, slot_of, placed, length, old_begin, ring_begin, heads, ring_rows, rows, slots, sink,
    P: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    old = tl.load(old_begin + b)
    if (tl.load(length + b) > 0) & (old < tl.load(ring_begin + b)):
        i, c = tl.arange(0, P), tl.arange(0, ROW)[None, :]
        from_row = row_at(ring, bh, ring_row_of(old + i, sink, ring_rows - sink), ring_rows, D)
        m = in_row(c, D)
        values = tl.load(from_row[:, None] + c, mask=m, other=0.0)
        row = tl.load(placed + bh * P + i)
        values = store_row(row_at(pool, bh, row[:, None], rows, D), c, values, (i >= 0)[:, None], m, D)
        slot = tl.load(slot_of + bh * (rows // P) + row // P).to(tl.int64)
        copy = row_at(hot, bh, (slot * P + row % P)[:, None], slots * P, D) + c
        tl.store(copy, values, mask=m & (slot >= 0)[:, None])


def launch(store, hot, placed, lengths) -> None:
    ring, pool = store
    batch, heads, ring_rows, _, d = ring.shape
    _place[(batch * heads,)](
        ring, pool, hot.rows, hot.slot_of, placed, lengths.length, lengths.previous_ring_begin,
        lengths.ring_begin, heads, ring_rows, pool.shape[2], hot.rows.shape[2], lengths.sink, P=placed.shape[2],
        D=d, ROW=next_power_of_2(row_width(d)), **chained(ring.device, batch * heads),
    )  # fmt: skip


place_page = register("place_page", reference, impls=(by_triton(launch),), check=check)
