"""Count, for each request, how many of its retrievable keys have each centroid id, where rows share one pool.

    counts[b, h, s, c] = number of positions p with sink <= p < ring_begin[b] and ids[h, pool row of p, s] = c

encode_keys keeps these counts for a row with a pool of its own. Where rows share a pool, a row may hold another request
at each step. If the row still holds the same request (views.py, Counted), this op adds only the keys that became
retrievable since its last call. Otherwise it counts all keys of the row.

Launches: `_count`, (row * kv head, subspaces). In most steps no key is new, and it returns at once.
"""
import torch

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import (
    launch_early,
    load_early,
    next_power_of_2,
    tl,
    triton,
    wait_for_previous,
)
from torchsparsekv.ops.pariskv.rank_by_votes import ids_of_row
from torchsparsekv.ops.pariskv.views import Counted, Ids
from torchsparsekv.ops.store.tables import check_table, pool_row_of
from torchsparsekv.ops.store.views import BlockTable, Lengths

CHUNK = 1024  # keys counted at a time


def check(ids, lengths, table, counted) -> None:
    batch = lengths.ring_begin.shape[0]
    if table.ids is None:
        raise ValueError("rows with a pool of their own have their counts already: count_ids needs a table")
    check_table(ids, batch, table)
    if batch > counted.ends.shape[0]:
        raise ValueError(f"{batch} rows are more than the {counted.ends.shape[0]} requests whose counts are kept")
    if ids.shape[2] != counted.uses.shape[1] * table.block_size:
        blocks = counted.uses.shape[1]
        raise ValueError(f"{ids.shape[2]} rows of the pool are not {blocks} blocks of {table.block_size} tokens")


def reference(ids: Ids, lengths: Lengths, table: BlockTable, counted: Changed[Counted]) -> None:
    """Count, for each request, how many of its retrievable keys have each centroid id, where rows share one pool.

    Args:
        ids: the ids of all keys of the pool [1, heads, rows, spaces].
        lengths: positions per row.
        table: the blocks of each row.
        counted: `uses` is read. The first `batch` rows of all other fields are updated.
    """
    assert table.ids is not None
    sink, page = lengths.sink, table.block_size
    for b, end in enumerate(lengths.ring_begin.tolist()):
        for h, s in torch.cartesian_prod(*map(torch.arange, ids.shape[1::2])).tolist():
            at = b, h, s
            first = int(counted.ends[at])
            if sink < first <= end:
                block = table.ids[b, (first - 1) // page]
                same = block == counted.blocks[at] and counted.uses[0, block] == counted.uses_then[at]
            else:
                same = False
            if not same:
                counted.counts[at], first = 0, sink
            if end > first:
                found = ids_of_row(ids, table, b, first, end)[h, :, s].long()
                counted.counts[at] += found.bincount(minlength=counted.counts.shape[3]).int()
            upto = end if end > sink else 0
            block = int(table.ids[b, (upto - 1) // page]) if upto else 0
            counted.ends[at], counted.blocks[at], counted.uses_then[at] = upto, block, counted.uses[0, block]


@triton.jit
def _count(
    ids, counted, ring_begin, table, heads, rows, places, sink, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    bh, space, spaces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b = bh // heads
    at = bh * spaces + space
    end = load_early(ring_begin + b)
    c = tl.arange(0, SIZE)
    counts = counted.counts + at * SIZE + c
    wait_for_previous(PDL)
    first, last_block = tl.load(counted.ends + at), tl.load(counted.blocks + at)
    known = (first > sink) & (first <= end)
    block = tl.load(table + b * places + (first - 1) // PAGE, mask=known, other=0)
    known &= (block == last_block) & (tl.load(counted.uses + last_block) == tl.load(counted.uses_then + at))
    if not known or end > first:
        tl.debug_barrier()  # all warps have read what is stored below
        count = tl.where(known, tl.load(counts), 0)
        first = tl.where(known, first, sink)
        ids += bh % heads * rows * spaces + space
        for start in range(first, end, CHUNK):
            position = start + tl.arange(0, CHUNK)
            live = position < end
            row = pool_row_of(table, b, places, position, live, PAGE).to(tl.int64)
            count += tl.histogram(tl.load(ids + row * spaces, mask=live, other=0).to(tl.int32), SIZE)
            dead = CHUNK - tl.sum(live.to(tl.int32), 0)
            count -= tl.where(c == 0, dead, 0)  # keys that are not there were counted as id 0
        tl.store(counts, count)
        block = tl.load(table + b * places + (end - 1) // PAGE, mask=end > sink, other=0)
        tl.store(counted.ends + at, tl.where(end > sink, end, 0))
        tl.store(counted.blocks + at, block)
        tl.store(counted.uses_then + at, tl.load(counted.uses + block))


def launch(ids, lengths, table, counted) -> None:
    _, heads, rows, spaces = ids.shape
    batch, places = table.ids.shape
    _count[(batch * heads, spaces)](
        ids, counted, lengths.ring_begin, table.ids, heads, rows, places, lengths.sink, SIZE=counted.counts.shape[3],
        CHUNK=min(CHUNK, max(16, next_power_of_2(places * table.block_size))), PAGE=table.block_size, num_warps=4,
        **launch_early(ids.device, batch * heads * spaces),
    )  # fmt: skip


count_ids = register("count_ids", reference, impls=(by_triton(launch),), check=check)
