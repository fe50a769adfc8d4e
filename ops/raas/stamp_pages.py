"""Keep the page that leaves the ring, evict the page with the oldest stamp, and stamp the better half.

    stamp of a new page = PROMPT if its first token came with a prompt, else the length of the row
    there is room         the page is kept
    otherwise             of this page and the kept pages, the page with the oldest stamp is evicted; of equal stamps
                          the lowest page

    bound[p]  = largest bound of a query head on q.k in page p    (ops/select/bound_scores.py)
    stamps[p] = the length of the row, for the `share` of the kept pages with the largest bounds, rounded up; pages of a
                prompt keep PROMPT; ties go to the lower place in `ids`

A step evicts by the stamps of the steps before it, as the authors' code does.
"""
import torch

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.fp8 import FP8, FP8_MAX
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.index.block_bounds import UNBOUNDED, check_spread, unit_of
from torchsparsekv.ops.index.observe import NOT_SINCE, NOT_YET
from torchsparsekv.ops.raas.views import PROMPT, PROMPTS, PageSet
from torchsparsekv.ops.select._top import ordered, take_top
from torchsparsekv.ops.select.bound_scores import AnyQuery, bound, bounds_of, dot_type
from torchsparsekv.ops.store.views import Digests, Lengths

MILLION = 1_000_000
PAGES = 64  # kept pages whose bounds are computed at a time
WIDEST = 16384  # kept pages at most: a program compares all of them at once


def check(q, digests, pages, lengths, share) -> None:
    _check.heads(q, digests.centre)
    check_spread(digests)
    if not 0 <= share <= MILLION:
        raise ValueError(f"share is in millionths, from 0 to {MILLION}, got {share}")
    if pages.ids.shape[2] > WIDEST:
        raise ValueError(f"at most {WIDEST} pages are kept, got room for {pages.ids.shape[2]}")


