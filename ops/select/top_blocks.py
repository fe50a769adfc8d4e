"""The ids of the k best scores of each row, in ascending order of id; ties go to the lower id.

No sort: `take_within` searches an order-preserving integer key for the k-th, then one compaction. Rows too long for one
program are best given with their peaks (ops/select/_top.py): one launch takes k groups, then k of their scores. Without,
they are cut into chunks whose winners meet in a second launch. Scores of -inf are never chosen; unused places are -1
and stand at the end. With `ids` (ascending where scores are above -inf), what is returned is the id at the place of
each winner.

Rows of the batch whose `counter` is at most `few` return their first `width` ids instead, whatever the scores; the
result is then `width` wide, at least k.

csrc/top_blocks.cu takes a row in one program, with its peaks or, where it is short, without.
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
WIDEST = 16384  # scores per program at most: 16 registers a thread without peaks, 64 with them
WARPS = 8  # of the program of a row with peaks
# What csrc/top_blocks.cu is for; other shapes are left to Triton. Of a program: threads, and scores that each looks at.
NATIVE = ((256, 8), (1024, 16))
NATIVE_PEAKS = 16  # that a thread looks at before, at most
NATIVE_SPARE = 4  # at least one group in excess for so many of the k, so that the search for theirs may end early


def check(scored, k, ids, counter, few, width) -> None:
    scores, peaks = scored
    if k < 1 or scores.shape[-1] < 1:
        raise ValueError(f"need k >= 1 and at least one score, got k={k}, scores {tuple(scores.shape)}")
    if peaks is not None and peaks.shape[-1] != cdiv(scores.shape[-1], GROUP):
        raise ValueError(f"{scores.shape[-1]} scores have {cdiv(scores.shape[-1], GROUP)} peaks, got {peaks.shape[-1]}")
    if counter is None and (few or width):
        raise ValueError(f"few and width are of whole rows; without them they are 0, got {few} and {width}")
    if counter is not None and (ids is None or width < k):
        raise ValueError(f"whole rows need ids, and a width of at least k={k}, got {width}")


def reference(
    scored: Scored, k: int, ids: Ids | None = None, counter: PerRow | None = None, few: int = 0, width: int = 0
) -> Tensor:
    n = scored.scores.shape[-1]
    scores = torch.where(scored.scores.isnan(), -torch.inf, scored.scores)  # NaN is nobody's best
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., : min(k, n)]
    chosen = torch.where(scores.gather(-1, order) == -torch.inf, n, order).sort(-1).values
    named = chosen if ids is None else ids.gather(-1, chosen.clamp(max=n - 1))
    out = torch.full((*scores.shape[:-1], max(k, width)), -1, dtype=torch.int32, device=scores.device)
    out[..., : chosen.shape[-1]] = torch.where(chosen == n, -1, named)
    if counter is not None and ids is not None:
        whole = counter <= few
        out[whole] = torch.nn.functional.pad(ids[whole][..., :width], (0, max(0, width - n)), value=-1)
    return out


@triton.jit
def _top(
    scores, ids, out, best, counter, all_ids, per, n, chunk, k, total, few, width, KEEP: tl.constexpr,
    MAPPED: tl.constexpr, WHOLE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    i = tl.arange(0, N)
    at = part * chunk + i
    x = tl.load(scores + row * n + at, mask=(i < chunk) & (at < n), other=float("-inf"))
    if WHOLE:
        k = tl.where(tl.load(counter + row // per) <= few, 0, k)
    key = ordered(x)
    low, top = range_of(key)
    take, taken, _ = take_within(key, k, k, low, top)
    chosen = at
    if MAPPED:
        chosen = tl.load(ids + row * n + at, mask=take, other=-1)
    base = (row * parts + part) * width
    place, empty = _put(out + base, take, taken, chosen, all_ids + row * total, total, k, width, WHOLE, K)
    if KEEP:
        tl.store(best + base + tl.arange(0, K), tl.full((K,), float("-inf"), tl.float32), mask=empty)
        tl.store(best + base + place, x, mask=take)


@triton.jit
def _put(out, take, taken, chosen, all_ids, total, k, width, WHOLE: tl.constexpr, K: tl.constexpr):
    """Write what was taken in front, and -1 behind it; in whole rows (k = 0) the first of all ids."""
    place = tl.cumsum(take.to(tl.int32), 0) - 1
    j = tl.arange(0, K)
    rest = tl.full((K,), -1, tl.int32)
    if WHOLE:
        rest = tl.load(all_ids + j, mask=j < tl.where(k == 0, tl.minimum(total, width), 0), other=-1)
    empty = (j >= taken) & (j < width)
    tl.store(out + j, rest, mask=empty)
    tl.store(out + place, chosen, mask=take & (place < width))
    return place, empty


@triton.jit
def best_of_peaks(
    scores, peaks, out, scratch, n, groups, k, width, GROUP: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Into `out`, `width` wide, the places of the k best of one row's scores; `scratch` has room for L >= k groups."""
    _, key, at, low, top = _candidates(scores, peaks, scratch, n, groups, k, GROUP, N, L)
    take, taken, _ = take_within(key, k, k, low, top)
    _put(out, take, taken, at, out, n, k, width, False, L)


