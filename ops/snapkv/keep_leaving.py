"""What leaves the ring joins the tokens that are kept of a prompt, as long as there is room.

`kept.frontier`, from which on the ring counts, goes with where the ring begins, once that has reached it: until then
tokens of the prompt that lie in the ring and were not chosen (ops/snapkv/snap_tokens.py) are not attended to. `updated`
says whether there is something to fetch: tokens that joined, or all of them at the first step after a prompt. Tokens
that find no room are counted as `lost`.
"""
import torch

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, tl, triton, wait_for_previous
from torchsparsekv.ops.index.observe import NOT_SINCE, NOT_YET
from torchsparsekv.ops.snapkv.views import Kept
from torchsparsekv.ops.store.rows import IN_RING, add_count, count
from torchsparsekv.ops.store.views import Lengths, Stats


def reference(kept: Changed[Kept], stats: Changed[Stats], lengths: Lengths) -> None:
    heads, most = kept.ids.shape[1:]
    for b, (n, begin) in enumerate(torch.stack([lengths.length, lengths.ring_begin], 1).tolist()):
        kept.updated[b] = 0
        if n <= 0:
            continue
        for h in range(heads):
            held, frontier, at = (int(t[b, h]) for t in (kept.count, kept.frontier, kept.at))
            leaving = max(begin - frontier, 0)
            joined = min(leaving, most - held)
            kept.ids[b, h, held : held + joined] = torch.arange(frontier, frontier + joined)
            kept.count[b, h], kept.frontier[b, h] = held + joined, frontier + leaving
            kept.lost[b, h] += leaving - joined
            if joined or at == NOT_YET:
                kept.updated[b, h], kept.at[b, h] = 1, n
                kept.updates[b, h] += 1
            count(stats.counts[b, h], in_ring=begin - frontier - leaving)  # append counted from where rings begin


@triton.jit
def _join(
    ids, held, frontier, at, updated, updates, lost, counts, length, ring_begin, heads, most, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    n, begin = tl.load(length + bh // heads), tl.load(ring_begin + bh // heads)
    new = tl.full((), 0, tl.int32)
    if n > 0:
        first, old = tl.load(held + bh), tl.load(frontier + bh)
        leaving = tl.maximum(begin - old, 0)
        joined = tl.minimum(leaving, most - first)
        for i in range(joined):
            tl.store(ids + bh * most + first + i, old + i)
        tl.store(held + bh, first + joined)
        tl.store(frontier + bh, old + leaving)
        tl.store(lost + bh, tl.load(lost + bh) + leaving - joined)
        new = ((joined > 0) | (tl.load(at + bh) == NOT_SINCE)).to(tl.int32)
        tl.store(at + bh, n, mask=new > 0)
        tl.store(updates + bh, tl.load(updates + bh) + new)
        add_count(counts, bh, IN_RING, begin - old - leaving)
    tl.store(updated + bh, new)


def launch(kept, stats, lengths) -> None:
    batch, heads, most = kept.ids.shape
    _join[(batch * heads,)](
        *kept, stats.counts, lengths.length, lengths.ring_begin, heads, most, num_warps=1,
        **launch_early(kept.ids.device, batch * heads),
    )  # fmt: skip


keep_leaving = register("keep_leaving", reference, impls=(by_triton(launch),))
