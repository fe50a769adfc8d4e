"""What the ops of static sets take, from a world (tests/support/cases.py)."""
import dataclasses

import torch
from world import World

from torchsparsekv.ops.index.block_bounds import VOLUMES
from torchsparsekv.ops.index.observe import NOT_YET
from torchsparsekv.ops.prkv.views import StaticSet
from torchsparsekv.ops.snapkv.snap_tokens import Pooling
from torchsparsekv.ops.snapkv.views import SnapSet
from torchsparsekv.ops.store.views import Attention, BlockTable, KVStore, Leaving, Observed, Token

FP8 = torch.float8_e4m3fn
I32 = torch.int32


def observed(w: World, length: torch.Tensor) -> Observed:
    """The queries of the latest tokens of rows with so many, NaN where there was none yet."""
    window = w.pick(1, min(5, w.window), w.window)
    queries = torch.randn(w.batch, window, w.heads * w.group, w.dim, generator=w.g).to(w.dtype)
    for b, n in enumerate(length.tolist()):
        queries[b, max(n, 0) :] = torch.nan
    return Observed(queries)


def append(w: World, store: KVStore):
    """With a window of queries, of which the newest is still NaN, or without."""
    queries = observed(w, w.length - 1).queries if w.pick(False, True) else None
    return (Token(w.k, w.v, None if queries is None else w.q), store, w.stats(), w.lengths_view, queries)


def observe(w: World):
    return (w.q, observed(w, w.start), _static(w, 1).chosen_at, w.lengths_view)


def _static(w: World, most: int) -> StaticSet:
    """Some heads have not chosen yet, some are full, some are waiting for more tokens."""
    lead, live = (w.batch, w.heads), (w.begin - w.sink).clamp(min=0)[:, None]
    target = torch.randint(0, most + 1, lead, generator=w.g, dtype=I32)
    count = torch.minimum(target, live - w.pick(0, 0, 1)).clamp(min=0).to(I32)
    ids = torch.full((*lead, most), -1, dtype=I32)
    for b, h in count.nonzero().tolist():
        n = int(count[b, h])
        ids[b, h, :n] = w.sink + torch.randperm(int(live[b]), generator=w.g)[:n].sort().values
    ago = torch.randint(0, w.pick(6, 90), lead, generator=w.g)  # a staggered choice may lie before the first token
    chosen_at = torch.where(torch.rand(lead, generator=w.g) < 0.3, NOT_YET, w.length[:, None] - ago).to(I32)
    stagger = torch.randint(0, 3, lead, generator=w.g, dtype=I32)
    updated = torch.randint(0, 2, lead, generator=w.g, dtype=I32)
    updates, barrier = torch.zeros(lead, dtype=I32), torch.zeros(*lead, 3, dtype=I32)
    return StaticSet(ids, count, target, updated, chosen_at, stagger, updates, barrier, w.pick(3, 1, 100))


