"""K-means of many short stretches of keys at once: kernels that are matrix products (defined: ops/clusters/_kmeans.py).

A stretch is at most 4096 keys with its own clusters; a program works on one stretch of one (row, head). Assignment is a
product of keys and centroids with a running maximum; the means are a product of the membership matrix and the keys, so
the order of summation is fixed and no float is added atomically. At 32K tokens, 8 heads of 128 and 16 keys a cluster a
round is 34 GFLOP.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.clusters._kmeans import DRAWS, WIDEST, unit
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.select._top import take_top
from torchsparsekv.ops.store.views import Lengths

KEYS, CENTRES = 1 << 15, 1 << 14  # bytes of a tile: three stages of them fit the smallest GPUs


@triton.jit
def span_of(start, length, ring_begin, units, heads, tokens, sink, size, slot, S: tl.constexpr):
    """(row and head, column of the first key, keys, position of the first, first unit, clusters) of stretch `slot`."""
    per_head = tl.cdiv(tokens, S)
    bh, i = (slot // per_head).to(tl.int64), slot % per_head
    b = bh // heads
    n, end = tl.load(length + b), tl.load(ring_begin + b)
    begin = tl.maximum(tl.load(start + b), sink) + i * S
    keys = tl.where(n > 0, tl.maximum(tl.minimum(end - begin, S), 0), 0)
    return bh, tokens - n + begin, keys, begin, tl.load(units + bh) + i * (S // size), tl.maximum(keys // size, 1)


@triton.jit
def seeded_hash(i, seed):
    """`seeded_hash` of _kmeans.py."""
    x = (i + 1).to(tl.uint32) * 2654435761 + seed * 9973
    x = (x ^ (x >> 15)) * 73244475
    return ((x ^ (x >> 16)) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _reached(clusters, draw, DRAWS: tl.constexpr):
    """`reached` after this draw, the first of which is 0."""
    return tl.maximum(clusters * (draw + 1) // DRAWS, 1)


@triton.jit
def _seat(
    k, centroid, half, far, square, place, best, slot, bh, column, keys, unit, have, count, k_s, clusters, most,
    SQUARE: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The `count` keys listed in `place` become centroids, after the `have` there are. With them `best`, of every key.

    `far` passes the scores of a tile on to the whole stretch. With SQUARE also the square of every key. With no `keys`
    nothing is done but to seat.
    """
    i, t, d, j = tl.arange(0, S), tl.arange(0, TILE), tl.arange(0, DP), tl.arange(0, FEW)
    for at in range(0, count, FEW):
        live = at + j < count
        m = live[:, None] & (d < D)[None, :]
        pick = (column + tl.load(place + at + j, mask=live, other=0)).to(tl.int64)
        c = tl.load(k + pick[:, None] * k_s + d[None, :], mask=m, other=0.0)
        tl.store(centroid + (bh * most + unit + have + at + j[:, None]) * D + d[None, :], c, mask=m)
        own = tl.where(live, halve(half, slot, have + at + j, live, c, clusters), float("inf"))
        c = tl.trans(c)
        for row in range(0, keys, TILE):
            near = row + t < keys
            x = tl.load(
                k + (column + row + t).to(tl.int64)[:, None] * k_s + d[None, :], mask=near[:, None] & (d < D)[None, :],
                other=0.0,
            )  # fmt: skip
            score = tl.dot(x, c, input_precision="ieee") - own[None, :]
            tl.store(far + row + t, tl.max(score, 1), mask=near)
            if SQUARE:
                x = x.to(tl.float32)
                tl.store(square + row + t, tl.sum(x * x, 1), mask=near)
        tl.debug_barrier()
        best = tl.maximum(best, tl.load(far + i, mask=i < keys, other=float("-inf")))
        tl.debug_barrier()
    return best


