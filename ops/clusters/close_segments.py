"""Close the segments that leave the ring when a prompt comes, and cut the tokens that stay in the ring.

    old = the tokens in [frontier, min(start, ring_begin))    older than the prompt, and they leave the ring
    the segments of `old` become units; the last unit ends at min(start, ring_begin)
    the tokens from ring_begin on are cut into segments of `longest` tokens
    frontier = ring_begin

The tokens of the prompt itself that leave the ring, [start, ring_begin), become units in ops/clusters/cluster_keys.py,
the next op of a prompt.

Launches: `_close`, one program per (row, kv head). A row without new tokens changes nothing.

LouisKV, section 4.2 (decode stage).
"""
import torch

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import next_power_of_2, tl, triton
from torchsparsekv.ops.clusters._segments import check_bounds, close, close_head
from torchsparsekv.ops.clusters.views import Segments, Units
from torchsparsekv.ops.store.rows import row_at
from torchsparsekv.ops.store.views import Lengths, Ring


def check(ring, units, segments, lengths, longest) -> None:
    check_bounds(1, longest)


def reference(
    ring: Ring, units: Changed[Units], segments: Changed[Segments], lengths: Lengths, longest: int
) -> None:
    """Close segments before a prompt is stored.

    Args:
        ring: [batch, heads, ring_rows, 2, dim], before the prompt is stored.
        units: the index; gets the closed segments.
        segments: cuts, newest segment and frontier; all three are set anew.
        lengths: positions per row.
        longest: the most tokens of a segment.
    """
    span, sink = segments.cuts.shape[2], lengths.sink
    times = torch.stack([lengths.start, lengths.length, lengths.ring_begin], 1).tolist()
    for b, (n0, n, end) in enumerate(times):
        if n <= 0:
            continue
        for h in range(ring.shape[1]):
            close_head(ring, units, segments, (b, h), min(n0, end), sink, True)
        entry = torch.arange(span, device=ring.device)
        segments.cuts[b] = (entry + sink - end) % span % longest == 0
        segments.segment_begin[b] = end + max(n - 1 - end, 0) // longest * longest
        segments.frontier[b] = end


@triton.jit
def _close(
    ring, first, centroid, unit_count, cuts, segment_begin, frontier, start, length, ring_begin, heads, span, capacity,
    sink, longest, P: tl.constexpr, LONGEST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    n0, n, end = tl.load(start + b), tl.load(length + b), tl.load(ring_begin + b)
    if n > 0:
        cuts += bh * span
        _, unit = close(
            row_at(ring, bh, 0, span + sink, D), cuts, first + bh * (capacity + 1), centroid + bh * capacity * D,
            tl.load(frontier + bh), tl.minimum(n0, end), tl.load(unit_count + bh), sink, span, True, P, LONGEST, D, DP,
        )  # fmt: skip
        tl.debug_barrier()  # all warps have read `frontier`, `unit_count` and `cuts`, which are written below
        tl.store(unit_count + bh, unit)
        entry = tl.arange(0, P)
        mark = ((entry + sink - end) % span + span) % span % longest == 0
        tl.store(cuts + entry, mark.to(tl.int32), mask=entry < span)
        tl.store(segment_begin + bh, end + tl.maximum(n - 1 - end, 0) // longest * longest)
        tl.store(frontier + bh, end)


def launch(ring, units, segments, lengths, longest) -> None:
    batch, heads, _, _, d = ring.shape
    span = segments.cuts.shape[2]
    _close[(batch * heads,)](
        ring, *units, *segments, lengths.start, lengths.length, lengths.ring_begin, heads, span,
        units.centroid.shape[2], lengths.sink, longest, P=next_power_of_2(span), LONGEST=next_power_of_2(longest), D=d,
        DP=next_power_of_2(d),
    )  # fmt: skip


close_segments = register("close_segments", reference, impls=(by_triton(launch),), check=check)
