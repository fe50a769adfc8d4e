"""A layer that follows another takes in a token: each of its kv heads does what the head does that it follows.

It attends to the pages that this one chose, `asked`: they become `followed.asked`, by this layer's heads. When a page
of tokens leaves the ring they are put into the rows of the pool that the other layer gave its own, so that its pages
are the same tokens: `placed` says which row each of them has (ops/icecache/insert_page.py). Those that are in the hot
buffer are written there too.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.gather._hot_buffer import check_blocks
from torchsparsekv.ops.icecache.views import AskedPages, Followed
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
from torchsparsekv.ops.store.views import I32, Hot, KVStore, Lengths

Placed = Annotated[Tensor, Of("batch heads page", I32)]
WIDE = 256  # ids that are copied at a time


def check(store, hot, followed, asked, placed, lengths) -> None:
    check_blocks(store.pool, hot.rows, hot.slot_of)
    if {placed.shape[2], lengths.interval} != {hot.rows.shape[3]}:
        raise ValueError(
            f"one page leaves at a time: rows for {placed.shape[2]} tokens, blocks of {hot.rows.shape[3]}, interval "
            f"{lengths.interval}"
        )


def followed_by(heads: Tensor) -> Tensor:
    """The numbers of the heads that are followed."""
    return torch.where(heads < 0, torch.arange(heads.shape[1], device=heads.device), heads).long()


def put(token: Tensor, row: int, pool: Tensor, hot: Hot) -> None:
    """Into a row of the pool, and into its copy if the hot buffer has one; all of one head."""
    block, at = divmod(row, hot.rows.shape[1])
    pool[row] = as_stored(token, pool)
    slot = int(hot.slot_of[block])
    if slot >= 0:
        hot.rows[slot, at] = as_numbers(pool[row], hot.rows.dtype)


def reference(
    store: Changed[KVStore], hot: Changed[Hot], followed: Changed[Followed], asked: AskedPages, placed: Placed,
    lengths: Lengths,
) -> None:  # fmt: skip
    (ring, pool), page, of = store, placed.shape[2], followed_by(followed.heads)[..., None]
    followed.asked.copy_(asked.gather(1, of.expand_as(asked)))
    placed = placed.gather(1, of.expand_as(placed))
    for b, (_, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= 0 or new <= old:
            continue
        position = torch.arange(old, old + page, device=placed.device)
        tokens = ring[b][:, ring_row(position, lengths.sink, ring.shape[2])]
        for h, rows in enumerate(placed[b].tolist()):
            for row, token in zip(rows, tokens[h]):
                put(token, row, pool[b, h], Hot(*(t[b, h] for t in hot)))
                block, at = divmod(row, page)
                followed.fill[b, h, block] = max(int(followed.fill[b, h, block]), at + 1)


@triton.jit
def _follow(
    ring, pool, hot, slot_of, followed, own_asked, fill, asked, placed, length, old_begin, ring_begin, heads, ring_rows,
    rows, slots, sink, n, P: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    head = tl.load(followed + bh)
    its = b * heads + tl.where(head < 0, bh % heads, head)
    for first in range(0, n, WIDE):
        j = first + tl.arange(0, WIDE)
        tl.store(own_asked + bh * n + j, tl.load(asked + its * n + j, mask=j < n), mask=j < n)
    old = tl.load(old_begin + b)
    if (tl.load(length + b) > 0) & (old < tl.load(ring_begin + b)):
        i, c = tl.arange(0, P), tl.arange(0, ROW)[None, :]
        from_row = row_at(ring, bh, ring_row_of(old + i, sink, ring_rows - sink), ring_rows, D)
        m = in_row(c, D)
        values = tl.load(from_row[:, None] + c, mask=m, other=0.0)
        row = tl.load(placed + its * P + i)
        tl.atomic_max(fill + bh * (rows // P) + row // P, row % P + 1)
        values = store_row(row_at(pool, bh, row[:, None], rows, D), c, values, (i >= 0)[:, None], m, D)
        slot = tl.load(slot_of + bh * (rows // P) + row // P).to(tl.int64)
        copy = row_at(hot, bh, (slot * P + row % P)[:, None], slots * P, D) + c
        tl.store(copy, values, mask=m & (slot >= 0)[:, None])


def launch(store, hot, followed, asked, placed, lengths) -> None:
    ring, pool = store
    batch, heads, ring_rows, _, d = ring.shape
    _follow[(batch * heads,)](
        ring, pool, hot.rows, hot.slot_of, *followed, asked, placed, lengths.length, lengths.previous_ring_begin,
        lengths.ring_begin, heads, ring_rows, pool.shape[2], hot.rows.shape[2], lengths.sink, asked.shape[2],
        P=placed.shape[2], D=d, ROW=next_power_of_2(row_width(d)), WIDE=WIDE, **launch_early(ring.device, batch * heads),
    )  # fmt: skip


share_step = register("share_step", reference, impls=(by_triton(launch),), check=check)
