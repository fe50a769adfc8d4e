"""Merge the pages that the query heads of a group selected, round-robin, until n different pages are found.

    ranked[g] = the pages of query head g by descending score, the lower page first among equal scores
    order     = ranked[0][0], ranked[1][0], ..., ranked[0][1], ranked[1][1], ...
    union     = the first n different pages of `order`, -1 after them

Launches: 1, a program for each kv head. csrc/union_pages.cu takes up to 1024 entries (query heads times n), a thread
each, and finds repeated pages by a hash table in shared memory. The Triton kernel ranks the entries of a head by
comparing each with each, then compares every entry of the merged order with those before it.

Paper: section 4.2, the union over the query heads of a group.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.store.views import I32

PageScores = Annotated[Tensor, Of("batch q_heads blocks", torch.float32)]
PageIds = Annotated[Tensor, Of("batch q_heads n", I32)]
Union = Annotated[Tensor, Of("batch heads n", I32)]
WIDE, PART = 256, 64  # a comparison is between WIDE entries and PART others
MAX_PAIRS = 65536  # of a comparison
NATIVE_ENTRIES = 1024  # entries that csrc/union_pages.cu takes at most


def check(scores, ids, union) -> None:
    if ids.shape[1] % union.shape[1]:
        raise ValueError(f"{ids.shape[1]} query heads are no multiple of {union.shape[1]} kv heads")


def reference(scores: PageScores, ids: PageIds, union: Changed[Union]) -> None:
    """Write the merged pages into `union`.

    Args:
        scores: [batch, q_heads, blocks], the score of every page for every query head.
        ids: [batch, q_heads, n], the pages that each query head selected, different ones, -1 for none.
        union: [batch, heads, n], written: page numbers in round-robin order, -1 after the last.
    """
    batch, heads, n = union.shape
    by_id = ids.sort(dim=-1).values
    own_scores = torch.where(by_id >= 0, scores.gather(2, by_id.clamp(min=0).long()), -torch.inf)
    ranked = by_id.gather(2, own_scores.argsort(dim=-1, descending=True, stable=True))
    order = ranked.view(batch, heads, -1, n).transpose(2, 3).flatten(2)
    repeated = (order[..., :, None] == order[..., None, :]).tril(-1).any(-1)
    new = (order >= 0) & ~repeated
    first = (~new).to(torch.uint8).argsort(dim=-1, stable=True)[..., :n]
    union.copy_(torch.where(new.gather(2, first), order.gather(2, first), -1))


@triton.jit
def _rank(ids, entry_scores, order, g, n, G: tl.constexpr, N: tl.constexpr, PART: tl.constexpr):
    """Write the pages of query head g into the merged order: the page of rank r to place r * G + g. Entries without a
    page come last, in any order."""
    i, p = tl.arange(0, N), tl.arange(0, PART)
    page = tl.load(ids + g * n + i, mask=i < n, other=-1)  # [N]
    score = tl.load(entry_scores + g * n + i, mask=i < n, other=float("-inf"))
    rank = tl.where(page < 0, tl.cumsum((page < 0).to(tl.int32), 0) - 1, 0)
    for first in range(0, n, PART):
        other = tl.load(ids + g * n + first + p, mask=first + p < n, other=-1)  # [PART]
        other_score = tl.load(entry_scores + g * n + first + p, mask=first + p < n, other=float("-inf"))
        before = (other_score[None, :] == score[:, None]) & (other[None, :] < page[:, None])
        before = (other_score[None, :] > score[:, None]) | before | (page < 0)[:, None]
        rank += tl.sum((before & (other >= 0)[None, :]).to(tl.int32), 1)
    tl.store(order + rank * G + g, page, mask=i < n)


@triton.jit
def _union(
    scores, ids, entry_scores, order, out, blocks, n, G: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
    PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`entry_scores` and `order` are scratch, [G * n] for each kv head."""
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    i, p, w = tl.arange(0, N), tl.arange(0, PART), tl.arange(0, WIDE)
    ids, entry_scores, order, out = ids + bh * G * n, entry_scores + bh * G * n, order + bh * G * n, out + bh * n
    for first in range(0, G * n, WIDE):
        entry = first + w
        page = tl.load(ids + entry, mask=entry < G * n, other=-1)  # [WIDE]
        score = tl.load(scores + (bh * G + entry // n) * blocks + page, mask=page >= 0, other=float("-inf"))
        tl.store(entry_scores + entry, score, mask=entry < G * n)
    tl.store(out + i, tl.full((N,), -1, tl.int32), mask=i < n)
    tl.debug_barrier()
    for g in range(G):
        _rank(ids, entry_scores, order, g, n, G, N, PART)
    tl.debug_barrier()
    found = 0
    for first in range(0, G * n, WIDE):
        entry = first + w
        page = tl.load(order + entry, mask=entry < G * n, other=-1)  # [WIDE]
        repeats = tl.zeros((WIDE,), tl.int32)
        for earlier in range(0, tl.minimum(first + WIDE, G * n), PART):
            other = tl.load(order + earlier + p, mask=earlier + p < G * n, other=-1)  # [PART]
            same = (page[:, None] == other[None, :]) & ((earlier + p)[None, :] < entry[:, None])
            repeats += tl.sum(same.to(tl.int32), 1)
        new = (page >= 0) & (repeats == 0)
        place = found + tl.cumsum(new.to(tl.int32), 0) - 1
        tl.store(out + place, page, mask=new & (place < n))
        found += tl.sum(new.to(tl.int32), 0)


def native(group: int, n: int) -> dict[str, int] | str:
    """The defines of csrc/union_pages.cu for `group` query heads of n pages each, or why it does not fit."""
    threads = max(32, next_power_of_2(group * n))
    return dict(G=group, THREADS=threads) if threads <= NATIVE_ENTRIES else f"{group} query heads of {n} pages each"


def _fits(scores, ids, union) -> tuple[_cuda.Module, int] | str:
    shape = native(ids.shape[1] // union.shape[1], ids.shape[2])
    if isinstance(shape, str):
        return shape
    kernels = _cuda.load("union_pages", ids.device, **shape)
    return kernels if isinstance(kernels, str) else (kernels, shape["THREADS"])


def _launch_cuda(fitting, scores, ids, union) -> None:
    """csrc/union_pages.cu"""
    (kernels, threads), (batch, heads, n) = fitting, union.shape
    kernels.launch("union_pages", (batch * heads, 1, 1), threads, scores, ids, union, scores.shape[2], n)


def _launch_triton(scores, ids, union) -> None:
    batch, heads, n = union.shape
    group, wide = ids.shape[1] // heads, next_power_of_2(n)
    order, entry_scores = torch.empty_like(ids), torch.empty_like(ids, dtype=torch.float32)
    _union[(batch * heads,)](
        scores, ids, entry_scores, order, union, scores.shape[2], n, G=group, N=wide,
        WIDE=min(WIDE, next_power_of_2(group * n)), PART=max(16, min(PART, MAX_PAIRS // wide)),
        num_warps=8, **launch_early(ids.device, batch * heads),
    )  # fmt: skip


union_pages = register(
    "union_pages", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), check=check
)
