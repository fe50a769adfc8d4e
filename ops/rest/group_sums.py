"""Add the tokens that leave the ring to the sums of their groups. At a step `append` does this, unless the method puts
the tokens at pool rows of its own choice.

    sums[g] += (sum of the pool rows p of group g) / group      for previous_ring_begin <= p < ring_begin

The number of tokens in a sum follows from the ring begin: min((g + 1) * group, ring_begin) - max(g * group, sink).

Args:
    leaving: the keys of the tokens that leave the ring. The pool holds the values of earlier tokens too.
    v [batch, heads, tokens, dim]: the values of the new tokens.
    rest: sums [batch, heads, groups, 2, dim], changed for the groups of the leaving tokens.
    order [batch, heads, tokens]: the pool row of a column takes the token of column `order[column]` (store_prompt.py).
    join: whether the sums of a prompt are made on the current stream. Otherwise they are made beside the next layer
        (ops/_machinery/side_stream.py), where `order` is made too.
    rows [batch, heads, interval]: at a step of a method that chooses pool rows, the rows that took the leaving tokens.

Launches: one program per (row, head, group that can change in one call); it returns at once if no token of its group
leaves. With `rows` one program per (row, head, COLUMNS columns) adds all tokens at once.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.rest.views import Rest, check_groups
from torchsparsekv.ops.store.rows import (
    as_numbers,
    in_row,
    load_key,
    load_row,
    load_value,
    row_at,
    row_width,
    rows_of,
    value_at,
)
from torchsparsekv.ops.store.views import I32, Leaving, Lengths, NewKeys

InsertedRows = Annotated[Tensor, Of("batch heads interval", I32)]
Order = Annotated[Tensor, Of("batch heads tokens", I32)]
TILE = 32  # tokens of a group that a program adds at once
COLUMNS = 64  # that a program adds, of all leaving tokens, if a method chooses the rows


def check(leaving, v, rest, lengths, order=None, join=True, rows=None) -> None:
    check_groups(rest, leaving.pool.shape[2])
    if rows is not None and v.shape[2] > 1:
        raise ValueError(f"rows are only for a step of one token, got {v.shape[2]} new tokens")


def reference(
    leaving: Leaving, v: NewKeys, rest: Changed[Rest], lengths: Lengths, order: Order | None = None, join: bool = True,
    rows: InsertedRows | None = None,
) -> None:  # fmt: skip
    (k, pool), (sums, group) = leaving, rest[:2]
    assert sums is not None
    for b, (n0, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= 0 or new <= old:
            continue
        if rows is not None:
            for h, taken in enumerate(rows[b].long()):
                tokens = as_numbers(pool[b, h, taken], torch.float32).float()
                sums[b, h] = sums[b, h].float().index_add(0, taken // group, tokens / group)
            continue
        fresh, column = min(max(old, n0), new), k.shape[2] - n
        added = rows_of(k[b], v[b])
        if order is not None:
            added = added.gather(1, order[b].long()[..., None, None].expand_as(added))
        earlier = as_numbers(pool[b, :, old:fresh], torch.float32).float()
        tokens = torch.cat([earlier, added[:, column + fresh : column + new].float()], 1)
        for g in range(old // group, cdiv(new, group)):
            first, last = max(g * group, old), min((g + 1) * group, new)
            sums[b, :, g] = sums[b, :, g].float() + tokens[:, first - old : last - old].sum(1) / group


@triton.jit(do_not_specialize=["tokens"])
def _sum(
    k, v, pool, sums, order, start, length, previous_ring_begin, ring_begin, k_b, k_h, k_s, v_b, v_h, v_s, heads,
    tokens, pool_rows, groups, ORDERED: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n = tl.load(start + b), tl.load(length + b)
    old, new = tl.load(previous_ring_begin + b), tl.load(ring_begin + b)
    g = old // GROUP + tl.program_id(0)  # the only grid dimension that may exceed 65,535
    if (n > 0) & (old < new) & (g * GROUP < new):
        d = tl.arange(0, DP)
        there = d < D
        row = row_at(sums, bh, g, groups, D)
        key, value = tl.zeros((DP,), tl.float32), tl.zeros((DP,), tl.float32)
        for first in range(0, GROUP, TILE):
            pos = g * GROUP + first + tl.arange(0, TILE)
            leaves = (pos >= old) & (pos < new)
            fresh = leaves & (pos >= n0)
            col = tokens - n + pos
            if ORDERED:
                col = tl.load(order + bh * tokens + col, mask=fresh, other=0)
            col = col.to(tl.int64)[:, None]
            stored, past, m = row_at(pool, bh, pos, pool_rows, D)[:, None], (leaves & ~fresh)[:, None], fresh[:, None]
            x = load_key(stored, d[None, :], past, there[None, :], D).to(tl.float32)  # [TILE, DP]
            x += tl.load(k + b * k_b + h * k_h + col * k_s + d[None, :], mask=m & there[None, :], other=0.0)
            y = load_value(stored, d[None, :], past, there[None, :], D).to(tl.float32)  # [TILE, DP]
            y += tl.load(v + b * v_b + h * v_h + col * v_s + d[None, :], mask=m & there[None, :], other=0.0)
            key += tl.sum(x, 0)
            value += tl.sum(y, 0)
        key = tl.load(row + d, mask=there, other=0.0).to(tl.float32) + key / GROUP
        value = tl.load(value_at(row, D) + d, mask=there, other=0.0).to(tl.float32) + value / GROUP
        tl.store(row + d, key.to(sums.dtype.element_ty), mask=there)
        tl.store(value_at(row, D) + d, value.to(sums.dtype.element_ty), mask=there)


@triton.jit
def _add_rows(
    pool, sums, rows, length, previous_ring_begin, ring_begin, heads, n, pool_rows, groups, GROUP: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add some columns of all rows. The first row of a group stores the sum for all rows of the group."""
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    if (tl.load(length + b) > 0) & (tl.load(previous_ring_begin + b) < tl.load(ring_begin + b)):
        i, c = tl.arange(0, N), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        at = tl.load(rows + bh * n + i, mask=i < n, other=0)
        group, there = tl.where(i < n, at // GROUP, -1), in_row(c, D)
        tokens = load_row(row_at(pool, bh, at, pool_rows, D)[:, None], c, (i < n)[:, None], there, D)  # [N, COLUMNS]
        same = (group[:, None] == group[None, :]).to(tl.float32)  # [N, N]
        first = tl.min(tl.where(group[:, None] == group[None, :], i[None, :], N), 1) == i
        to = row_at(sums, bh, at // GROUP, groups, D)[:, None] + c
        m = (first & (i < n))[:, None] & there
        found = tl.load(to, mask=m, other=0.0).to(tl.float32)
        found += tl.dot(same, tokens.to(tl.float32), input_precision="ieee") / GROUP
        tl.store(to, found.to(sums.dtype.element_ty), mask=m)


def launch(leaving, v, rest, lengths, order, join, rows) -> None:
    if rows is not None:
        return _launch_rows(leaving.pool, rest, lengths, rows, v.shape[3])
    if v.shape[2] == 1:  # a step
        return _launch(leaving, v, rest, lengths, order)
    used = (*leaving, v, rest.sums, *lengths[:4], *(() if order is None else (order,)))
    with on_side_stream(join, *used):
        _launch(leaving, v, rest, lengths, order)


def _launch_rows(pool, rest, lengths, rows, d) -> None:
    (batch, heads, pool_rows), (sums, group), n = pool.shape[:3], rest[:2], rows.shape[2]
    parts = cdiv(row_width(d), COLUMNS)
    _add_rows[(batch * heads, parts)](
        pool, sums, rows, *lengths[1:4], heads, n, pool_rows, sums.shape[2], GROUP=group, D=d,
        N=max(16, next_power_of_2(n)), COLUMNS=COLUMNS, **launch_early(sums.device, batch * heads * parts),
    )  # fmt: skip


def _launch(leaving, v, rest, lengths, order) -> None:
    (k, pool), (sums, group) = leaving, rest[:2]
    (batch, heads, rows), (tokens, d), groups = pool.shape[:3], k.shape[2:], sums.shape[2]
    most = min(cdiv(tokens + lengths.interval, group) + 1, groups)  # groups that can change in one call
    _sum[(most, batch * heads)](
        k, v, pool, sums, lengths.start if order is None else order, *lengths[:4], *k.stride()[:3], *v.stride()[:3],
        heads, tokens, rows, groups, ORDERED=order is not None, GROUP=group, TILE=min(group, TILE), D=d,
        DP=next_power_of_2(d), num_warps=2, **launch_early(sums.device, batch * heads * most),
    )  # fmt: skip


group_sums = register("group_sums", reference, impls=(by_triton(launch),), check=check)
