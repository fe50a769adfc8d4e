"""Temporal segments: the runs of tokens, cut at boundaries, in which what was generated enters the index.

Per (row, kv head) the tokens of the pool from the sinks up to `frontier` are cut into units, in order. From `frontier`
on tokens are in the ring, where `cuts` says where segments begin (ops/store/views.py, Units and Segments).
"""
import torch

from torchsparsekv.ops._machinery.triton import tl, triton
from torchsparsekv.ops.clusters.views import Segments, Units
from torchsparsekv.ops.store.rows import keys_of, ring_row, row_at, turn_of
from torchsparsekv.ops.store.views import Ring


def unit_capacity(rows: int, interval: int, least: int) -> int:
    """The most units that `rows` tokens can make, where segments have `least` tokens and clusters so many on average.

    A prompt can make one segment that is shorter, of what was before it, and one cluster more than its share; both only
    if tokens retired since the prompt before, and those come in whole intervals.
    """
    return rows // least + 2 * (rows // interval) + 2


def check_bounds(shortest: int, longest: int) -> None:
    if not 1 <= shortest <= longest:
        raise ValueError(f"need 1 <= shortest <= longest, got {shortest}, {longest}")


def close_head(
    ring: Ring, units: Units, segments: Segments, at: tuple[int, int], end: int, sink: int, forced: bool
) -> int:
    """Of one head `at` (row, kv head): the segments from the frontier on that end by `end` become units; with `forced`
    the last one ends there. Returns where the frontier is to be."""
    ring, first, centroid, cuts = ring[at], units.first[at], units.centroid[at], segments.cuts[at]
    start, unit = int(segments.frontier[at]), int(units.unit_count[at])
    marks = [p for p in range(start + 1, end + 1) if cuts[(p - sink) % len(cuts)] or (forced and p == end)]
    for stop in marks:
        rows = ring_row(torch.arange(start, stop, device=ring.device), sink, ring.shape[0])
        centroid[unit] = keys_of(ring[rows]).float().mean(0)
        start, unit = stop, unit + 1
        first[unit] = stop
    units.unit_count[at] = unit
    return start


@triton.jit
def close(
    ring, cuts, first, centroid, start, end, unit, sink, span, FORCED: tl.constexpr, P: tl.constexpr,
    LONGEST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """`close_head` in a kernel; the pointers are those of the head, `span` is the number of entries of `cuts`."""
    never: tl.constexpr = 2147483647
    pos = start + 1 + tl.arange(0, P)
    mark = tl.load(cuts + turn_of(pos, sink, span), mask=pos <= end, other=0) != 0
    if FORCED:
        mark = mark | (pos == end)
    pos = tl.where(mark & (pos <= end), pos, never)
    stop = tl.min(pos, 0)
    i, d = tl.arange(0, LONGEST), tl.arange(0, DP)
    while stop < never:
        row = sink + turn_of(start + i, sink, span)
        m = (start + i < stop)[:, None] & (d < D)[None, :]
        x = tl.load(row_at(ring, 0, row[:, None], 0, D) + d[None, :], mask=m, other=0.0).to(tl.float32)
        mean = tl.sum(x, 0) / (stop - start).to(tl.float32)
        tl.store(centroid + unit.to(tl.int64) * D + d, mean, mask=d < D)
        unit += 1
        tl.store(first + unit, stop)
        start = stop
        stop = tl.min(tl.where(pos > start, pos, never), 0)
    return start, unit
