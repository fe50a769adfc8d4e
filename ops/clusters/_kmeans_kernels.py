"""Kernels of k-means over many short stretches of keys at once (definition: ops/clusters/_kmeans.py).

A stretch has at most 4096 keys and its own clusters. A `slot` is one stretch of one (row, kv head). Assignment is a
matrix product of keys and centroids with a running maximum. Means are a matrix product of the membership matrix and the
keys: the order of summation is fixed, and no float is added atomically.

Launches, in order (`launch` below):
    _draw         one program per slot: the first centroids, in `draws` draws
    _assign       rounds times, one program per tile of keys: the nearest centroid of every key
    _means        rounds times, one program per tile of clusters: the mean of every cluster
    _fill_empty   one program per slot: every empty cluster takes a key
    _means        once more, for the slots that `_fill_empty` changed
    _order        one program per slot: where units begin, and the order of the tokens in the pool
    _count        one program: the new numbers of units

Sizes that the kernels share: S keys of a stretch, D channels (DP: rounded up to a power of two), `size` keys per
cluster, `capacity` units that a head has room for.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.clusters._kmeans import DRAWS, MAX_STRETCH, Kmeans, normalized, without
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.select._top import take_top
from torchsparsekv.ops.store.views import Lengths

KEYS, CENTRES = 1 << 15, 1 << 14  # bytes of a tile of keys, of centroids: three stages fit the smallest GPUs


@triton.jit
def stretch_of(start, length, ring_begin, unit_count, heads, tokens, sink, size, slot, S: tl.constexpr):
    """Where stretch `slot` lies.

    Returns the index of its (row, head), the column of `k` with its first key, the number of keys, the position of the
    first key, the first unit, and the number of clusters.
    """
    per_head = tl.cdiv(tokens, S)
    bh, i = (slot // per_head).to(tl.int64), slot % per_head
    b = bh // heads
    n, end = tl.load(length + b), tl.load(ring_begin + b)
    begin = tl.maximum(tl.load(start + b), sink) + i * S
    keys = tl.where(n > 0, tl.maximum(tl.minimum(end - begin, S), 0), 0)
    return bh, tokens - n + begin, keys, begin, tl.load(unit_count + bh) + i * (S // size), tl.maximum(keys // size, 1)


@triton.jit
def seeded_hash(i, seed):
    """`seeded_hash` of _kmeans.py."""
    x = (i + 1).to(tl.uint32) * 2654435761 + seed * 9973
    x = (x ^ (x >> 15)) * 73244475
    return ((x ^ (x >> 16)) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _centroids_after(clusters, draw, DRAWS: tl.constexpr):
    """`centroids_after` of _kmeans.py, after draw number `draw` (from 0)."""
    return tl.maximum(clusters * (draw + 1) // DRAWS, 1)


@triton.jit
def _add_centroids(
    k, centroid, half, scores, norm2, picks, best, slot, bh, column, keys, unit, existing, count, k_s, clusters,
    capacity, SQUARE: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    NEW: tl.constexpr,
):  # fmt: skip
    """Append the `count` keys whose numbers are in `picks` to the `existing` centroids.

    Returns `best` [S]: the best score <x, c> - |c|^2 / 2 of every key over all centroids, the new ones included. NEW
    centroids are scored at a time. `scores` passes the scores of a tile to the whole stretch. SQUARE also stores
    the squared norm of every key. With keys = 0 the centroids are stored, and nothing is scored.
    """
    i, t, d, j = tl.arange(0, S), tl.arange(0, TILE), tl.arange(0, DP), tl.arange(0, NEW)
    for begin in range(0, count, NEW):
        live = begin + j < count
        mask = live[:, None] & (d < D)[None, :]
        row_of_pick = (column + tl.load(picks + begin + j, mask=live, other=0)).to(tl.int64)
        c = tl.load(k + row_of_pick[:, None] * k_s + d[None, :], mask=mask, other=0.0)  # [NEW, DP]
        tl.store(centroid + (bh * capacity + unit + existing + begin + j[:, None]) * D + d[None, :], c, mask=mask)
        half_norm = tl.where(live, store_half_norm(half, slot, existing + begin + j, live, c, clusters), float("inf"))
        c = tl.trans(c)  # [DP, NEW]
        for row in range(0, keys, TILE):
            valid = row + t < keys
            x = tl.load(
                k + (column + row + t).to(tl.int64)[:, None] * k_s + d[None, :], mask=valid[:, None] & (d < D)[None, :],
                other=0.0,
            )  # fmt: skip
            score = tl.dot(x, c, input_precision="ieee") - half_norm[None, :]
            tl.store(scores + row + t, tl.max(score, 1), mask=valid)
            if SQUARE:
                x = x.to(tl.float32)
                tl.store(norm2 + row + t, tl.sum(x * x, 1), mask=valid)
        tl.debug_barrier()
        best = tl.maximum(best, tl.load(scores + i, mask=i < keys, other=float("-inf")))
        tl.debug_barrier()
    return best


@triton.jit
def _draw(
    k, unit_count, centroid, half, scores, norm2, picks, order, start, length, ring_begin, k_b, k_h, k_s, heads, tokens,
    capacity, sink, size, seed, S: tl.constexpr, DRAWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    MAX_STRETCH: tl.constexpr, TILE: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """All draws of a stretch, one after the other: a draw needs the distances to the centroids drawn before.

    Also fills `order` with the identity, for the columns that are not clustered.
    """
    slot = tl.program_id(0)
    bh, column, keys, _, unit, clusters = stretch_of(
        start, length, ring_begin, unit_count, heads, tokens, sink, size, slot, S
    )
    i = tl.arange(0, S)
    index = slot % tl.cdiv(tokens, S) * S + i
    tl.store(order + bh * tokens + index, index, mask=index < tokens)
    if keys > 0:
        k += bh // heads * k_b + bh % heads * k_h
        scratch = slot.to(tl.int64) * S
        scores, norm2, picks = scores + scratch, norm2 + scratch, picks + scratch
        existing = _centroids_after(clusters, 0, DRAWS)
        begin, end = i * keys // existing, (i + 1) * keys // existing
        tl.store(picks + i, begin + seeded_hash(i, seed) % tl.maximum(end - begin, 1), mask=i < existing)
        tl.debug_barrier()
        best = tl.full((S,), float("-inf"), tl.float32)
        best = _add_centroids(
            k, centroid, half, scores, norm2, picks, best, slot, bh, column, tl.where(DRAWS > 1, keys, 0), unit, 0,
            existing, k_s, S // size, capacity, True, S, D, DP, TILE, NEW,
        )  # fmt: skip
        for draw in range(1, DRAWS):
            count = _centroids_after(clusters, draw, DRAWS) - existing
            if count > 0:
                u = ((seeded_hash(draw * MAX_STRETCH + i, seed) >> 15) + 1).to(tl.float32) / 65536
                distance2 = tl.maximum(tl.load(norm2 + i, mask=i < keys, other=0.0) - 2 * best, 0.0)
                priority = tl.div_rn(distance2, u)
                taken = take_top(tl.where(i < keys, priority.to(tl.uint32, bitcast=True) + 1, 0).to(tl.uint32), count)
                tl.store(picks + tl.cumsum(taken.to(tl.int32), 0) - 1, i, mask=taken)
                tl.debug_barrier()
                best = _add_centroids(
                    k, centroid, half, scores, norm2, picks, best, slot, bh, column,
                    tl.where(draw + 1 < DRAWS, keys, 0), unit, existing, count, k_s, S // size, capacity, False, S, D,
                    DP, TILE, NEW,
                )  # fmt: skip
            existing += count


@triton.jit
def store_half_norm(half, slot, c, live, row, clusters):
    """Store and return |c|^2 / 2 of centroids `row` [n, DP]: `_assign` would otherwise recompute it in registers."""
    wide = row.to(tl.float32)
    half_norm = tl.sum(wide * wide, 1) * 0.5
    tl.store(half + slot.to(tl.int64) * clusters + c, half_norm, mask=live)
    return half_norm


@triton.jit
def slot_and_part(parts):
    """(slot, part) of a program, of `parts` programs per slot; one grid dimension, since the others end at 65,535."""
    return tl.program_id(0) // parts, tl.program_id(0) % parts


@triton.jit
def _assign(
    k, unit_count, centroid, half, cluster, distance2, start, length, ring_begin, k_b, k_h, k_s, heads, tokens,
    capacity, sink, size, S: tl.constexpr, DISTANCE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, CENTRES: tl.constexpr,
):  # fmt: skip
    """Assign every key to its nearest centroid; DISTANCE also stores the squared distance.

    The best score is kept per column of a tile of centroids, and the columns are compared once, at the end.
    """
    slot, part = slot_and_part(tl.cdiv(S, TILE))
    bh, column, keys, _, unit, clusters = stretch_of(
        start, length, ring_begin, unit_count, heads, tokens, sink, size, slot, S
    )
    if part * TILE < keys:
        i = part * TILE + tl.arange(0, TILE)
        d, j = tl.arange(0, DP), tl.arange(0, CENTRES)
        mask = (i < keys)[:, None] & (d < D)[None, :]
        k += bh // heads * k_b + bh % heads * k_h
        x = tl.load(k + (column + i).to(tl.int64)[:, None] * k_s + d[None, :], mask=mask, other=0.0)  # [TILE, DP]
        best = tl.full((TILE, CENTRES), float("-inf"), tl.float32)
        tile = tl.zeros((TILE, CENTRES), tl.int32)
        centroid += (bh * capacity + unit) * D
        half += slot.to(tl.int64) * (S // size)
        for begin in range(0, clusters, CENTRES):
            live = begin + j < clusters
            centroid_at = centroid + (begin + j)[None, :] * D + d[:, None]
            c = tl.load(centroid_at, mask=live[None, :] & (d < D)[:, None], other=0.0)  # [DP, CENTRES]
            half_norm = tl.load(half + begin + j, mask=live, other=float("inf"))
            score = tl.dot(x, c, input_precision="ieee") - half_norm[None, :]
            better = score > best
            best, tile = tl.where(better, score, best), tl.where(better, begin, tile)
        top = tl.max(best, 1)
        key_at = slot.to(tl.int64) * S + i
        tl.store(cluster + key_at, tl.min(tl.where(best == top[:, None], tile + j[None, :], S), 1), mask=i < keys)
        if DISTANCE:
            x = x.to(tl.float32)
            tl.store(distance2 + key_at, tl.maximum(tl.sum(x * x, 1) - 2 * top, 0.0), mask=i < keys)


@triton.jit
def _means(
    k, unit_count, centroid, half, cluster, place, count, stale, start, length, ring_begin, k_b, k_h, k_s, heads,
    tokens, capacity, sink, size, S: tl.constexpr, RANK: tl.constexpr, NORMALIZE: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr, CENTRES: tl.constexpr,
):  # fmt: skip
    """The mean of every cluster, for slots that are `stale`; NORMALIZE scales it to length 1.

    RANK also stores the number of keys of each cluster, and of each key its rank within its cluster.
    """
    slot, part = slot_and_part(tl.cdiv(S // size, CENTRES))
    bh, column, keys, _, unit, clusters = stretch_of(
        start, length, ring_begin, unit_count, heads, tokens, sink, size, slot, S
    )
    c = part * CENTRES + tl.arange(0, CENTRES)
    if (keys > 0) & (part * CENTRES < clusters) & (tl.load(stale + slot) != 0):
        i, d = tl.arange(0, TILE), tl.arange(0, DP)
        k += bh // heads * k_b + bh % heads * k_h
        total, members = tl.zeros((CENTRES, DP), tl.float32), tl.zeros((CENTRES,), tl.int32)
        cluster, place = cluster + slot.to(tl.int64) * S, place + slot.to(tl.int64) * S
        for begin in range(0, keys, TILE):
            live = begin + i < keys
            cluster_of = tl.load(cluster + begin + i, mask=live, other=-1)
            mask = live[:, None] & (d < D)[None, :]
            x = tl.load(k + (column + begin + i).to(tl.int64)[:, None] * k_s + d[None, :], mask=mask, other=0.0)
            member = c[:, None] == cluster_of[None, :]
            total += tl.dot(member.to(x.dtype), x, input_precision="ieee")
            if RANK:
                is_member = member.to(tl.int32)
                rank = tl.sum(is_member * (members[:, None] + tl.cumsum(is_member, 1) - 1), 0)
                tl.store(place + begin + i, rank, mask=live & (tl.max(is_member, 0) > 0))
            members += tl.sum(member.to(tl.int32), 1)
        mask = ((members > 0) & (c < clusters))[:, None] & (d < D)[None, :]
        divisor = tl.maximum(members, 1).to(tl.float32)
        mean = tl.div_rn(total, tl.broadcast_to(divisor[:, None], (CENTRES, DP))).to(centroid.dtype.element_ty)
        if NORMALIZE:
            wide = mean.to(tl.float32)
            norm = tl.sqrt_rn(tl.sum(wide * wide, 1))
            norm = tl.broadcast_to(tl.where(norm > 0, norm, 1.0)[:, None], (CENTRES, DP))
            mean = tl.div_rn(wide, norm).to(centroid.dtype.element_ty)
        tl.store(centroid + (bh * capacity + unit + c[:, None]) * D + d[None, :], mean, mask=mask)
        store_half_norm(half, slot, c, (members > 0) & (c < clusters), mean, S // size)
        if RANK:
            tl.store(count + slot.to(tl.int64) * (S // size) + c, members, mask=c < clusters)


@triton.jit
def _fill_empty(
    unit_count, cluster, distance2, place, count, stale, start, length, ring_begin, heads, tokens, sink, size,
    S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Every empty cluster takes a key (`fill_empty_clusters` of _kmeans.py).

    Sets `stale` to the number of empty clusters: without any, the last `_means` skips the slot. `count` is overwritten
    with the list of empty clusters.
    """
    slot = tl.program_id(0)
    _, _, keys, _, _, clusters = stretch_of(start, length, ring_begin, unit_count, heads, tokens, sink, size, slot, S)
    c, i = tl.arange(0, C), tl.arange(0, S)
    count += slot.to(tl.int64) * (S // size)
    empty = tl.load(count + c, mask=c < tl.where(keys > 0, clusters, 0), other=1) == 0
    n_empty = tl.sum(empty.to(tl.int32), 0)
    tl.store(stale + slot, n_empty)
    if n_empty > 0:
        key_at = slot.to(tl.int64) * S + i
        distance = tl.load(distance2 + key_at, mask=i < keys, other=0.0)
        not_first = tl.load(place + key_at, mask=i < keys, other=0) > 0
        key = tl.where(not_first & (i < keys), distance.to(tl.uint32, bitcast=True) + 1, 0)
        taken = take_top(key, n_empty)
        tl.debug_barrier()
        tl.store(count + tl.cumsum(empty.to(tl.int32), 0) - 1, c, mask=empty)
        tl.debug_barrier()
        index = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(cluster + key_at, tl.load(count + index, mask=taken, other=0), mask=taken)


@triton.jit
def _order(
    unit_count, first, order, cluster, place, count, start, length, ring_begin, heads, tokens, capacity, sink, size,
    S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Where the units begin in the pool, and the columns of `k` in the order of the pool."""
    slot = tl.program_id(0)
    bh, column, keys, begin, unit, clusters = stretch_of(
        start, length, ring_begin, unit_count, heads, tokens, sink, size, slot, S
    )
    if keys > 0:
        c, i = tl.arange(0, C), tl.arange(0, S)
        members = tl.load(count + slot.to(tl.int64) * (S // size) + c, mask=c < clusters, other=0)
        first += bh * (capacity + 1) + unit
        tl.store(first + 1 + c, begin + tl.cumsum(members, 0), mask=c < clusters)
        # Not by `first`: the program of the stretch before may not have written its last entry.
        before = count + slot.to(tl.int64) * (S // size)
        tl.debug_barrier()
        tl.store(before + c, tl.cumsum(members, 0) - members, mask=c < clusters)
        tl.debug_barrier()
        key_at = slot.to(tl.int64) * S + i
        cluster_of = tl.load(cluster + key_at, mask=i < keys, other=0)
        row = tl.load(before + cluster_of, mask=i < keys, other=0) + tl.load(place + key_at, mask=i < keys, other=0)
        tl.store(order + bh * tokens + column + row, column + i, mask=i < keys)


@triton.jit
def _count(unit_count, start, length, ring_begin, heads, sink, size, total, S: tl.constexpr, N: tl.constexpr):
    """Add the clusters of this call to the unit counts of all rows and heads."""
    bh = tl.arange(0, N)
    b = bh // heads
    live = bh < total
    begin = tl.maximum(tl.load(start + b, mask=live, other=0), sink)
    keys = tl.maximum(tl.load(ring_begin + b, mask=live, other=0) - begin, 0)
    keys = tl.where(tl.load(length + b, mask=live, other=0) > 0, keys, 0)
    rest = keys % S
    clusters = keys // S * (S // size) + tl.where(rest > 0, tl.maximum(rest // size, 1), 0)
    tl.store(unit_count + bh, tl.load(unit_count + bh, mask=live, other=0) + clusters, mask=live)


def _centre(k: Tensor, lengths: Lengths) -> Tensor:
    """The mean in fp32 of the keys that leave the ring, [batch, heads, dim]."""
    column = torch.arange(k.shape[2], device=k.device) - k.shape[2] + lengths.length[:, None]  # positions of columns
    leaves = (column >= lengths.start.clamp(min=lengths.sink)[:, None]) & (column < lengths.ring_begin[:, None])
    total = torch.where(leaves[:, None, :, None], k, 0).sum(2, dtype=torch.float32)
    return total / leaves.sum(1).clamp(min=1)[:, None, None]


class Launches:
    """The launches of one call, with their shared arguments and scratch buffers."""

    def __init__(self, k: Tensor, units: Units, lengths: Lengths, kmeans: Kmeans, stretch: int):
        centroid, times, size = units.centroid, (lengths.start, lengths.length, lengths.ring_begin), kmeans.size
        batch, heads, tokens, d = k.shape
        self.slots, self.clusters = batch * heads * cdiv(tokens, stretch), stretch // size
        new = lambda n, dtype: torch.empty(self.slots * n, dtype=dtype, device=k.device)  # noqa: E731
        # place: numbers of the drawn keys, then the rank of every key within its cluster
        self.cluster, self.place = new(stretch, torch.int32), new(stretch, torch.int32)
        self.distance2, self.norm2 = new(stretch, torch.float32), new(stretch, torch.float32)
        self.half, self.count = new(self.clusters, torch.float32), new(self.clusters, torch.int32)
        self.stale = torch.ones(self.slots, dtype=torch.int32, device=k.device)
        self.anew, self.cosine = kmeans.cosine or kmeans.centred, kmeans.cosine
        moved = without(k, _centre(k, lengths)) if kmeans.centred else k
        compared = normalized(moved) if kmeans.cosine else moved
        state = (units.unit_count, centroid, self.half)
        self.sizes = (heads, tokens, centroid.shape[2], lengths.sink, size)
        both = lambda x: ((x, *state), (*times, *x.stride()[:3], *self.sizes))  # noqa: E731
        self.compared, self.compared_times = both(compared)
        self.moved, self.moved_times = both(moved)  # whose means a round takes
        self.given, self.given_times = both(k)  # whose means the units keep
        self.wide = next_power_of_2(d)
        self.shape = dict(S=stretch, D=d, DP=self.wide)
        row = self.wide * k.element_size()
        self.keys, self.centres = min(128, KEYS // row), min(64, CENTRES // row)

    def start(self, order: Tensor, draws: int, seed: int) -> None:
        """The first centroids; and the identity into `order`."""
        new_at_once = min(max(16, next_power_of_2(cdiv(self.clusters, draws))), self.centres)
        _draw[(self.slots,)](
            *self.compared, self.distance2, self.norm2, self.place, order, *self.compared_times, seed, DRAWS=draws,
            MAX_STRETCH=MAX_STRETCH, TILE=self.keys // 2, NEW=new_at_once, **self.shape, num_warps=8, num_stages=5,
        )  # fmt: skip

    def assign(self, distance2: bool) -> None:
        _assign[(self.slots * cdiv(self.shape["S"], self.keys),)](
            *self.compared, self.cluster, self.distance2, *self.compared_times, DISTANCE=distance2, TILE=self.keys,
            CENTRES=self.centres, **self.shape, num_warps=8,
        )  # fmt: skip

    def update(self, rank: bool, last: bool = False) -> None:
        """Means of the clusters. The `last` call takes the means of the unchanged keys, not scaled to length 1."""
        if last and self.anew:
            self.stale.fill_(1)
        keys, times = (self.given, self.given_times) if last else (self.moved, self.moved_times)
        _means[(self.slots * cdiv(self.clusters, self.centres),)](
            *keys, self.cluster, self.place, self.count, self.stale, *times, RANK=rank,
            NORMALIZE=self.cosine and not last, TILE=self.centres, CENTRES=self.centres, **self.shape,
        )  # fmt: skip


def launch(k: Tensor, units: Units, lengths: Lengths, kmeans: Kmeans) -> Tensor:
    (batch, heads, tokens, _), (size, stretch, rounds, seed) = k.shape, kmeans[:4]
    times, sink, count = (lengths.start, lengths.length, lengths.ring_begin), lengths.sink, units.unit_count
    run = Launches(k, units, lengths, kmeans, stretch)
    order = torch.empty((batch, heads, tokens), dtype=torch.int32, device=k.device)
    run.start(order, min(DRAWS, run.clusters), seed)
    for i in range(rounds):
        last = i == rounds - 1
        run.assign(last)
        run.update(last)
    ends = dict(S=stretch, C=next_power_of_2(run.clusters), num_warps=8)
    _fill_empty[(run.slots,)](
        count, run.cluster, run.distance2, run.place, run.count, run.stale, *times, heads, tokens, sink, size, **ends
    )
    run.update(True, last=True)
    _order[(run.slots,)](count, units.first, order, run.cluster, run.place, run.count, *times, *run.sizes, **ends)
    _count[(1,)](count, *times, heads, sink, size, batch * heads, S=stretch, N=next_power_of_2(batch * heads))
    return order
