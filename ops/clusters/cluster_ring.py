"""Tokens leave the ring for good: group them by k-means, as ClusterKV does with what a model writes.

Of every row these are the tokens `[previous_ring_begin, min(ring_begin, start))`: all that leave while decoding, and
before a prompt is stored those that were in the ring already and leave with it. They are taken `stretch` at a time, so
that while decoding, where the ring's interval is as long, all that leave are taken together; a stretch has one cluster
per `size` tokens, at least one. K-means is that of ops/clusters/cluster_keys.py, from one draw: a key of each of as many
equal parts.

Every cluster becomes a unit (ops/store/views.py), and its tokens stand side by side in the pool, in order of position,
where `append` or `flush_ring` had put them as they came. No hot buffer holds one of them: they could not be retrieved
before. On most steps nothing leaves and the kernel returns at once. A program does all of a head, once in `stretch`
steps; it stops at the round after which no centroid is another, as all that follow would do the same again.
"""
import torch

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.clusters import _kmeans
from torchsparsekv.ops.clusters._kmeans import Kmeans
from torchsparsekv.ops.clusters._kmeans_kernels import seeded_hash
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.select._top import take_top
from torchsparsekv.ops.store.rows import as_stored, copy_rows, keys_of, ring_row, row_at, row_width, turn_of
from torchsparsekv.ops.store.views import KVStore, Lengths

MOST_CLUSTERS = 64  # of a stretch: a program keeps their centroids in registers
TILE = 32  # keys at a time


def check(store, units, lengths, kmeans) -> None:
    size, stretch, rounds, seed, _ = kmeans
    if size < 1 or rounds < 1 or not 1 <= stretch <= _kmeans.WIDEST or stretch // size > MOST_CLUSTERS:
        raise ValueError(
            f"need size, rounds >= 1 and stretch from 1 to {_kmeans.WIDEST}, at most {MOST_CLUSTERS} sizes; got size "
            f"{size}, stretch {stretch}, rounds {rounds}"
        )
    _kmeans.check_seed(seed)


