"""The k largest of a row of keys in registers, in Triton. Selection, the hot buffer and k-means use it.

Rows that are too long for one program come with peaks: the maximum of every GROUP scores, written by the scoring op.
The k best scores lie in the k groups of the highest peaks (of equal peaks the lower groups). Proof: suppose one of the
k best scores lies in another group. Then each of those k groups holds a score above it, or an equal score at a lower
place, so it is not among the k best.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv, tl, triton

GROUP = 16  # scores that share a peak; a power of two


def peaks_of(scores: Tensor) -> Tensor:
    """The maximum of every GROUP scores: [..., n] to [..., cdiv(n, GROUP)]. NaN counts as -inf."""
    best = torch.where(scores.isnan(), -torch.inf, scores)
    missing = cdiv(scores.shape[-1], GROUP) * GROUP - scores.shape[-1]
    return torch.nn.functional.pad(best, (0, missing), value=-torch.inf).unflatten(-1, (-1, GROUP)).amax(-1)


@triton.jit
def store_peaks(peaks, best, first, end, N: tl.constexpr, GROUP: tl.constexpr):
    """Store the peaks of the scores `best` [N], which are numbers `first` to `first + N` of the `end` scores of a row.

    The caller passes -inf for numbers past the end; `first` and N are multiples of GROUP.
    """
    best = tl.where(best == best, best, float("-inf"))
    group = first // GROUP + tl.arange(0, N // GROUP)
    tl.store(peaks + group, tl.max(tl.reshape(best, (N // GROUP, GROUP)), 1), mask=group * GROUP < end)


@triton.jit
def ordered(x):
    """Floats as uint32 keys in the same order. NaN and -inf become 0, and -0 ties with +0."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.uint32, bitcast=True)
    # Not ~bits: the interpreter of Triton 3.7 cannot invert a uint32.
    key = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where((x == float("-inf")) | (x != x), 0, key).to(tl.uint32)


@triton.jit
def take_top(key, k):
    """Mask of the `k` largest keys (uint32); zeros are never taken, ties go to the lower index."""
    low, top = range_of(key)
    return take_within(key, k, k, low, top)[0]


@triton.jit
def least_of_top(key, k):
    """The score of the least of the `k` largest keys; the lowest finite float if fewer than `k` keys are above 0."""
    last = tl.min(tl.where(take_top(key, k), key, 0xFFFFFFFF).to(tl.uint32), 0)
    LOWEST: tl.constexpr = 0x00800000
    last = tl.where(tl.sum((key > 0).to(tl.int32), 0) < k, LOWEST, last).to(tl.uint32)
    return tl.where(last >> 31 != 0, last ^ 0x80000000, last ^ 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def range_of(key):
    """The least key above zero, and the largest key."""
    return tl.min(tl.where(key > 0, key, 0xFFFFFFFF).to(tl.uint32), 0), tl.max(key, 0)


@triton.jit
def take_within(key, k, most, low, top):
    """(mask, number taken, threshold) of the `k` largest keys, or of up to `most` if a threshold separates these first.

    Keys are zero, or from `low` to `top`. No taken key is below the threshold.

    Nothing is sorted. Each round cuts the range of the k-th largest key to a third. The two counts of a round share one
    sum, of 32 bits if they fit: a warp adds up 32-bit numbers in one instruction. The search ends when `k` to `most`
    keys are not below a threshold.
    """
    HALF: tl.constexpr = 16 if key.shape[0] < 65536 else 32
    TWO: tl.constexpr = tl.uint32 if HALF == 16 else tl.uint64
    count = tl.sum((key > 0).to(tl.int32), 0)
    # At least k keys are not below the threshold, and fewer than k not below `end`.
    threshold, end = tl.where(k > 0, low, 0xFFFFFFFF).to(tl.uint32), (top + 1).to(tl.uint32)
    while (count > most) & (end - threshold > 1) & (k > 0):
        third = tl.maximum((end - threshold) // 3, 1).to(tl.uint32)
        t1, t2 = threshold + third, threshold + 2 * third
        counts = tl.sum((key >= t1).to(TWO) + ((key >= t2).to(TWO) << HALF), 0)
        n1, n2 = (counts & ((1 << HALF) - 1)).to(tl.int32), (counts >> HALF).to(tl.int32)
        end = tl.where(n1 < k, t1, tl.where(n2 < k, t2, end)).to(tl.uint32)
        threshold = tl.where(n2 >= k, t2, tl.where(n1 >= k, t1, threshold)).to(tl.uint32)
        count = tl.where(n2 >= k, n2, tl.where(n1 >= k, n1, count))
    take = (key >= threshold) & (key > 0)
    if count > most:  # keys tie at the threshold: the first of them fill the places that larger keys leave
        above = key > threshold
        room = k - tl.sum(above.to(tl.int32), 0)
        take = above | (take & (tl.cumsum((take & ~above).to(tl.int32), 0) <= room))
    return take, tl.where(k > 0, tl.where(count > most, k, count), 0), threshold
