"""K-means in torch: the definition that the kernels of _kmeans_kernels.py, _kmeans_whole.py and cluster_ring.py follow.

    centroids start at keys that `draw_centroids` picks; then, `rounds` times:
    cluster of a key = argmax_c  <k, c> - |c|^2 / 2        the nearest centroid, ties to the lower
    centroid = mean of its keys, rounded to the type of the keys; unchanged where a cluster has no key
    at the end every empty cluster takes one of the keys that are farthest from their centroids

With `cosine` keys and centroids have length 1 while they are compared. With `centred` the mean of the keys is
subtracted from the keys first. The returned centroids are the means of the unchanged keys.
"""
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops.clusters.views import Units

MAX_STRETCH = 4096  # keys of a stretch: one program ranks them in registers
SEEDS = 1 << 16
DRAWS = 16  # of first centroids. With rare keys inertia is 1.011 times that of k-means++; 1.20 times with 1 draw


class Kmeans(NamedTuple):
    """How keys are clustered.

    size: keys per cluster, on average.
    stretch: keys that are clustered together.
    rounds: how often keys are assigned and means computed.
    seed: of the first centroids.
    cosine: compare keys by direction alone, instead of by Euclidean distance.
    centred: subtract the mean of the keys before they are compared. cluster_keys takes the mean of a whole prompt,
        cluster_ring the mean of each stretch.
    """

    size: int
    stretch: int
    rounds: int
    seed: int
    cosine: bool
    centred: bool = False


def check_seed(seed: int) -> None:
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed must be from 0 to {SEEDS - 1}, got {seed}")


def seeded_hash(i: Tensor, seed: int) -> Tensor:
    """A hash below 2^31 of each integer and the seed."""
    x = ((i + 1) * 2654435761 + seed * 9973) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 73244475) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0x7FFFFFFF