def reference(store: Changed[KVStore], units: Changed[Units], lengths: Lengths, kmeans: Kmeans) -> None:
    size, stretch, rounds, seed, cosine = kmeans
    (ring, pool), sink = store, lengths.sink
    for b, (n0, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        stop = min(n0, new) if n > 0 else 0
        for begin in range(old, stop, stretch):
            end = min(begin + stretch, stop)
            rows = ring[b][:, ring_row(torch.arange(begin, end, device=ring.device), sink, ring.shape[2])]
            found = _kmeans.kmeans(keys_of(rows), max(1, (end - begin) // size), 1, rounds, seed, cosine)
            order = _kmeans.add_units(units, b, begin, *found)
            moved = rows.gather(1, order[..., None, None].expand_as(rows))
            pool[b, :, begin:end] = as_stored(moved, pool)


@triton.jit
def _keys(ring, pos, live, sink, span, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    at = row_at(ring, 0, (sink + turn_of(pos, sink, span))[:, None], 0, D) + d[None, :]
    return tl.load(at, mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _unit(x):
    """`unit`."""
    wide = x.to(tl.float32)
    long = tl.sqrt_rn(tl.sum(wide * wide, 1))
    long = tl.where(long > 0, long, 1.0)[:, None]
    return tl.div_rn(wide, tl.broadcast_to(long, wide.shape)).to(x.dtype)


@triton.jit
def _mean(total, members, TYPE: tl.constexpr):
    """`means`, where a cluster has keys."""
    size = tl.maximum(members, 1).to(tl.float32)[:, None]
    return tl.div_rn(total, tl.broadcast_to(size, total.shape)).to(TYPE)


@triton.jit
def _lloyd(
    ring, name, far, begin, keys, clusters, sink, span, rounds, seed, COSINE: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """The cluster of every key of a stretch after so many rounds, and how far it is from the centroid before."""
    j, t = tl.arange(0, C), tl.arange(0, TILE)
    low, high = j * keys // clusters, (j + 1) * keys // clusters
    c = _keys(ring, begin + low + seeded_hash(j, seed) % tl.maximum(high - low, 1), j < clusters, sink, span, D, DP)
    if COSINE:
        c = _unit(c)
    left = rounds
    while left > 0:
        long = c.to(tl.float32)
        half = tl.where(j < clusters, tl.sum(long * long, 1) * 0.5, float("inf"))
        total, members = tl.zeros((C, DP), tl.float32), tl.zeros((C,), tl.int32)
        for at in range(0, keys, TILE):
            live = at + t < keys
            x = _keys(ring, begin + at + t, live, sink, span, D, DP)
            seen = _unit(x) if COSINE else x
            score = tl.dot(seen, tl.trans(c), input_precision="ieee") - half[None, :]
            best, of = tl.max(score, 1, return_indices=True, return_indices_tie_break_left=True)
            wide = seen.to(tl.float32)
            tl.store(name + at + t, of, mask=live)
            tl.store(far + at + t, tl.maximum(tl.sum(wide * wide, 1) - 2 * best, 0.0), mask=live)
            member = (of[:, None] == j[None, :]) & live[:, None]
            total += tl.dot(tl.trans(member.to(x.dtype)), x, input_precision="ieee")
            members += tl.sum(member.to(tl.int32), 0)
        mean = _mean(total, members, c.dtype)
        if COSINE:
            mean = _unit(mean)
        mean = tl.where((members > 0)[:, None], mean, c)
        moved = tl.max(tl.max((mean != c).to(tl.int32), 1), 0)
        left = tl.where(moved != 0, left - 1, 0)
        c = mean


@triton.jit
def _repaired(of, away, clusters, live):
    """`repaired`."""
    first, lacking = live & (of < 0), tl.zeros((), tl.int32)
    for c in range(clusters):
        mine = of == c
        first = first | (mine & (tl.cumsum(mine.to(tl.int32), 0) == 1))
        lacking += tl.where(tl.max(mine.to(tl.int32), 0) == 0, 1, 0)
    fixed = of
    if lacking > 0:
        taken = take_top(tl.where(live & ~first, away.to(tl.uint32, bitcast=True) + 1, 0).to(tl.uint32), lacking)
        turn, empty = tl.cumsum(taken.to(tl.int32), 0) - 1, tl.zeros((), tl.int32)
        for c in range(clusters):
            none = tl.max((of == c).to(tl.int32), 0) == 0
            fixed = tl.where(taken & none & (turn == empty), c, fixed)
            empty += tl.where(none, 1, 0)
    return fixed


@triton.jit
def _place(name, far, place, first, begin, keys, clusters, S: tl.constexpr):
    """Of every key its cluster in the end, and its row among those of the stretch; and where the units end."""
    i = tl.arange(0, S)
    live = i < keys
    of = tl.load(name + i, mask=live, other=S)
    of = _repaired(of, tl.load(far + i, mask=live, other=0.0), clusters, live)
    row, upto = tl.zeros((S,), tl.int32), tl.zeros((), tl.int32)
    for c in range(clusters):
        mine = (of == c).to(tl.int32)
        row = tl.where(mine != 0, upto + tl.cumsum(mine, 0) - 1, row)
        upto += tl.sum(mine, 0)
        tl.store(first + c, begin + upto)
    tl.debug_barrier()
    tl.store(name + i, of, mask=live)
    tl.store(place + i, row, mask=live)


@triton.jit
def _move(
    ring, pool, centroid, name, place, begin, keys, clusters, sink, span, C: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """The tokens of a stretch into the pool, and the mean key of every cluster."""
    j, t, d = tl.arange(0, C), tl.arange(0, TILE), tl.arange(0, DP)
    total, members = tl.zeros((C, DP), tl.float32), tl.zeros((C,), tl.int32)
    for at in range(0, keys, TILE):
        live = at + t < keys
        x = _keys(ring, begin + at + t, live, sink, span, D, DP)
        member = tl.load(name + at + t, mask=live, other=-1)[:, None] == j[None, :]
        total += tl.dot(tl.trans(member.to(x.dtype)), x, input_precision="ieee")
        members += tl.sum(member.to(tl.int32), 0)
        row = (begin + tl.load(place + at + t, mask=live, other=0)).to(tl.int64)
        source = row_at(ring, 0, sink + turn_of(begin + at + t, sink, span), 0, D)
        copy_rows(source, row_at(pool, 0, row, 0, D), live, D, ROW)
    mean = _mean(total, members, centroid.dtype.element_ty)
    tl.store(centroid + j[:, None] * D + d[None, :], mean, mask=(j < clusters)[:, None] & (d < D)[None, :])


@triton.jit
def _cluster(
    ring, pool, first, centroid, unit_count, name, far, place, start, length, old_begin, ring_begin, heads, ring_rows,
    pool_rows, most, sink, stretch, size, rounds, seed, COSINE: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    old, stop = tl.load(old_begin + b), tl.minimum(tl.load(ring_begin + b), tl.load(start + b))
    if (tl.load(length + b) > 0) & (old < stop):
        ring, pool = row_at(ring, bh, 0, ring_rows, D), row_at(pool, bh, 0, pool_rows, D)
        first, centroid = first + bh * (most + 1) + 1, centroid + bh * most * D
        name, far, place = name + bh * S, far + bh * S, place + bh * S
        unit, span = tl.load(unit_count + bh), ring_rows - sink
        for begin in range(old, stop, stretch):
            keys = tl.minimum(stop - begin, stretch)
            clusters = tl.maximum(keys // size, 1)
            _lloyd(ring, name, far, begin, keys, clusters, sink, span, rounds, seed, COSINE, C, TILE, D, DP)
            tl.debug_barrier()
            _place(name, far, place, first + unit, begin, keys, clusters, S)
            tl.debug_barrier()
            own = centroid + unit.to(tl.int64) * D
            _move(ring, pool, own, name, place, begin, keys, clusters, sink, span, C, TILE, D, DP, ROW)
            tl.debug_barrier()
            unit += clusters
        tl.store(unit_count + bh, unit)


def launch(store, units, lengths, kmeans) -> None:
    batch, heads, ring_rows, _, d = store.ring.shape
    size, stretch, rounds, seed, cosine = kmeans
    wide, device = next_power_of_2(stretch), store.ring.device
    name, place = (torch.empty(batch * heads * wide, dtype=torch.int32, device=device) for _ in range(2))
    away = torch.empty(batch * heads * wide, dtype=torch.float32, device=device)
    _cluster[(batch * heads,)](
        *store, *units, name, away, place, lengths.start, lengths.length, lengths.previous_ring_begin,
        lengths.ring_begin, heads, ring_rows, store.pool.shape[2], units.centroid.shape[2], lengths.sink, stretch, size,
        rounds, seed, COSINE=cosine, S=wide, C=max(16, next_power_of_2(stretch // size)), TILE=TILE, D=d,
        DP=next_power_of_2(d), ROW=next_power_of_2(row_width(d)), num_warps=8, **launch_early(device, batch * heads),
    )  # fmt: skip


cluster_ring = register("cluster_ring", reference, impls=(by_triton(launch),), check=check)
