"""Cluster the tokens that leave the ring by k-means, and write them to the pool by cluster.

The tokens are [previous_ring_begin, min(ring_begin, start)) of every row: at a decode step all tokens that leave the
ring; with a prompt the tokens that were in the ring before it and leave with it. They are cut into stretches of
`stretch` tokens. At a decode step `stretch` is the ring's interval, so the tokens are one stretch.

    clusters of a stretch = max(1, tokens // size)
    every cluster becomes a unit: its tokens lie side by side in the pool, in order of position

`append` or `flush_ring` has written these tokens to the pool in order of position; this op writes them again. No hot
buffer holds one of them, since none could be retrieved before. K-means is that of ops/clusters/_kmeans.py, from the
first draw alone.

Launches: `_cluster`, one program per (row, kv head), which does all stretches of its head. It stops after a round
that changes no centroid. At steps where nothing leaves the ring a program returns at once.

ClusterKV, arXiv 2412.03213 (clustering of generated tokens).
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

MOST_CLUSTERS = 64  # of a stretch: a program keeps the centroids in registers
TILE = 32  # keys at a time


def check(store, units, lengths, kmeans) -> None:
    size, stretch, rounds, seed = kmeans[:4]
    if size < 1 or rounds < 1 or not 1 <= stretch <= _kmeans.MAX_STRETCH or stretch // size > MOST_CLUSTERS:
        raise ValueError(
            f"need size, rounds >= 1 and stretch from 1 to {_kmeans.MAX_STRETCH}, at most {MOST_CLUSTERS} * size; "
            f"got size {size}, stretch {stretch}, rounds {rounds}"
        )
    _kmeans.check_seed(seed)


def reference(store: Changed[KVStore], units: Changed[Units], lengths: Lengths, kmeans: Kmeans) -> None:
    """Cluster the tokens that leave the ring.

    Args:
        store: ring and pool; the pool rows of these tokens are written.
        units: the index; gets the clusters.
        lengths: positions per row.
        kmeans: size, stretch, rounds, seed, cosine, centred.
    """
    size, stretch, rounds, seed, cosine, centred = kmeans
    (ring, pool), sink = store, lengths.sink
    for b, (n0, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        stop = min(n0, new) if n > 0 else 0
        for begin in range(old, stop, stretch):
            end = min(begin + stretch, stop)
            rows = ring[b][:, ring_row(torch.arange(begin, end, device=ring.device), sink, ring.shape[2])]
            keys = keys_of(rows)
            found = _kmeans.kmeans(
                keys, max(1, (end - begin) // size), 1, rounds, seed, cosine, _kmeans.shifted(keys, centred)
            )
            order = _kmeans.add_units(units, b, begin, *found)
            moved = rows.gather(1, order[..., None, None].expand_as(rows))
            pool[b, :, begin:end] = as_stored(moved, pool)


@triton.jit
def _load_keys(ring, pos, live, sink, span, D: tl.constexpr, DP: tl.constexpr):
    """Keys of the tokens at positions `pos` [n] in the ring: [n, DP]."""
    d = tl.arange(0, DP)
    key_at = row_at(ring, 0, (sink + turn_of(pos, sink, span))[:, None], 0, D) + d[None, :]
    return tl.load(key_at, mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _normalized(x):
    """`normalized` of _kmeans.py."""
    wide = x.to(tl.float32)
    norm = tl.sqrt_rn(tl.sum(wide * wide, 1))
    norm = tl.where(norm > 0, norm, 1.0)[:, None]
    return tl.div_rn(wide, tl.broadcast_to(norm, wide.shape)).to(x.dtype)


@triton.jit
def _without(x, centre, live):
    """`without` of _kmeans.py, of the keys x [n, DP] where `live` [n]; the others stay 0."""
    return tl.where(live[:, None], x.to(tl.float32) - centre[None, :], 0.0).to(x.dtype)


@triton.jit
def _mean(total, members, TYPE: tl.constexpr):
    """`means` of _kmeans.py, of clusters with keys: total [clusters, DP], members [clusters]."""
    size = tl.maximum(members, 1).to(tl.float32)[:, None]
    return tl.div_rn(total, tl.broadcast_to(size, total.shape)).to(TYPE)


@triton.jit
def _lloyd(
    ring, cluster, distance2, begin, keys, clusters, sink, span, rounds, seed, COSINE: tl.constexpr,
    CENTRED: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store the cluster of every key of a stretch after `rounds` rounds, and its squared distance to its centroid."""
    j, t = tl.arange(0, C), tl.arange(0, TILE)
    low, high = j * keys // clusters, (j + 1) * keys // clusters
    drawn = begin + low + seeded_hash(j, seed) % tl.maximum(high - low, 1)
    c = _load_keys(ring, drawn, j < clusters, sink, span, D, DP)  # [C, DP]
    if CENTRED:
        centre = tl.zeros((DP,), tl.float32)
        for tile in range(0, keys, TILE):
            x = _load_keys(ring, begin + tile + t, tile + t < keys, sink, span, D, DP)
            centre += tl.sum(x.to(tl.float32), 0)
        centre = tl.div_rn(centre, tl.zeros((DP,), tl.float32) + keys)
        c = _without(c, centre, j < clusters)
    if COSINE:
        c = _normalized(c)
    left = rounds
    while left > 0:
        wide_c = c.to(tl.float32)
        half = tl.where(j < clusters, tl.sum(wide_c * wide_c, 1) * 0.5, float("inf"))
        total, members = tl.zeros((C, DP), tl.float32), tl.zeros((C,), tl.int32)
        for tile in range(0, keys, TILE):
            live = tile + t < keys
            x = _load_keys(ring, begin + tile + t, live, sink, span, D, DP)  # [TILE, DP]
            if CENTRED:
                x = _without(x, centre, live)
            compared = _normalized(x) if COSINE else x
            score = tl.dot(compared, tl.trans(c), input_precision="ieee") - half[None, :]
            best, nearest = tl.max(score, 1, return_indices=True, return_indices_tie_break_left=True)
            wide = compared.to(tl.float32)
            tl.store(cluster + tile + t, nearest, mask=live)
            tl.store(distance2 + tile + t, tl.maximum(tl.sum(wide * wide, 1) - 2 * best, 0.0), mask=live)
            member = (nearest[:, None] == j[None, :]) & live[:, None]
            total += tl.dot(tl.trans(member.to(x.dtype)), x, input_precision="ieee")
            members += tl.sum(member.to(tl.int32), 0)
        mean = _mean(total, members, c.dtype)
        if COSINE:
            mean = _normalized(mean)
        mean = tl.where((members > 0)[:, None], mean, c)
        changed = tl.max(tl.max((mean != c).to(tl.int32), 1), 0)
        left = tl.where(changed != 0, left - 1, 0)
        c = mean


