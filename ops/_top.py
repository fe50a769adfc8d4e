"""The k largest of a row of keys held in registers: shared by page selection and by cache replacement."""
from torchsparsekv.ops._triton import tl, triton


@triton.jit
def take_top(key, k, ROUNDS: tl.constexpr):
    """Mask of the `k` largest of `key` (unsigned, below 4**ROUNDS); zeros are never taken, ties go to the lower index.

    No sort: the k-th largest key is found by bisection, two bits a round (three counts share one int64 reduction).
    """
    threshold = tl.zeros((), tl.uint32)  # becomes the largest t with at least k keys >= t, or stays 0
    for step in tl.static_range(ROUNDS):
        low: tl.constexpr = 2 * (ROUNDS - 1 - step)
        t1 = threshold + tl.full((), 1 << low, tl.uint32)
        t2 = threshold + tl.full((), 2 << low, tl.uint32)
        t3 = threshold + tl.full((), 3 << low, tl.uint32)
        counts = (key >= t1).to(tl.int64) + ((key >= t2).to(tl.int64) << 21) + ((key >= t3).to(tl.int64) << 42)
        total = tl.sum(counts, 0)
        n1, n2, n3 = total & 0x1FFFFF, (total >> 21) & 0x1FFFFF, total >> 42
        threshold = tl.where(n3 >= k, t3, tl.where(n2 >= k, t2, tl.where(n1 >= k, t1, threshold)))
    above = key > threshold
    equal = (key == threshold) & (key > 0)
    room = k - tl.sum(above.to(tl.int32), 0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
