"""Take a decode step into a sharing layer: copy the selected pages, and store tokens where the selecting layer did.

    source = source_heads[h], or h where that is -1
    shared.pages[h] = selected_pages[source]
    when a page of tokens leaves the ring: token i of head h goes to the pool row inserted_rows[source][i]

So the pages of both layers hold the same tokens. Every page with slot_of >= 0 is written in its slot too, so copies
equal the pool.

Launches: 1, a program for each kv head. When no page leaves the ring it only copies the selection.

Paper: appendix C, "reuse".
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.gather._hot_buffer import check_blocks
from torchsparsekv.ops.icecache.views import SelectedPages, SharedSelection
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
from torchsparsekv.ops.store.views import I32, HotBuffer, KVStore, Lengths

InsertedRows = Annotated[Tensor, Of("batch heads page", I32)]
WIDE = 256  # page numbers that are copied at a time


def check(store, hot, shared, selected_pages, inserted_rows, lengths) -> None:
    check_blocks(store.pool, hot.rows, hot.slot_of)
    if {inserted_rows.shape[2], lengths.interval} != {hot.rows.shape[3]}:
        raise ValueError(
            f"inserted_rows, blocks and interval must be one page, got {inserted_rows.shape[2]}, {hot.rows.shape[3]} "
            f"and {lengths.interval} tokens"
        )


def head_numbers(source_heads: Tensor) -> Tensor:
    """`source_heads` [batch, heads] with the head's own number in place of -1."""
    own = torch.arange(source_heads.shape[1], device=source_heads.device)
    return torch.where(source_heads < 0, own, source_heads).long()


def store_in_pool_and_hot(token: Tensor, row: int, pool: Tensor, hot: HotBuffer) -> None:
    """Store a token [2, dim] in a pool row of one head, and in the hot buffer if the page of that row is there."""
    block, offset = divmod(row, hot.rows.shape[1])
    pool[row] = as_stored(token, pool)
    slot = int(hot.slot_of[block])
    if slot >= 0:
        hot.rows[slot, offset] = as_numbers(pool[row], hot.rows.dtype)


def reference(
    store: Changed[KVStore], hot: Changed[HotBuffer], shared: Changed[SharedSelection], selected_pages: SelectedPages,
    inserted_rows: InsertedRows, lengths: Lengths,
) -> None:  # fmt: skip
    """Copy the selection, and store the page of tokens that leaves the ring.

    Args:
        store, hot: of this layer; pool and hot rows are written.
        shared: pages and fill are written.
        selected_pages: [batch, heads, selected], of the selecting layer.
        inserted_rows: [batch, heads, page], of the selecting layer (`Tree`).
    """
    (ring, pool), page, source = store, inserted_rows.shape[2], head_numbers(shared.source_heads)[..., None]
    shared.pages.copy_(selected_pages.gather(1, source.expand_as(selected_pages)))
    inserted_rows = inserted_rows.gather(1, source.expand_as(inserted_rows))
    for b, (_, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= 0 or new <= old:
            continue
        position = torch.arange(old, old + page, device=inserted_rows.device)
        tokens = ring[b][:, ring_row(position, lengths.sink, ring.shape[2])]
        for h, rows in enumerate(inserted_rows[b].tolist()):
            for row, token in zip(rows, tokens[h]):
                store_in_pool_and_hot(token, row, pool[b, h], HotBuffer(*(t[b, h] for t in hot)))
                block, offset = divmod(row, page)
                shared.fill[b, h, block] = max(int(shared.fill[b, h, block]), offset + 1)


@triton.jit
def _share(
    ring, pool, hot, slot_of, source_heads, pages, fill, selected_pages, inserted_rows, length, old_begin, ring_begin,
    heads, ring_rows, rows, slots, sink, n, P: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    head = tl.load(source_heads + bh)
    source = b * heads + tl.where(head < 0, bh % heads, head)
    for first in range(0, n, WIDE):
        j = first + tl.arange(0, WIDE)
        tl.store(pages + bh * n + j, tl.load(selected_pages + source * n + j, mask=j < n), mask=j < n)
    old = tl.load(old_begin + b)
    if (tl.load(length + b) > 0) & (old < tl.load(ring_begin + b)):
        i, c = tl.arange(0, P), tl.arange(0, ROW)[None, :]
        from_row = row_at(ring, bh, ring_row_of(old + i, sink, ring_rows - sink), ring_rows, D)
        m = in_row(c, D)
        values = tl.load(from_row[:, None] + c, mask=m, other=0.0)  # [P, ROW], key and value
        row = tl.load(inserted_rows + source * P + i)
        tl.atomic_max(fill + bh * (rows // P) + row // P, row % P + 1)
        values = store_row(row_at(pool, bh, row[:, None], rows, D), c, values, (i >= 0)[:, None], m, D)
        slot = tl.load(slot_of + bh * (rows // P) + row // P).to(tl.int64)
        copy = row_at(hot, bh, (slot * P + row % P)[:, None], slots * P, D) + c
        tl.store(copy, values, mask=m & (slot >= 0)[:, None])


def launch(store, hot, shared, selected_pages, inserted_rows, lengths) -> None:
    ring, pool = store
    batch, heads, ring_rows, _, d = ring.shape
    _share[(batch * heads,)](
        ring, pool, hot.rows, hot.slot_of, *shared, selected_pages, inserted_rows, lengths.length,
        lengths.previous_ring_begin, lengths.ring_begin, heads, ring_rows, pool.shape[2], hot.rows.shape[2],
        lengths.sink, selected_pages.shape[2], P=inserted_rows.shape[2], D=d, ROW=next_power_of_2(row_width(d)),
        WIDE=WIDE, **launch_early(ring.device, batch * heads),
    )  # fmt: skip


share_step = register("share_step", reference, impls=(by_triton(launch),), check=check)
