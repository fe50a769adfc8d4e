"""K-means of all keys of a prompt at once, however many (defined: ops/clusters/_kmeans.py).

Assignment and means are the kernels of ops/clusters/_kmeans_kernels.py, over one stretch as long as the prompt. What a
program does there with a whole stretch in its registers is done by sorting here: which clusters are empty, which keys
they take, and the order of the keys. Shapes follow from the number of tokens alone, so nothing waits for the device.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.clusters._kmeans import Kmeans
from torchsparsekv.ops.clusters._kmeans_kernels import Run, halve, seeded_hash, slot_and_part, span_of
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.store.views import Lengths


class _Keys(NamedTuple):
    """Of every (row, head): the column of the first key, its position, how many keys and clusters there are [n, 1]."""

    column: Tensor
    begin: Tensor
    keys: Tensor
    clusters: Tensor


@triton.jit
def _sow(
    k, units, centroid, half, start, length, ring_begin, k_b, k_h, k_s, heads, tokens, most, sink, size, seed,
    S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CENTRES: tl.constexpr,
):  # fmt: skip
    """The first centroids: a key of each of as many parts."""
    slot, part = slot_and_part(tl.cdiv(S // size, CENTRES))
    bh, column, keys, _, unit, clusters = span_of(
        start, length, ring_begin, units, heads, tokens, sink, size, slot, S
    )
    if (keys > 0) & (part * CENTRES < clusters):
        c, d = part * CENTRES + tl.arange(0, CENTRES), tl.arange(0, DP)
        live = c < clusters
        low, high = c.to(tl.int64) * keys // clusters, (c.to(tl.int64) + 1) * keys // clusters
        at = column + low + seeded_hash(c, seed) % tl.maximum(high - low, 1)
        m = live[:, None] & (d < D)[None, :]
        k += bh // heads * k_b + bh % heads * k_h
        x = tl.load(k + at[:, None] * k_s + d[None, :], mask=m, other=0.0)
        tl.store(centroid + (bh * most + unit + c[:, None]) * D + d[None, :], x, mask=m)
        halve(half, slot, c, live, x, S // size)


def _sorted(name: Tensor, clusters: int) -> tuple[Tensor, Tensor, Tensor]:
    """Clusters in ascending order, the keys in that order, and where every cluster ends [n, clusters + 1], after 0.
    Keys of no cluster are last."""
    names, order = name.sort(dim=1, stable=True)
    each = torch.arange(clusters + 1, dtype=name.dtype, device=name.device)
    return names, order, torch.searchsorted(names, each.expand(len(name), -1).contiguous())


def _repaired(name: Tensor, far: Tensor, of: _Keys, clusters: int) -> Tensor:
    """`repaired`, of all heads."""
    names, order, ends = _sorted(name, clusters)
    leads = torch.ones_like(names, dtype=torch.bool)
    leads[:, 1:] = names[:, 1:] != names[:, :-1]
    leads = torch.zeros_like(leads).scatter_(1, order, leads)
    each = torch.arange(clusters, device=name.device)
    empty = (ends.diff(dim=1) == 0) & (each < of.clusters)
    best = far.masked_fill(leads | (name == clusters), -1).argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(name.shape[1], device=name.device)
    taken = torch.zeros_like(leads).scatter_(1, best, rank < empty.sum(1, keepdim=True))
    turn = (taken.cumsum(1) - 1).clamp(0, clusters - 1)
    listed = (~empty).to(torch.int32).argsort(dim=1, stable=True)
    return torch.where(taken, listed.gather(1, turn).to(name.dtype), name)


def _inside(positions: int, before: Tensor, many: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of so many positions which are the `many` behind the `before` first, and their number among them."""
    at = torch.arange(positions, device=device) - before
    return (at >= 0) & (at < many), at.clamp(min=0)


def _settle(name: Tensor, of: _Keys, units: Units, tokens: int, clusters: int) -> Tensor:
    """Where the units begin, how many there are, and the columns in the order of the pool."""
    first, _, unit_count = units
    _, order, ends = _sorted(name, clusters)
    mine, at = _inside(first.shape[2], unit_count.flatten()[:, None] + 1, of.clusters, name.device)
    edges = of.begin + ends[:, 1:].gather(1, at.clamp(max=clusters - 1))
    first.copy_(torch.where(mine, edges.to(first.dtype), first.flatten(0, 1)).view_as(first))
    unit_count.add_(of.clusters.view_as(unit_count))
    mine, at = _inside(tokens, of.column, of.keys, name.device)
    column = torch.arange(tokens, device=name.device)
    return torch.where(mine, of.column + order.gather(1, at.clamp(max=name.shape[1] - 1)), column).to(torch.int32)


def launch(k: Tensor, units: Units, lengths: Lengths, kmeans: Kmeans) -> Tensor:
    batch, heads, tokens, _ = k.shape
    size, _, rounds, seed, cosine = kmeans
    times, sink = (lengths.start, lengths.length, lengths.ring_begin), lengths.sink
    run = Run(k, units, times, sink, size, next_power_of_2(max(tokens, size)), cosine)
    _sow[(run.slots * cdiv(run.clusters, run.centres),)](
        *run.seen, *run.now_seen, seed, CENTRES=run.centres, **run.shape
    )
    for i in range(rounds):
        run.assign(i == rounds - 1)
        run.update(False)
    begin = lengths.start.clamp(min=sink)
    keys = torch.where(lengths.length > 0, (lengths.ring_begin - begin).clamp(min=0), 0)
    clusters = torch.where(keys > 0, (keys // size).clamp(min=1), 0)
    at = (tokens - lengths.length + begin, begin, keys, clusters)
    of = _Keys(*(t[:, None].expand(-1, heads).reshape(-1, 1) for t in at))
    name = run.name.view(run.slots, -1)
    away = torch.arange(name.shape[1], device=k.device) >= of.keys
    name.masked_fill_(away, run.clusters)
    name.copy_(_repaired(name, run.far.view_as(name), of, run.clusters))
    run.update(False, last=True)
    return _settle(name, of, units, tokens, run.clusters).view(batch, heads, tokens)
