"""The blocks that every request of an engine attends to, by id: its sinks, those behind `near_begin`, and the chosen.

`chosen` are places in the table of the request, -1 for none. Beside the ids, -1 for none, how many of the first rows of
each block hold a token.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops._machinery.triton import cdiv, tl, triton
from torchsparsekv.ops.engine.tables import check_tables, near_begin, near_begin_of, near_blocks
from torchsparsekv.ops.engine.views import Requests
from torchsparsekv.ops.store.views import I32

Places = Annotated[Tensor, Of("requests heads chosen", I32)]
LISTED = 128  # of a program


def check(chosen, requests, block_size) -> None:
    check_tables(requests, block_size)


def listed(chosen: int, requests: Requests, block_size: int) -> int:
    """How many places the list of a request has."""
    return requests.sink // block_size + near_blocks(requests.window, block_size) + chosen


def reference(chosen: Places, requests: Requests, block_size: int) -> tuple[Tensor, Tensor]:
    length, table, sink, window = requests
    first, steps = sink // block_size, torch.arange(near_blocks(window, block_size), device=table.device)
    sinks = torch.arange(first, device=table.device).expand(length.shape[0], -1)
    always = torch.cat([sinks, near_begin(requests, block_size)[:, None] // block_size + steps], 1)
    always = always[:, None].expand(-1, chosen.shape[1], -1)
    left = (length[:, None, None] - always * block_size).clamp(0, block_size)
    place = torch.cat([always, chosen], 2)
    fill = torch.cat([left, torch.where(chosen >= 0, block_size, 0)], 2).to(I32)
    ids = table[:, None].expand(-1, chosen.shape[1], -1).gather(2, torch.where(fill > 0, place, 0).long())
    return torch.where(fill > 0, ids, -1), fill


@triton.jit
def _list(
    chosen, length, table, ids, fill, heads, places, n, k, sink, window, P: tl.constexpr, IN_RING: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    j = tl.program_id(1) * LISTED + tl.arange(0, LISTED)
    end, first = tl.load(length + b), sink // P
    near = near_begin_of(end, sink, window, P) // P + j - first
    mine = j - first - IN_RING
    place = tl.load(chosen + bh * k + mine, mask=(mine >= 0) & (j < n), other=-1)
    full = tl.where(place >= 0, P, 0)
    place = tl.where(j < first, j, tl.where(mine < 0, near, place))
    left = tl.minimum(tl.maximum(end - place * P, 0), P)
    live = tl.where(mine < 0, left, full)
    block = tl.load(table + b * places + place, mask=(live > 0) & (j < n), other=-1)
    tl.store(ids + bh * n + j, block, mask=j < n)
    tl.store(fill + bh * n + j, live, mask=j < n)


def launch(chosen, requests, block_size) -> tuple[Tensor, Tensor]:
    (length, table, sink, window), (count, heads, k) = requests, chosen.shape
    ids, fill = fake(chosen, requests, block_size)
    n = ids.shape[2]
    _list[(count * heads, cdiv(n, LISTED))](
        chosen, length, table, ids, fill, heads, table.shape[1], n, k, sink, window, P=block_size,
        IN_RING=near_blocks(window, block_size), LISTED=LISTED,
    )  # fmt: skip
    return ids, fill


def fake(chosen, requests, block_size) -> tuple[Tensor, Tensor]:
    count, heads, k = chosen.shape
    shape = (count, heads, listed(k, requests, block_size))
    return chosen.new_empty(shape), chosen.new_empty(shape)


list_blocks = register("list_blocks", reference, impls=(by_triton(launch),), fake=fake, check=check)
