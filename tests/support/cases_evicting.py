"""What the ops of methods that evict take, from a world (tests/support/cases.py)."""
import math

import torch
from world import World

from torchsparsekv.ops.h2o.views import HeavySet
from torchsparsekv.ops.index.observe import NOT_YET
from torchsparsekv.ops.raas.stamp_pages import MILLION
from torchsparsekv.ops.raas.views import EVICTED, PROMPT, PageSet
from torchsparsekv.ops.store.views import Attention, Digests, HotBuffer

I32 = torch.int32


def _received(w: World) -> torch.Tensor:
    """Sums with many ties, some of evicted tokens."""
    out = torch.randint(0, 6, (w.batch, w.heads, w.rows), generator=w.g).float() / 4
    out[torch.rand(out.shape, generator=w.g) < 0.2] = -math.inf
    return out


def _heavy(w: World, begin: torch.Tensor) -> HeavySet:
    """Tokens before `begin`; some heads have room, some are full, and some are at their first step after a prompt."""
    lead, most = (w.batch, w.heads), w.pick(w.rows, 1, w.rows // 2 + 1)
    ids, count = torch.full((*lead, most), -1, dtype=I32), torch.zeros(lead, dtype=I32)
    received = _received(w)
    for b, end in enumerate(begin.tolist()):
        for h in range(w.heads):
            live = w.sink + torch.randperm(max(end - w.sink, 0), generator=w.g)
            n = min(len(live), int(torch.randint(0, 2, (), generator=w.g)) * most or most // 2)
            ids[b, h, :n], count[b, h] = live[:n].to(I32), n
            received[b, h, live[:n]] = received[b, h, live[:n]].clamp(min=0.25)
    at = torch.where(torch.rand(lead, generator=w.g) < 0.5, NOT_YET, w.start[:, None]).to(I32)
    return HeavySet(ids, count, received, at, *torch.randint(0, 9, (2, *lead), generator=w.g, dtype=I32))


def _attention(w: World) -> Attention:
    return Attention(w.dim**-0.5, w.pick(0.0, 5.0), w.sink_logits() if w.pick(False, True) else None)


def add_prompt_attention(w: World):
    spans = [*w.start.tolist(), *w.length.tolist()] if w.pick(True, False) else None
    return (w.q, w.k, _heavy(w, w.previous_begin), w.pool(w.start), w.lengths_view, _attention(w), spans, w.pick(0, 3))


def keep_heaviest(w: World):
    return (_heavy(w, w.previous_begin), w.lengths_view)


def evict_lightest(w: World):
    return (_heavy(w, w.previous_begin), w.lengths_view)


def add_attention(w: World):
    """Slots hold any tokens; some are empty, and some places of the choice too."""
    lead, slots = (w.batch, w.heads), w.pick(8, 1, w.rows)
    kept = w.pick(min(slots, 5), slots, 1)
    block_of = torch.full((*lead, slots), -1, dtype=I32)
    rows = torch.full((*lead, slots, 1, 2, w.dim), torch.nan, dtype=w.dtype)
    chosen = torch.full((*lead, kept), -1, dtype=I32)
    for b, end in enumerate(w.begin.tolist()):
        for h in range(w.heads):
            tokens = (w.sink + torch.randperm(max(end - w.sink, 0), generator=w.g))[:slots]
            places = torch.randperm(slots, generator=w.g)[: len(tokens)]
            block_of[b, h, places], rows[b, h, places, 0] = tokens.to(I32), w.truth[b, h, tokens]
            n = int(torch.randint(0, min(kept, len(tokens)) + 1, (), generator=w.g))
            chosen[b, h, :n] = places[:n].to(I32)
    none = torch.zeros(lead, dtype=I32)
    slot_of, used = torch.full((*lead, w.rows), -1, dtype=I32), torch.zeros(*lead, slots, dtype=I32)
    hot = HotBuffer(rows, slot_of, block_of, used, none, none.clone(), chosen)
    return (w.q, w.ring(w.length, w.begin), hot, _received(w), w.lengths_view, _attention(w))


def _pages(w: World) -> PageSet:
    """Kept pages before the ring; some heads have room, some are full, and some are at their first step."""
    lead, most = (w.batch, w.heads), w.pick(w.blocks, 1, w.blocks // 2 + 1)
    stamps = torch.randint(EVICTED, 4, (*lead, w.blocks), generator=w.g, dtype=I32)
    stamps[torch.rand(stamps.shape, generator=w.g) < 0.3] = PROMPT
    ids, count = torch.full((*lead, most), -1, dtype=I32), torch.zeros(lead, dtype=I32)
    first = w.sink // w.block
    for b, end in enumerate((w.previous_begin // w.block).tolist()):
        for h in range(w.heads):
            live = first + torch.randperm(max(end - first, 0), generator=w.g)
            n = min(len(live), int(torch.randint(0, 2, (), generator=w.g)) * most or most // 2)
            ids[b, h, :n], count[b, h] = live[:n].to(I32), n
            stamps[b, h, live[:n]] = stamps[b, h, live[:n]].clamp(min=0)
    at = torch.where(torch.rand(lead, generator=w.g) < 0.5, NOT_YET, w.start[:, None]).to(I32)
    prompt_end = torch.randint(0, w.rows, lead, generator=w.g, dtype=I32)
    return PageSet(ids, count, stamps, prompt_end, at, *torch.randint(0, 9, (2, *lead), generator=w.g, dtype=I32))


def keep_prompt_pages(w: World):
    """Scores with many ties."""
    place = torch.arange(w.blocks)
    live = (place >= w.sink // w.block) & (place < (w.begin // w.block)[:, None])
    scores = torch.randint(0, 5, (w.batch, w.heads, w.blocks), generator=w.g).float()
    return (_pages(w), scores.masked_fill(~live[:, None], -math.inf), w.lengths_view, w.block)


def stamp_pages(w: World, scoring):
    """Boxes of whole numbers, so that bounds are exact and tie."""
    q, (centre, spread, size, volume, origin), lengths = scoring[:3]
    dtype = w.pick(torch.float32, torch.float8_e4m3fn)
    digests = Digests(centre.round().to(dtype), (4 * spread).round().to(dtype), size, volume, origin.round())
    return (q.round(), digests, _pages(w), lengths, w.pick(MILLION // 2, 0, MILLION, 333_333))
