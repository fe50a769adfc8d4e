"""Select the ids of the k best scores of each head, in ascending order of id; of equal scores the lower ids.

    out = sorted(the k largest of `scores`), -1 in unused places at the end;  scores of -inf or NaN are never selected

Nothing is sorted: `take_within` searches the k-th largest order-preserving integer key, and one compaction follows.

Args:
    scored: scores [batch, heads, n], and their peaks [batch, heads, cdiv(n, GROUP)] or None (ops/select/_top.py).
    k: ids per head.
    ids [batch, heads, n]: if given, the result holds the id at the place of each winner instead of the place. `ids`
        ascend where scores are above -inf.
    row_sizes [batch]: with `ids` only. Rows of the batch whose `row_sizes` is at most `take_all_up_to` take all their
        ids, whatever the scores: the first `width` of `ids`.
    take_all_up_to: see `row_sizes`.
    width: ids per head in the result, at least k. 0 without `row_sizes`: the result has k.

Returns: ids [batch, heads, max(k, width)], int32.
Launches: csrc/top_blocks.cu, one program per (row, head), for rows that it can read at once or by their peaks. Else
Triton: one launch that takes k groups by their peaks, then k of their scores; or, for long rows without peaks, one
launch per round: each program takes the winners of one chunk, and the next round takes the winners of the winners.
"""
import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.select._top import GROUP, ordered, range_of, take_within
from torchsparsekv.ops.store.views import I32, PerRow, Scored

Ids = Annotated[Tensor, Of("batch heads n", I32)]
WIDEST = 16384  # scores per program at most: 16 registers per thread without peaks, 64 with peaks
WARPS = 8  # of a program that takes a row by its peaks
# The shapes of csrc/top_blocks.cu: (threads of a program, scores per thread). Triton takes rows that fit none of them.
NATIVE = ((256, 8), (1024, 8), (1024, 16))
NATIVE_PEAKS = 16  # peaks per thread at most
NATIVE_SPARE = 4  # there is room for k + k / NATIVE_SPARE groups, so that the search for the k-th peak may end early


def check(scored, k, ids, row_sizes, take_all_up_to, width) -> None:
    scores, peaks = scored
    if k < 1 or scores.shape[-1] < 1:
        raise ValueError(f"need k >= 1 and at least one score, got k={k}, scores {tuple(scores.shape)}")
    if peaks is not None and peaks.shape[-1] != cdiv(scores.shape[-1], GROUP):
        raise ValueError(f"{scores.shape[-1]} scores have {cdiv(scores.shape[-1], GROUP)} peaks, got {peaks.shape[-1]}")
    if row_sizes is None and (take_all_up_to or width):
        raise ValueError(f"take_all_up_to and width must be 0 without row_sizes, got {take_all_up_to} and {width}")
    if row_sizes is not None and (ids is None or width < k):
        have = "no ids" if ids is None else "ids"
        raise ValueError(f"row_sizes needs ids and a width of at least k={k}, got {have} and width {width}")


def reference(
    scored: Scored, k: int, ids: Ids | None = None, row_sizes: PerRow | None = None, take_all_up_to: int = 0,
    width: int = 0,
) -> Tensor:  # fmt: skip
    n = scored.scores.shape[-1]
    scores = torch.where(scored.scores.isnan(), -torch.inf, scored.scores)  # NaN is never selected
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., : min(k, n)]
    chosen = torch.where(scores.gather(-1, order) == -torch.inf, n, order).sort(-1).values
    named = chosen if ids is None else ids.gather(-1, chosen.clamp(max=n - 1))
    out = torch.full((*scores.shape[:-1], max(k, width)), -1, dtype=torch.int32, device=scores.device)
    out[..., : chosen.shape[-1]] = torch.where(chosen == n, -1, named)
    if row_sizes is not None and ids is not None:
        take_all = row_sizes <= take_all_up_to
        out[take_all] = torch.nn.functional.pad(ids[take_all][..., :width], (0, max(0, width - n)), value=-1)
    return out