def choose_static(w: World):
    queries, static = observed(w, w.length), _static(w, w.pick(1, w.rows // 2 + 1, w.rows))
    store = KVStore(w.ring(w.length, w.begin), w.pool(w.begin))
    attention = Attention(w.dim**-0.5, w.pick(0.0, 5.0))
    coarse = store.pool[:, :, :, 0].to(FP8).view(torch.uint8) if w.pick(False, True) else None
    origin = None if coarse is None else torch.randn(w.batch, w.heads, w.dim, generator=w.g)
    return (queries, static, store, coarse, origin, w.lengths_view, attention)


def _kept(w: World, frontier: torch.Tensor) -> SnapSet:
    """Some heads have room, some are full; some are at their first step after a prompt."""
    lead, most = (w.batch, w.heads), w.pick(w.rows, 1, w.rows // 2 + 1)
    held = torch.minimum(torch.randint(0, most + 1, lead, generator=w.g), frontier[:, None] - w.sink).clamp(min=0)
    held = torch.where(torch.rand(lead, generator=w.g) < 0.3, held.clamp(min=most), held).to(I32)
    ids = torch.full((*lead, most), -1, dtype=I32)
    for b, h in held.nonzero().tolist():
        ids[b, h, : held[b, h]] = torch.arange(w.sink, w.sink + int(held[b, h]))
    at = torch.where(torch.rand(lead, generator=w.g) < 0.5, NOT_YET, w.start[:, None]).to(I32)
    numbers = torch.randint(0, 9, (3, *lead), generator=w.g, dtype=I32)
    return SnapSet(ids, held, frontier[:, None].expand(lead).contiguous().to(I32), at, *numbers)


def snap_tokens(w: World):
    """All sizes of the observation window, of the pooling, of past and prompt; what was kept before is forgotten."""
    queries, kept = observed(w, w.length), _kept(w, w.start.clamp(min=w.sink))
    attention = Attention(w.dim**-0.5, w.pick(0.0, 5.0), w.sink_logits() if w.pick(False, True) else None)
    pooling = Pooling(w.pick(5, 1, 7, 3), w.pick(False, True))
    spans = [*w.start.tolist(), *w.length.tolist()] if w.pick(True, False) else None
    return (w.k, queries, kept, w.pool(w.start), w.lengths_view, attention, pooling, spans)


def keep_leaving(w: World):
    """The ring counts from further on than it begins, from there, or from before: then tokens join."""
    away = torch.randint(-2 * w.interval, 4, (w.batch,), generator=w.g)
    kept = _kept(w, (w.begin + away).clamp(min=w.sink))
    return (kept, w.stats(), w.lengths_view)


def copy_keys(w: World):
    coarse = torch.zeros(w.batch, w.heads, w.rows, w.dim, dtype=torch.uint8)
    origin = torch.randn(w.batch, w.heads, w.dim, generator=w.g)
    keys = w.pick(1, 2000)  # also beyond what fp8 holds
    return (Leaving(w.k * keys, w.pool(torch.maximum(w.begin, w.length)) * keys), coarse, origin, w.lengths_view)


def block_bounds(w: World, things):
    """With a copy of the keys, or without."""
    return (*things, w.pick(torch.zeros(w.batch, w.heads, w.rows, w.dim, dtype=torch.uint8), None))


def static_target(w: World):
    """Keys and queries are small integers: products are exact, and there are ties."""
    most = w.pick(1, w.rows // 2 + 1, w.rows)
    queries, static = observed(w, w.length), _static(w, most)
    chosen_at = torch.where(torch.rand(w.batch, 1, generator=w.g) < 0.8, NOT_YET, w.length[:, None] - w.pick(1, 90))
    static.chosen_at.copy_(chosen_at.expand_as(static.chosen_at))
    queries, pool = Observed(queries.queries.round()), w.pool(w.begin).round()
    k = w.pick(most, 1 + w.seed % most)
    coarse = pool[:, :, :, 0].to(FP8).view(torch.uint8) if w.pick(False, True) else None
    return (queries, static, pool, coarse, w.lengths_view, k, w.pick(False, True))


def bound_scores(w: World, things):
    """With blocks that are pinned, up to all that can be retrieved, or without."""
    live = (w.begin - w.sink).clamp(min=0)[:, None] // w.block
    count = (torch.rand(w.batch, w.heads, generator=w.g) * (live + 1)).long().clamp(max=live).to(I32) * w.block
    return (*things, w.pick(count, None), BlockTable())


def relocate(w: World, fetching, bounding):
    """A set of whole blocks anywhere behind the sinks, another one before it, and a hot buffer that may hold some."""
    _, pool, hot, _ = fetching
    volume = w.pick(*range(len(VOLUMES)))
    _, digests, _ = bounding(dataclasses.replace(w, pick=lambda *options: options[volume % len(options)]))
    most = w.blocks * w.block - w.sink
    static = _static(w, max(1, most))
    static.count.zero_(), static.ids.fill_(-1)
    for b in range(w.batch):
        for h in range(w.heads):
            n = int(torch.randint(0, most // w.block + 1, (), generator=w.g)) * w.block
            static.ids[b, h, :n] = w.sink + torch.randperm(most, generator=w.g)[:n].sort().values
            static.count[b, h] = n
    coarse = pool[:, :, :, 0].to(FP8).view(torch.uint8) if w.pick(False, True) else None
    return (static._replace(front_home=_front_home(w, static.ids.shape[2], most)), pool, coarse, hot, digests, w.sink)


def update_static_set(w: World, fetching, bounding):
    """Sets of any size, as `choose_static` has them; retrievable tokens that the last update moved away from home."""
    queries, static, store, coarse, _, lengths, attention = choose_static(w)
    _, _, hot, _ = fetching
    volume = w.pick(*range(len(VOLUMES)))
    _, digests, _ = bounding(dataclasses.replace(w, pick=lambda *options: options[volume % len(options)]))
    front_home = torch.full_like(static.ids, -1)
    live = (w.begin - w.sink).clamp(min=0).tolist()
    for b, h in static.count.nonzero().tolist():
        n = int(static.count[b, h])
        pairs = int(torch.randint(0, min(n, live[b] - n) + 1, (), generator=w.g))
        front, behind = (torch.randperm(x, generator=w.g)[:pairs] for x in (n, live[b] - n))
        front_home[b, h, front] = (w.sink + n + behind).to(I32)
    return (queries, static._replace(front_home=front_home), store, coarse, hot, digests, lengths, attention)


def _front_home(w: World, most: int, rows: int):
    """Some rows of a front that was as long as whole blocks are, hold tokens from behind it."""
    front_home = torch.full((w.batch, w.heads, most), -1, dtype=I32)
    for b in range(w.batch):
        for h in range(w.heads):
            n = int(torch.randint(0, rows // w.block + 1, (), generator=w.g)) * w.block
            pairs = int(torch.randint(0, min(n, rows - n) + 1, (), generator=w.g))
            held = torch.randperm(n, generator=w.g)[:pairs]
            front_home[b, h, held] = (w.sink + n + torch.randperm(rows - n, generator=w.g)[:pairs]).to(I32)
    return front_home
