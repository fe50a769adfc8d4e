"""Decide, per (row, kv head), whether this decode step retrieves, and let finished segments into the index if so.

It retrieves at a boundary: where the cosine between each query head and the same head of the step before, averaged over
all heads of the row (or with `per_head` over those of the kv head), is below `tau`; at the first step after a prompt;
and where the ring could not hold the token of the next step. `wanted` is what the predicated stages of this step read.

A boundary also cuts the generated tokens: the newest one begins a segment, unless the current one is shorter than
`shortest`; a segment of `longest` tokens ends in any case. Segments leave the ring for the index only when something is
retrieved, all that lie whole before `retired`: until then they stay in sight, so nothing is ever out of reach of both
attention and the last choice. On all other steps a program reads two queries and returns.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import chain, chained, next_power_of_2, tl, triton
from torchsparsekv.ops.index._segments import check_bounds, check_units, close, close_segments

SCHEMA = (
    "(Tensor q, Tensor ring, Tensor(a!) previous, Tensor(b!) seen, Tensor(c!) cuts, Tensor(d!) begun, "
    "Tensor(e!) frontier, Tensor(f!) units, Tensor(g!) first, Tensor(h!) centroid, Tensor(i!) wanted, "
    "Tensor(j!) retrievals, Tensor(k!) stats, Tensor length, Tensor retired, int sink, float tau, bool per_head, "
    "int shortest, int longest) -> ()"
)


def check(
    q, ring, previous, seen, cuts, begun, frontier, units, first, centroid, wanted, retrievals, stats, length, retired,
    sink, tau, per_head, shortest, longest,
) -> None:  # fmt: skip
    check_units(ring, cuts, begun, frontier, units, first, centroid, sink)
    check_bounds(shortest, longest)
    _check.one_query(q, ring)
    _check.same_dtype(q=q, ring=ring, previous=previous)
    _check.dtype((torch.int32,), seen=seen, wanted=wanted, retrievals=retrievals)
    _check.contiguous(previous=previous, seen=seen, wanted=wanted, retrievals=retrievals)
    _check.shape((q.shape[0], 2, q.shape[1], q.shape[3]), previous=previous)
    _check.shape(ring.shape[:2], seen=seen, wanted=wanted, retrievals=retrievals)
    _check.stats(stats, ring)
    _check.counters(q.shape[0], length=length, retired=retired)


def cosines(x: Tensor, y: Tensor) -> Tensor:
    """Along the last dimension, in fp32; 0 where a vector is zero."""
    x, y = x.float(), y.float()
    size = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return torch.where(size > 0, (x * y).sum(-1) / torch.where(size > 0, size, 1.0), 0.0)


def reference(
    q, ring, previous, seen, cuts, begun, frontier, units, first, centroid, wanted, retrievals, stats, length, retired,
    sink, tau, per_head, shortest, longest,
) -> None:  # fmt: skip
    heads, turn = ring.shape[1], cuts.shape[2]
    for b, (n, end) in enumerate(zip(length.tolist(), retired.tolist())):
        if n <= 0:
            wanted[b] = 0
            continue
        # Two places, used in turn: what one head writes here, the programs of other heads may still be reading there.
        alike = cosines(q[b, :, 0], previous[b, (n - 1) % 2])
        alike = alike.view(heads, -1).mean(1) if per_head else alike.mean().expand(heads)
        previous[b, n % 2] = q[b, :, 0]
        for h in range(heads):
            full = n + 1 - int(frontier[b, h]) > turn
            found = int(seen[b, h]) != n - 1 or bool(alike[h] < tau) or full
            size = n - 1 - int(begun[b, h])
            cut = (found and size >= shortest) or size >= longest
            if n - 1 >= sink:
                cuts[b, h, (n - 1 - sink) % turn] = cut
            if cut:
                begun[b, h] = n - 1
            if found:
                old, count = int(frontier[b, h]), int(units[b, h])
                args = (ring[b, h], cuts[b, h], first[b, h], centroid[b, h], old, end, count, sink, False)
                frontier[b, h], units[b, h] = close_segments(*args)
            seen[b, h], wanted[b, h] = n, found
            retrievals[b, h] += found
            stats[b, h, 2] += end - frontier[b, h]  # append counted what the clock leaves in the ring


@triton.jit
def _likeness(q, previous, n, h, q_h, PER_HEAD: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr,
              D: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    """The mean cosine of this step's query heads with the last step's; keeps the heads of this group for the next."""
    i, d = tl.arange(0, QP), tl.arange(0, DP)
    m = (i < Q)[:, None] & (d < D)[None, :]
    mine = (i >= h * G) & (i < (h + 1) * G)
    new = tl.load(q + i[:, None] * q_h + d[None, :], mask=m, other=0.0)
    at = i[:, None] * D + d[None, :]
    old = tl.load(previous + (n + 1) % 2 * Q * D + at, mask=m, other=0.0).to(tl.float32)
    tl.store(previous + n % 2 * Q * D + at, new, mask=m & mine[:, None])
    new = new.to(tl.float32)
    size = tl.sqrt(tl.sum(new * new, 1) * tl.sum(old * old, 1))
    cosine = tl.where(size > 0, tl.sum(new * old, 1) / tl.where(size > 0, size, 1.0), 0.0)
    if PER_HEAD:
        return tl.sum(tl.where(mine, cosine, 0.0), 0) / G
    return tl.sum(cosine, 0) / Q


@triton.jit
def _boundary(
    q, ring, previous, seen, cuts, begun, frontier, units, first, centroid, wanted, retrievals, stats, length, retired,
    q_b, q_h, heads, turn, most, sink, tau, shortest, longest, PER_HEAD: tl.constexpr, G: tl.constexpr,
    Q: tl.constexpr, QP: tl.constexpr, P: tl.constexpr, LONGEST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    n, end = tl.load(length + b), tl.load(retired + b)
    found = tl.full((), False, tl.int1)
    if n > 0:
        alike = _likeness(q + b * q_b, previous + b * 2 * Q * D, n, h, q_h, PER_HEAD, G, Q, QP, D, DP)
        old, start = tl.load(frontier + bh), tl.load(begun + bh)
        found = (tl.load(seen + bh) != n - 1) | (alike < tau) | (n + 1 - old > turn)
        size = n - 1 - start
        cut = (found & (size >= shortest)) | (size >= longest)
        cuts += bh * turn
        tl.store(cuts + tl.maximum(n - 1 - sink, 0) % turn, cut.to(tl.int32), mask=n - 1 >= sink)
        tl.store(begun + bh, tl.where(cut, n - 1, start))
        tl.store(seen + bh, n)
        tl.debug_barrier()
        if found:
            rows, of = ring + bh * (turn + sink) * 2 * D, first + bh * (most + 1)
            old, unit = close(
                rows, cuts, of, centroid + bh * most * D, old, end, tl.load(units + bh), sink, turn, False, P, LONGEST,
                D, DP,
            )  # fmt: skip
            tl.store(units + bh, unit)
            tl.store(frontier + bh, old)
            tl.store(retrievals + bh, tl.load(retrievals + bh) + 1)
        near = stats + bh * 5 + 2
        tl.store(near, tl.load(near) + (end - old))
    tl.store(wanted + bh, found.to(tl.int32))


def cuda(
    q, ring, previous, seen, cuts, begun, frontier, units, first, centroid, wanted, retrievals, stats, length, retired,
    sink, tau, per_head, shortest, longest,
) -> None:  # fmt: skip
    batch, heads, _, _, d = ring.shape
    q_heads, turn = q.shape[1], cuts.shape[2]
    wide_q, wide_d = next_power_of_2(q_heads), next_power_of_2(d)
    _boundary[(batch * heads,)](
        q, ring, previous, seen, cuts, begun, frontier, units, first, centroid, wanted, retrievals, stats, length,
        retired, q.stride(0), q.stride(1), heads, turn, centroid.shape[2], sink, tau, shortest, longest,
        PER_HEAD=per_head, G=q_heads // heads, Q=q_heads, QP=wide_q, P=next_power_of_2(turn),
        LONGEST=next_power_of_2(longest), D=d, DP=wide_d, num_warps=min(16, max(4, wide_q * wide_d // 1024)),
        **chained(q.device, batch * heads),
    )  # fmt: skip


def fake(q: Tensor, *_) -> None: ...


find_boundary = register("find_boundary", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
