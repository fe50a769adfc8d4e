"""The k largest of a row of keys held in registers: shared by page selection and by cache replacement.

Rows too long for that have peaks, written along with their scores: the best of every GROUP of them. The k best scores
lie in the k groups of the highest peaks, of equal ones the lower: were one in another group, each of those k would
hold a score above it, or an equal one at a lower place, and it would not be among the k best.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._triton import cdiv, tl, triton

GROUP = 16  # scores that share a peak; a power of two


def peaks_of(scores: Tensor) -> Tensor:
    """The best of every GROUP scores [..., n] as [..., n / GROUP rounded up]; NaN is nobody's best."""
    best = torch.where(scores.isnan(), -torch.inf, scores)
    missing = cdiv(scores.shape[-1], GROUP) * GROUP - scores.shape[-1]
    return torch.nn.functional.pad(best, (0, missing), value=-torch.inf).unflatten(-1, (-1, GROUP)).amax(-1)


@triton.jit
def store_peaks(peaks, best, first, end, N: tl.constexpr, GROUP: tl.constexpr):
    """Into a row of `peaks` those of the scores number `first` to `first + N`, of `end` that there are.

    Scores past the end are -inf; `first` and N are multiples of GROUP.
    """
    best = tl.where(best == best, best, float("-inf"))
    group = first // GROUP + tl.arange(0, N // GROUP)
    tl.store(peaks + group, tl.max(tl.reshape(best, (N // GROUP, GROUP)), 1), mask=group * GROUP < end)


@triton.jit
def ordered(x):
    """Floats as keys for `take_top`, in the same order: NaN and -inf are 0, and -0 ties with +0."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)
    return tl.where((x == float("-inf")) | (x != x), 0, key).to(tl.uint32)


@triton.jit
def take_top(key, k, N: tl.constexpr, ROUNDS: tl.constexpr):
    """Mask of the `k` largest of the `N` keys (uint32 below 4**ROUNDS); zeros are never taken, ties go to the lower
    index.
    """
    low, top = range_of(key)
    return take_within(key, k, k, low, top, ROUNDS)[0]


@triton.jit
def range_of(key):
    """The least key but zero, and the largest."""
    return tl.min(tl.where(key > 0, key, 0xFFFFFFFF).to(tl.uint32), 0), tl.max(key, 0)


@triton.jit
def take_within(key, k, most, low, top, ROUNDS: tl.constexpr):
    """Mask of the `k` largest keys, or of as many up to `most` as are quicker to tell apart; and a key that none of
    them is below. Keys are zero, or from `low` to `top`.

    No sort: the k-th largest key is found by bisection, two bits a round (three counts share one int64 reduction). It
    begins at the highest bit in which the keys differ at all, and ends as soon as a threshold separates k to `most` of
    them: scores that differ by a few powers of two need four or five rounds out of the sixteen.
    """
    differ = top ^ low
    count = tl.sum((key > 0).to(tl.int32), 0)
    highest = ((differ | 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # or one more, by rounding
    shift = (tl.minimum(highest, 2 * ROUNDS - 1) >> 1) << 1
    # Becomes a t with at least k keys >= t; all keys have these bits in common.
    threshold = (((top >> shift.to(tl.uint32)) >> 2) << 2) << shift.to(tl.uint32)
    threshold = tl.where(k > 0, threshold, 0xFFFFFFFF).to(tl.uint32)
    while (shift >= 0) & (count > most) & (k > 0):
        unit = (tl.full((), 1, tl.uint32) << shift.to(tl.uint32)).to(tl.uint32)
        t1, t2, t3 = threshold + unit, threshold + 2 * unit, threshold + 3 * unit
        counts = (key >= t1).to(tl.int64) + ((key >= t2).to(tl.int64) << 21) + ((key >= t3).to(tl.int64) << 42)
        total = tl.sum(counts, 0)
        n1, n2 = (total & 0x1FFFFF).to(tl.int32), ((total >> 21) & 0x1FFFFF).to(tl.int32)
        n3 = (total >> 42).to(tl.int32)
        threshold = tl.where(n3 >= k, t3, tl.where(n2 >= k, t2, tl.where(n1 >= k, t1, threshold)))
        count = tl.where(n3 >= k, n3, tl.where(n2 >= k, n2, tl.where(n1 >= k, n1, count)))
        shift -= 2
    take = (key >= threshold) & (key > 0)
    if count > most:  # ties at the threshold: the first of them fill the room that the larger keys leave
        above = key > threshold
        room = k - tl.sum(above.to(tl.int32), 0)
        take = above | (take & (tl.cumsum((take & ~above).to(tl.int32), 0) <= room))
    return take, threshold
