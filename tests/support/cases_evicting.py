"""What the ops of methods that evict take, from a world (tests/support/cases.py)."""
import math

import torch
from world import World

from torchsparsekv.ops.h2o.views import HeavySet
from torchsparsekv.ops.index.observe import NOT_YET
from torchsparsekv.ops.store.views import Attention, HotBuffer

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
