"""Before a prompt is stored: close the segments that were in the ring, and begin new ones behind what leaves it.

The tokens from the frontier on that are older than the prompt and leave the ring with it become units as they were cut,
the last one ending where the prompt or the ring begins. What stays in the ring is cut every `longest` tokens from where
it begins, whether it is of this prompt or older. Afterwards the frontier is there too: if tokens of the prompt itself
leave the ring, ops/clusters/cluster_keys.py makes units of them next.
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
    span, sink = segments.cuts.shape[2], lengths.sink
    times = torch.stack([lengths.start, lengths.length, lengths.ring_begin], 1).tolist()
    for b, (n0, n, end) in enumerate(times):
        if n <= 0:
            continue
        for h in range(ring.shape[1]):
            close_head(ring, units, segments, (b, h), min(n0, end), sink, True)
        at = torch.arange(span, device=ring.device)
        segments.cuts[b] = (at + sink - end) % span % longest == 0
        segments.segment_begin[b] = end + max(n - 1 - end, 0) // longest * longest
        segments.frontier[b] = end


@triton.jit
def _settle(
    ring, first, centroid, unit_count, cuts, segment_begin, frontier, start, length, ring_begin, heads, span, most,
    sink, longest, P: tl.constexpr, LONGEST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    n0, n, end = tl.load(start + b), tl.load(length + b), tl.load(ring_begin + b)
    if n > 0:
        cuts += bh * span
        _, unit = close(
            row_at(ring, bh, 0, span + sink, D), cuts, first + bh * (most + 1), centroid + bh * most * D,
            tl.load(frontier + bh), tl.minimum(n0, end), tl.load(unit_count + bh), sink, span, True, P, LONGEST, D, DP,
        )  # fmt: skip
        tl.debug_barrier()  # all warps have read what is written below
        tl.store(unit_count + bh, unit)
        at = tl.arange(0, P)
        mark = ((at + sink - end) % span + span) % span % longest == 0
        tl.store(cuts + at, mark.to(tl.int32), mask=at < span)
        tl.store(segment_begin + bh, end + tl.maximum(n - 1 - end, 0) // longest * longest)
        tl.store(frontier + bh, end)


def launch(ring, units, segments, lengths, longest) -> None:
    batch, heads, _, _, d = ring.shape
    span = segments.cuts.shape[2]
    _settle[(batch * heads,)](
        ring, *units, *segments, lengths.start, lengths.length, lengths.ring_begin, heads, span,
        units.centroid.shape[2], lengths.sink, longest, P=next_power_of_2(span), LONGEST=next_power_of_2(longest), D=d,
        DP=next_power_of_2(d),
    )  # fmt: skip


close_segments = register("close_segments", reference, impls=(by_triton(launch),), check=check)
