"""Choose the units that a step estimates by their means, and count the tokens that each mean stands for.

    left[u]    = tokens of unit u that are not retrieved
    estimated  = the best round(share * units) units with left > 0, by score; ties to the lower unit
    tokens[u]  = left[u] for an estimated unit, 0 for other units

`pick_units` retrieves by the same scores (ops/clusters/_unit_scores.py), so the estimated units follow the retrieved
ones. The budget may cut a unit. Then the mean of all its tokens stands for those that are not retrieved.

Launches, three per call:
    _logits   (row * kv head, parts): of _unit_scores.py
    _left     (row * kv head, chunks): the rank of each unit, and its tokens that are not retrieved
    _zone     (row * kv head): searches the rank that the best units reach, as pick_units.py does; 0 for units below it
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.clusters._unit_scores import UnitLogits, ranks_of, scores, sums_above
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.store.views import Candidates, Query

ONE = 1 << 16  # a share of all units
CHUNK, ZONE = 256, 2048  # units of a program of `_left`, and units that `_zone` loads at a time


def check(q, units, ids, share, scale) -> None:
    _check.heads(q, units.centroid)
    if not 0 <= share <= ONE:
        raise ValueError(f"share must be from 0 to {ONE}, which is all units, got {share}")


def reference(q: Query, units: Units, ids: Candidates, share: int, scale: float) -> Tensor:
    """How many tokens the mean of each unit stands for at this step.

    Args:
        q: [batch, q_heads, 1, dim].
        units: the index.
        ids: [batch, heads, candidates]: the retrieved pool rows in ascending order, -1 after them.
        share: of the units that are estimated, in parts of ONE.
        scale: of the logits.

    Returns:
        [batch, heads, units], int32; 0 for units that are not estimated.
    """
    first, centroid, unit_count = units
    x = q[:, :, 0].unflatten(1, (centroid.shape[1], -1))
    out = torch.zeros(centroid.shape[:3], dtype=torch.int32, device=q.device)
    for b, h in unit_count.nonzero().tolist():
        count, rows = int(unit_count[b, h]), ids[b, h][ids[b, h] >= 0]
        begin, end = first[b, h, :count, None], first[b, h, 1:][:count, None]
        left = (end - begin)[:, 0] - ((rows >= begin) & (rows < end)).sum(-1)
        best = scores(x[b, h], centroid[b, h, :count], scale).argsort(descending=True, stable=True)
        best = best[left[best] > 0][: count * share + ONE // 2 >> 16]
        out[b, h, best] = left[best].int()
    return out


@triton.jit
def _before(ids, x, n, ROUNDS: tl.constexpr):
    """How many of the `n` ids are below `x` [units]; -1 counts as the largest."""
    low, high = tl.zeros_like(x), tl.zeros_like(x) + n
    for _ in range(ROUNDS):
        middle = (low + high) // 2
        at = tl.load(ids + middle, mask=middle < n, other=-1)
        below = (middle < high) & (at >= 0) & (at < x)
        low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
    return low


@triton.jit
def _left(
    logits, tops, totals, first, unit_count, ids, ranks, out, capacity, n, parts, G: tl.constexpr, GR: tl.constexpr,
    PARTS: tl.constexpr, N: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    count, u = tl.load(unit_count + bh), tl.program_id(1) * N + tl.arange(0, N)
    live, starts, ids = u < count, first + bh * (capacity + 1) + u, ids + bh * n
    left = tl.zeros((N,), tl.int32)
    if tl.program_id(1) * N < count:
        begin, end = tl.load(starts, mask=live, other=0), tl.load(starts + 1, mask=live, other=0)
        left = end - begin - _before(ids, end, n, ROUNDS) + _before(ids, begin, n, ROUNDS)
        sums = bh * parts * G
        rank = ranks_of(logits + bh * capacity * G, tops + sums, totals + sums, u, live, parts, G, GR, PARTS)
        tl.store(ranks + bh * capacity + u, tl.where(left > 0, rank, -2147483648), mask=live)
    tl.store(out + bh * capacity + u, left, mask=u < capacity)


@triton.jit
def _zone(unit_count, ranks, out, capacity, share, N: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    count, i = tl.load(unit_count + bh), tl.arange(0, N)
    most = ((count.to(tl.int64) * share + 32768) >> 16).to(tl.int32)
    ranks, out = ranks + bh * capacity, out + bh * capacity
    found = tl.zeros((), tl.int32)
    lowest, highest = tl.full((), 2147483647, tl.int32), tl.full((), -2147483648, tl.int32)
    for offset in range(0, count, N):
        rank = tl.load(ranks + offset + i, mask=offset + i < count, other=-2147483648)
        there = rank > -2147483648
        found += tl.sum(there.to(tl.int32), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(there, rank, 2147483647), 0))
        highest = tl.maximum(highest, tl.max(rank, 0))
    if found > most:
        # At or above `low` lie as many units as are estimated, or more; at or above `high` fewer.
        low, high, above = lowest.to(tl.int64), highest.to(tl.int64) + 1, tl.zeros((), tl.uint32)
        while (high - low > 1) & (most > 0):
            sums = tl.zeros((8,), tl.uint32)
            for offset in range(0, count, N):
                rank = tl.load(ranks + offset + i, mask=offset + i < count, other=-2147483648)
                sums += sums_above(rank, (rank > -2147483648).to(tl.uint32), low, high)
            enough = sums >= most
            above = tl.max(tl.where(enough, 0, sums), 0)
            step = (high - low + 7) >> 3
            low += tl.sum(enough.to(tl.int32), 0) * step
            high = tl.minimum(low + step, high)
        cut = tl.where(most > 0, low, highest.to(tl.int64) + 1).to(tl.int64)
        room, before = most - above.to(tl.int32), tl.zeros((), tl.int32)
        for offset in range(0, count, N):
            rank = tl.load(ranks + offset + i, mask=offset + i < count, other=-2147483648).to(tl.int64)
            equal = (rank == cut).to(tl.int32)
            kept = (rank > cut) | ((equal != 0) & (before + tl.cumsum(equal, 0) <= room))
            tl.store(out + offset + i, 0, mask=(offset + i < count) & ~kept)
            before += tl.sum(equal, 0)


def launch(q, units, ids, share, scale) -> Tensor:
    first, centroid, unit_count = units
    (batch, heads, capacity), n = centroid.shape[:3], ids.shape[2]
    rows, found = batch * heads, UnitLogits(q, centroid, unit_count, unit_count, scale)
    ranks = torch.empty(rows * capacity, dtype=torch.int32, device=q.device)
    out, chunks = fake(q, units), cdiv(capacity, CHUNK)
    _left[(rows, chunks)](
        found.logits, found.tops, found.totals, first, unit_count, ids, ranks, out, capacity, n, found.parts, N=CHUNK,
        ROUNDS=n.bit_length(), num_warps=4, **found.shape(), **launch_early(q.device, rows * chunks),
    )  # fmt: skip
    _zone[(rows,)](
        unit_count, ranks, out, capacity, share, N=min(ZONE, next_power_of_2(capacity)), num_warps=8,
        **launch_early(q.device, rows),
    )  # fmt: skip
    return out


def fake(q, units, *_) -> Tensor:
    return q.new_empty(units.centroid.shape[:3], dtype=torch.int32)


estimate_units = register("estimate_units", reference, impls=(by_triton(launch),), fake=fake, check=check)
