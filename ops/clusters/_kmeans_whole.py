"""K-means of all keys of a prompt as one stretch, however long (definition: ops/clusters/_kmeans.py).

A prompt does not fit the registers of one program. So two steps of _kmeans_kernels.py, which need a whole stretch in
registers, are done here by sorting in torch: finding the empty clusters and the keys that they take, and ordering the
keys. All shapes follow from the number of tokens, so the host never waits for the device.

Launches, in order:
    _draw_centroids   one program per tile of clusters: the first centroids, in one draw
    _assign, _means   of _kmeans_kernels.py, rounds times
    torch             sort by cluster; empty clusters take a key
    _means            once more
    torch             where units begin, and the order of the tokens in the pool
"""
from typing import NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.clusters._kmeans import Kmeans
from torchsparsekv.ops.clusters._kmeans_kernels import Launches, seeded_hash, slot_and_part, store_half_norm, stretch_of
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.store.views import Lengths


class _Extent(NamedTuple):
    """The keys to cluster of every (row, head), each [rows * heads, 1]: first column of `k`, first position, counts."""

    column: Tensor
    begin: Tensor
    keys: Tensor
    clusters: Tensor


@triton.jit
def _draw_centroids(
    k, unit_count, centroid, half, start, length, ring_begin, k_b, k_h, k_s, heads, tokens, capacity, sink, size, seed,
    S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CENTRES: tl.constexpr,
):  # fmt: skip
    """`first_draw` of _kmeans.py: the keys are cut into one equal part per cluster, and one key of each part is drawn.
    """
    slot, part = slot_and_part(tl.cdiv(S // size, CENTRES))
    bh, column, keys, _, unit, clusters = stretch_of(
        start, length, ring_begin, unit_count, heads, tokens, sink, size, slot, S
    )
    if (keys > 0) & (part * CENTRES < clusters):
        c, d = part * CENTRES + tl.arange(0, CENTRES), tl.arange(0, DP)
        live = c < clusters
        low, high = c.to(tl.int64) * keys // clusters, (c.to(tl.int64) + 1) * keys // clusters
        row = column + low + seeded_hash(c, seed) % tl.maximum(high - low, 1)
        mask = live[:, None] & (d < D)[None, :]
        k += bh // heads * k_b + bh % heads * k_h
        x = tl.load(k + row[:, None] * k_s + d[None, :], mask=mask, other=0.0)
        tl.store(centroid + (bh * capacity + unit + c[:, None]) * D + d[None, :], x, mask=mask)
        store_half_norm(half, slot, c, live, x, S // size)


def _sort_by_cluster(cluster: Tensor, clusters: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort keys by cluster: (sorted clusters, key numbers in that order, where each cluster begins [n, clusters + 1]).

    Keys whose cluster is `clusters` belong to none, and come last.
    """
    sorted_clusters, order = cluster.sort(dim=1, stable=True)
    each = torch.arange(clusters + 1, dtype=cluster.dtype, device=cluster.device)
    return sorted_clusters, order, torch.searchsorted(sorted_clusters, each.expand(len(cluster), -1).contiguous())


def fill_empty_clusters(cluster: Tensor, distance2: Tensor, count: Tensor, clusters: int) -> Tensor:
    """`fill_empty_clusters` of _kmeans.py, of all heads at once. A head has the first `count` [n, 1] of the `clusters`.
    """
    sorted_clusters, order, ends = _sort_by_cluster(cluster, clusters)
    is_first = torch.ones_like(sorted_clusters, dtype=torch.bool)
    is_first[:, 1:] = sorted_clusters[:, 1:] != sorted_clusters[:, :-1]
    is_first = torch.zeros_like(is_first).scatter_(1, order, is_first)
    each = torch.arange(clusters, device=cluster.device)
    empty = (ends.diff(dim=1) == 0) & (each < count)
    farthest = distance2.masked_fill(is_first | (cluster == clusters), -1).argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(cluster.shape[1], device=cluster.device)
    moved = torch.zeros_like(is_first).scatter_(1, farthest, rank < empty.sum(1, keepdim=True))
    index = (moved.cumsum(1) - 1).clamp(0, clusters - 1)
    empty_first = (~empty).to(torch.int32).argsort(dim=1, stable=True)
    return torch.where(moved, empty_first.gather(1, index).to(cluster.dtype), cluster)


def _in_range(positions: int, before: Tensor, count: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which of `positions` positions are in [before, before + count), and their number from `before` on."""
    number = torch.arange(positions, device=device) - before
    return (number >= 0) & (number < count), number.clamp(min=0)


def _append_units(cluster: Tensor, extent: _Extent, units: Units, tokens: int, clusters: int) -> Tensor:
    """Append the clusters to the units, and return the columns of `k` in the order of the pool."""
    first, _, unit_count = units
    _, order, ends = _sort_by_cluster(cluster, clusters)
    inside, number = _in_range(first.shape[2], unit_count.flatten()[:, None] + 1, extent.clusters, cluster.device)
    edges = extent.begin + ends[:, 1:].gather(1, number.clamp(max=clusters - 1))
    first.copy_(torch.where(inside, edges.to(first.dtype), first.flatten(0, 1)).view_as(first))
    unit_count.add_(extent.clusters.view_as(unit_count))
    inside, number = _in_range(tokens, extent.column, extent.keys, cluster.device)
    column = torch.arange(tokens, device=cluster.device)
    ordered = extent.column + order.gather(1, number.clamp(max=cluster.shape[1] - 1))
    return torch.where(inside, ordered, column).to(torch.int32)


def launch(k: Tensor, units: Units, lengths: Lengths, kmeans: Kmeans) -> Tensor:
    batch, heads, tokens, _ = k.shape
    (size, _, rounds, seed), sink = kmeans[:4], lengths.sink
    run = Launches(k, units, lengths, kmeans, next_power_of_2(max(tokens, size)))
    _draw_centroids[(run.slots * cdiv(run.clusters, run.centres),)](
        *run.compared, *run.compared_times, seed, CENTRES=run.centres, **run.shape
    )
    for i in range(rounds):
        run.assign(i == rounds - 1)
        run.update(False)
    begin = lengths.start.clamp(min=sink)
    keys = torch.where(lengths.length > 0, (lengths.ring_begin - begin).clamp(min=0), 0)
    clusters = torch.where(keys > 0, (keys // size).clamp(min=1), 0)
    counts = (tokens - lengths.length + begin, begin, keys, clusters)
    extent = _Extent(*(t[:, None].expand(-1, heads).reshape(-1, 1) for t in counts))
    cluster = run.cluster.view(run.slots, -1)
    no_key = torch.arange(cluster.shape[1], device=k.device) >= extent.keys
    cluster.masked_fill_(no_key, run.clusters)
    cluster.copy_(fill_empty_clusters(cluster, run.distance2.view_as(cluster), extent.clusters, run.clusters))
    run.update(False, last=True)
    return _append_units(cluster, extent, units, tokens, run.clusters).view(batch, heads, tokens)
