"""Add the tokens that leave the ring to the kept tokens, and evict the tokens that received the least attention.

For each token p that leaves the ring, in order:

    there is room      p is kept
    otherwise          of p and the kept tokens, the token with the least `received` is evicted; of equals the latest

`received` is the sum up to the step before. A step here evicts, attends, and then adds. The paper attends, adds, and
evicts last, which keeps the same tokens.
"""
import torch

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.h2o.views import HeavySet
from torchsparsekv.ops.index.observe import NOT_SINCE, NOT_YET
from torchsparsekv.ops.store.views import Lengths

WIDE = 1024  # kept tokens that are compared at a time


def reference(heavy: Changed[HeavySet], lengths: Lengths) -> None:
    """Add the tokens that leave the ring to the kept tokens, and evict the tokens that received the least attention.

    Args:
        heavy: `updated` becomes 1 where tokens joined, and at the first step after a prompt, which fetches all kept
            tokens.
        lengths: the tokens from `previous_ring_begin` up to `ring_begin` leave. A row past its capacity only gets
            `updated` 0.

    Launches:
        One kernel of batch * heads programs. If no token leaves, a program only writes its counters.
    """
    heads, most = heavy.ids.shape[1:]
    for b, (n, old, new) in enumerate(torch.stack([lengths.length, *lengths[2:4]], 1).tolist()):
        heavy.updated[b] = 0
        for h in range(heads if n > 0 else 0):
            ids, received, joined = heavy.ids[b, h], heavy.received[b, h], False
            for p in range(old, new):
                held = int(heavy.count[b, h])
                if held < most:
                    ids[held], heavy.count[b, h], joined = p, held + 1, True
                    continue
                least = min(range(most), key=lambda i: (float(received[ids[i]]), -int(ids[i])))
                if received[p] > received[ids[least]]:
                    ids[least], joined = p, True
            if joined or int(heavy.chosen_at[b, h]) == NOT_YET:
                heavy.updated[b, h] = 1
                heavy.updates[b, h] += 1
            heavy.chosen_at[b, h] = n


@triton.jit
def _evict(heavy, lengths, heads, most, rows, WIDE: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    n, old, new = tl.load(lengths.length + b), tl.load(lengths.previous_ring_begin + b), tl.load(lengths.ring_begin + b)
    updated = tl.full((), 0, tl.int32)
    if n > 0:
        ids, received = heavy.ids + bh * most, heavy.received + bh * rows
        held = tl.load(heavy.count + bh)
        for p in range(old, new):
            if held < most:
                tl.store(ids + held, p)
                held += 1
                updated = tl.full((), 1, tl.int32)
            else:
                least, slot = _least(ids, received, most, WIDE)
                if tl.load(received + p) > least:
                    tl.store(ids + slot, p)
                    updated = tl.full((), 1, tl.int32)
            tl.debug_barrier()
        tl.store(heavy.count + bh, held)
        updated = tl.where(tl.load(heavy.chosen_at + bh) == NOT_SINCE, 1, updated).to(tl.int32)
        tl.store(heavy.chosen_at + bh, n)
        tl.store(heavy.updates + bh, tl.load(heavy.updates + bh) + updated)
    tl.store(heavy.updated + bh, updated)


@triton.jit
def _least(ids, received, most, WIDE: tl.constexpr):
    """(attention, place) of the kept token that received the least attention; of equal tokens that of the highest
    position."""
    least, where, slot = float("inf"), tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, most, WIDE):
        j = first + tl.arange(0, WIDE)
        p = tl.load(ids + j, mask=j < most, other=-1)
        x = tl.load(received + p, mask=p >= 0, other=float("inf"))
        low = tl.min(x, 0)
        at = tl.max(tl.where((x == low) & (p >= 0), p, -1), 0)
        place = tl.max(tl.where((p == at) & (p >= 0), j, 0), 0)
        better = (low < least) | ((low == least) & (at > where))
        least = tl.where(better, low, least)
        where = tl.where(better, at, where)
        slot = tl.where(better, place, slot)
    return least, slot


def launch(heavy, lengths) -> None:
    batch, heads, most = heavy.ids.shape
    _evict[(batch * heads,)](
        heavy, lengths, heads, most, heavy.received.shape[2], WIDE=min(WIDE, next_power_of_2(most)),
        **launch_early(heavy.ids.device, batch * heads),
    )  # fmt: skip


evict_lightest = register("evict_lightest", reference, impls=(by_triton(launch),))
