"""The k largest of a row of keys held in registers: shared by selection, cache replacement and k-means.

Rows too long for that have peaks, written along with their scores: the best of every GROUP of them. The k best scores
lie in the k groups of the highest peaks, of equal ones the lower: were one in another group, each of those k would
hold a score above it, or an equal one at a lower place, and it would not be among the k best.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv, tl, triton

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
def take_top(key, k):
    """Mask of the `k` largest keys (uint32); zeros are never taken, ties go to the lower index."""
    low, top = range_of(key)
    return take_within(key, k, k, low, top)[0]


@triton.jit
def least_of_top(key, k):
    """What has the least of the `k` largest keys; where fewer are above zero it is the lowest number."""
    last = tl.min(tl.where(take_top(key, k), key, 0xFFFFFFFF).to(tl.uint32), 0)
    LOWEST: tl.constexpr = 0x00800000
    last = tl.where(tl.sum((key > 0).to(tl.int32), 0) < k, LOWEST, last).to(tl.uint32)
    return tl.where(last >> 31 != 0, last ^ 0x80000000, ~last).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def range_of(key):
    """The least key but zero, and the largest."""
    return tl.min(tl.where(key > 0, key, 0xFFFFFFFF).to(tl.uint32), 0), tl.max(key, 0)


@triton.jit
def take_within(key, k, most, low, top):
    """Mask of the `k` largest keys, or of as many up to `most` as are quicker to tell apart; how many these are; and a
    key that none of them is below. Keys are zero, or from `low` to `top`.

    No sort: a round cuts the range in which the k-th largest key must lie to a third. The two counts that it needs are
    one sum, of 32 bits where they fit: that a warp adds up in one instruction. It ends as soon as a threshold separates
    k to `most`.
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
    if count > most:  # ties at the threshold: the first of them fill the room that the larger keys leave
        above = key > threshold
        room = k - tl.sum(above.to(tl.int32), 0)
        take = above | (take & (tl.cumsum((take & ~above).to(tl.int32), 0) <= room))
    return take, tl.where(k > 0, tl.where(count > most, k, count), 0), threshold
