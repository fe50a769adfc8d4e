"""Each query head of a group has chosen pages of its own: take turns until there are as many different ones as may be.

`ids` [batch, q_heads, n] are a query head's pages, distinct, -1 for none, and `scores` how good each page is to it.
First comes the best page of every head, in order of heads, then the second of every head, and so on (of equal scores
the lower page first); a page that is there already is passed by, and the first n are taken: into `union`, in that
order, and -1 behind them.

A program per kv head: ranks by comparing the n entries of a head with each other, then the turns, many at a time, each
compared with those before it. For 4 heads of 64 pages that is 256 entries; no more than 8 SMs have work, and what it
costs is steps that wait for one another: csrc/union_pages.cu has all in shared memory, and looks pages up in a table.
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
WIDE, PART = 256, 64  # entries compared with others, and how many others, at a time
COMPARED = 65536  # pairs at a time, at most
NATIVE_ENTRIES = 1024  # that csrc/union_pages.cu is for, a thread each


def check(scores, ids, union) -> None:
    if ids.shape[1] % union.shape[1]:
        raise ValueError(f"{ids.shape[1]} query heads are no multiple of {union.shape[1]} kv heads")


def reference(scores: PageScores, ids: PageIds, union: Changed[Union]) -> None:
    batch, heads, n = union.shape
    by_id = ids.sort(dim=-1).values
    own = torch.where(by_id >= 0, scores.gather(2, by_id.clamp(min=0).long()), -torch.inf)
    ranked = by_id.gather(2, own.argsort(dim=-1, descending=True, stable=True))
    turns = ranked.view(batch, heads, -1, n).transpose(2, 3).flatten(2)
    again = (turns[..., :, None] == turns[..., None, :]).tril(-1).any(-1)
    new = (turns >= 0) & ~again
    first = (~new).to(torch.uint8).argsort(dim=-1, stable=True)[..., :n]
    union.copy_(torch.where(new.gather(2, first), turns.gather(2, first), -1))


@triton.jit
def _rank(ids, worth, turns, g, n, G: tl.constexpr, N: tl.constexpr, PART: tl.constexpr):
    """Of one head: an entry of rank k goes to place k * G + g. Those that are none stand behind, in any order."""
    i, p = tl.arange(0, N), tl.arange(0, PART)
    x = tl.load(ids + g * n + i, mask=i < n, other=-1)
    own = tl.load(worth + g * n + i, mask=i < n, other=float("-inf"))
    rank = tl.where(x < 0, tl.cumsum((x < 0).to(tl.int32), 0) - 1, 0)
    for first in range(0, n, PART):
        y = tl.load(ids + g * n + first + p, mask=first + p < n, other=-1)
        other = tl.load(worth + g * n + first + p, mask=first + p < n, other=float("-inf"))
        before = (other[None, :] == own[:, None]) & (y[None, :] < x[:, None])
        before = (other[None, :] > own[:, None]) | before | (x < 0)[:, None]
        rank += tl.sum((before & (y >= 0)[None, :]).to(tl.int32), 1)
    tl.store(turns + rank * G + g, x, mask=i < n)


@triton.jit
def _union(
    scores, ids, worth, turns, out, blocks, n, G: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
    PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    i, p, every = tl.arange(0, N), tl.arange(0, PART), tl.arange(0, WIDE)
    ids, worth, turns, out = ids + bh * G * n, worth + bh * G * n, turns + bh * G * n, out + bh * n
    for first in range(0, G * n, WIDE):
        at = first + every
        x = tl.load(ids + at, mask=at < G * n, other=-1)
        score = tl.load(scores + (bh * G + at // n) * blocks + x, mask=x >= 0, other=float("-inf"))
        tl.store(worth + at, score, mask=at < G * n)
    tl.store(out + i, tl.full((N,), -1, tl.int32), mask=i < n)
    tl.debug_barrier()
    for g in range(G):
        _rank(ids, worth, turns, g, n, G, N, PART)
    tl.debug_barrier()
    seen = 0
    for first in range(0, G * n, WIDE):
        at = first + every
        x = tl.load(turns + at, mask=at < G * n, other=-1)
        again = tl.zeros((WIDE,), tl.int32)
        for earlier in range(0, tl.minimum(first + WIDE, G * n), PART):
            y = tl.load(turns + earlier + p, mask=earlier + p < G * n, other=-1)
            again += tl.sum(((x[:, None] == y[None, :]) & ((earlier + p)[None, :] < at[:, None])).to(tl.int32), 1)
        new = (x >= 0) & (again == 0)
        place = seen + tl.cumsum(new.to(tl.int32), 0) - 1
        tl.store(out + place, x, mask=new & (place < n))
        seen += tl.sum(new.to(tl.int32), 0)


def native(group: int, n: int) -> dict[str, int] | str:
    """How csrc/union_pages.cu is compiled for as many heads and pages of each, or why it is not for them."""
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
    turns, worth = torch.empty_like(ids), torch.empty_like(ids, dtype=torch.float32)
    _union[(batch * heads,)](
        scores, ids, worth, turns, union, scores.shape[2], n, G=group, N=wide,
        WIDE=min(WIDE, next_power_of_2(group * n)), PART=max(16, min(PART, COMPARED // wide)),
        num_warps=8, **launch_early(ids.device, batch * heads),
    )  # fmt: skip


union_pages = register(
    "union_pages", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), check=check
)
