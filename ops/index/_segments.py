"""Temporal segments: the runs of tokens, cut at boundaries, in which what was generated enters the index.

Per (row, kv head) the tokens of the pool from the sinks up to `frontier` are cut into units, in order: unit u holds the
rows from first[u] up to first[u + 1], `units` says how many there are, centroid[u] is the mean of their keys. From
`frontier` on tokens are in the ring; `cuts`, one entry for each of its rows behind the sinks, marks where a segment
begins.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._triton import tl, triton
from torchsparsekv.ops.index.append import ring_row


def unit_capacity(rows: int, interval: int, least: int) -> int:
    """The most units that `rows` tokens can make, where segments have `least` tokens and clusters so many on average.

    A prompt can make one segment that is shorter, of what was before it, and one cluster more than its share; both only
    if tokens retired since the prompt before, and those come in whole intervals.
    """
    return rows // least + 2 * (rows // interval) + 2


def check_units(ring: Tensor, cuts: Tensor, begun: Tensor, frontier: Tensor, units: Tensor, first, centroid, sink: int):
    lead, most, d = ring.shape[:2], centroid.shape[2], ring.shape[-1]
    _check.rows(ring)
    _check.dtype((torch.int32,), cuts=cuts, begun=begun, frontier=frontier, units=units, first=first)
    _check.same_dtype(ring=ring, centroid=centroid)
    _check.contiguous(cuts=cuts, begun=begun, frontier=frontier, units=units, first=first, centroid=centroid)
    _check.shape((*lead, ring.shape[2] - sink), cuts=cuts)
    _check.shape(lead, begun=begun, frontier=frontier, units=units)
    _check.shape((*lead, most + 1), first=first)
    _check.shape((*lead, most, d), centroid=centroid)


def check_bounds(shortest: int, longest: int) -> None:
    if not 1 <= shortest <= longest:
        raise ValueError(f"need 1 <= shortest <= longest, got {shortest}, {longest}")


def close_segments(
    ring: Tensor, cuts: Tensor, first: Tensor, centroid: Tensor, start: int, end: int, unit: int, sink: int,
    forced: bool,
) -> tuple[int, int]:  # fmt: skip
    """Of one head: the segments from `start` that end by `end` become units; with `forced` the last ends there.

    Returns the new frontier and the new number of units.
    """
    marks = [p for p in range(start + 1, end + 1) if cuts[(p - sink) % len(cuts)] or (forced and p == end)]
    for stop in marks:
        at = ring_row(torch.arange(start, stop, device=ring.device), sink, ring.shape[0])
        centroid[unit] = ring[at, 0].float().mean(0)
        start, unit = stop, unit + 1
        first[unit] = stop
    return start, unit


@triton.jit
def close(
    ring, cuts, first, centroid, start, end, unit, sink, turn, FORCED: tl.constexpr, P: tl.constexpr,
    LONGEST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """`close_segments` in a kernel; the pointers are those of the head, `turn` is the number of entries of `cuts`."""
    never: tl.constexpr = 2147483647
    pos = start + 1 + tl.arange(0, P)
    mark = tl.load(cuts + tl.maximum(pos - sink, 0) % turn, mask=pos <= end, other=0) != 0
    if FORCED:
        mark = mark | (pos == end)
    pos = tl.where(mark & (pos <= end), pos, never)
    stop = tl.min(pos, 0)
    i, d = tl.arange(0, LONGEST), tl.arange(0, DP)
    while stop < never:
        row = sink + (start + i - sink) % turn
        m = (start + i < stop)[:, None] & (d < D)[None, :]
        x = tl.load(ring + row[:, None] * 2 * D + d[None, :], mask=m, other=0.0).to(tl.float32)
        mean = tl.sum(x, 0) / (stop - start).to(tl.float32)
        tl.store(centroid + unit.to(tl.int64) * D + d, mean, mask=d < D)
        unit += 1
        tl.store(first + unit, stop)
        start = stop
        stop = tl.min(tl.where(pos > start, pos, never), 0)
    return start, unit
