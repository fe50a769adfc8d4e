"""Cluster the keys of a prompt by k-means, and return the order in which the pool holds its tokens.

The keys are those of the new tokens that leave the ring, [max(start, sink), ring_begin), cut into stretches of
`stretch` tokens. The cost grows linearly with the number of tokens.

    clusters of a stretch = max(1, tokens // size)
    every cluster becomes a unit: its tokens lie side by side in the pool, in order of position

K-means is Lloyd's (ops/clusters/_kmeans.py) and deterministic. The first centroids are keys that `seed` draws, in up to
16 draws. The first draw cuts the stretch into equal parts, and takes one key of each. Later draws take keys by their
squared distance to the centroids drawn before: k-means++, several keys at a time. A start by position alone leaves a
rare key in a cluster of many other keys, whose mean does not show it.

stretch = 0 clusters the whole prompt as one stretch, from the first draw alone, as ClusterKV does. It costs as
much as attention of all tokens to one centroid per `size` tokens.

Inertia, the sum of the squared distances of keys to their centroids, is within 2 % of that of k-means++ with as many
rounds, on four kinds of keys (tests/ops/clusters/test_kmeans.py).

Launches: those of _kmeans_kernels.py, or with stretch = 0 of _kmeans_whole.py. They run on the side stream, beside the
next layer, unless `join` (ops/_machinery/side_stream.py). Stretches without keys cost programs that return at once.

LouisKV, section 4.2 (prefill stage); ClusterKV, arXiv 2412.03213.
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

WHOLE = 0  # a `stretch` of this value is the whole prompt


def check(k, units, lengths, kmeans, join) -> None:
    size, stretch, rounds, seed = kmeans[:4]
    cut = stretch & (stretch - 1) == 0 and size <= stretch <= _kmeans.MAX_STRETCH
    if size < 1 or rounds < 1 or not (cut or stretch == WHOLE):
        raise ValueError(
            f"need size, rounds >= 1 and stretch a power of two, from size to {_kmeans.MAX_STRETCH}, or 0 for all; "
            f"got size {size}, stretch {stretch}, rounds {rounds}"
        )
    _kmeans.check_seed(seed)


def reference(k: NewKeys, units: Changed[Units], lengths: Lengths, kmeans: Kmeans, join: bool) -> Tensor:
    """Cluster the keys of a prompt.

    Args:
        k: [batch, heads, tokens, dim], the keys of the new tokens.
        units: the index; gets the clusters.
        lengths: positions per row.
        kmeans: size, stretch, rounds, seed, cosine, centred. `cosine` compares keys by direction alone.
        join: whether the calling stream waits for the result.

    Returns:
        [batch, heads, tokens], int32: the columns of `k` in the order of the pool; the identity for other columns.
    """
    batch, heads, tokens, _ = k.shape
    size, stretch, rounds, seed, cosine, centred = kmeans
    draws = 1 if stretch == WHOLE else min(_kmeans.DRAWS, stretch // size)
    order = torch.arange(tokens, dtype=torch.int32, device=k.device).expand(batch, heads, -1).contiguous()
    times = lengths.start, lengths.length, lengths.ring_begin
    for b, (n0, n, end) in enumerate(torch.stack(times, 1).tolist()):
        first, end = max(n0, lengths.sink), end if n > 0 else 0
        keys = k[b, :, tokens - n + first : tokens - n + end]
        moved = _kmeans.shifted(keys, centred)
        for begin in range(first, end, stretch or tokens):
            stop = min(begin + (stretch or tokens), end)
            column, clusters = tokens - n + begin, max(1, (stop - begin) // size)
            some = (x[:, begin - first : stop - first] for x in (keys, moved))
            parts = zip(*(x.split(1 if stretch == WHOLE else heads) for x in some))  # one head at a time, for memory
            clustered = [_kmeans.kmeans(x, clusters, draws, rounds, seed, cosine, y) for x, y in parts]
            found = map(torch.cat, zip(*clustered))
            order[b, :, column : column + stop - begin] = column + _kmeans.add_units(units, b, begin, *found)
    return order


def launch(k, units, lengths, kmeans, join) -> Tensor:
    with on_side_stream(join, k, *units, *lengths[:4]):
        if kmeans.stretch == WHOLE:
            return _kmeans_whole.launch(k, units, lengths, kmeans)
        return launch_kmeans(k, units, lengths, kmeans)


def fake(k, *_) -> Tensor:
    return k.new_empty(k.shape[:3], dtype=torch.int32)


cluster_keys = register(
    "cluster_keys", reference, impls=(by_triton(launch),), fake=fake, check=check, capturable=False
)
