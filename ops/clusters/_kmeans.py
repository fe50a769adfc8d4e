"""K-means of a stretch of keys: the plain definition, which ops/clusters/_kmeans_kernels.py follows."""
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops.clusters.views import Units

WIDEST = 4096  # keys of a stretch: what one program can rank at once
SEEDS = 1 << 16
DRAWS = 16  # of the first centroids. Inertia against k-means++, rare keys: 1.20 with 1, 1.024 with 8, 1.011 with 16


class Kmeans(NamedTuple):
    """Keys per cluster, keys that are clustered together, rounds, the seed of the first centroids, and the distance."""

    size: int
    stretch: int
    rounds: int
    seed: int
    cosine: bool


def check_seed(seed: int) -> None:
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed must be from 0 to {SEEDS - 1}, got {seed}")


def seeded_hash(i: Tensor, seed: int) -> Tensor:
    """An integer hash below 2^31 of each of the integers and the seed."""
    x = ((i + 1) * 2654435761 + seed * 9973) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 73244475) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0x7FFFFFFF


def reached(clusters: int, draws: int) -> list[int]:
    """How many centroids there are after each draw."""
    return [max(1, clusters * (i + 1) // draws) for i in range(draws)]


def drawn(keys: int, count: int, seed: int) -> Tensor:
    """The keys of the first draw: one of each of as many parts of the stretch."""
    c = torch.arange(count)
    begin, end = c * keys // count, (c + 1) * keys // count
    return begin + seeded_hash(c, seed) % (end - begin)


def spread(far: Tensor, count: int, draw: int, seed: int) -> Tensor:
    """The keys of a later draw, in order of position, from squared distances to the centroids so far [heads, keys].

    Those with the largest ratios of distance and a number from (0, 1], which is a hash: drawn without replacement, with
    chances close to proportional to the distance.
    """
    hashes = seeded_hash(draw * WIDEST + torch.arange(far.shape[1]), seed)
    chance = ((hashes >> 15) + 1).to(far.device) / 65536
    return (far / chance).argsort(dim=-1, descending=True, stable=True)[:, :count].sort(-1).values


def chosen(x: Tensor, clusters: int, draws: int, seed: int) -> Tensor:
    """The keys at which the centroids begin [heads, clusters, head_dim]."""
    after = reached(clusters, draws)
    centres = newest = x[:, drawn(x.shape[1], after[0], seed).to(x.device)]
    far = x.new_full(x.shape[:2], float("inf"), dtype=torch.float32)
    for draw, more in enumerate((j - i for i, j in pairwise(after)), 1):
        if more > 0:
            far = torch.minimum(far, nearest(x, newest)[1])
            at = spread(far, more, draw, seed)
            newest = x.gather(1, at[..., None].expand(-1, -1, x.shape[2]))
            centres = torch.cat([centres, newest], 1)
    return centres


def nearest(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Of every key the nearest centroid, ties to the lower, and its squared distance."""
    c = centres.float()
    score, name = (x.float() @ c.transpose(-1, -2) - c.square().sum(-1)[:, None] / 2).max(-1)
    return name, (x.float().square().sum(-1) - 2 * score).clamp(min=0)


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1 in the type that they have; those of length 0 stay."""
    wide = x.float()
    size = wide.square().sum(-1, keepdim=True).sqrt()
    return torch.where(size > 0, wide / size, wide).to(x.dtype)


def means(x: Tensor, name: Tensor, centres: Tensor, cosine: bool = False) -> Tensor:
    """The mean of every cluster in the type of the keys, with `cosine` made as long as 1; of an empty one what it
    was."""
    member = name[:, None] == torch.arange(centres.shape[1], device=x.device)[:, None]
    count = member.sum(-1, keepdim=True)
    total = member.float() @ x.float()
    mean = (total / count.clamp(min=1)).to(x.dtype)
    return torch.where(count > 0, unit(mean) if cosine else mean, centres)


def repaired(name: Tensor, far: Tensor, clusters: int) -> Tensor:
    """`name` of one head with no cluster empty: the empty ones in turn take the farthest keys in order of position."""
    count = torch.bincount(name, minlength=clusters)
    empty = (count == 0).nonzero()[:, 0]
    if len(empty) == 0:
        return name
    leads = torch.zeros_like(name, dtype=torch.bool)
    for c in range(clusters):
        leads[(name == c).nonzero()[:1, 0]] = True
    taken = far.masked_fill(leads, -1).argsort(descending=True, stable=True)[: len(empty)].sort().values
    return name.index_put((taken,), empty)


def kmeans(
    x: Tensor, clusters: int, draws: int, rounds: int, seed: int, cosine: bool = False
) -> tuple[Tensor, Tensor]:
    """Centroids [heads, clusters, head_dim] and the cluster of every key of x [heads, keys, head_dim]."""
    seen = unit(x) if cosine else x
    centres = chosen(seen, clusters, draws, seed)
    for _ in range(rounds):
        name, far = nearest(seen, centres)
        before, centres = centres, means(x, name, centres, cosine)
        if torch.equal(before, centres):  # so it would go on
            break
    name = torch.stack([repaired(n, f, clusters) for n, f in zip(name, far)])
    return means(x, name, centres), name


def add_units(units: Units, b: int, begin: int, centres: Tensor, name: Tensor) -> Tensor:
    """The clusters of all heads of a row become units, of pool rows from `begin` on. Returns the order of the keys."""
    first, centroid, unit_count = units
    count = centres.shape[1]
    ends = begin + (name[..., None] == torch.arange(count, device=name.device)).sum(1).cumsum(-1)
    for h, u in enumerate(unit_count[b].tolist()):
        centroid[b, h, u : u + count], first[b, h, u + 1 : u + 1 + count] = centres[h], ends[h]
    unit_count[b] += count
    return name.argsort(dim=-1, stable=True)
