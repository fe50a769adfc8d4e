"""Count the ids of the retrievable keys of each row, where rows share one pool.

    counts[b, h, s, c] = number of positions p from `sink` up to ring_begin[b] with id_s of p = c

A row with a pool of its own counts when its keys leave the ring (encode_keys). With a shared pool a key may belong to
several rows, so each step counts the ids of each row anew.

Launches: `_count`, (row * kv head, parts of the row), after a fill with zeros. It reads the ids of the row once.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, sm_count, tl, triton
from torchsparsekv.ops.pariskv.rank_by_votes import ids_of_row
from torchsparsekv.ops.pariskv.views import Ids
from torchsparsekv.ops.store.tables import check_table, pool_row_of
from torchsparsekv.ops.store.views import BlockTable, Lengths

CHUNK = 1024  # keys counted at a time
RESIDENT = 4  # programs per multiprocessor


def check(ids, lengths, table, centroids) -> None:
    if table.ids is None:
        raise ValueError("rows with a pool of their own have their counts already: count_ids needs a table")
    check_table(ids, lengths.ring_begin.shape[0], table)


def reference(ids: Ids, lengths: Lengths, table: BlockTable, centroids: int) -> Tensor:
    """Count the ids of the retrievable keys of each row, where rows share one pool.

    Args:
        ids: the ids of all keys of the pool [1, heads, rows, spaces].
        lengths: positions per row.
        table: the blocks of each row.
        centroids: how many ids there are.

    Returns:
        [batch, heads, spaces, centroids], int32.
    """
    out = fake(ids, lengths, table, centroids).zero_()
    for b, end in enumerate(lengths.ring_begin.tolist()):
        if end > lengths.sink:
            found = ids_of_row(ids, table, b, lengths.sink, end).transpose(1, 2).long()
            out[b].scatter_add_(2, found, torch.ones_like(found, dtype=torch.int32))
    return out


@triton.jit
def _count(
    ids, counts, ring_begin, table, heads, rows, places, sink, B: tl.constexpr, SIZE: tl.constexpr,
    CHUNK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b = bh // heads
    end = tl.load(ring_begin + b)
    ids += bh % heads * rows * B
    counts += bh * B * SIZE
    c = tl.arange(0, SIZE)
    for first in range(sink + part * CHUNK, end, parts * CHUNK):
        position = first + tl.arange(0, CHUNK)
        live = position < end
        row = pool_row_of(table, b, places, position, live, PAGE)
        dead = CHUNK - tl.sum(live.to(tl.int32), 0)
        for space in tl.static_range(B):
            found = tl.histogram(tl.load(ids + row * B + space, mask=live, other=0).to(tl.int32), SIZE)
            found -= tl.where(c == 0, dead, 0)  # keys that are not there were counted as id 0
            tl.atomic_add(counts + space * SIZE + c, found, mask=found > 0)


def launch(ids, lengths, table, centroids) -> Tensor:
    out = fake(ids, lengths, table, centroids).zero_()
    batch, heads, spaces, size = out.shape
    places = table.ids.shape[1]
    chunk = min(CHUNK, max(16, next_power_of_2(places * table.block_size)))
    parts = max(1, min(cdiv(places * table.block_size, chunk), cdiv(RESIDENT * sm_count(out.device), batch * heads)))
    _count[(batch * heads, parts)](
        ids, out, lengths.ring_begin, table.ids, heads, ids.shape[2], places, lengths.sink, B=spaces,
        SIZE=size, CHUNK=chunk, PAGE=table.block_size, num_warps=4,
    )  # fmt: skip
    return out


def fake(ids, lengths, table, centroids) -> Tensor:
    batch, heads, spaces = lengths.ring_begin.shape[0], ids.shape[1], ids.shape[3]
    return ids.new_empty((batch, heads, spaces, centroids), dtype=torch.int32)


count_ids = register("count_ids", reference, impls=(by_triton(launch),), fake=fake, check=check)
