"""The scores of units: the attention that their centroids get, in torch and Triton.

    p[g, u] = softmax over units u of  scale * <q_g, centroid_u>       for every query head g of the group
    score[u] = log of sum_g p[g, u]                                    ordered as the mean over heads, no underflow
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import (
    cdiv,
    launch_early,
    next_power_of_2,
    sm_count,
    tl,
    triton,
    wait_for_previous,
)

UNITS, BYTES = 64, 1 << 14  # the most centroids, and the most bytes of them, that a program loads at a time
STAGES, RESIDENT = 4, 2  # loads in flight, and programs per multiprocessor: enough to keep the memory busy


def scores(q: Tensor, centroid: Tensor, scale: float) -> Tensor:
    """Scores of the units of one head: q [group, dim], centroids [units, dim] -> [units].

    Computed in fp64 and then rounded, so that equal units get equal scores: a vectorised loop in fp32 may round its
    last elements differently.
    """
    z = (q.float() @ centroid.float().T * scale).double()
    return (z - z.logsumexp(-1, keepdim=True)).logsumexp(0).float()


@triton.jit
def _logits(
    q, centroid, unit_count, retrieve_now, logits, tops, totals, q_b, q_h, heads, capacity, scale, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, UNITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits of this program's part of the units, [units, G]; per query head their maximum and exponential sum."""
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    b, h = bh // heads, bh % heads
    count = tl.load(unit_count + bh)
    if (tl.load(retrieve_now + bh) != 0) & (count > 0):
        g, d = tl.arange(0, GP), tl.arange(0, DP)
        x = q + b * q_b + (h * G + g[None, :]) * q_h + d[:, None]
        x = tl.load(x, mask=(g < G)[None, :] & (d < D)[:, None], other=0.0)  # [DP, GP]
        centroid, logits = centroid + bh * capacity * D, logits + bh * capacity * G
        # One running sum per unit of a tile: warps meet only once, after the loop. -1e38 keeps empty sums finite.
        top, total = tl.full((UNITS, GP), -1e38, tl.float32), tl.zeros((UNITS, GP), tl.float32)
        for tile in range(part, tl.cdiv(count, UNITS), parts):
            u = tile * UNITS + tl.arange(0, UNITS)
            live = (u < count)[:, None]
            c = tl.load(centroid + u.to(tl.int64)[:, None] * D + d[None, :], mask=live & (d < D)[None, :], other=0.0)
            z = tl.dot(c, x, input_precision="ieee") * scale  # [UNITS, GP]
            tl.store(logits + u[:, None] * G + g[None, :], z, mask=live & (g < G)[None, :])
            z = tl.where(live, z, float("-inf"))
            peak = tl.maximum(top, z)
            total = total * tl.exp(top - peak) + tl.exp(z - peak)
            top = peak
        stats_at, peak = (bh * parts + part) * G + g, tl.max(top, 0)
        tl.store(tops + stats_at, peak, mask=g < G)
        tl.store(totals + stats_at, tl.sum(total * tl.exp(top - peak[None, :]), 0), mask=g < G)


@triton.jit
def ranks_of(logits, tops, totals, u, live, parts, G: tl.constexpr, GR: tl.constexpr, PARTS: tl.constexpr):
    """Integers in the order of the scores of units `u` [n]: the maxima and sums of all parts make the softmax."""
    g, p = tl.arange(0, GR), tl.arange(0, PARTS)
    mask = (p < parts)[:, None] & (g < G)[None, :]
    top = tl.load(tops + p[:, None] * G + g[None, :], mask=mask, other=float("-inf"))
    total = tl.load(totals + p[:, None] * G + g[None, :], mask=mask, other=0.0)
    z = tl.load(logits + u[:, None] * G + g[None, :], mask=live[:, None] & (g < G)[None, :], other=0.0)
    peak = tl.where(g < G, tl.max(top, 0), 0.0)
    log_sum = peak + tl.log(tl.where(g < G, tl.sum(total * tl.exp(top - peak[None, :]), 0), 1.0))
    z = tl.where((g < G)[None, :], z - log_sum[None, :], float("-inf"))
    best = tl.max(z, 1)
    score = best + tl.log(tl.sum(tl.exp(z - best[:, None]), 1))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def sums_above(rank, weight, low, high):
    """Sums of the weights of units at or above each of the eight ranks that divide [low, high); the last is `high`."""
    step = (high - low + 7) >> 3
    ranks = tl.minimum(low + step * (1 + tl.arange(0, 8)), high).to(tl.int32)
    return tl.sum(tl.where(rank[None, :] >= ranks[:, None], weight[None, :], 0), 1)


class UnitLogits:
    """The launch of `_logits`, and what it leaves: logits, and the maxima and exponential sums of its parts."""

    def __init__(self, q: Tensor, centroid: Tensor, unit_count: Tensor, now: Tensor, scale: float):
        batch, heads, capacity, d = centroid.shape
        rows, self.group, wide = batch * heads, q.shape[1] // heads, next_power_of_2(d)
        tile = max(16, min(UNITS, BYTES // (wide * q.element_size())))
        self.parts = max(1, min(cdiv(capacity, tile), RESIDENT * sm_count(q.device) // rows))  # all run at once
        new = lambda n: torch.empty(rows * n, dtype=torch.float32, device=q.device)  # noqa: E731
        self.logits, self.tops, self.totals = new(capacity * self.group), *(new(self.parts * self.group) for _ in "mt")
        _logits[(rows, self.parts)](
            q, centroid, unit_count, now, self.logits, self.tops, self.totals, q.stride(0), q.stride(1), heads,
            capacity, scale, G=self.group, GP=max(16, next_power_of_2(self.group)), D=d, DP=wide, UNITS=tile,
            num_warps=4, num_stages=STAGES, **launch_early(q.device, rows * self.parts),
        )  # fmt: skip

    def shape(self) -> dict[str, int]:
        """The constants of `ranks_of`."""
        return dict(G=self.group, GR=next_power_of_2(self.group), PARTS=next_power_of_2(self.parts))
