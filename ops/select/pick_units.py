"""Choose whole units by the attention their centroids get, best first, until a budget of tokens is full.

A unit's score is softmax(scale * q.centroid) over the units of the head, averaged over the query heads of the group
(compared by the logarithm of their sum, which cannot underflow). Units are taken by descending score, ties to the lower
one; of the one that does not fit any more the first rows are taken. Unit u holds the pool rows from first[u] up to
first[u + 1]. Returns those rows in ascending order, int32 [batch, kv_heads, budget], -1 behind them; of heads whose
`wanted` is 0, nothing but -1.

One kernel: programs share the centroids of a head, and the last one to finish chooses. No sort: the score at which the
budget is full is found by search, a quarter of the range a round, over the tokens of the units that reach it.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import cdiv, chain, chained, next_power_of_2, sm_count, tl, triton

SCHEMA = (
    "(Tensor q, Tensor centroid, Tensor first, Tensor units, Tensor wanted, Tensor(a!) arrivals, int budget, "
    "float scale) -> Tensor"
)
UNITS, BYTES = 64, 1 << 14  # centroids of a step at most, and what they take
# Units, or rows of the result, that the choosing program looks at together; more where it goes over them many times.
LANES, WIDE = 2048, 8192
MOST_ROWS = 1 << 21  # of a pool: the search adds three counts of its tokens in one integer


def check(q, centroid, first, units, wanted, arrivals, budget, scale) -> None:
    _check.one_query(q, centroid)
    _check.same_dtype(q=q, centroid=centroid)
    _check.dtype(_check.FLOATS, q=q)
    _check.dtype((torch.int32,), first=first, units=units, wanted=wanted, arrivals=arrivals)
    _check.contiguous(centroid=centroid, first=first, units=units, wanted=wanted, arrivals=arrivals)
    _check.shape((*centroid.shape[:2], centroid.shape[2] + 1), first=first)
    _check.shape(centroid.shape[:2], units=units, wanted=wanted, arrivals=arrivals)
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")


def scores(q: Tensor, centroid: Tensor, scale: float) -> Tensor:
    """Of one head: the logarithm of the summed softmax, q [group, head_dim] against centroids [units, head_dim].

    In fp64, then rounded: vectorised loops end in scalar ones that round otherwise, and equal units must stay equal.
    """
    z = (q.float() @ centroid.float().T * scale).double()
    return (z - z.logsumexp(-1, keepdim=True)).logsumexp(0).float()


def reference(q, centroid, first, units, wanted, arrivals, budget, scale) -> Tensor:
    x = q[:, :, 0].unflatten(1, (centroid.shape[1], -1))
    out = torch.full((*centroid.shape[:2], budget), -1, dtype=torch.int32, device=q.device)
    for b, h in (wanted * units != 0).nonzero().tolist():
        count = int(units[b, h])
        best = scores(x[b, h], centroid[b, h, :count], scale).argsort(descending=True, stable=True)
        begin, end = first[b, h, best], first[b, h, best + 1]
        room = (budget - (end - begin).cumsum(0) + (end - begin)).clamp(min=0)
        rows = [torch.arange(int(i), min(int(j), int(i + r))) for i, j, r in zip(begin, end, room)]
        chosen = torch.cat(rows).sort().values
        out[b, h, : len(chosen)] = chosen
    return out


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _logits(
    q, q_h, centroid, h, count, logits, tops, totals, scale, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """q.centroid of this program's share of the units, [units, G]; its largest, and the sum of exponentials."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    x = tl.load(q + (h * G + g[None, :]) * q_h + d[:, None], mask=(g < G)[None, :] & (d < D)[:, None], other=0.0)
    top, total = tl.full((GP,), float("-inf"), tl.float32), tl.zeros((GP,), tl.float32)
    for tile in range(part, tl.cdiv(count, UNITS), parts):
        u = tile * UNITS + tl.arange(0, UNITS)
        live = (u < count)[:, None]
        c = tl.load(centroid + u.to(tl.int64)[:, None] * D + d[None, :], mask=live & (d < D)[None, :], other=0.0)
        z = tl.dot(c, x, input_precision="ieee") * scale
        tl.store(logits + u[:, None] * G + g[None, :], z, mask=live & (g < G)[None, :])
        z = tl.where(live, z, float("-inf"))
        peak = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - peak) + tl.sum(tl.exp(z - peak[None, :]), 0)
        top = peak
    tl.store(tops + part * G + g, top, mask=g < G)
    tl.store(totals + part * G + g, total, mask=g < G)


