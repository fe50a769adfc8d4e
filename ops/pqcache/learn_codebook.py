"""Learn the codebook of a prompt by k-means, and give every key that has left the ring its codes.

    keys       all keys of a sequence from `sink` up to `length`, the keys in the ring included; at most KEYS per
               centroid, evenly spaced
    centroids  k-means of the parts of the keys in every space, by Euclidean distance (ops/clusters/_kmeans.py)
    codes      those of `assign_codes`, for all positions from `sink` up to `ring_begin`

So a codebook depends on the tokens of a sequence, and not on how they were cut into prompts and chunks. A row with
fewer keys than centroids learns none: it adopts its keys as they leave the ring (`assign_codes`). Rows without new
tokens stay as they are.

PQCache (arXiv 2407.12820), and its authors' code.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops.attend.prompt_attention import check_spans
from torchsparsekv.ops.clusters._kmeans import check_seed, first_draw, kmeans, means, nearest
from torchsparsekv.ops.clusters._kmeans_whole import fill_empty_clusters
from torchsparsekv.ops.index._leaving import row_keys
from torchsparsekv.ops.pqcache.assign_codes import encode, launch_assign, parts
from torchsparsekv.ops.pqcache.views import Codebook, check_codebook
from torchsparsekv.ops.store.rows import keys_of, only_keys
from torchsparsekv.ops.store.views import Leaving, Lengths

KEYS = 256  # keys per centroid that k-means learns from; more keys hardly move a centroid
SCORES = 1 << 25  # products of keys and centroids at a time: 128 MiB, which is two rows of 8 heads by default


def check(leaving, codebook, lengths, rounds, seed, spans, join) -> None:
    check_codebook(codebook, leaving.new.shape[3])
    check_seed(seed)
    check_spans(spans, leaving.new.shape[0])
    if rounds < 1:
        raise ValueError(f"k-means needs rounds >= 1, got {rounds}")


def reference(
    leaving: Leaving, codebook: Changed[Codebook], lengths: Lengths, rounds: int, seed: int, spans: list[int] | None,
    join: bool,
) -> None:  # fmt: skip
    """Learn the codebook of a prompt, and give every key that has left the ring its codes.

    Args:
        leaving: the keys of the new tokens; the pool holds all earlier tokens.
        codebook: the index, changed.
        lengths: positions per row.
        rounds, seed: of k-means.
        spans: `start` and `length` of all rows as host integers, or None (ops/attend/prompt_attention.py).
        join: whether the calling stream waits for the result.

    Launches:
        Kernels of torch for k-means, a few rows of the batch at a time, then one launch of `assign_codes`. K-means
        takes as many keys as `spans` says; without `spans`, as many as a row has room for. All kernels run on the side
        stream, beside the next layer, unless `join`.
    """
    centroids, sink = codebook.centroids, lengths.sink
    heads, spaces, most, _ = centroids.shape[1:]
    for b, (n0, n, _, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= n0:
            continue
        keys = row_keys(leaving, b, n0, n, sink, max(n, sink))
        codebook.learned[b] = learned = int(keys.shape[1] >= most)
        if learned:
            taken = min(keys.shape[1], KEYS * most)
            x = parts(keys[:, torch.arange(taken) * keys.shape[1] // taken], spaces)
            centroids[b] = kmeans(x, most, 1, rounds, seed)[0].unflatten(0, (heads, spaces))
        encode(codebook, b, sink, keys[:, : new - sink], sink)


def sampled_keys(leaving: Leaving, lengths: Lengths, count: Tensor, taken: Tensor, most: int) -> Tensor:
    """The keys that k-means learns from, [batch, heads, most, dim]: `taken` of the `count` keys of every row."""
    (k, pool), (start, length, *_) = leaving, lengths
    i = torch.arange(most, device=k.device)
    position = lengths.sink + (i * count[:, None]) // taken.clamp(min=1)[:, None]
    fresh = position >= start[:, None]
    row = torch.arange(len(count), device=k.device)[:, None]
    column = (k.shape[2] - length[:, None] + position).clamp(0, k.shape[2] - 1)
    stored = keys_of(only_keys(pool)[row, :, position.clamp(max=pool.shape[2] - 1)]).to(k.dtype)
    return torch.where(fresh[..., None, None], k[row, :, column], stored).transpose(1, 2)


def learn(leaving: Leaving, codebook: Codebook, lengths: Lengths, rounds: int, seed: int, capacity: int) -> None:
    """The centroids of all rows at once, without a wait for the device, from `capacity` keys of a row at most."""
    centroids, learned = codebook.centroids, codebook.learned
    heads, spaces, most, width = centroids.shape[1:]
    fresh, count = lengths.length > lengths.start, (lengths.length - lengths.sink).long().clamp(min=0)
    learns, taken = fresh & (count >= most), count.clamp(max=capacity)
    learned.copy_(torch.where(fresh, learns, learned))
    if capacity < most:
        return
    of_part = lambda x: x[:, None].expand(-1, heads * spaces).reshape(-1, 1)  # noqa: E731
    keys = of_part(torch.where(learns, taken, most))
    x = sampled_keys(leaving, lengths, count, taken, capacity).unflatten(-1, (spaces, width))
    x = x.permute(0, 1, 3, 2, 4).flatten(0, 2)  # [batch * heads * spaces, capacity, width]
    there = torch.arange(capacity, device=x.device) < keys
    x = x.masked_fill(~there[..., None], 0)
    found = x.gather(1, first_draw(keys, most, seed)[..., None].expand(-1, -1, width))
    for _ in range(rounds):
        cluster, distance2 = nearest(x, found)
        cluster = cluster.masked_fill(~there, most)
        found = means(x, cluster, found)
    cluster = fill_empty_clusters(cluster, distance2, torch.full_like(keys, most), most)
    found, flat = means(x, cluster, found), centroids.view(-1, most, width)
    flat.copy_(torch.where(of_part(learns)[..., None], found, flat))


def of_rows(view, rows: slice):
    """A view whose tensors hold some rows of the batch."""
    return view._make(x[rows] if isinstance(x, Tensor) else x for x in view)


def launch(leaving, codebook, lengths, rounds, seed, spans, join) -> None:
    batch, heads, spaces, most, _ = codebook.centroids.shape
    longest = max(spans[batch:]) if spans else leaving.pool.shape[2]
    capacity = min(longest - lengths.sink, KEYS * most)
    some = max(1, SCORES // max(1, heads * spaces * most * capacity))
    with on_side_stream(join, *leaving, *codebook, *lengths[:4]):
        for b in range(0, batch, some):
            new, mine, ends = (of_rows(view, slice(b, b + some)) for view in (leaving, codebook, lengths))
            learn(new, mine, ends, rounds, seed, capacity)
        launch_assign(leaving, codebook, lengths, True)


learn_codebook = register("learn_codebook", reference, impls=(by_triton(launch),), check=check)
