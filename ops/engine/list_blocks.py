"""List the blocks that each request attends to: its sinks, those from `near_begin` on, and the selected blocks.

    ids[r, h] = table[r, (sinks, newest, selected[r, h])]

A list always has the same length; places without a block have id -1 and fill 0.
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

Places = Annotated[Tensor, Of("requests heads selected", I32)]
LISTED = 128  # places of a program


def check(selected, requests, block_size) -> None:
    check_tables(requests, block_size)


def listed(selected: int, requests: Requests, block_size: int) -> int:
    """The number of blocks in the list of a request."""
    return requests.sink // block_size + near_blocks(requests.window, block_size) + selected


def reference(selected: Places, requests: Requests, block_size: int) -> tuple[Tensor, Tensor]:
    """List the blocks that each request attends to: its sinks, those from `near_begin` on, and the selected blocks.

    Args:
        selected: places in the table of the request [requests, heads, selected], -1 for none.
        requests: lengths and tables.
        block_size: tokens of a block.

    Returns:
        ids of blocks [requests, heads, listed], -1 for none; and of each block how many of its first rows hold a token.

    Launches:
        One kernel of requests * heads x listed / LISTED programs.
    """
    length, table, sink, window = requests
    first, steps = sink // block_size, torch.arange(near_blocks(window, block_size), device=table.device)
    sinks = torch.arange(first, device=table.device).expand(length.shape[0], -1)
    always = torch.cat([sinks, near_begin(requests, block_size)[:, None] // block_size + steps], 1)
    always = always[:, None].expand(-1, selected.shape[1], -1)
    left = (length[:, None, None] - always * block_size).clamp(0, block_size)
    place = torch.cat([always, selected], 2)
    fill = torch.cat([left, torch.where(selected >= 0, block_size, 0)], 2).to(I32)
    ids = table[:, None].expand(-1, selected.shape[1], -1).gather(2, torch.where(fill > 0, place, 0).long())
    return torch.where(fill > 0, ids, -1), fill


@triton.jit
def _list(
    selected, length, table, ids, fill, heads, places, n, k, sink, window, P: tl.constexpr, IN_RING: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    j = tl.program_id(1) * LISTED + tl.arange(0, LISTED)
    end, first = tl.load(length + b), sink // P
    newest = near_begin_of(end, sink, window, P) // P + j - first
    nth = j - first - IN_RING  # of the selected blocks; below 0 for a block that is always attended to
    place = tl.load(selected + bh * k + nth, mask=(nth >= 0) & (j < n), other=-1)
    full = tl.where(place >= 0, P, 0)
    place = tl.where(j < first, j, tl.where(nth < 0, newest, place))
    left = tl.minimum(tl.maximum(end - place * P, 0), P)
    rows = tl.where(nth < 0, left, full)
    block = tl.load(table + b * places + place, mask=(rows > 0) & (j < n), other=-1)
    tl.store(ids + bh * n + j, block, mask=j < n)
    tl.store(fill + bh * n + j, rows, mask=j < n)


def launch(selected, requests, block_size) -> tuple[Tensor, Tensor]:
    (length, table, sink, window), (count, heads, k) = requests, selected.shape
    ids, fill = fake(selected, requests, block_size)
    n = ids.shape[2]
    _list[(count * heads, cdiv(n, LISTED))](
        selected, length, table, ids, fill, heads, table.shape[1], n, k, sink, window, P=block_size,
        IN_RING=near_blocks(window, block_size), LISTED=LISTED,
    )  # fmt: skip
    return ids, fill


def fake(selected, requests, block_size) -> tuple[Tensor, Tensor]:
    count, heads, k = selected.shape
    shape = (count, heads, listed(k, requests, block_size))
    return selected.new_empty(shape), selected.new_empty(shape)


list_blocks = register("list_blocks", reference, impls=(by_triton(launch),), fake=fake, check=check)