@triton.jit
def _fill_empty_clusters(cluster, distance2, clusters, live):
    """`fill_empty_clusters` of _kmeans.py, of one head."""
    is_first, n_empty = live & (cluster < 0), tl.zeros((), tl.int32)
    for c in range(clusters):
        inside = cluster == c
        is_first = is_first | (inside & (tl.cumsum(inside.to(tl.int32), 0) == 1))
        n_empty += tl.where(tl.max(inside.to(tl.int32), 0) == 0, 1, 0)
    filled = cluster
    if n_empty > 0:
        key = tl.where(live & ~is_first, distance2.to(tl.uint32, bitcast=True) + 1, 0)
        taken = take_top(key.to(tl.uint32), n_empty)
        index, number = tl.cumsum(taken.to(tl.int32), 0) - 1, tl.zeros((), tl.int32)
        for c in range(clusters):
            is_empty = tl.max((cluster == c).to(tl.int32), 0) == 0
            filled = tl.where(taken & is_empty & (index == number), c, filled)
            number += tl.where(is_empty, 1, 0)
    return filled


@triton.jit
def _arrange(cluster, distance2, place, first, begin, keys, clusters, S: tl.constexpr):
    """Store the final cluster of every key, its pool row relative to the first row of the stretch, and the units' ends.
    """
    i = tl.arange(0, S)
    live = i < keys
    cluster_of = tl.load(cluster + i, mask=live, other=S)
    cluster_of = _fill_empty_clusters(cluster_of, tl.load(distance2 + i, mask=live, other=0.0), clusters, live)
    row, upto = tl.zeros((S,), tl.int32), tl.zeros((), tl.int32)
    for c in range(clusters):
        inside = (cluster_of == c).to(tl.int32)
        row = tl.where(inside != 0, upto + tl.cumsum(inside, 0) - 1, row)
        upto += tl.sum(inside, 0)
        tl.store(first + c, begin + upto)
    tl.debug_barrier()
    tl.store(cluster + i, cluster_of, mask=live)
    tl.store(place + i, row, mask=live)


