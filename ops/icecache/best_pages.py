"""The best pages of each query head, and of those of a group as many different ones by turns as there is room for.

Each query head takes its best pages (top_blocks.py), as many as `union` holds, and then they take turns
(union_pages.py), into `union`. csrc/best_pages.cu does both in one launch, where a page is a thread's and the programs
of a kv head's query heads can see each other; all else is left to those two ops.
"""
from typing import Annotated

from torch import Tensor

from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops.icecache import union_pages as turns
from torchsparsekv.ops.select import top_blocks as top
from torchsparsekv.ops.select._top import GROUP
from torchsparsekv.ops.store.views import I32, Scored

Union = Annotated[Tensor, Of("batch kv_heads chosen", I32)]
CLUSTER = 8  # programs of one, at most
# As top_blocks.NATIVE: 256 threads, each with 8 scores, would take 0.4 us more of 10240 pages.
NATIVE = ((512, 4), (1024, 16))


def check(scored, union) -> None:
    top.check(scored, union.shape[2], None, None, 0, 0)
    turns.check(scored.scores, scored.scores, union)


def reference(scored: Scored, union: Changed[Union]) -> None:
    turns.reference(scored.scores, top.reference(scored, union.shape[2]), union)


def native(n: int, k: int, group: int) -> dict[str, int] | str:
    """How csrc/best_pages.cu is compiled for the best k of n pages of each of so many query heads, or why it is not."""
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
    turns.union_pages(scored.scores, top.top_blocks(scored, union.shape[2]), union)


best_pages = register(
    "best_pages", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_both)), check=check
)
