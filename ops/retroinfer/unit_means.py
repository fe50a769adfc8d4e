"""Take the mean key and the mean value of each unit that this forward has made.

    means[u] = mean over the pool rows p in first[u] .. first[u + 1]    for units with first[u] >= previous_ring_begin

Rows below `start` are read in the pool. The pool does not have the new tokens yet: row p will hold the token of column
`order[p + tokens - length]`. Units without rows keep their means.

Launches: PROGRAMS programs per (row, kv head). A program takes one unit of every PROGRAMS, from the newest on, and
returns at the first unit that is not new. With a prompt the programs run on the side stream, where `order` is made too.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.signature import FLOATS, Changed, Of
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.store.rows import as_numbers, load_key, load_value, row_at, rows_of, value_at
from torchsparsekv.ops.store.views import I32, Leaving, Lengths, NewKeys

Means = Annotated[Tensor, Of("batch heads units 2 dim", FLOATS)]
Order = Annotated[Tensor, Of("batch heads tokens", I32)]
PROGRAMS, TILE = 64, 16  # programs of a head, and rows of a unit that a program adds at once


def check(leaving, v, units, means, lengths, order, join) -> None:
    if (v is None) != (order is None):
        raise ValueError("give v and order for a prompt, and neither for a step")


def reference(
    leaving: Leaving, v: NewKeys | None, units: Units, means: Changed[Means], lengths: Lengths, order: Order | None,
    join: bool,
) -> None:  # fmt: skip
    """Take the mean key and the mean value of each unit that this forward has made.

    Args:
        leaving: the keys of the new tokens, and the pool.
        v: the values of a prompt; None at a step, whose leaving tokens are all in the pool.
        units: the index.
        means: [batch, heads, units, 2, dim]; gets the means.
        lengths: positions per row.
        order: [batch, heads, tokens], of a prompt: the column whose token a pool row takes (store_prompt.py).
        join: whether the calling stream waits for the means of a prompt.
    """
    k, pool = leaving
    for b, (n0, n, old) in enumerate(torch.stack(lengths[:3], 1).tolist()):
        for h, count in enumerate(units.unit_count[b].tolist() if n > 0 else []):
            rows = as_numbers(pool[b, h, :n0], torch.float32).float()
            if v is not None and order is not None:
                new = rows_of(k[b, h], v[b, h])[order[b, h].long()].float()
                rows = torch.cat([rows, new[k.shape[2] - n + n0 :]])
            for u in range(count):
                begin, end = units.first[b, h, u : u + 2].tolist()
                if old <= begin < end:
                    means[b, h, u] = rows[begin:end].mean(0)


@triton.jit(do_not_specialize=["tokens"])
def _mean(
    k, v, pool, order, first, unit_count, means, start, length, old_begin, k_b, k_h, k_s, v_b, v_h, v_s, heads, tokens,
    pool_rows, capacity, NEW: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n, old = tl.load(start + b), tl.load(length + b), tl.load(old_begin + b)
    first, d = first + bh * (capacity + 1), tl.arange(0, DP)[None, :]
    u = tl.load(unit_count + bh) - 1 - tl.program_id(1)
    begin = tl.where((u >= 0) & (n > 0), tl.load(first + tl.maximum(u, 0)), -1)
    while (begin >= old) & (begin >= 0):
        end = tl.load(first + u + 1)
        key, value = tl.zeros((DP,), tl.float32), tl.zeros((DP,), tl.float32)
        for tile in range(begin, end, TILE):
            row = tile + tl.arange(0, TILE)
            stored, there = row_at(pool, bh, row, pool_rows, D)[:, None], ((row < end) & (row < n0))[:, None]
            key += tl.sum(load_key(stored, d, there, d < D, D).to(tl.float32), 0)
            value += tl.sum(load_value(stored, d, there, d < D, D).to(tl.float32), 0)
            if NEW:
                new = (row < end) & (row >= n0)
                column = tl.load(order + bh * tokens + tokens - n + row, mask=new, other=0).to(tl.int64)[:, None]
                there = new[:, None] & (d < D)
                x = tl.load(k + b * k_b + h * k_h + column * k_s + d, mask=there, other=0.0)
                key += tl.sum(x.to(tl.float32), 0)
                x = tl.load(v + b * v_b + h * v_h + column * v_s + d, mask=there, other=0.0)
                value += tl.sum(x.to(tl.float32), 0)
        to, c = row_at(means, bh, u, capacity, D), tl.arange(0, DP)
        there = c < tl.where(end > begin, D, 0)
        size = tl.maximum(end - begin, 1)
        tl.store(to + c, (key / size).to(means.dtype.element_ty), mask=there)
        tl.store(value_at(to, D) + c, (value / size).to(means.dtype.element_ty), mask=there)
        u -= tl.num_programs(1)
        begin = tl.where(u >= 0, tl.load(first + tl.maximum(u, 0)), -1)


def launch(leaving, v, units, means, lengths, order, join) -> None:
    if v is None:
        return _launch(leaving, v, units, means, lengths, order)
    with on_side_stream(join, *leaving, v, *units, means, *lengths[:4], order):
        _launch(leaving, v, units, means, lengths, order)


def _launch(leaving, v, units, means, lengths, order) -> None:
    (k, pool), (first, _, unit_count) = leaving, units
    (batch, heads, tokens, d), new = k.shape, v is not None
    v = k if v is None else v
    _mean[(batch * heads, PROGRAMS)](
        k, v, pool, first if order is None else order, first, unit_count, means, *lengths[:3], *k.stride()[:3],
        *v.stride()[:3], heads, tokens, pool.shape[2], means.shape[2], NEW=new, TILE=TILE, D=d, DP=next_power_of_2(d),
        num_warps=2, **launch_early(k.device, batch * heads * PROGRAMS),
    )  # fmt: skip


unit_means = register("unit_means", reference, impls=(by_triton(launch),), check=check)
