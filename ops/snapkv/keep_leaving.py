"""Add the tokens that leave the ring to the tokens that SnapKV keeps of a prompt, as long as there is room.

    leaving = max(ring_begin - frontier, 0)
    joined  = min(leaving, room)           the tokens from `frontier` on, in order
    frontier += leaving;  lost += leaving - joined

The ring may begin before `frontier`. Of the prompt's tokens between the two a step attends only to those that
snap_tokens chose, although all still lie in the ring.
"""
import torch

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, tl, triton, wait_for_previous
from torchsparsekv.ops.index.observe import NOT_SINCE, NOT_YET
from torchsparsekv.ops.snapkv.views import SnapSet
from torchsparsekv.ops.store.rows import IN_RING, add_count, count
from torchsparsekv.ops.store.views import Lengths, Stats


def reference(kept: Changed[SnapSet], stats: Changed[Stats], lengths: Lengths) -> None:
    """Add the tokens that leave the ring to the tokens that SnapKV keeps of a prompt, as long as there is room.

    Args:
        kept: the kept tokens. `updated` becomes 1 where tokens joined, and at the first step after a prompt, which
            fetches all kept tokens.
        stats: counts [batch, heads, 5]. `append` counted the tokens of the ring from `ring_begin` on; this op
            subtracts those before `frontier`.
        lengths: `ring_begin` and `length` of each row; a row past its capacity only gets `updated` 0.

    Launches:
        One kernel of batch * heads programs of one warp. Where no token leaves, count, frontier and lost stay as they
        are.
    """
    heads, most = kept.ids.shape[1:]
    for b, (n, begin) in enumerate(torch.stack([lengths.length, lengths.ring_begin], 1).tolist()):
        kept.updated[b] = 0
        if n <= 0:
            continue
        for h in range(heads):
            held, frontier, chosen_at = (int(t[b, h]) for t in (kept.count, kept.frontier, kept.chosen_at))
            leaving = max(begin - frontier, 0)
            joined = min(leaving, most - held)
            kept.ids[b, h, held : held + joined] = torch.arange(frontier, frontier + joined)
            kept.count[b, h], kept.frontier[b, h] = held + joined, frontier + leaving
            kept.lost[b, h] += leaving - joined
            if joined or chosen_at == NOT_YET:
                kept.updated[b, h], kept.chosen_at[b, h] = 1, n
                kept.updates[b, h] += 1
            count(stats.counts[b, h], in_ring=begin - frontier - leaving)


@triton.jit
def _join(kept, counts, lengths, heads, most, PDL: tl.constexpr):
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    n, begin = tl.load(lengths.length + bh // heads), tl.load(lengths.ring_begin + bh // heads)
    updated = tl.full((), 0, tl.int32)
    if n > 0:
        held, frontier = tl.load(kept.count + bh), tl.load(kept.frontier + bh)
        leaving = tl.maximum(begin - frontier, 0)
        joined = tl.minimum(leaving, most - held)
        for i in range(joined):
            tl.store(kept.ids + bh * most + held + i, frontier + i)
        tl.store(kept.count + bh, held + joined)
        tl.store(kept.frontier + bh, frontier + leaving)
        tl.store(kept.lost + bh, tl.load(kept.lost + bh) + leaving - joined)
        updated = ((joined > 0) | (tl.load(kept.chosen_at + bh) == NOT_SINCE)).to(tl.int32)
        tl.store(kept.chosen_at + bh, n, mask=updated > 0)
        tl.store(kept.updates + bh, tl.load(kept.updates + bh) + updated)
        add_count(counts, bh, IN_RING, begin - frontier - leaving)
    tl.store(kept.updated + bh, updated)


def launch(kept, stats, lengths) -> None:
    batch, heads, most = kept.ids.shape
    _join[(batch * heads,)](
        kept, stats.counts, lengths, heads, most, num_warps=1, **launch_early(kept.ids.device, batch * heads)
    )


keep_leaving = register("keep_leaving", reference, impls=(by_triton(launch),))