@triton.jit
def _top(
    scores, ids, out, best, row_sizes, all_ids, heads, n, chunk, k, total, take_all_up_to, width, KEEP: tl.constexpr,
    MAPPED: tl.constexpr, TAKE_ALL: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    i = tl.arange(0, N)
    at = part * chunk + i
    x = tl.load(scores + row * n + at, mask=(i < chunk) & (at < n), other=float("-inf"))
    if TAKE_ALL:
        k = tl.where(tl.load(row_sizes + row // heads) <= take_all_up_to, 0, k)
    key = ordered(x)
    low, top = range_of(key)
    take, taken, _ = take_within(key, k, k, low, top)
    chosen = at
    if MAPPED:
        chosen = tl.load(ids + row * n + at, mask=take, other=-1)
    base = (row * parts + part) * width
    place, empty = _put(out + base, take, taken, chosen, all_ids + row * total, total, k, width, TAKE_ALL, K)
    if KEEP:
        tl.store(best + base + tl.arange(0, K), tl.full((K,), float("-inf"), tl.float32), mask=empty)
        tl.store(best + base + place, x, mask=take)


@triton.jit
def _put(out, take, taken, chosen, all_ids, total, k, width, TAKE_ALL: tl.constexpr, K: tl.constexpr):
    """Write the `taken` winners first and -1 after them. A row that takes all (k = 0) gets the first `width` ids."""
    place = tl.cumsum(take.to(tl.int32), 0) - 1
    j = tl.arange(0, K)
    rest = tl.full((K,), -1, tl.int32)
    if TAKE_ALL:
        rest = tl.load(all_ids + j, mask=j < tl.where(k == 0, tl.minimum(total, width), 0), other=-1)
    empty = (j >= taken) & (j < width)
    tl.store(out + j, rest, mask=empty)
    tl.store(out + place, chosen, mask=take & (place < width))
    return place, empty


@triton.jit
def best_of_peaks(
    scores, peaks, out, scratch, n, groups, k, width, GROUP: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Write the places of the k best scores of one row into `out` [width]. `scratch` has room for L >= k groups."""
    _, key, at, low, top = _candidates(scores, peaks, scratch, n, groups, k, GROUP, N, L)
    take, taken, _ = take_within(key, k, k, low, top)
    _put(out, take, taken, at, out, n, k, width, False, L)


@triton.jit
def _candidates(
    scores, peaks, scratch, n, groups, k, GROUP: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Read all scores [L * GROUP] of the groups with the k best peaks.

    Returns which scores exist, their keys (0 for a score that cannot be among the k best), their places, and bounds of
    the keys.
    """
    i = tl.arange(0, N)
    key = ordered(tl.load(peaks + i, mask=i < groups, other=float("-inf")))
    low, top = range_of(key)
    take, taken, least = take_within(key, k, L, low, top)
    tl.store(scratch + tl.cumsum(take.to(tl.int32), 0) - 1, i, mask=take)
    tl.debug_barrier()
    e = tl.arange(0, L * GROUP)
    group = tl.load(scratch + e // GROUP, mask=e // GROUP < taken, other=0)
    at = group * GROUP + e % GROUP
    live = (e // GROUP < taken) & (at < n)
    x = tl.load(scores + at, mask=live, other=float("-inf"))
    key = ordered(x)
    # If k groups were taken, none of the k best scores is below the least of their peaks.
    low = tl.where(taken < k, 1, least).to(tl.uint32)
    return live, tl.where(key >= low, key, 0).to(tl.uint32), at, low, top


@triton.jit
def _top_of_peaks(
    scores, peaks, ids, out, scratch, row_sizes, heads, n, groups, k, take_all_up_to, width, MAPPED: tl.constexpr,
    TAKE_ALL: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, L: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if TAKE_ALL:
        k = tl.where(tl.load(row_sizes + row // heads) <= take_all_up_to, 0, k)
    live, key, at, low, top = _candidates(
        scores + row * n, peaks + row * groups, scratch + row * L, n, groups, k, GROUP, N, L
    )
    chosen = at
    if MAPPED:
        chosen = tl.load(ids + row * n + at, mask=live, other=-1)
    take, taken, _ = take_within(key, k, k, low, top)
    _put(out + row * width, take, taken, chosen, ids + row * n, n, k, width, TAKE_ALL, K)


class _Answer(NamedTuple):
    """The shape of the result, and the rows that take all of `ids`. `heads` rows of scores share one of `row_sizes`."""

    width: int
    row_sizes: Tensor | None = None
    heads: int = 1
    ids: Tensor | None = None
    take_all_up_to: int = 0


def _from_peaks(scores: Tensor, peaks: Tensor, ids: Tensor | None, k: int, answer: _Answer) -> Tensor:
    (rows, n), groups = scores.shape, peaks.shape[-1]
    width, row_sizes, heads, _, take_all_up_to = answer
    lanes = next_power_of_2(k)  # groups whose scores are read
    out = torch.empty((rows, width), dtype=torch.int32, device=scores.device)
    scratch = torch.empty((rows, lanes), dtype=torch.int32, device=scores.device)
    _top_of_peaks[(rows,)](
        scores, peaks, out if ids is None else ids, out, scratch, out if row_sizes is None else row_sizes, heads, n,
        groups, k, take_all_up_to, width, MAPPED=ids is not None, TAKE_ALL=row_sizes is not None, GROUP=GROUP,
        N=next_power_of_2(groups), L=lanes, K=next_power_of_2(width), num_warps=WARPS,
        **launch_early(scores.device, rows),
    )  # fmt: skip
    return out


def _launch(scores: Tensor, ids: Tensor | None, k: int, parts: int, answer: _Answer) -> tuple[Tensor, Tensor]:
    rows, n = scores.shape
    chunk = cdiv(n, parts)
    width, row_sizes, heads, all_ids, take_all_up_to = answer
    out = torch.empty((rows, parts * width), dtype=torch.int32, device=scores.device)
    best = torch.empty((rows, parts * k) if parts > 1 else (1,), dtype=torch.float32, device=scores.device)
    lanes = next_power_of_2(chunk)
    _top[(rows, parts)](
        scores, out if ids is None else ids, out, best, out if row_sizes is None else row_sizes,
        out if all_ids is None else all_ids, heads, n, chunk, k, 0 if all_ids is None else all_ids.shape[1],
        take_all_up_to, width, KEEP=parts > 1, MAPPED=ids is not None, TAKE_ALL=row_sizes is not None, N=lanes,
        K=next_power_of_2(width), num_warps=min(32, max(4, lanes // 512)), **launch_early(scores.device, rows * parts),
    )  # fmt: skip
    return out, best


def _parts(n: int, k: int) -> int:
    """Chunks of a row. A launch takes as long as its widest program, so a chunk is about as wide as all winners."""
    chunk = next_power_of_2(math.isqrt(n * k))
    return cdiv(n, min(max(chunk, 2 * k, 1024), WIDEST))


def _launch_triton(scored, k, ids, row_sizes, take_all_up_to, width) -> Tensor:
    scores, peaks = scored
    best, named, answer = scores.flatten(0, -2), None, _Answer(k)
    if ids is not None:
        named = ids.flatten(0, -2)
    if row_sizes is not None:
        answer = _Answer(width, row_sizes, best.shape[0] // row_sizes.shape[0], named, take_all_up_to)
    shape = (*scores.shape[:-1], answer.width)
    parts = _parts(best.shape[1], k)
    if parts > 1 and peaks is not None and max(next_power_of_2(k) * GROUP, peaks.shape[-1]) <= WIDEST:
        return _from_peaks(best, peaks, named, k, answer).view(shape)
    while parts > 1:
        named, best = _launch(best, named, k, parts, _Answer(k))
        parts = cdiv(best.shape[1], max(WIDEST, 2 * k))
    return _launch(best, named, k, 1, answer)[0].view(shape)


def native(n: int, k: int, peaks: bool, least: int = 1, shapes=NATIVE) -> dict[str, int] | str:
    """The constants with which csrc/top_blocks.cu is compiled for rows of n scores, or the reason why it is not.

    The constants are those of the first of `shapes` that can read such a row and has `least` threads or more.
    """
    groups = cdiv(n, GROUP)
    for threads, each in shapes:
        if threads < least:
            continue
        most = threads * each // GROUP  # groups whose scores a program can read
        if groups <= most:
            return dict(THREADS=threads, SCORES=each, PEAKS=0)
        mine = next_power_of_2(cdiv(groups, threads))
        if peaks and k + k // NATIVE_SPARE <= most and mine <= NATIVE_PEAKS:
            return dict(THREADS=threads, SCORES=each, PEAKS=mine)
    return f"the best {k} of {n} scores {'with' if peaks else 'without'} peaks"


def _fits(scored, k, ids, row_sizes, take_all_up_to, width) -> tuple[_cuda.Module, int] | str:
    scores, peaks = scored
    shape = native(scores.shape[-1], k, peaks is not None)
    if isinstance(shape, str):
        return shape
    kernels = _cuda.load("top_blocks", scores.device, GROUP=GROUP, **shape)
    return kernels if isinstance(kernels, str) else (kernels, shape["THREADS"])


def _launch_cuda(fitting, scored, k, ids, row_sizes, take_all_up_to, width) -> Tensor:
    """csrc/top_blocks.cu"""
    (kernels, threads), (scores, peaks) = fitting, scored
    n, width = scores.shape[-1], max(k, width)
    rows = scores.numel() // n
    out = fake(scored, k, width=width)
    heads = 1 if row_sizes is None else rows // row_sizes.shape[0]
    kernels.launch("top", (rows, 1, 1), threads, scores, peaks, ids, out, row_sizes, heads, n, k, take_all_up_to, width)
    return out


def fake(scored, k: int, ids=None, row_sizes=None, take_all_up_to=0, width: int = 0) -> Tensor:
    scores, _ = scored
    return scores.new_empty((*scores.shape[:-1], max(k, width)), dtype=torch.int32)


top_blocks = register(
    "top_blocks", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake, check=check
)
