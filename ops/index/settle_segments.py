"""Before a prompt is stored: close the segments that were in the ring, and begin new ones behind what retires.

The tokens from `frontier` on that are older than the prompt and retire with it become units as they were cut, the last
one ending where the prompt or the ring begins. What stays in the ring is cut every `longest` tokens from `retired` on,
whether it is of this prompt or older. Afterwards `frontier` is `retired`: if tokens of the prompt itself retire,
ops/index/cluster_keys.py makes units of them next.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import next_power_of_2, tl, triton
from torchsparsekv.ops.index._segments import check_bounds, check_units, close, close_segments

SCHEMA = (
    "(Tensor ring, Tensor(a!) cuts, Tensor(b!) begun, Tensor(c!) frontier, Tensor(d!) units, Tensor(e!) first, "
    "Tensor(f!) centroid, Tensor start, Tensor length, Tensor retired, int sink, int longest) -> ()"
)


def check(ring, cuts, begun, frontier, units, first, centroid, start, length, retired, sink, longest) -> None:
    check_units(ring, cuts, begun, frontier, units, first, centroid, sink)
    check_bounds(1, longest)
    _check.counters(ring.shape[0], start=start, length=length, retired=retired)


def reference(ring, cuts, begun, frontier, units, first, centroid, start, length, retired, sink, longest) -> None:
    turn = cuts.shape[2]
    for b, (n0, n, end) in enumerate(torch.stack([start, length, retired], 1).tolist()):
        if n <= 0:
            continue
        for h in range(ring.shape[1]):
            old, count = int(frontier[b, h]), int(units[b, h])
            args = (ring[b, h], cuts[b, h], first[b, h], centroid[b, h], old, min(n0, end), count, sink, True)
            units[b, h] = close_segments(*args)[1]
        at = torch.arange(turn, device=cuts.device)
        cuts[b] = (at + sink - end) % turn % longest == 0
        begun[b] = end + max(n - 1 - end, 0) // longest * longest
        frontier[b] = end


@triton.jit
def _settle(
    ring, cuts, begun, frontier, units, first, centroid, start, length, retired, heads, turn, most, sink, longest,
    P: tl.constexpr, LONGEST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    n0, n, end = tl.load(start + b), tl.load(length + b), tl.load(retired + b)
    if n > 0:
        cuts += bh * turn
        rows, of = ring + bh * (turn + sink) * 2 * D, first + bh * (most + 1)
        _, unit = close(
            rows, cuts, of, centroid + bh * most * D, tl.load(frontier + bh), tl.minimum(n0, end), tl.load(units + bh),
            sink, turn, True, P, LONGEST, D, DP,
        )  # fmt: skip
        tl.store(units + bh, unit)
        tl.debug_barrier()
        at = tl.arange(0, P)
        mark = ((at + sink - end) % turn + turn) % turn % longest == 0
        tl.store(cuts + at, mark.to(tl.int32), mask=at < turn)
        tl.store(begun + bh, end + tl.maximum(n - 1 - end, 0) // longest * longest)
        tl.store(frontier + bh, end)


def cuda(ring, cuts, begun, frontier, units, first, centroid, start, length, retired, sink, longest) -> None:
    batch, heads, _, _, d = ring.shape
    turn = cuts.shape[2]
    _settle[(batch * heads,)](
        ring, cuts, begun, frontier, units, first, centroid, start, length, retired, heads, turn, centroid.shape[2],
        sink, longest, P=next_power_of_2(turn), LONGEST=next_power_of_2(longest), D=d, DP=next_power_of_2(d),
    )  # fmt: skip


def fake(ring: Tensor, *_) -> None: ...


settle_segments = register("settle_segments", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
