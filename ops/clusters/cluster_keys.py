"""Group the keys of a prompt by k-means, and say in which order the pool should hold its tokens.

The new tokens that do not stay in the ring, `[max(start, sink), ring_begin)`, are taken a stretch at a time (so the
cost grows linearly), each with one cluster per `size` tokens, at least one. Every cluster becomes a unit
(ops/store/views.py): its tokens stand side by side in the pool, in order of position. Returns that order as columns of
`k`, int32 [batch, kv_heads, tokens]; other columns stay where they are. Runs beside the next layer unless told to
`join` (ops/_machinery/side_stream.py).

K-means is Lloyd's, deterministic. It begins at keys that `seed` draws, in up to 16 draws of as many: first one from
each of as many equal parts of the stretch, then each time by the squared distance to those that are drawn already,
which is k-means++ some at a time. (What is searched for is often a key far from most others. A
start by position alone leaves it in a cluster of many, and their mean does not show it.) Then `rounds` times every key
goes to the nearest centroid (ties to the lower one) and the centroids to the mean of their keys, rounded to the type of
the keys. A cluster without keys keeps its centroid; those left empty at the end each take one key, of the farthest from
their centroids, leaving every cluster its first.

With a `stretch` of 0 all of them are taken at once, as ClusterKV has it, which costs as much as attention to a centroid
per `size` tokens, and k-means begins at one draw alone: a key of each of as many equal parts.

With `cosine` keys and centroids are compared by their directions alone, as ClusterKV has it: both have length 1 where
one is assigned to the other or drawn by its distance. What a unit is known by is the mean of its keys as they are.

Inertia is within 2 % of that of k-means++ with as many rounds, on keys with topics, keys that drift, keys of which many
are like no other and keys of no structure (tests/ops/clusters/test_kmeans.py). A start by position alone ends 4 % lower where they
drift, and 20 % higher where many are like no other.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops.clusters import _kmeans, _kmeans_whole
from torchsparsekv.ops.clusters._kmeans import Kmeans
from torchsparsekv.ops.clusters._kmeans_kernels import launch as launch_kmeans
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.store.views import Lengths, NewKeys

WHOLE = 0  # as a stretch


def check(k, units, lengths, kmeans, join) -> None:
    size, stretch, rounds, seed, _ = kmeans
    cut = stretch & (stretch - 1) == 0 and size <= stretch <= _kmeans.WIDEST
    if size < 1 or rounds < 1 or not (cut or stretch == WHOLE):
        raise ValueError(
            f"need size, rounds >= 1 and stretch a power of two, from size to {_kmeans.WIDEST}, or 0 for all; got size "
            f"{size}, stretch {stretch}, rounds {rounds}"
        )
    _kmeans.check_seed(seed)


def reference(k: NewKeys, units: Changed[Units], lengths: Lengths, kmeans: Kmeans, join: bool) -> Tensor:
    batch, heads, tokens, _ = k.shape
    size, stretch, rounds, seed, cosine = kmeans
    draws = 1 if stretch == WHOLE else min(_kmeans.DRAWS, stretch // size)
    order = torch.arange(tokens, dtype=torch.int32, device=k.device).expand(batch, heads, -1).contiguous()
    times = lengths.start, lengths.length, lengths.ring_begin
    for b, (n0, n, end) in enumerate(torch.stack(times, 1).tolist()):
        for begin in range(max(n0, lengths.sink), end if n > 0 else 0, stretch or tokens):
            stop = min(begin + (stretch or tokens), end)
            column = tokens - n + begin
            x = k[b, :, column : column + stop - begin]
            parts = x.split(1 if stretch == WHOLE else heads)  # else memory would be heads x clusters x tokens
            of = [_kmeans.kmeans(p, max(1, (stop - begin) // size), draws, rounds, seed, cosine) for p in parts]
            found = map(torch.cat, zip(*of))
            order[b, :, column : column + stop - begin] = column + _kmeans.add_units(units, b, begin, *found)
    return order


def launch(k, units, lengths, kmeans, join) -> Tensor:
    with on_side_stream(join, k, *units, *lengths[:4]):
        if kmeans.stretch == WHOLE:
            return _kmeans_whole.launch(k, units, lengths, kmeans)
        return launch_kmeans(k, units, lengths, *kmeans)


def fake(k, *_) -> Tensor:
    return k.new_empty(k.shape[:3], dtype=torch.int32)


cluster_keys = register(
    "cluster_keys", reference, impls=(by_triton(launch),), fake=fake, check=check, capturable=False
)
