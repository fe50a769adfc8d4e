"""What leaves the ring joins the tokens that are kept of a prompt, as long as there is room. The newest query is kept.

`kept.frontier`, from which on the ring counts, goes with where the ring begins, once that has reached it: until then
tokens of the prompt that lie in the ring and were not chosen (ops/select/snap_tokens.py) are not attended to. `updated`
says whether there is something to fetch: tokens that joined, or all of them at the first step after a prompt. Tokens
that find no room are counted as `lost`. The next prompt may be shorter than its observation window (`observed`,
ops/store/observe.py).
"""
import torch

from torchsparsekv.ops import _check
from torchsparsekv.ops._impl import triton as by_triton
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._signature import Changed
from torchsparsekv.ops._triton import chain, chained, next_power_of_2, tl, triton
from torchsparsekv.ops.store.observe import NOT_SINCE, NOT_YET, keep_newest
from torchsparsekv.ops.store.rows import NEAR, add_count, count
from torchsparsekv.ops.store.views import Kept, Lengths, Observed, Query, Stats


def check(q, observed, kept, stats, lengths) -> None:
    _check.heads(q, kept.ids)


def reference(
    q: Query, observed: Changed[Observed], kept: Changed[Kept], stats: Changed[Stats], lengths: Lengths
) -> None:
    heads, most = kept.ids.shape[1:]
    for b, (n, begin) in enumerate(torch.stack([lengths.length, lengths.ring_begin], 1).tolist()):
        kept.updated[b] = 0
        if n <= 0:
            continue
        observed.queries[b, (n - 1) % observed.queries.shape[1]] = q[b, :, 0]
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
            count(stats.counts[b, h], near=begin - frontier - leaving)  # append counted from where rings begin


@triton.jit
def _join(
    q, queries, ids, held, frontier, at, updated, updates, lost, counts, length, ring_begin, q_b, q_h, heads, window,
    most, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    n, begin = tl.load(length + b), tl.load(ring_begin + b)
    keep_newest(q, queries, b, h, n, q_b, q_h, heads, window, G, GP, D, DP)
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
        add_count(counts, bh, NEAR, begin - old - leaving)
    tl.store(updated + bh, new)


def launch(q, observed, kept, stats, lengths) -> None:
    (batch, heads, most), (queries,) = kept.ids.shape, observed
    group, d = q.shape[1] // heads, q.shape[3]
    _join[(batch * heads,)](
        q, queries, *kept, stats.counts, lengths.length, lengths.ring_begin, q.stride(0), q.stride(1), heads,
        queries.shape[1], most, G=group, GP=next_power_of_2(group), D=d, DP=next_power_of_2(d), num_warps=1,
        **chained(q.device, batch * heads),
    )  # fmt: skip


keep_leaving = register("keep_leaving", reference, impls=(by_triton(launch),), check=check)
