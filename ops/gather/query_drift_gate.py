"""Decide, per kv head, whether the step waits for the blocks that it selected, or fetches them for the next step.

    cosine = mean over the query heads of the group of cos(query now, query of the previous step)
    late   = cosine >= alike, and seen = length - 1, and (not at_once or no token leaves the ring)

A late head attends to the selection of the previous step, and prefetch_async brings the new one while later layers
compute (FreeKV, arXiv 2505.13109). All other heads wait, as without this op. `seen` is the length at the previous step,
so all heads wait at the first step after a prompt.

Tokens that leave the ring at this step are in no selection of the previous step. Late heads still see them in the ring,
which keeps them until the next step: their `frontier` is previous_ring_begin.

Args:
    q [batch, q_heads, 1, dim]
    ids [batch, heads, n]: the selection of this step.
    prefetch: changed: query, seen, now, later, frontier, waits and ids (ops/store/views.py).
    stats: in_ring grows by the tokens before ring_begin that late heads see in the ring.
    alike: the least cosine of a late head.
    at_once: no head is late at a step at which tokens leave the ring. For an index that puts such tokens into blocks
        that were selected before.

Launches: one program per (row, kv head).
"""
import torch

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.select._cosine import cosines, mean_cosine
from torchsparsekv.ops.store.rows import IN_RING, add_count, count
from torchsparsekv.ops.store.views import Candidates, Lengths, Prefetch, Query, Stats


def check(q, ids, prefetch, stats, lengths, alike, at_once) -> None:
    _check.heads(q, ids)


def reference(
    q: Query, ids: Candidates, prefetch: Changed[Prefetch], stats: Changed[Stats], lengths: Lengths, alike: float,
    at_once: bool,
) -> None:  # fmt: skip
    batch, heads, _ = ids.shape
    new = q[:, :, 0].unflatten(1, (heads, -1))
    found = cosines(new, prefetch.query.unflatten(1, (heads, -1))).mean(2)
    n, before, end = (t[:, None] for t in (lengths.length, lengths.previous_ring_begin, lengths.ring_begin))
    now = (prefetch.seen != n - 1) | ~(found >= alike) | (at_once & (before != end))
    live = (n > 0).expand(batch, heads)
    prefetch.now.copy_(now & live)
    prefetch.later.copy_(~now & live)
    prefetch.waits.add_(prefetch.now)
    prefetch.frontier.copy_(torch.where(prefetch.later > 0, before, end))
    count(stats.counts, in_ring=prefetch.later * (end - before))  # append counted the tokens from ring_begin on
    prefetch.seen.copy_(n.expand(batch, heads))
    prefetch.query.copy_(q[:, :, 0])
    prefetch.ids.copy_(ids)


@triton.jit
def _gate(
    q, ids, query, seen, now, later, frontier, waits, kept, counts, length, previous_ring_begin, ring_begin, q_b, q_h,
    heads, n_ids, alike, AT_ONCE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    i, d, j = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, N)
    live = (i < G)[:, None] & (d < D)[None, :]  # [GP, DP]
    x = tl.load(q + b * q_b + (h * G + i)[:, None] * q_h + d[None, :], mask=live, other=0.0)
    at = query + (bh * G + i)[:, None] * D + d[None, :]
    old = tl.load(at, mask=live, other=0.0).to(tl.float32)
    n, last_length = tl.load(length + b), tl.load(seen + bh)
    before, end, waited = tl.load(previous_ring_begin + b), tl.load(ring_begin + b), tl.load(waits + bh)
    tl.store(kept + bh * n_ids + j, tl.load(ids + bh * n_ids + j, mask=j < n_ids), mask=j < n_ids)
    late = (last_length == n - 1) & (mean_cosine(x.to(tl.float32), old, i < G, False, G, G) >= alike)
    if AT_ONCE:
        late &= before == end
    late &= n > 0
    waiting = (n > 0) & ~late
    tl.debug_barrier()  # all warps have read the state that is written below
    tl.store(at, x, mask=live)
    tl.store(seen + bh, n)
    tl.store(now + bh, waiting.to(tl.int32))
    tl.store(later + bh, late.to(tl.int32))
    tl.store(waits + bh, waited + waiting.to(tl.int32))
    tl.store(frontier + bh, tl.where(late, before, end))
    add_count(counts, bh, IN_RING, tl.where(late, end - before, 0))


def launch(q, ids, prefetch, stats, lengths, alike, at_once) -> None:
    batch, heads, n = ids.shape
    group, d = q.shape[1] // heads, q.shape[3]
    _gate[(batch * heads,)](
        q, ids, *prefetch[:7], stats.counts, lengths.length, lengths.previous_ring_begin, lengths.ring_begin,
        q.stride(0), q.stride(1), heads, n, alike, AT_ONCE=at_once, G=group, GP=next_power_of_2(group), D=d,
        DP=next_power_of_2(d), N=next_power_of_2(max(n, 1)), **launch_early(q.device, batch * heads),
    )  # fmt: skip


query_drift_gate = register("query_drift_gate", reference, impls=(by_triton(launch),), check=check)