@triton.jit
def _begin(
    k, units, centroid, half, far, square, place, order, start, length, ring_begin, k_b, k_h, k_s, heads, tokens, most,
    sink, size, seed, S: tl.constexpr, DRAWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WIDEST: tl.constexpr,
    TILE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """All the draws of a stretch: a draw waits for the one before, so a program keeps what is known of every key.

    And the order of columns, for those that nothing is done with.
    """
    slot = tl.program_id(0)
    bh, column, keys, _, unit, clusters = span_of(start, length, ring_begin, units, heads, tokens, sink, size, slot, S)
    i = tl.arange(0, S)
    at = slot % tl.cdiv(tokens, S) * S + i
    tl.store(order + bh * tokens + at, at, mask=at < tokens)
    if keys > 0:
        k += bh // heads * k_b + bh % heads * k_h
        far, square, place = far + slot.to(tl.int64) * S, square + slot.to(tl.int64) * S, place + slot.to(tl.int64) * S
        have = _reached(clusters, 0, DRAWS)
        begin, end = i * keys // have, (i + 1) * keys // have
        tl.store(place + i, begin + seeded_hash(i, seed) % tl.maximum(end - begin, 1), mask=i < have)
        tl.debug_barrier()
        best = tl.full((S,), float("-inf"), tl.float32)
        best = _seat(
            k, centroid, half, far, square, place, best, slot, bh, column, tl.where(DRAWS > 1, keys, 0), unit, 0, have,
            k_s, S // size, most, True, S, D, DP, TILE, FEW,
        )  # fmt: skip
        for draw in range(1, DRAWS):
            count = _reached(clusters, draw, DRAWS) - have
            if count > 0:
                chance = ((seeded_hash(draw * WIDEST + i, seed) >> 15) + 1).to(tl.float32) / 65536
                away = tl.maximum(tl.load(square + i, mask=i < keys, other=0.0) - 2 * best, 0.0)
                weight = tl.div_rn(away, chance)
                taken = take_top(tl.where(i < keys, weight.to(tl.uint32, bitcast=True) + 1, 0).to(tl.uint32), count)
                tl.store(place + tl.cumsum(taken.to(tl.int32), 0) - 1, i, mask=taken)
                tl.debug_barrier()
                best = _seat(
                    k, centroid, half, far, square, place, best, slot, bh, column, tl.where(draw + 1 < DRAWS, keys, 0),
                    unit, have, count, k_s, S // size, most, False, S, D, DP, TILE, FEW,
                )  # fmt: skip
            have += count


@triton.jit
def halve(half, slot, c, live, row, clusters):
    """Half the square of centroids, for the assignment: it would have to go through registers for it there."""
    wide = row.to(tl.float32)
    own = tl.sum(wide * wide, 1) * 0.5
    tl.store(half + slot.to(tl.int64) * clusters + c, own, mask=live)
    return own


@triton.jit
def slot_and_part(parts):
    """Of programs that are `parts` for each slot, in one dimension: the others may not exceed 65,535."""
    return tl.program_id(0) // parts, tl.program_id(0) % parts


@triton.jit
def _assign(
    k, units, centroid, half, name, far, start, length, ring_begin, k_b, k_h, k_s, heads, tokens, most, sink, size,
    S: tl.constexpr, FAR: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, CENTRES: tl.constexpr,
):  # fmt: skip
    """Every key to its nearest centroid; with FAR also the squared distance.

    Best scores are kept per column of the tile and compared once, at the end.
    """
    slot, part = slot_and_part(tl.cdiv(S, TILE))
    bh, column, keys, _, unit, clusters = span_of(start, length, ring_begin, units, heads, tokens, sink, size, slot, S)
    if part * TILE < keys:
        i = part * TILE + tl.arange(0, TILE)
        d, j = tl.arange(0, DP), tl.arange(0, CENTRES)
        m = (i < keys)[:, None] & (d < D)[None, :]
        k += bh // heads * k_b + bh % heads * k_h
        x = tl.load(k + (column + i).to(tl.int64)[:, None] * k_s + d[None, :], mask=m, other=0.0)
        best = tl.full((TILE, CENTRES), float("-inf"), tl.float32)
        tile = tl.zeros((TILE, CENTRES), tl.int32)
        centroid += (bh * most + unit) * D
        half += slot.to(tl.int64) * (S // size)
        for at in range(0, clusters, CENTRES):
            live = at + j < clusters
            at_c = centroid + (at + j)[None, :] * D + d[:, None]
            c = tl.load(at_c, mask=live[None, :] & (d < D)[:, None], other=0.0)
            own = tl.load(half + at + j, mask=live, other=float("inf"))
            score = tl.dot(x, c, input_precision="ieee") - own[None, :]
            better = score > best
            best, tile = tl.where(better, score, best), tl.where(better, at, tile)
        top = tl.max(best, 1)
        to = slot.to(tl.int64) * S + i
        tl.store(name + to, tl.min(tl.where(best == top[:, None], tile + j[None, :], S), 1), mask=i < keys)
        if FAR:
            x = x.to(tl.float32)
            tl.store(far + to, tl.maximum(tl.sum(x * x, 1) - 2 * top, 0.0), mask=i < keys)


@triton.jit
def _means(
    k, units, centroid, half, name, place, count, stale, start, length, ring_begin, k_b, k_h, k_s, heads, tokens, most,
    sink, size, S: tl.constexpr, RANK: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, CENTRES: tl.constexpr,
):  # fmt: skip
    """The mean of every cluster, where it is `stale`, with UNIT made as long as 1. With RANK also how many keys it has,
    and of every key how many of it come before."""
    slot, part = slot_and_part(tl.cdiv(S // size, CENTRES))
    bh, column, keys, _, unit, clusters = span_of(start, length, ring_begin, units, heads, tokens, sink, size, slot, S)
    c = part * CENTRES + tl.arange(0, CENTRES)
    if (keys > 0) & (part * CENTRES < clusters) & (tl.load(stale + slot) != 0):
        i, d = tl.arange(0, TILE), tl.arange(0, DP)
        k += bh // heads * k_b + bh % heads * k_h
        total, members = tl.zeros((CENTRES, DP), tl.float32), tl.zeros((CENTRES,), tl.int32)
        name, place = name + slot.to(tl.int64) * S, place + slot.to(tl.int64) * S
        for at in range(0, keys, TILE):
            live = at + i < keys
            of = tl.load(name + at + i, mask=live, other=-1)
            m = live[:, None] & (d < D)[None, :]
            x = tl.load(k + (column + at + i).to(tl.int64)[:, None] * k_s + d[None, :], mask=m, other=0.0)
            member = c[:, None] == of[None, :]
            total += tl.dot(member.to(x.dtype), x, input_precision="ieee")
            if RANK:
                one = member.to(tl.int32)
                rank = tl.sum(one * (members[:, None] + tl.cumsum(one, 1) - 1), 0)
                tl.store(place + at + i, rank, mask=live & (tl.max(one, 0) > 0))
            members += tl.sum(member.to(tl.int32), 1)
        m = ((members > 0) & (c < clusters))[:, None] & (d < D)[None, :]
        size_of = tl.maximum(members, 1).to(tl.float32)
        mean = tl.div_rn(total, tl.broadcast_to(size_of[:, None], (CENTRES, DP))).to(centroid.dtype.element_ty)
        if UNIT:
            wide = mean.to(tl.float32)
            long = tl.sqrt_rn(tl.sum(wide * wide, 1))
            long = tl.broadcast_to(tl.where(long > 0, long, 1.0)[:, None], (CENTRES, DP))
            mean = tl.div_rn(wide, long).to(centroid.dtype.element_ty)
        tl.store(centroid + (bh * most + unit + c[:, None]) * D + d[None, :], mean, mask=m)
        halve(half, slot, c, (members > 0) & (c < clusters), mean, S // size)
        if RANK:
            tl.store(count + slot.to(tl.int64) * (S // size) + c, members, mask=c < clusters)


@triton.jit
def _repair(
    units, name, far, place, count, stale, start, length, ring_begin, heads, tokens, sink, size, S: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Every empty cluster takes a key; `count` then serves to list the empty ones. Where there is none, none is
    `stale`."""
    slot = tl.program_id(0)
    _, _, keys, _, _, clusters = span_of(start, length, ring_begin, units, heads, tokens, sink, size, slot, S)
    c, i = tl.arange(0, C), tl.arange(0, S)
    count += slot.to(tl.int64) * (S // size)
    empty = tl.load(count + c, mask=c < tl.where(keys > 0, clusters, 0), other=1) == 0
    lacking = tl.sum(empty.to(tl.int32), 0)
    tl.store(stale + slot, lacking)
    if lacking > 0:
        at = slot.to(tl.int64) * S + i
        away = tl.load(far + at, mask=i < keys, other=0.0)
        follows = tl.load(place + at, mask=i < keys, other=0) > 0
        key = tl.where(follows & (i < keys), away.to(tl.uint32, bitcast=True) + 1, 0)
        taken = take_top(key, lacking)
        tl.debug_barrier()
        tl.store(count + tl.cumsum(empty.to(tl.int32), 0) - 1, c, mask=empty)
        tl.debug_barrier()
        turn = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(name + at, tl.load(count + turn, mask=taken, other=0), mask=taken)


@triton.jit
def _order(
    units, first, order, name, place, count, start, length, ring_begin, heads, tokens, most, sink, size,
    S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Where the units begin, and the columns in the order of the pool."""
    slot = tl.program_id(0)
    bh, column, keys, begin, unit, clusters = span_of(
        start, length, ring_begin, units, heads, tokens, sink, size, slot, S
    )
    if keys > 0:
        c, i = tl.arange(0, C), tl.arange(0, S)
        members = tl.load(count + slot.to(tl.int64) * (S // size) + c, mask=c < clusters, other=0)
        first += bh * (most + 1) + unit
        tl.store(first + 1 + c, begin + tl.cumsum(members, 0), mask=c < clusters)
        before = count + slot.to(tl.int64) * (S // size)  # `first` of the unit before may be another program's
        tl.debug_barrier()
        tl.store(before + c, tl.cumsum(members, 0) - members, mask=c < clusters)
        tl.debug_barrier()
        at = slot.to(tl.int64) * S + i
        of = tl.load(name + at, mask=i < keys, other=0)
        row = tl.load(before + of, mask=i < keys, other=0) + tl.load(place + at, mask=i < keys, other=0)
        tl.store(order + bh * tokens + column + row, column + i, mask=i < keys)


@triton.jit
def _count(units, start, length, ring_begin, heads, sink, size, total, S: tl.constexpr, N: tl.constexpr):
    """The clusters of this call, added to the units."""
    bh = tl.arange(0, N)
    b = bh // heads
    live = bh < total
    begin = tl.maximum(tl.load(start + b, mask=live, other=0), sink)
    keys = tl.maximum(tl.load(ring_begin + b, mask=live, other=0) - begin, 0)
    keys = tl.where(tl.load(length + b, mask=live, other=0) > 0, keys, 0)
    rest = keys % S
    more = keys // S * (S // size) + tl.where(rest > 0, tl.maximum(rest // size, 1), 0)
    tl.store(units + bh, tl.load(units + bh, mask=live, other=0) + more, mask=live)


class Run:
    """The launches of one call: what they share, and where they leave what the next one reads."""

    def __init__(self, k: Tensor, units: Units, times, sink: int, size: int, stretch: int, cosine: bool):
        centroid = units.centroid
        batch, heads, tokens, d = k.shape
        self.slots, self.clusters = batch * heads * cdiv(tokens, stretch), stretch // size
        new = lambda n, dtype: torch.empty(self.slots * n, dtype=dtype, device=k.device)  # noqa: E731
        self.name, self.place = new(stretch, torch.int32), new(stretch, torch.int32)
        self.far, self.square = new(stretch, torch.float32), new(stretch, torch.float32)
        self.half, self.count = new(self.clusters, torch.float32), new(self.clusters, torch.int32)
        self.stale = torch.ones(self.slots, dtype=torch.int32, device=k.device)
        self.cosine = cosine
        seen = unit(k) if cosine else k
        state = (units.unit_count, centroid, self.half)
        self.seen, self.mean_of = (seen, *state), (k, *state)
        self.at = (heads, tokens, centroid.shape[2], sink, size)
        self.now, self.now_seen = ((*times, *x.stride()[:3], *self.at) for x in (k, seen))
        self.wide = next_power_of_2(d)
        self.shape = dict(S=stretch, D=d, DP=self.wide)
        row = self.wide * k.element_size()
        self.keys, self.centres = min(128, KEYS // row), min(64, CENTRES // row)

    def start(self, order: Tensor, draws: int, seed: int) -> None:
        """The first centroids; and `order` of columns that nothing is done with."""
        few = min(max(16, next_power_of_2(cdiv(self.clusters, draws))), self.centres)
        _begin[(self.slots,)](
            *self.seen, self.far, self.square, self.place, order, *self.now_seen, seed, DRAWS=draws, WIDEST=WIDEST,
            TILE=self.keys // 2, FEW=few, **self.shape, num_warps=8, num_stages=5,
        )  # fmt: skip

    def assign(self, far: bool) -> None:
        _assign[(self.slots * cdiv(self.shape["S"], self.keys),)](
            *self.seen, self.name, self.far, *self.now_seen, FAR=far, TILE=self.keys, CENTRES=self.centres,
            **self.shape, num_warps=8,
        )  # fmt: skip

    def update(self, rank: bool, last: bool = False) -> None:
        """With `cosine` centroids have length 1 until they are needed no more, so the `last` time all are made anew."""
        if last and self.cosine:
            self.stale.fill_(1)
        _means[(self.slots * cdiv(self.clusters, self.centres),)](
            *self.mean_of, self.name, self.place, self.count, self.stale, *self.now, RANK=rank,
            UNIT=self.cosine and not last, TILE=self.centres, CENTRES=self.centres, **self.shape,
        )  # fmt: skip


def launch(
    k: Tensor, units: Units, lengths: Lengths, size: int, stretch: int, rounds: int, seed: int, cosine: bool
) -> Tensor:
    batch, heads, tokens, _ = k.shape
    times, sink, count = (lengths.start, lengths.length, lengths.ring_begin), lengths.sink, units.unit_count
    run = Run(k, units, times, sink, size, stretch, cosine)
    order = torch.empty((batch, heads, tokens), dtype=torch.int32, device=k.device)
    run.start(order, min(DRAWS, run.clusters), seed)
    for i in range(rounds):
        last = i == rounds - 1
        run.assign(last)
        run.update(last)
    ends = dict(S=stretch, C=next_power_of_2(run.clusters), num_warps=8)
    _repair[(run.slots,)](
        count, run.name, run.far, run.place, run.count, run.stale, *times, heads, tokens, sink, size, **ends
    )
    run.update(True, last=True)
    _order[(run.slots,)](count, units.first, order, run.name, run.place, run.count, *times, *run.at, **ends)
    _count[(1,)](count, *times, heads, sink, size, batch * heads, S=stretch, N=next_power_of_2(batch * heads))
    return order
