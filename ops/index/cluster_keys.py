"""Group the keys of a prompt by k-means, and say in which order the pool should hold its tokens.

The new tokens that do not stay in the ring, `[max(start, sink), ring_begin)`, are taken a stretch at a time (so the
cost grows linearly), each with one cluster per `size` tokens, at least one. Every cluster becomes a unit
(ops/store/views.py): its tokens stand side by side in the pool, in order of position. Returns that order as columns of
`k`, int32 [batch, kv_heads, tokens]; other columns stay where they are. Runs beside the next layer unless told to
`join` (ops/_side.py).

K-means is Lloyd's, deterministic. It begins at keys that `seed` draws, in up to 16 draws of as many: first one from
each of as many equal parts of the stretch, then each time by the squared distance to those that are drawn already,
which is k-means++ some at a time. (What is searched for is often a key far from most others. A
start by position alone leaves it in a cluster of many, and their mean does not show it.) Then `rounds` times every key
goes to the nearest centroid (ties to the lower one) and the centroids to the mean of their keys, rounded to the type of
the keys. A cluster without keys keeps its centroid; those left empty at the end each take one key, of the farthest from
their centroids, leaving every cluster its first.

With `cosine` keys and centroids are compared by their directions alone, as ClusterKV has it: both have length 1 where
one is assigned to the other or drawn by its distance. What a unit is known by is the mean of its keys as they are.

Inertia is within 2 % of that of k-means++ with as many rounds, on keys with topics, keys that drift, keys of which many
are like no other and keys of no structure (tests/test_kmeans.py). A start by position alone ends 4 % lower where they
drift, and 20 % higher where many are like no other.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._impl import triton as by_triton
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._side import beside
from torchsparsekv.ops._signature import Changed
from torchsparsekv.ops.index import _kmeans
from torchsparsekv.ops.index._kmeans_kernels import launch as launch_kmeans
from torchsparsekv.ops.store.views import Lengths, NewKeys, Units


class Kmeans(NamedTuple):
    """Keys per cluster, keys that are clustered together, rounds, the seed of the first centroids, and the distance."""

    size: int
    stretch: int
    rounds: int
    seed: int
    cosine: bool


def check(k, units, lengths, kmeans, join) -> None:
    size, stretch, rounds, seed, _ = kmeans
    if size < 1 or rounds < 1 or stretch & (stretch - 1) or not size <= stretch <= _kmeans.WIDEST:
        raise ValueError(
            f"need size, rounds >= 1 and stretch a power of two, from size to {_kmeans.WIDEST}; got size {size}, "
            f"stretch {stretch}, rounds {rounds}"
        )
    if not 0 <= seed < _kmeans.SEEDS:
        raise ValueError(f"seed must be from 0 to {_kmeans.SEEDS - 1}, got {seed}")


def reference(k: NewKeys, units: Changed[Units], lengths: Lengths, kmeans: Kmeans, join: bool) -> Tensor:
    batch, heads, tokens, _ = k.shape
    first, centroid, unit_count = units
    size, stretch, rounds, seed, cosine = kmeans
    draws = min(_kmeans.DRAWS, stretch // size)
    order = torch.arange(tokens, dtype=torch.int32, device=k.device).expand(batch, heads, -1).contiguous()
    times = lengths.start, lengths.length, lengths.ring_begin
    for b, (n0, n, end) in enumerate(torch.stack(times, 1).tolist()):
        for begin in range(max(n0, lengths.sink), end if n > 0 else 0, stretch):
            stop = min(begin + stretch, end)
            column = tokens - n + begin
            x = k[b, :, column : column + stop - begin]
            centres, name = _kmeans.kmeans(x, max(1, (stop - begin) // size), draws, rounds, seed, cosine)
            count = centres.shape[1]
            ends = begin + (name[..., None] == torch.arange(count, device=k.device)).sum(1).cumsum(-1)
            order[b, :, column : column + stop - begin] = column + name.argsort(dim=-1, stable=True)
            for h in range(heads):
                u = int(unit_count[b, h])
                centroid[b, h, u : u + count], first[b, h, u + 1 : u + 1 + count] = centres[h], ends[h]
            unit_count[b] += count
    return order


def launch(k, units, lengths, kmeans, join) -> Tensor:
    with beside(join, k, *units, *lengths[:4]):
        return launch_kmeans(k, units, lengths, *kmeans)


def fake(k, *_) -> Tensor:
    return k.new_empty(k.shape[:3], dtype=torch.int32)


cluster_keys = register(
    "cluster_keys", reference, impls=(by_triton(launch),), fake=fake, check=check, capturable=False
)
