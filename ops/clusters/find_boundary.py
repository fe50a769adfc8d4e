"""Decide, per (row, kv head), whether this decode step retrieves; if it does, move finished segments into the index.

    r = mean over query heads of cos(q, previous)        over all query heads of the row, or per kv head
    boundary = r < tau, or the first step after a prompt, or the ring cannot hold the token of the next step
    retrieve_now = boundary
    previous = q at a boundary, else memory * previous + (1 - memory) * q

With memory = 0 a query is compared with the query of the last step, with memory = 1 with that of the last retrieval.

Cuts: at a boundary the newest token begins a segment, unless the current segment has fewer than `shortest` tokens. A
segment of `longest` tokens always ends. A head that retrieves moves every segment that ends before `ring_begin` into
the index. Until then the segments stay in the ring, so every token can be attended to at every step.

Launches: `_boundary`, one program per (row, kv head). Without a boundary a program reads two queries, writes one and
the cut, and returns.

LouisKV, section 4.1 (semantic-aware adaptive retrieval) and section 4.2 (decode stage).
"""
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.clusters._segments import check_bounds, close, close_head
from torchsparsekv.ops.clusters.views import Boundaries, Segments, Trigger, Units
from torchsparsekv.ops.select._cosine import cosines, mean_cosine
from torchsparsekv.ops.store.rows import IN_RING, add_count, count, row_at, turn_of
from torchsparsekv.ops.store.views import Lengths, Query, Ring, Stats


def check(q, ring, units, segments, trigger, stats, lengths, rule) -> None:
    _check.heads(q, ring)
    check_bounds(rule.shortest, rule.longest)
    if not 0 <= rule.memory <= 1:
        raise ValueError(f"memory must be from 0 to 1, got {rule.memory}")


def reference(
    q: Query, ring: Ring, units: Changed[Units], segments: Changed[Segments], trigger: Changed[Trigger],
    stats: Changed[Stats], lengths: Lengths, rule: Boundaries,
) -> None:  # fmt: skip
    """Find boundaries and close segments, for one decode step.

    Args:
        q: [batch, q_heads, 1, dim], the queries of this step.
        ring: [batch, heads, ring_rows, 2, dim], with the token of this step.
        units: the index; gets the segments that leave the ring.
        segments: cuts, newest segment and frontier.
        trigger: the query to compare with, and the decision of this step.
        stats: counters; `append` counted the ring from `ring_begin` on; this op adds the tokens from the frontier up to
            `ring_begin`.
        lengths: positions per row.
        rule: tau, per_head, shortest, longest, memory.
    """
    heads, span, previous = ring.shape[1], segments.cuts.shape[2], trigger.previous
    for b, (n, end) in enumerate(zip(lengths.length.tolist(), lengths.ring_begin.tolist())):
        if n <= 0:
            trigger.retrieve_now[b] = 0
            continue
        # The step reads one half of `previous` and writes the other: programs of other heads may still be reading.
        new, old = q[b, :, 0].unflatten(0, (heads, -1)), previous[b, (n - 1) % 2].unflatten(0, (heads, -1))
        cosine = cosines(new, old)
        cosine = cosine.mean(1) if rule.per_head else cosine.mean().expand(heads)
        for h in range(heads):
            full = n + 1 - int(segments.frontier[b, h]) > span
            boundary = int(trigger.seen[b, h]) != n - 1 or bool(cosine[h] < rule.tau) or full
            compared = new[h] if boundary else _blend(old[h], new[h], rule.memory)
            previous[b, n % 2].unflatten(0, (heads, -1))[h] = compared
            _cut(segments, (b, h), n, lengths.sink, boundary, rule)
            if boundary:
                segments.frontier[b, h] = close_head(ring, units, segments, (b, h), end, lengths.sink, False)
            trigger.seen[b, h], trigger.retrieve_now[b, h] = n, boundary
            trigger.retrievals[b, h] += boundary
            count(stats.counts[b, h], in_ring=end - int(segments.frontier[b, h]))


def _blend(old: Tensor, new: Tensor, memory: float) -> Tensor:
    return memory * old + (1 - memory) * new.float()


def _cut(segments: Segments, head: tuple[int, int], n: int, sink: int, boundary: bool, rule: Boundaries) -> None:
    """Mark in `cuts` whether the newest token begins a segment, and set `segment_begin` if it does."""
    size = n - 1 - int(segments.segment_begin[head])
    cut = (boundary and size >= rule.shortest) or size >= rule.longest
    if n - 1 >= sink:
        segments.cuts[head][(n - 1 - sink) % segments.cuts.shape[2]] = cut
    if cut:
        segments.segment_begin[head] = n - 1


@triton.jit
def _boundary(
    q, ring, first, centroid, unit_count, cuts, segment_begin, frontier, previous, seen, retrieve_now, retrievals,
    counts, length, ring_begin, q_b, q_h, heads, span, capacity, sink, tau, shortest, longest, memory,
    PER_HEAD: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, P: tl.constexpr,
    LONGEST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    n, end = tl.load(length + b), tl.load(ring_begin + b)
    boundary = tl.full((), False, tl.int1)
    if n > 0:
        i, d = tl.arange(0, QP), tl.arange(0, DP)
        mask, in_group = (i < Q)[:, None] & (d < D)[None, :], (i >= h * G) & (i < (h + 1) * G)
        new = tl.load(q + b * q_b + i[:, None] * q_h + d[None, :], mask=mask, other=0.0).to(tl.float32)  # [QP, DP]
        previous_at = previous + b * 2 * Q * D + i[:, None] * D + d[None, :]
        compared = tl.load(previous_at + (n + 1) % 2 * Q * D, mask=mask, other=0.0)
        cosine = mean_cosine(new, compared, in_group, PER_HEAD, G, Q)
        begin, start = tl.load(frontier + bh), tl.load(segment_begin + bh)
        boundary = (tl.load(seen + bh) != n - 1) | (cosine < tau) | (n + 1 - begin > span)
        tl.debug_barrier()  # all warps have read `seen`, `frontier` and `segment_begin`, which are written below
        # Each program writes the query heads of its own group, into the half that no program of this step reads.
        # `compute-sanitizer --tool racecheck` reports a race in the sums of `mean_cosine`, at shapes with few query
        # heads. It is benign: several warps hold the same rows, and store the same partial sum at the same place.
        compared = tl.where(boundary, new, memory * compared + (1 - memory) * new)
        tl.store(previous_at + n % 2 * Q * D, compared, mask=mask & in_group[:, None])
        size = n - 1 - start
        cut = (boundary & (size >= shortest)) | (size >= longest)
        cuts += bh * span
        tl.store(cuts + turn_of(n - 1, sink, span), cut.to(tl.int32), mask=n - 1 >= sink)
        tl.store(segment_begin + bh, tl.where(cut, n - 1, start))
        tl.store(seen + bh, n)
        tl.debug_barrier()
        if boundary:
            begin, unit = close(
                row_at(ring, bh, 0, span + sink, D), cuts, first + bh * (capacity + 1), centroid + bh * capacity * D,
                begin, end, tl.load(unit_count + bh), sink, span, False, P, LONGEST, D, DP,
            )  # fmt: skip
            tl.debug_barrier()  # all warps have read `unit_count`
            tl.store(unit_count + bh, unit)
            tl.store(frontier + bh, begin)
            tl.store(retrievals + bh, tl.load(retrievals + bh) + 1)
        add_count(counts, bh, IN_RING, end - begin)
    tl.store(retrieve_now + bh, boundary.to(tl.int32))


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
