"""Mark the outliers of a prompt: the chunks with the least cosine between a key and the landmark.

    outlier = 1 for the `count` chunks of a head with the least cosines, among all chunks that have left the ring; of
    equal cosines the lower chunk

So the marks depend on the tokens of a sequence, and not on how they were cut into prompts and chunks of prompts. Rows
without new tokens stay as they are.

ShadowKV (arXiv 2410.21465), and its authors' code.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import torch_kernels
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops.shadowkv.views import Landmarks
from torchsparsekv.ops.store.views import Lengths


def check(landmarks, lengths, block_size, count) -> None:
    if block_size < 1 or lengths.sink % block_size or count < 0:
        raise ValueError(
            f"need whole chunks of sinks and a count of at least 0, got {lengths.sink} sinks, chunks of {block_size}, "
            f"count {count}"
        )


def reference(landmarks: Changed[Landmarks], lengths: Lengths, block_size: int, count: int) -> None:
    """Mark the outliers of a prompt: the chunks with the least cosine between a key and the landmark.

    Args:
        landmarks: the index. `outlier` changes.
        lengths: positions per row.
        block_size: tokens of a chunk.
        count: the number of outliers of a head.

    Launches:
        Kernels of torch, on all rows at once.
    """
    _, cosines, outlier = landmarks
    for b, (n0, n, _, end) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= n0:
            continue
        first, last = lengths.sink // block_size, end // block_size
        for h, cosine in enumerate(cosines[b].tolist()):
            order = sorted(range(first, last), key=lambda chunk: (cosine[chunk], chunk))
            outlier[b, h] = 0
            outlier[b, h, order[:count]] = 1


def ranked(cosines: Tensor) -> Tensor:
    """The rank of every cosine among the cosines of its head, from the least on."""
    order = cosines.argsort(dim=-1, stable=True)
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def launch(landmarks, lengths, block_size, count) -> None:
    _, cosines, outlier = landmarks
    chunk = torch.arange(cosines.shape[2], device=cosines.device)
    end = (lengths.ring_begin // block_size)[:, None, None]
    live = (chunk >= lengths.sink // block_size) & (chunk < end)
    marked = live & (ranked(cosines.masked_fill(~live, torch.inf)) < count)
    fresh = (lengths.length > lengths.start)[:, None, None]
    outlier.copy_(torch.where(fresh, marked.to(outlier.dtype), outlier))


mark_outliers = register("mark_outliers", reference, impls=(torch_kernels(launch),), check=check)