@triton.jit
def _move(
    ring, pool, centroid, cluster, place, begin, keys, clusters, sink, span, C: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Write the tokens of a stretch to the pool, and the mean key of every cluster."""
    j, t, d = tl.arange(0, C), tl.arange(0, TILE), tl.arange(0, DP)
    total, members = tl.zeros((C, DP), tl.float32), tl.zeros((C,), tl.int32)
    for tile in range(0, keys, TILE):
        live = tile + t < keys
        x = _load_keys(ring, begin + tile + t, live, sink, span, D, DP)
        member = tl.load(cluster + tile + t, mask=live, other=-1)[:, None] == j[None, :]
        total += tl.dot(tl.trans(member.to(x.dtype)), x, input_precision="ieee")
        members += tl.sum(member.to(tl.int32), 0)
        row = (begin + tl.load(place + tile + t, mask=live, other=0)).to(tl.int64)
        source = row_at(ring, 0, sink + turn_of(begin + tile + t, sink, span), 0, D)
        copy_rows(source, row_at(pool, 0, row, 0, D), live, D, ROW)
    mean = _mean(total, members, centroid.dtype.element_ty)
    tl.store(centroid + j[:, None] * D + d[None, :], mean, mask=(j < clusters)[:, None] & (d < D)[None, :])


@triton.jit
def _cluster(
    ring, pool, first, centroid, unit_count, cluster, distance2, place, start, length, old_begin, ring_begin, heads,
    ring_rows, pool_rows, capacity, sink, stretch, size, rounds, seed, COSINE: tl.constexpr, CENTRED: tl.constexpr,
    S: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    old, stop = tl.load(old_begin + b), tl.minimum(tl.load(ring_begin + b), tl.load(start + b))
    if (tl.load(length + b) > 0) & (old < stop):
        ring, pool = row_at(ring, bh, 0, ring_rows, D), row_at(pool, bh, 0, pool_rows, D)
        first, centroid = first + bh * (capacity + 1) + 1, centroid + bh * capacity * D
        cluster, distance2, place = cluster + bh * S, distance2 + bh * S, place + bh * S
        unit, span = tl.load(unit_count + bh), ring_rows - sink
        for begin in range(old, stop, stretch):
            keys = tl.minimum(stop - begin, stretch)
            clusters = tl.maximum(keys // size, 1)
            _lloyd(
                ring, cluster, distance2, begin, keys, clusters, sink, span, rounds, seed, COSINE, CENTRED, C, TILE, D,
                DP,
            )  # fmt: skip
            tl.debug_barrier()
            _arrange(cluster, distance2, place, first + unit, begin, keys, clusters, S)
            tl.debug_barrier()
            new_centroid = centroid + unit.to(tl.int64) * D
            _move(ring, pool, new_centroid, cluster, place, begin, keys, clusters, sink, span, C, TILE, D, DP, ROW)
            tl.debug_barrier()
            unit += clusters
        tl.store(unit_count + bh, unit)


def launch(store, units, lengths, kmeans) -> None:
    batch, heads, ring_rows, _, d = store.ring.shape
    size, stretch, rounds, seed, cosine, centred = kmeans
    wide, device = next_power_of_2(stretch), store.ring.device
    cluster, place = (torch.empty(batch * heads * wide, dtype=torch.int32, device=device) for _ in range(2))
    distance2 = torch.empty(batch * heads * wide, dtype=torch.float32, device=device)
    _cluster[(batch * heads,)](
        *store, *units, cluster, distance2, place, lengths.start, lengths.length, lengths.previous_ring_begin,
        lengths.ring_begin, heads, ring_rows, store.pool.shape[2], units.centroid.shape[2], lengths.sink, stretch, size,
        rounds, seed, COSINE=cosine, CENTRED=centred, S=wide, C=max(16, next_power_of_2(stretch // size)), TILE=TILE,
        D=d, DP=next_power_of_2(d), ROW=next_power_of_2(row_width(d)), num_warps=8,
        **launch_early(device, batch * heads),
    )  # fmt: skip


cluster_ring = register("cluster_ring", reference, impls=(by_triton(launch),), check=check)
