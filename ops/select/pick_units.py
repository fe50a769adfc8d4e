"""Choose whole units by the attention their centroids get, best first, until a budget of tokens is full.

A unit's score is softmax(scale * q.centroid) over the units of the head, averaged over the query heads of the group
(compared by the logarithm of their sum, which cannot underflow). Units are taken by descending score, ties to the lower
one; of the one that does not fit any more the first rows are taken. Unit u holds the pool rows from first[u] up to
first[u + 1]. Returns those rows in ascending order, int32 [batch, kv_heads, budget], -1 behind them; of heads whose
`wanted` is 0, nothing but -1.

One kernel: programs share the centroids of a head, and the last one to finish chooses. No sort: the score at which the
budget is full is found by bisection, two bits a round, over the tokens of the units that reach it.
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
UNITS = 64  # centroids of a step: 16 KiB at head_dim 128
LANES = 2048  # units, or rows of the result, that the choosing program looks at together


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
    """Of one head: the logarithm of the summed softmax, q [group, head_dim] against centroids [units, head_dim]."""
    z = q.float() @ centroid.float().T * scale
    return (z - z.logsumexp(-1, keepdim=True)).logsumexp(0)


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
    """q.centroid of this program's share of the units, [units, GP]; its largest, and the sum of exponentials."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    x = tl.load(q + (h * G + g[None, :]) * q_h + d[:, None], mask=(g < G)[None, :] & (d < D)[:, None], other=0.0)
    top, total = tl.full((GP,), float("-inf"), tl.float32), tl.zeros((GP,), tl.float32)
    for tile in range(part, tl.cdiv(count, UNITS), parts):
        u = tile * UNITS + tl.arange(0, UNITS)
        live = (u < count)[:, None]
        c = tl.load(centroid + u.to(tl.int64)[:, None] * D + d[None, :], mask=live & (d < D)[None, :], other=0.0)
        z = tl.dot(c, x, input_precision="ieee") * scale
        tl.store(logits + u[:, None] * GP + g[None, :], z, mask=live)
        z = tl.where(live, z, float("-inf"))
        peak = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - peak) + tl.sum(tl.exp(z - peak[None, :]), 0)
        top = peak
    tl.store(tops + part * GP + g, top)
    tl.store(totals + part * GP + g, total)


@triton.jit
def _rank(logits, tops, totals, keys, count, parts, G: tl.constexpr, GP: tl.constexpr, PARTS: tl.constexpr,
          UNITS: tl.constexpr):  # fmt: skip
    """From logits to keys: integers above 0 in the order of the scores."""
    g, p = tl.arange(0, GP), tl.arange(0, PARTS)
    live = (p < parts)[:, None] & (g < G)[None, :]
    top = tl.load(tops + p[:, None] * GP + g[None, :], mask=live, other=float("-inf"))
    peak = tl.max(tl.where(live, top, float("-inf")), 0)
    safe = tl.where(g < G, peak, 0.0)
    total = tl.load(totals + p[:, None] * GP + g[None, :], mask=live, other=0.0)
    whole = safe + tl.log(tl.where(g < G, tl.sum(total * tl.exp(top - safe[None, :]), 0), 1.0))
    for at in range(0, count, UNITS):
        u = at + tl.arange(0, UNITS)
        m = (u < count)[:, None] & (g < G)[None, :]
        z = tl.load(logits + u[:, None] * GP + g[None, :], mask=m, other=0.0)
        z = tl.where((g < G)[None, :], z - whole[None, :], float("-inf"))
        best = tl.max(z, 1)
        score = best + tl.log(tl.sum(tl.exp(z - best[:, None]), 1))
        bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
        key = tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)
        tl.store(keys + u, key.to(tl.int32, bitcast=True), mask=u < count)


@triton.jit
def _tokens(keys, first, at, count, LANES: tl.constexpr):
    """Key, first row and number of tokens of the units from `at` on; key 0 and no token where there is none."""
    u = at + tl.arange(0, LANES)
    live = u < count
    key = tl.load(keys + u, mask=live, other=0).to(tl.uint32, bitcast=True)
    begin = tl.load(first + u, mask=live, other=0)
    return key, begin, tl.load(first + u + 1, mask=live, other=0) - begin