@triton.jit
def _candidates(
    scores, peaks, scratch, n, groups, k, GROUP: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Of the groups with the best peaks, all scores: their keys, zero where they cannot be among the k best, their
    places, and bounds of the keys."""
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
    # Where k groups have a peak, none of the k best is below the least of these.
    low = tl.where(taken < k, 1, least).to(tl.uint32)
    return live, tl.where(key >= low, key, 0).to(tl.uint32), at, low, top


@triton.jit
def _top_of_peaks(
    scores, peaks, ids, out, scratch, counter, per, n, groups, k, few, width, MAPPED: tl.constexpr, WHOLE: tl.constexpr,
    GROUP: tl.constexpr, N: tl.constexpr, L: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if WHOLE:
        k = tl.where(tl.load(counter + row // per) <= few, 0, k)
    live, key, at, low, top = _candidates(
        scores + row * n, peaks + row * groups, scratch + row * L, n, groups, k, GROUP, N, L
    )
    chosen = at
    if MAPPED:
        chosen = tl.load(ids + row * n + at, mask=live, other=-1)
    take, taken, _ = take_within(key, k, k, low, top)
    _put(out + row * width, take, taken, chosen, ids + row * n, n, k, width, WHOLE, K)


class _Answer(NamedTuple):
    """How wide it is, and which rows return their first `ids` instead: `per` of them share a counter in `counter`."""

    width: int
    counter: Tensor | None = None
    per: int = 1
    ids: Tensor | None = None
    few: int = 0


def _from_peaks(scores: Tensor, peaks: Tensor, ids: Tensor | None, k: int, answer: _Answer) -> Tensor:
    (rows, n), groups = scores.shape, peaks.shape[-1]
    width, counter, per, _, few = answer
    lanes = next_power_of_2(k)  # groups that are looked into
    out = torch.empty((rows, width), dtype=torch.int32, device=scores.device)
    scratch = torch.empty((rows, lanes), dtype=torch.int32, device=scores.device)
    _top_of_peaks[(rows,)](
        scores, peaks, out if ids is None else ids, out, scratch, out if counter is None else counter, per, n,
        groups, k, few, width, MAPPED=ids is not None, WHOLE=counter is not None, GROUP=GROUP,
        N=next_power_of_2(groups), L=lanes, K=next_power_of_2(width), num_warps=WARPS, **launch_early(scores.device, rows),
    )  # fmt: skip
    return out


def _launch(scores: Tensor, ids: Tensor | None, k: int, parts: int, answer: _Answer) -> tuple[Tensor, Tensor]:
    rows, n = scores.shape
    chunk = cdiv(n, parts)
    width, counter, per, all_ids, few = answer
    out = torch.empty((rows, parts * width), dtype=torch.int32, device=scores.device)
    best = torch.empty((rows, parts * k) if parts > 1 else (1,), dtype=torch.float32, device=scores.device)
    lanes = next_power_of_2(chunk)
    _top[(rows, parts)](
        scores, out if ids is None else ids, out, best, out if counter is None else counter,
        out if all_ids is None else all_ids, per, n, chunk, k, 0 if all_ids is None else all_ids.shape[1], few,
        width, KEEP=parts > 1, MAPPED=ids is not None, WHOLE=counter is not None, N=lanes, K=next_power_of_2(width),
        num_warps=min(32, max(4, lanes // 512)), **launch_early(scores.device, rows * parts),
    )  # fmt: skip
    return out, best


def _parts(n: int, k: int) -> int:
    """Both launches take as long as their widest program, so the chunks are about as wide as their winners together."""
    chunk = next_power_of_2(math.isqrt(n * k))
    return cdiv(n, min(max(chunk, 2 * k, 1024), WIDEST))


def _launch_triton(scored, k, ids, counter, few, width) -> Tensor:
    scores, peaks = scored
    best, named, answer = scores.flatten(0, -2), None, _Answer(k)
    if ids is not None:
        named = ids.flatten(0, -2)
    if counter is not None:
        answer = _Answer(width, counter, best.shape[0] // counter.shape[0], named, few)
    shape = (*scores.shape[:-1], answer.width)
    parts = _parts(best.shape[1], k)
    if parts > 1 and peaks is not None and max(next_power_of_2(k) * GROUP, peaks.shape[-1]) <= WIDEST:
        return _from_peaks(best, peaks, named, k, answer).view(shape)
    while parts > 1:
        named, best = _launch(best, named, k, parts, _Answer(k))
        parts = cdiv(best.shape[1], max(WIDEST, 2 * k))
    return _launch(best, named, k, 1, answer)[0].view(shape)


def native(n: int, k: int, peaks: bool, least: int = 1, shapes=NATIVE) -> dict[str, int] | str:
    """How csrc/top_blocks.cu is compiled for rows like these: as the first of `shapes` that can look at them and has so
    many threads at least. Or why it is not."""
    groups = cdiv(n, GROUP)
    for threads, each in shapes:
        if threads < least:
            continue
        most = threads * each // GROUP  # groups whose scores can be looked at
        if groups <= most:
            return dict(THREADS=threads, SCORES=each, PEAKS=0)
        mine = next_power_of_2(cdiv(groups, threads))
        if peaks and k + k // NATIVE_SPARE <= most and mine <= NATIVE_PEAKS:
            return dict(THREADS=threads, SCORES=each, PEAKS=mine)
    return f"the best {k} of {n} scores {'with' if peaks else 'without'} peaks"


def _fits(scored, k, ids, counter, few, width) -> tuple[_cuda.Module, int] | str:
    scores, peaks = scored
    shape = native(scores.shape[-1], k, peaks is not None)
    if isinstance(shape, str):
        return shape
    kernels = _cuda.load("top_blocks", scores.device, GROUP=GROUP, **shape)
    return kernels if isinstance(kernels, str) else (kernels, shape["THREADS"])


def _launch_cuda(fitting, scored, k, ids, counter, few, width) -> Tensor:
    """csrc/top_blocks.cu"""
    (kernels, threads), (scores, peaks) = fitting, scored
    n, width = scores.shape[-1], max(k, width)
    rows = scores.numel() // n
    out = fake(scored, k, width=width)
    per = 1 if counter is None else rows // counter.shape[0]
    kernels.launch("top", (rows, 1, 1), threads, scores, peaks, ids, out, counter, per, n, k, few, width)
    return out


def fake(scored, k: int, ids=None, counter=None, few=0, width: int = 0) -> Tensor:
    scores, _ = scored
    return scores.new_empty((*scores.shape[:-1], max(k, width)), dtype=torch.int32)


top_blocks = register(
    "top_blocks", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake, check=check
)