def reference(q: AnyQuery, digests: Digests, pages: Changed[PageSet], lengths: Lengths, share: int) -> None:
    """Keep the page that leaves the ring, evict the page with the oldest stamp, and stamp the better half.

    Args:
        q: [batch, q_heads, 1, dim]
        digests: of all pages. Only the digests of kept pages are read.
        pages: `updated` becomes 1 where a page joined, and at the first step after a prompt, which fetches all kept
            pages.
        lengths: the tokens from `previous_ring_begin` up to `ring_begin` leave. A row past its capacity only gets
            `updated` 0.
        share: the share of the kept pages that get a new stamp, in millionths.

    Launches: one kernel of batch * heads programs.
    """
    heads, most = pages.ids.shape[1:]
    bounds = bound(q, *digests[:2], digests.origin)
    for b, (n, old, new) in enumerate(torch.stack([lengths.length, *lengths[2:4]], 1).tolist()):
        pages.updated[b] = 0
        for h in range(heads if n > 0 else 0):
            ids, stamps, joined = pages.ids[b, h], pages.stamps[b, h], False
            for p in range(old // digests.block_size, new // digests.block_size):
                stamps[p] = PROMPT if p * digests.block_size < int(pages.prompt_end[b, h]) else n
                held = int(pages.count[b, h])
                if held < most:
                    ids[held], pages.count[b, h], joined = p, held + 1, True
                    continue
                oldest = min(range(most), key=lambda i: (int(stamps[ids[i]]), int(ids[i])))
                if stamps[ids[oldest]] <= stamps[p]:
                    ids[oldest], joined = p, True
            held = int(pages.count[b, h])
            best = bounds[b, h, ids[:held].long()].argsort(descending=True, stable=True)
            seen = ids[best[: -(-held * share // MILLION)]].long()
            stamps[seen] = torch.where(stamps[seen] == PROMPT, PROMPT, n).int()
            if joined or int(pages.chosen_at[b, h]) == NOT_YET:
                pages.updated[b, h] = 1
                pages.updates[b, h] += 1
            pages.chosen_at[b, h] = n


@triton.jit
def _stamp(
    q, digests, pages, lengths, scratch, q_b, q_h, heads, blocks, most, share, P: tl.constexpr, BOX: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, PAGES: tl.constexpr,
    MILLION: tl.constexpr, DOT: tl.constexpr, LIMIT: tl.constexpr, UNBOUNDED: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    n, old, new = tl.load(lengths.length + b), tl.load(lengths.previous_ring_begin + b), tl.load(lengths.ring_begin + b)
    updated = tl.full((), 0, tl.int32)
    if n > 0:
        ids, stamps, scores, j = pages.ids + bh * most, pages.stamps + bh * blocks, scratch + bh * N, tl.arange(0, N)
        held, prompt_end = tl.load(pages.count + bh), tl.load(pages.prompt_end + bh)
        for p in range(old // P, new // P):
            stamp = tl.where(p * P < prompt_end, PROMPTS, n).to(tl.int32)
            slot = held
            if held < most:
                held += 1
            else:
                kept = tl.load(ids + j, mask=j < most, other=-1)
                at = tl.load(stamps + kept, mask=kept >= 0, other=PROMPTS)
                oldest = tl.min(at, 0)
                first = tl.min(tl.where((at == oldest) & (kept >= 0), kept, blocks), 0)
                place = tl.max(tl.where((kept == first) & (kept >= 0), j, 0), 0)
                slot = tl.where(oldest <= stamp, place, most).to(tl.int32)
            tl.debug_barrier()
            tl.store(stamps + p, stamp)
            tl.store(ids + slot, p, mask=slot < most)
            updated = tl.where(slot < most, 1, updated).to(tl.int32)
            tl.debug_barrier()
        for begin in range(0, held, PAGES):
            i = begin + tl.arange(0, PAGES)
            page = tl.load(ids + i, mask=i < held, other=0)
            s = bounds_of(
                q, q_b, q_h, b, h, digests.centre, digests.spread, digests.origin, bh, blocks, page, i, 0, held, BOX, G,
                GP, D, DP, DOT, LIMIT, UNBOUNDED, UNIT,
            )  # fmt: skip
            tl.store(scores + i, tl.max(s, 1), mask=i < held)
        tl.debug_barrier()
        key = ordered(tl.load(scores + j, mask=j < held, other=float("-inf")))
        some = (held.to(tl.int64) * share + MILLION - 1) // MILLION
        seen = take_top(key, some.to(tl.int32))
        kept = tl.load(ids + j, mask=j < held, other=-1)
        at = tl.load(stamps + kept, mask=kept >= 0, other=PROMPTS)
        tl.store(stamps + kept, tl.full((N,), 0, tl.int32) + n, mask=seen & (at != PROMPTS))
        tl.store(pages.count + bh, held)
        updated = tl.where(tl.load(pages.chosen_at + bh) == NOT_SINCE, 1, updated).to(tl.int32)
        tl.store(pages.chosen_at + bh, n)
        tl.store(pages.updates + bh, tl.load(pages.updates + bh) + updated)
    tl.store(pages.updated + bh, updated)


def launch(q, digests, pages, lengths, share) -> None:
    batch, heads, most = pages.ids.shape
    (centre, spread, block_size, *_), group, wide = digests, q.shape[1] // heads, next_power_of_2(most)
    scratch = torch.empty(batch * heads * wide, dtype=torch.float32, device=q.device)
    _stamp[(batch * heads,)](
        q, digests, pages, lengths, scratch, q.stride(0), q.stride(1), heads, centre.shape[2], most, share,
        P=block_size, BOX=spread.shape[-1] > 1, G=group, GP=max(16, next_power_of_2(group)), D=centre.shape[3],
        DP=next_power_of_2(centre.shape[3]), N=wide, PAGES=PAGES, MILLION=MILLION, DOT=dot_type(q, centre),
        LIMIT=FP8_MAX if spread.dtype == FP8 else 0.0, UNBOUNDED=UNBOUNDED, UNIT=unit_of(centre.dtype),
        num_warps=4 if wide <= 2048 else 8, **launch_early(q.device, batch * heads),
    )  # fmt: skip


stamp_pages = register("stamp_pages", reference, impls=(by_triton(launch),), check=check)