@triton.jit
def _threshold(keys, first, count, budget, LANES: tl.constexpr):
    """The largest key that `budget` tokens reach (0: there are fewer), and how many tokens exceed it."""
    threshold = tl.zeros((), tl.uint32)
    reach = tl.load(first + count) - tl.load(first)
    shift = tl.full((), 30, tl.int32)
    while (shift >= 0) & (reach > budget):
        unit = (tl.full((), 1, tl.uint32) << shift.to(tl.uint32)).to(tl.uint32)
        t1, t2, t3 = threshold + unit, threshold + 2 * unit, threshold + 3 * unit
        n1, n2, n3 = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
        for at in range(0, count, LANES):
            key, _, size = _tokens(keys, first, at, count, LANES)
            n1 += tl.sum(tl.where(key >= t1, size, 0), 0)
            n2 += tl.sum(tl.where(key >= t2, size, 0), 0)
            n3 += tl.sum(tl.where(key >= t3, size, 0), 0)
        threshold = tl.where(n3 >= budget, t3, tl.where(n2 >= budget, t2, tl.where(n1 >= budget, t1, threshold)))
        reach = tl.where(n3 >= budget, n3, tl.where(n2 >= budget, n2, tl.where(n1 >= budget, n1, reach)))
        shift -= 2
    above = tl.zeros((), tl.int32)
    for at in range(0, count, LANES):
        key, _, size = _tokens(keys, first, at, count, LANES)
        above += tl.sum(tl.where(key > threshold, size, 0), 0)
    return threshold, above


@triton.jit
def _write(keys, first, skips, out, count, threshold, above, budget, LANES: tl.constexpr):
    """The rows of the chosen units. Row number i of the result is i and the rows skipped before it, which `skips` has
    at the first row of every chosen unit and which only grow."""
    i = tl.arange(0, LANES)
    for at in range(0, budget, LANES):
        tl.store(skips + at + i, tl.zeros((LANES,), tl.int32), mask=at + i < budget)
    tl.debug_barrier()
    ties, filled = above, tl.zeros((), tl.int32)
    for at in range(0, count, LANES):
        key, begin, size = _tokens(keys, first, at, count, LANES)
        tie = tl.where(key == threshold, size, 0)
        room = tl.minimum(tl.maximum(budget - ties - (tl.cumsum(tie, 0) - tie), 0), size)
        take = tl.where(key > threshold, size, tl.where(key == threshold, room, 0))
        place = filled + tl.cumsum(take, 0) - take
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
    q, centroid, first, units, wanted, arrivals, out, logits, tops, totals, keys, skips, q_b, q_h, heads, most, budget,
    scale, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr,
    UNITS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    b, h = bh // heads, bh % heads
    count = tl.load(units + bh)
    out += bh * budget
    i = tl.arange(0, LANES)
    if (tl.load(wanted + bh) != 0) & (count > 0):
        logits, tops, totals = logits + bh * most * GP, tops + bh * parts * GP, totals + bh * parts * GP
        _logits(q + b * q_b, q_h, centroid + bh * most * D, h, count, logits, tops, totals, scale, G, GP, D, DP, UNITS)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + bh, 1) == parts - 1:  # every program of this head has written its logits
            first, keys = first + bh * (most + 1), keys + bh * most
            _rank(logits, tops, totals, keys, count, parts, G, GP, PARTS, UNITS)
            tl.debug_barrier()
            threshold, above = _threshold(keys, first, count, budget, LANES)
            _write(keys, first, skips + bh * budget, out, count, threshold, above, budget, LANES)
            tl.store(arrivals + bh, 0)
    else:
        for at in range(part * LANES, budget, parts * LANES):
            tl.store(out + at + i, tl.full((LANES,), -1, tl.int32), mask=at + i < budget)


def cuda(q, centroid, first, units, wanted, arrivals, budget, scale) -> Tensor:
    batch, heads, most, d = centroid.shape
    group = q.shape[1] // heads
    gp = max(16, next_power_of_2(group))
    parts = max(1, min(cdiv(most, UNITS), cdiv(2 * sm_count(q.device), batch * heads)))
    lanes = min(LANES, max(16, next_power_of_2(max(most, budget))))
    new = lambda n, dtype: torch.empty(batch * heads * n, dtype=dtype, device=q.device)  # noqa: E731
    out = torch.empty((batch, heads, budget), dtype=torch.int32, device=q.device)
    logits, sums = new(most * gp, torch.float32), new(2 * parts * gp, torch.float32).view(2, -1)
    keys, skips = new(most, torch.int32), new(budget, torch.int32)
    _pick[(batch * heads, parts)](
        q, centroid, first, units, wanted, arrivals, out, logits, sums[0], sums[1], keys, skips, q.stride(0),
        q.stride(1), heads, most, budget, scale, G=group, GP=gp, D=d, DP=next_power_of_2(d),
        PARTS=next_power_of_2(parts), UNITS=UNITS, LANES=lanes, num_warps=8,
        **chained(q.device, batch * heads * parts),
    )  # fmt: skip
    return out


def fake(q: Tensor, centroid: Tensor, first, units, wanted, arrivals, budget: int, scale) -> Tensor:
    return q.new_empty((*centroid.shape[:2], budget), dtype=torch.int32)


pick_units = register("pick_units", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