def centroids_after(clusters: int, draws: int) -> list[int]:
    """The number of centroids after each draw."""
    return [max(1, clusters * (i + 1) // draws) for i in range(draws)]


def first_draw(keys: int | Tensor, count: int, seed: int) -> Tensor:
    """The first draw: the stretch is cut into `count` equal parts, and one key of each part is drawn. `keys` may be
    those of several stretches, [n, 1]."""
    c = torch.arange(count, device=keys.device if isinstance(keys, Tensor) else None)
    begin, end = c * keys // count, (c + 1) * keys // count
    return begin + seeded_hash(c, seed) % (end - begin)


def later_draw(distance2: Tensor, count: int, draw: int, seed: int) -> Tensor:
    """A later draw: `count` keys in order of position, from squared distances to the nearest centroid [heads, keys].

    The keys with the largest distance2 / u, with u in (0, 1] a hash of the key. This draws without replacement, with
    chances close to proportional to the squared distance.
    """
    hashes = seeded_hash(draw * MAX_STRETCH + torch.arange(distance2.shape[1]), seed)
    u = ((hashes >> 15) + 1).to(distance2.device) / 65536
    return (distance2 / u).argsort(dim=-1, descending=True, stable=True)[:, :count].sort(-1).values


def draw_centroids(x: Tensor, clusters: int, draws: int, seed: int) -> Tensor:
    """The keys at which the centroids start: x [heads, keys, dim] -> [heads, clusters, dim]."""
    after = centroids_after(clusters, draws)
    centres = newest = x[:, first_draw(x.shape[1], after[0], seed).to(x.device)]
    distance2 = x.new_full(x.shape[:2], float("inf"), dtype=torch.float32)
    for draw, count in enumerate((j - i for i, j in pairwise(after)), 1):
        if count > 0:
            distance2 = torch.minimum(distance2, nearest(x, newest)[1])
            picked = later_draw(distance2, count, draw, seed)
            newest = x.gather(1, picked[..., None].expand(-1, -1, x.shape[2]))
            centres = torch.cat([centres, newest], 1)
    return centres


def nearest(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centroid of every key, ties to the lower one, and the squared distance to it: both [heads, keys]."""
    c = centres.float()
    score, cluster = (x.float() @ c.transpose(-1, -2) - c.square().sum(-1)[:, None] / 2).max(-1)
    return cluster, (x.float().square().sum(-1) - 2 * score).clamp(min=0)


def normalized(x: Tensor) -> Tensor:
    """Vectors scaled to length 1, in their own type; zero vectors stay zero."""
    wide = x.float()
    size = wide.square().sum(-1, keepdim=True).sqrt()
    return torch.where(size > 0, wide / size, wide).to(x.dtype)


def without(x: Tensor, centre: Tensor) -> Tensor:
    """Keys [..., keys, dim] less a vector in fp32 [..., dim], in their own type."""
    return (x.float() - centre[..., None, :]).to(x.dtype)


def shifted(x: Tensor, centred: bool) -> Tensor:
    """Keys [..., keys, dim], less their mean if `centred`."""
    return without(x, x.float().mean(-2)) if centred else x


def means(x: Tensor, cluster: Tensor, centres: Tensor, cosine: bool = False) -> Tensor:
    """The mean of every cluster, in the type of the keys; with `cosine` scaled to length 1.

    An empty cluster keeps its centroid.
    """
    member = cluster[:, None] == torch.arange(centres.shape[1], device=x.device)[:, None]
    count = member.sum(-1, keepdim=True)
    total = member.float() @ x.float()
    mean = (total / count.clamp(min=1)).to(x.dtype)
    return torch.where(count > 0, normalized(mean) if cosine else mean, centres)


def fill_empty_clusters(cluster: Tensor, distance2: Tensor, clusters: int) -> Tensor:
    """Clusters of the keys of one head, with no cluster empty.

    With n empty clusters, the n keys farthest from their centroids are taken, but never the first key of a cluster. The
    empty clusters get these keys in order of position.
    """
    count = torch.bincount(cluster, minlength=clusters)
    empty = (count == 0).nonzero()[:, 0]
    if len(empty) == 0:
        return cluster
    is_first = torch.zeros_like(cluster, dtype=torch.bool)
    for c in range(clusters):
        is_first[(cluster == c).nonzero()[:1, 0]] = True
    moved = distance2.masked_fill(is_first, -1).argsort(descending=True, stable=True)[: len(empty)].sort().values
    return cluster.index_put((moved,), empty)


def kmeans(
    x: Tensor, clusters: int, draws: int, rounds: int, seed: int, cosine: bool = False, moved: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Centroids [heads, clusters, dim] and the cluster of every key of x [heads, keys, dim].

    moved: the keys to compare instead of x: with `centred` x less the mean.
    """
    moved = x if moved is None else moved
    compared = normalized(moved) if cosine else moved
    centres = draw_centroids(compared, clusters, draws, seed)
    for _ in range(rounds):
        cluster, distance2 = nearest(compared, centres)
        before, centres = centres, means(moved, cluster, centres, cosine)
        if torch.equal(before, centres):  # no further round would change anything
            break
    cluster = torch.stack([fill_empty_clusters(n, f, clusters) for n, f in zip(cluster, distance2)])
    return means(x, cluster, centres), cluster


def add_units(units: Units, b: int, begin: int, centres: Tensor, cluster: Tensor) -> Tensor:
    """Append the clusters of all heads of row `b` to its units, for the pool rows from `begin` on.

    Returns the order in which these rows hold the keys [heads, keys]: by cluster, then by position.
    """
    first, centroid, unit_count = units
    count = centres.shape[1]
    ends = begin + (cluster[..., None] == torch.arange(count, device=cluster.device)).sum(1).cumsum(-1)
    for h, unit in enumerate(unit_count[b].tolist()):
        centroid[b, h, unit : unit + count], first[b, h, unit + 1 : unit + 1 + count] = centres[h], ends[h]
    unit_count[b] += count
    return cluster.argsort(dim=-1, stable=True)
