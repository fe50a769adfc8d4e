"""Copy the ring into the pool before a prompt is stored, so that the pool alone holds the whole past of each row.

    pool[p] = ring[ring_row(p)]   for 0 <= p < sink and previous_ring_begin <= p < start

The tokens stay in the ring too. A token that leaves the ring later is written to the pool again, with the same values.

Args:
    store: the ring is read, the pool is changed.
    lengths: `start` is the end of the past.

Launches: cdiv(ring_rows, TILE) * batch * heads programs. None if the pool has no rows: the ring is the whole past then.
"""
import torch

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.store.rows import as_stored, copy_rows, ring_position_of, ring_row, row_at, row_width
from torchsparsekv.ops.store.views import KVStore, Lengths

TILE = 16


def reference(store: Changed[KVStore], lengths: Lengths) -> None:
    (ring, pool), sink = store, lengths.sink
    for b in range(ring.shape[0]):
        n0, n, old = (int(t[b]) for t in (lengths.start, lengths.length, lengths.previous_ring_begin))
        if n > 0 and pool.shape[2]:
            kept = torch.cat([torch.arange(min(n0, sink)), torch.arange(max(old, sink), max(n0, sink))])
            pool[b][:, kept] = as_stored(ring[b][:, ring_row(kept, sink, ring.shape[2])], pool)


@triton.jit(do_not_specialize=["ring_rows"])
def _flush(
    ring, pool, start, length, previous_ring_begin, heads, ring_rows, pool_rows, sink,
    D: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(1).to(tl.int64)
    b = bh // heads
    old = tl.load(previous_ring_begin + b)
    kept = tl.where(tl.load(length + b) > 0, tl.load(start + b), 0)  # 0 for a row past its capacity
    r = tl.program_id(0) * TILE + tl.arange(0, TILE)  # program_id(0): the only grid dimension that may exceed 65,535
    pos = ring_position_of(r, old, sink, ring_rows - sink)
    source, target = row_at(ring, bh, r, ring_rows, D), row_at(pool, bh, pos, pool_rows, D)
    copy_rows(source, target, (pos < kept) & (r < ring_rows), D, ROW)


def launch(store, lengths) -> None:
    ring, pool = store
    batch, heads, ring_rows, _, d = ring.shape
    if not pool.shape[2]:
        return
    _flush[(cdiv(ring_rows, TILE), batch * heads)](
        ring, pool, *lengths[:3], heads, ring_rows, pool.shape[2], lengths.sink, D=d, ROW=next_power_of_2(row_width(d)),
        TILE=TILE,
    )  # fmt: skip


flush_ring = register("flush_ring", reference, impls=(by_triton(launch),))
