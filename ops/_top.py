"""The k largest of a row of keys held in registers: shared by page selection and by cache replacement."""
from torchsparsekv.ops._triton import tl, triton


@triton.jit
def take_top(key, k, N: tl.constexpr, ROUNDS: tl.constexpr):
    """Mask of the `k` largest of the `N` keys (uint32 below 4**ROUNDS); zeros are never taken, ties go to the lower
    index.

    No sort: the k-th largest key is found by bisection, two bits a round (three counts share one int64 reduction). It
    begins at the highest bit in which the keys differ at all, and ends as soon as a threshold separates exactly k of
    them: scores that differ by a few powers of two need four or five rounds out of the sixteen.
    """
    some = key > 0
    top = tl.max(key, 0)
    differ = top ^ tl.min(tl.where(some, key, 0xFFFFFFFF).to(tl.uint32), 0)
    count = tl.sum(some.to(tl.int32), 0)
    highest = ((differ | 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # or one more, by rounding
    shift = (tl.minimum(highest, 2 * ROUNDS - 1) >> 1) << 1
    # Becomes a t with at least k keys >= t; all keys have these bits in common.
    threshold = (((top >> shift.to(tl.uint32)) >> 2) << 2) << shift.to(tl.uint32)
    threshold = tl.where(k > 0, threshold, 0xFFFFFFFF).to(tl.uint32)
    while (shift >= 0) & (count > k) & (k > 0):
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
    if count > k:  # ties at the threshold: the first of them fill the room that the larger keys leave
        above = key > threshold
        room = k - tl.sum(above.to(tl.int32), 0)
        take = above | (take & (tl.cumsum((take & ~above).to(tl.int32), 0) <= room))
    return take