@triton.jit
def _rank(
    logits, tops, totals, first, ranks, count, parts, G: tl.constexpr, GR: tl.constexpr, PARTS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Of every unit an integer in the order of the scores, and below it its size: what the choice is made from.

    Returns the least and the largest of those integers.
    """
    g, p = tl.arange(0, GR), tl.arange(0, PARTS)
    live = (p < parts)[:, None] & (g < G)[None, :]
    top = tl.load(tops + p[:, None] * G + g[None, :], mask=live, other=float("-inf"))
    peak = tl.where(g < G, tl.max(top, 0), 0.0)
    total = tl.load(totals + p[:, None] * G + g[None, :], mask=live, other=0.0)
    whole = peak + tl.log(tl.where(g < G, tl.sum(total * tl.exp(top - peak[None, :]), 0), 1.0))
    least, most = tl.full((), 2147483647, tl.int32), tl.full((), -2147483648, tl.int32)
    for at in range(0, count, LANES):
        u = at + tl.arange(0, LANES)
        m = (u < count)[:, None] & (g < G)[None, :]
        z = tl.load(logits + u[:, None] * G + g[None, :], mask=m, other=0.0)
        z = tl.where((g < G)[None, :], z - whole[None, :], float("-inf"))
        best = tl.max(z, 1)
        score = best + tl.log(tl.sum(tl.exp(z - best[:, None]), 1))
        bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
        rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        least = tl.minimum(least, tl.min(tl.where(u < count, rank, 2147483647), 0))
        most = tl.maximum(most, tl.max(tl.where(u < count, rank, -2147483648), 0))
        size = tl.load(first + u + 1, mask=u < count, other=0) - tl.load(first + u, mask=u < count, other=0)
        tl.store(ranks + u, rank.to(tl.int64) << 32 | size.to(tl.int64), mask=u < count)
    return least.to(tl.int64), most.to(tl.int64)


@triton.jit
def _cut(ranks, count, budget, total, least, most, LANES: tl.constexpr):
    """The rank at which `budget` tokens are reached (below all of them if there are fewer), and the tokens above it."""
    low, high = least, most + 1  # tokens from `low` on fill the budget, those from `high` on do not
    above = tl.zeros((), tl.int64)
    if total <= budget:
        low, above = least - 1, above + total
        high = least
    while high - low > 1:
        step = (high - low + 3) // 4
        reach = tl.zeros((), tl.int64)  # three sums side by side, of less than MOST_ROWS each
        for at in range(0, count, LANES):
            u = at + tl.arange(0, LANES)
            both = tl.load(ranks + u, mask=u < count, other=0)
            rank, size = both >> 32, both & 0xFFFFFFFF
            near = tl.where(rank >= low + step, size, 0) + (tl.where(rank >= low + 2 * step, size, 0) << 21)
            reach += tl.sum(near + (tl.where(rank >= low + 3 * step, size, 0) << 42), 0)
        n1, n2, n3 = reach & 0x1FFFFF, (reach >> 21) & 0x1FFFFF, reach >> 42
        steps = (n1 >= budget).to(tl.int64) + (n2 >= budget).to(tl.int64) + (n3 >= budget).to(tl.int64)
        next_one = low + (steps + 1) * step
        if (steps < 3) & (next_one < high):
            high = next_one
            above = tl.where(steps == 0, n1, tl.where(steps == 1, n2, n3))
        low += steps * step
    return low, above.to(tl.int32)


@triton.jit
def _write(ranks, first, skips, out, count, cut, above, budget, LANES: tl.constexpr):
    """The rows of the chosen units. Row number i of the result is i and the rows skipped before it, which `skips` has
    at the first row of every chosen unit and which only grow."""
    i = tl.arange(0, LANES)
    for at in range(0, budget, LANES):
        tl.store(skips + at + i, tl.zeros((LANES,), tl.int32), mask=at + i < budget)
    tl.debug_barrier()
    ties, filled = above, tl.zeros((), tl.int32)
    for at in range(0, count, LANES):
        u = at + i
        both = tl.load(ranks + u, mask=u < count, other=0)
        rank, size = both >> 32, (both & 0xFFFFFFFF).to(tl.int32)
        tie = tl.where(rank == cut, size, 0)
        room = tl.minimum(tl.maximum(budget - ties - (tl.cumsum(tie, 0) - tie), 0), size)
        take = tl.where(rank > cut, size, tl.where(rank == cut, room, 0))
        place = filled + tl.cumsum(take, 0) - take
        begin = tl.load(first + u, mask=u < count, other=0)
        tl.store(skips + place, begin - place, mask=take > 0)
        ties += tl.sum(tie, 0)
        filled += tl.sum(take, 0)
    tl.debug_barrier()
    before = tl.zeros((), tl.int32)
    for at in range(0, budget, LANES):
        skip = tl.load(skips + at + i, mask=at + i < budget, other=0)
        skip = tl.maximum(tl.associative_scan(skip, 0, _larger), before)
        before = tl.max(skip, 0)
        tl.store(out + at + i, tl.where(at + i < filled, at + i + skip, -1), mask=at + i < budget)


@triton.jit
def _pick(
    q, centroid, first, units, wanted, arrivals, out, logits, tops, totals, ranks, skips, q_b, q_h, heads, most, budget,
    scale, G: tl.constexpr, GP: tl.constexpr, GR: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PARTS: tl.constexpr, UNITS: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    b, h = bh // heads, bh % heads
    count = tl.load(units + bh)
    out += bh * budget
    if (tl.load(wanted + bh) != 0) & (count > 0):
        logits, tops, totals = logits + bh * most * G, tops + bh * parts * G, totals + bh * parts * G
        _logits(q + b * q_b, q_h, centroid + bh * most * D, h, count, logits, tops, totals, scale, G, GP, D, DP, UNITS)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + bh, 1) == parts - 1:  # every program of this head has written its logits
            first, ranks = first + bh * (most + 1), ranks + bh * most
            low, high = _rank(logits, tops, totals, first, ranks, count, parts, G, GR, PARTS, LANES)
            tl.debug_barrier()
            total = tl.load(first + count) - tl.load(first)
            cut, above = _cut(ranks, count, budget, total, low, high, WIDE)
            _write(ranks, first, skips + bh * budget, out, count, cut, above, budget, LANES)
            tl.store(arrivals + bh, 0)
    else:
        i = tl.arange(0, LANES)
        for at in range(part * LANES, budget, parts * LANES):
            tl.store(out + at + i, tl.full((LANES,), -1, tl.int32), mask=at + i < budget)


def cuda(q, centroid, first, units, wanted, arrivals, budget, scale) -> Tensor:
    batch, heads, most, d = centroid.shape
    group = q.shape[1] // heads
    # One wave: a program with registers for the choice has an SM to itself.
    parts = max(1, min(cdiv(most, UNITS), sm_count(q.device) // (batch * heads)))
    wide = next_power_of_2(d)
    step = min(UNITS, BYTES // (wide * q.element_size()))
    lanes = max(16, next_power_of_2(max(most, budget)))
    new = lambda n, dtype: torch.empty(batch * heads * n, dtype=dtype, device=q.device)  # noqa: E731
    out = torch.empty((batch, heads, budget), dtype=torch.int32, device=q.device)
    logits, sums = new(most * group, torch.float32), new(2 * parts * group, torch.float32).view(2, -1)
    ranks, skips = new(most, torch.int64), new(budget, torch.int32)
    _pick[(batch * heads, parts)](
        q, centroid, first, units, wanted, arrivals, out, logits, sums[0], sums[1], ranks, skips, q.stride(0),
        q.stride(1), heads, most, budget, scale, G=group, GP=max(16, next_power_of_2(group)),
        GR=next_power_of_2(group), D=d, DP=wide, PARTS=next_power_of_2(parts), UNITS=step,
        LANES=min(lanes, LANES), WIDE=min(lanes, WIDE), num_warps=16,
        **chained(q.device, batch * heads * parts),
    )  # fmt: skip
    return out


def fake(q: Tensor, centroid: Tensor, first, units, wanted, arrivals, budget: int, scale) -> Tensor:
    return q.new_empty((*centroid.shape[:2], budget), dtype=torch.int32)


pick_units = register("pick_units", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
