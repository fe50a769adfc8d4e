"""Close temporal segments: runs of generated tokens in the ring become units of the index.

Per (row, kv head), units cover the pool rows from the sinks up to `frontier`, in order. Tokens from `frontier` on are
in the ring, where `cuts` marks the tokens that begin a segment (ops/clusters/views.py, Units and Segments).
"""
import torch

from torchsparsekv.ops._machinery.triton import tl, triton
from torchsparsekv.ops.clusters.views import Segments, Units
from torchsparsekv.ops.store.rows import keys_of, ring_row, row_at, turn_of
from torchsparsekv.ops.store.views import Ring


def unit_capacity(rows: int, interval: int, least: int) -> int:
    """The most units that `rows` tokens can make, where a segment has at least and a cluster on average `least` tokens.

    Each prompt can add two units: one shorter segment of the tokens before the prompt, and one cluster more than its
    share. Both need tokens that left the ring since the prompt before, and tokens leave in whole intervals.
    """
    return rows // least + 2 * (rows // interval) + 2


def check_bounds(shortest: int, longest: int) -> None:
    if not 1 <= shortest <= longest:
        raise ValueError(f"need 1 <= shortest <= longest, got {shortest}, {longest}")


def close_head(
    ring: Ring, units: Units, segments: Segments, at: tuple[int, int], end: int, sink: int, forced: bool
) -> int:
    """Append to the units of head `at` (row, kv head) all segments from the frontier on that end by `end`.

    `forced` ends the last segment at `end`. Returns the new frontier: the position after the last new unit.
    """
    ring, first, centroid, cuts = ring[at], units.first[at], units.centroid[at], segments.cuts[at]
    start, unit = int(segments.frontier[at]), int(units.unit_count[at])
    ends = [p for p in range(start + 1, end + 1) if cuts[(p - sink) % len(cuts)] or (forced and p == end)]
    for stop in ends:
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
    """`close_head` in a kernel: returns the new frontier and the number of units.

    The pointers are those of the head, `span` is the number of entries of `cuts`, `start` is the frontier.
    """
    never: tl.constexpr = 2147483647
    pos = start + 1 + tl.arange(0, P)
    mark = tl.load(cuts + turn_of(pos, sink, span), mask=pos <= end, other=0) != 0  # [P]
    if FORCED:
        mark = mark | (pos == end)
    pos = tl.where(mark & (pos <= end), pos, never)
    stop = tl.min(pos, 0)
    i, d = tl.arange(0, LONGEST), tl.arange(0, DP)
    while stop < never:  # the tokens from `start` up to `stop` are one segment
        row = sink + turn_of(start + i, sink, span)
        mask = (start + i < stop)[:, None] & (d < D)[None, :]
        x = tl.load(row_at(ring, 0, row[:, None], 0, D) + d[None, :], mask=mask, other=0.0)  # [LONGEST, DP]
        x = x.to(tl.float32)
        mean = tl.sum(x, 0) / (stop - start).to(tl.float32)
        tl.store(centroid + unit.to(tl.int64) * D + d, mean, mask=d < D)
        unit += 1
        tl.store(first + unit, stop)
        start = stop
        stop = tl.min(tl.where(pos > start, pos, never), 0)
    return start, unit
