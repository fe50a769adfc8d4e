"""Select the best pages of every query head and merge them round-robin for the kv head.

    union = the first n different pages of round_robin(top_n(scores of each query head))

This is top_blocks followed by union_pages (union_pages.py says how pages are merged).

Launches: 1 by csrc/best_pages.cu: a program for each query head, those of a kv head in one cluster, whose first program
merges. Otherwise the launches of top_blocks and union_pages.

Paper: section 4.2, the union over the query heads of a group.
"""
from typing import Annotated

from torch import Tensor

from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops.icecache import union_pages as merging
from torchsparsekv.ops.select import top_blocks as top
from torchsparsekv.ops.select._top import GROUP
from torchsparsekv.ops.store.views import I32, Scored

Union = Annotated[Tensor, Of("batch kv_heads chosen", I32)]
CLUSTER = 8  # programs of a cluster at most
# (threads, scores of a thread), as in top_blocks.NATIVE. 256 threads of 8 scores take 0.4 us more at 10240 pages.
NATIVE = ((512, 4), (1024, 16))


def check(scored, union) -> None:
    top.check(scored, union.shape[2], None, None, 0, 0)
    merging.check(scored.scores, scored.scores, union)


def reference(scored: Scored, union: Changed[Union]) -> None:
    """Write the merged pages into `union`.

    Args:
        scored: scores [batch, q_heads, pages] with their peaks; -inf for pages that are never selected.
        union: [batch, kv_heads, n], written: page numbers in round-robin order, -1 after the last.
    """
    merging.reference(scored.scores, top.reference(scored, union.shape[2]), union)


def native(n: int, k: int, group: int) -> dict[str, int] | str:
    """The defines of csrc/best_pages.cu for the best k of n pages and `group` query heads a kv head, or why it does
    not fit."""
    if group > CLUSTER:
        return f"{group} query heads a kv head"
    shape = top.native(n, k, True, group * k, NATIVE)
    return shape if isinstance(shape, str) else shape | dict(K=k, G=group, GROUP=GROUP)


def _fits(scored, union) -> tuple[_cuda.Module, int] | str:
    (scores, peaks), (_, heads, k) = scored, union.shape
    if peaks is None:
        return "scores without peaks"
    shape = native(scores.shape[2], k, scores.shape[1] // heads)
    if isinstance(shape, str):
        return shape
    kernels = _cuda.load("best_pages", scores.device, **shape)
    return kernels if isinstance(kernels, str) else (kernels, shape["THREADS"])


def _launch_cuda(fitting, scored, union) -> None:
    """csrc/best_pages.cu"""
    (kernels, threads), (scores, peaks) = fitting, scored
    batch, heads, n = scores.shape
    kernels.launch("best", (batch * heads, 1, 1), threads, scores, peaks, union, n)


def _launch_both(scored, union) -> None:
    merging.union_pages(scored.scores, top.top_blocks(scored, union.shape[2]), union)


best_pages = register(
    "best_pages", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_both)), check=check
)
