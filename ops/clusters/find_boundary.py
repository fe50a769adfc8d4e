"""Decide, per (row, kv head), whether this decode step retrieves, and let finished segments into the index if so.

It retrieves at a boundary: where the cosine between each query head and the same head of the step before, averaged over
all heads of the row (or with `per_head` over those of the kv head), is below `tau`; at the first step after a prompt;
and where the ring could not hold the token of the next step. `retrieve_now` is what the predicated stages of this step
read. With `memory` the query is held against more than the last one: what it is compared with moves to it by
1 - memory at every step and all the way where it retrieves, so with 1 it is the query of the last retrieval.

A boundary also cuts the generated tokens: the newest one begins a segment, unless the current one is shorter than
`shortest`; a segment of `longest` tokens ends in any case. Segments leave the ring for the index only when something is
retrieved, all that lie whole before where the rings begin: until then they stay in sight, so nothing is ever out of
reach of both attention and the last choice. On all other steps a program reads two queries and returns.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.clusters._segments import check_bounds, close, close_head
from torchsparsekv.ops.clusters.views import Boundaries, Segments, Trigger, Units
from torchsparsekv.ops.store.rows import IN_RING, add_count, count, row_at, turn_of
from torchsparsekv.ops.store.views import Lengths, Query, Ring, Stats


def check(q, ring, units, segments, trigger, stats, lengths, rule) -> None:
    _check.heads(q, ring)
    check_bounds(rule.shortest, rule.longest)
    if not 0 <= rule.memory <= 1:
        raise ValueError(f"memory must be from 0 to 1, got {rule.memory}")


def cosines(x: Tensor, y: Tensor) -> Tensor:
    """Along the last dimension, in fp32; 0 where a vector is zero."""
    x, y = x.float(), y.float()
    size = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return torch.where(size > 0, (x * y).sum(-1) / torch.where(size > 0, size, 1.0), 0.0)


def reference(
    q: Query, ring: Ring, units: Changed[Units], segments: Changed[Segments], trigger: Changed[Trigger],
    stats: Changed[Stats], lengths: Lengths, rule: Boundaries,
) -> None:  # fmt: skip
    heads, span, previous = ring.shape[1], segments.cuts.shape[2], trigger.previous
    for b, (n, end) in enumerate(zip(lengths.length.tolist(), lengths.ring_begin.tolist())):
        if n <= 0:
            trigger.retrieve_now[b] = 0
            continue
        # Two places, used in turn: what one head writes here, the programs of other heads may still be reading there.
        new, old = q[b, :, 0].unflatten(0, (heads, -1)), previous[b, (n - 1) % 2].unflatten(0, (heads, -1))
        alike = cosines(new, old)
        alike = alike.mean(1) if rule.per_head else alike.mean().expand(heads)
        for h in range(heads):
            full = n + 1 - int(segments.frontier[b, h]) > span
            found = int(trigger.seen[b, h]) != n - 1 or bool(alike[h] < rule.tau) or full
            previous[b, n % 2].unflatten(0, (heads, -1))[h] = new[h] if found else _moved(old[h], new[h], rule.memory)
            _cut(segments, (b, h), n, lengths.sink, found, rule)
            if found:
                segments.frontier[b, h] = close_head(ring, units, segments, (b, h), end, lengths.sink, False)
            trigger.seen[b, h], trigger.retrieve_now[b, h] = n, found
            trigger.retrievals[b, h] += found
            count(stats.counts[b, h], in_ring=end - int(segments.frontier[b, h]))  # append counted from where rings begin


def _moved(old: Tensor, new: Tensor, memory: float) -> Tensor:
    return memory * old.float() + (1 - memory) * new.float()


def _cut(segments: Segments, at: tuple[int, int], n: int, sink: int, found: bool, rule: Boundaries) -> None:
    """Whether the newest token begins a segment."""
    size = n - 1 - int(segments.segment_begin[at])
    cut = (found and size >= rule.shortest) or size >= rule.longest
    if n - 1 >= sink:
        segments.cuts[at][(n - 1 - sink) % segments.cuts.shape[2]] = cut
    if cut:
        segments.segment_begin[at] = n - 1


@triton.jit
def likeness(new, old, mine, PER_HEAD: tl.constexpr, G: tl.constexpr, Q: tl.constexpr):
    """The mean cosine of the query heads with what they are compared with; with PER_HEAD of those that are `mine`."""
    size = tl.sqrt(tl.sum(new * new, 1) * tl.sum(old * old, 1))
    cosine = tl.where(size > 0, tl.sum(new * old, 1) / tl.where(size > 0, size, 1.0), 0.0)
    if PER_HEAD:
        return tl.sum(tl.where(mine, cosine, 0.0), 0) / G
    return tl.sum(cosine, 0) / Q


@triton.jit
def _boundary(
    q, ring, first, centroid, unit_count, cuts, segment_begin, frontier, previous, seen, retrieve_now, retrievals,
    counts, length, ring_begin, q_b, q_h, heads, span, most, sink, tau, shortest, longest, memory,
    PER_HEAD: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, P: tl.constexpr,
    LONGEST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    n, end = tl.load(length + b), tl.load(ring_begin + b)
    found = tl.full((), False, tl.int1)
    if n > 0:
        i, d = tl.arange(0, QP), tl.arange(0, DP)
        m, mine = (i < Q)[:, None] & (d < D)[None, :], (i >= h * G) & (i < (h + 1) * G)
        new = tl.load(q + b * q_b + i[:, None] * q_h + d[None, :], mask=m, other=0.0).to(tl.float32)
        at = previous + b * 2 * Q * D + i[:, None] * D + d[None, :]
        past = tl.load(at + (n + 1) % 2 * Q * D, mask=m, other=0.0).to(tl.float32)
        alike = likeness(new, past, mine, PER_HEAD, G, Q)
        old, start = tl.load(frontier + bh), tl.load(segment_begin + bh)
        found = (tl.load(seen + bh) != n - 1) | (alike < tau) | (n + 1 - old > span)
        tl.debug_barrier()  # all warps have read what is written below
        # The programs of a row's heads write rows of their own here, each those of its group, into the half that no
        # program of this step reads. What `compute-sanitizer --tool racecheck` reports of the sums above, at shapes
        # with few query heads, is none of this: it watches shared memory alone. There are fewer query heads than the
        # warps cover, so several warps hold the same rows and leave the same partial sum at the same place of the
        # reduction.
        past = tl.where(found, new, memory * past + (1 - memory) * new)
        tl.store(at + n % 2 * Q * D, past.to(previous.dtype.element_ty), mask=m & mine[:, None])
        size = n - 1 - start
        cut = (found & (size >= shortest)) | (size >= longest)
        cuts += bh * span
        tl.store(cuts + turn_of(n - 1, sink, span), cut.to(tl.int32), mask=n - 1 >= sink)
        tl.store(segment_begin + bh, tl.where(cut, n - 1, start))
        tl.store(seen + bh, n)
        tl.debug_barrier()
        if found:
            old, unit = close(
                row_at(ring, bh, 0, span + sink, D), cuts, first + bh * (most + 1), centroid + bh * most * D, old, end,
                tl.load(unit_count + bh), sink, span, False, P, LONGEST, D, DP,
            )  # fmt: skip
            tl.debug_barrier()  # and how many units there were
            tl.store(unit_count + bh, unit)
            tl.store(frontier + bh, old)
            tl.store(retrievals + bh, tl.load(retrievals + bh) + 1)
        add_count(counts, bh, IN_RING, end - old)
    tl.store(retrieve_now + bh, found.to(tl.int32))


def launch(q, ring, units, segments, trigger, stats, lengths, rule) -> None:
    batch, heads, _, _, d = ring.shape
    q_heads, span = q.shape[1], segments.cuts.shape[2]
    wide_q, wide_d = next_power_of_2(q_heads), next_power_of_2(d)
    _boundary[(batch * heads,)](
        q, ring, *units, *segments, *trigger, stats.counts, lengths.length, lengths.ring_begin, q.stride(0),
        q.stride(1), heads, span, units.centroid.shape[2], lengths.sink, rule.tau, rule.shortest, rule.longest,
        rule.memory, PER_HEAD=rule.per_head, G=q_heads // heads, Q=q_heads, QP=wide_q, P=next_power_of_2(span),
        LONGEST=next_power_of_2(rule.longest), D=d, DP=wide_d, num_warps=min(16, max(4, wide_q * wide_d // 1024)),
        **launch_early(q.device, batch * heads),
    )  # fmt: skip


find_boundary = register("find_boundary", reference, impls=(by_triton(launch),), check=check)
