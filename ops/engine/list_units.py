"""List the units that each request attends to: the sinks, all units from `ring_begin` on, and the selected units.

    ids[r, h] = units (sinks, newest, selected[r, h]) of the text, by their place in the pool

A unit is a block of the engine, or an equal part of a block. Unit u of the text lies in block
table.ids[r, u * unit // block_size]. A list always has the same length; places without a unit have id -1 and fill 0.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, load_early, tl, triton, wait_for_previous
from torchsparsekv.ops.engine.tables import near_units
from torchsparsekv.ops.store.tables import pool_row_of, pool_rows
from torchsparsekv.ops.store.views import I32, BlockTable, Lengths

Units = Annotated[Tensor, Of("batch heads selected", I32)]
LISTED = 128  # units of a program


def check(selected, lengths, table, window, unit) -> None:
    if table.ids is None or unit < 1 or table.block_size % unit:
        blocks = "no table" if table.ids is None else f"blocks of {table.block_size} tokens"
        raise ValueError(f"need a table with blocks of whole units of {unit} tokens, got {blocks}")
    if lengths.sink < 0 or lengths.sink % unit or lengths.interval % unit or window < 1:
        got = f"sink {lengths.sink}, interval {lengths.interval}, window {window}"
        raise ValueError(f"need window >= 1, and sink and interval in whole units of {unit} tokens: {got}")


def listed(selected: int, sink: int, window: int, interval: int, unit: int) -> int:
    """The number of units in the list of a request."""
    return sink // unit + near_units(window, interval, unit) + selected


def reference(selected: Units, lengths: Lengths, table: BlockTable, window: int, unit: int) -> tuple[Tensor, Tensor]:
    """List the units that each request attends to: the sinks, all units from `ring_begin` on, and the selected units.

    Args:
        selected: units of the text [batch, heads, selected], -1 for none.
        lengths: of each request (ops/engine/tables.py).
        table: the blocks of each request.
        window: how many newest tokens every step attends to at least.
        unit: tokens of a unit.

    Returns:
        numbers of units of the pool [batch, heads, listed], -1 for none; and how many of the first rows of each unit
        hold a token.

    Launches:
        One kernel of requests * heads x listed / LISTED programs.
    """
    length, begin, sink, interval = lengths.length, lengths.ring_begin, lengths.sink, lengths.interval
    steps = torch.arange(near_units(window, interval, unit), device=length.device)
    sinks = torch.arange(sink // unit, device=length.device).expand(length.shape[0], -1)
    always = torch.cat([sinks, begin[:, None] // unit + steps], 1)[:, None].expand(-1, selected.shape[1], -1)
    left = (length[:, None, None] - always * unit).clamp(0, unit)
    fill = torch.cat([left, torch.where(selected >= 0, unit, 0)], 2).to(I32)
    place = torch.where(fill > 0, torch.cat([always, selected], 2), 0)
    return torch.where(fill > 0, pool_rows(place * unit, table) // unit, -1).to(I32), fill


@triton.jit
def _list(
    selected, length, ring_begin, table, ids, fill, heads, places, n, k, sink, NEAR: tl.constexpr, UNIT: tl.constexpr,
    P: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    j = tl.program_id(1) * LISTED + tl.arange(0, LISTED)
    end, first = load_early(length + b), sink // UNIT
    newest = load_early(ring_begin + b) // UNIT + j - first
    nth = j - first - NEAR  # of the selected units; below 0 for a unit that is always attended to
    wait_for_previous(PDL)
    place = tl.load(selected + bh * k + nth, mask=(nth >= 0) & (j < n), other=-1)
    full = tl.where(place >= 0, UNIT, 0)
    place = tl.where(j < first, j, tl.where(nth < 0, newest, place))
    left = tl.minimum(tl.maximum(end - place * UNIT, 0), UNIT)
    rows = tl.where(nth < 0, left, full)
    live = (rows > 0) & (j < n)
    at = pool_row_of(table, b, places, place * UNIT, live, P) // UNIT
    tl.store(ids + bh * n + j, tl.where(live, at, -1), mask=j < n)
    tl.store(fill + bh * n + j, rows, mask=j < n)


def launch(selected, lengths, table, window, unit) -> tuple[Tensor, Tensor]:
    count, heads, k = selected.shape
    ids, fill = fake(selected, lengths, table, window, unit)
    n = ids.shape[2]
    _list[(count * heads, cdiv(n, LISTED))](
        selected, lengths.length, lengths.ring_begin, table.ids, ids, fill, heads, table.ids.shape[1], n, k,
        lengths.sink, NEAR=near_units(window, lengths.interval, unit), UNIT=unit, P=table.block_size, LISTED=LISTED,
        **launch_early(ids.device, count * heads * cdiv(n, LISTED)),
    )  # fmt: skip
    return ids, fill


def fake(selected, lengths, table, window, unit) -> tuple[Tensor, Tensor]:
    count, heads, k = selected.shape
    shape = (count, heads, listed(k, lengths.sink, window, lengths.interval, unit))
    return selected.new_empty(shape), selected.new_empty(shape)


list_units = register("list_units", reference, impls=(by_triton(launch),), fake=fake, check=check)
