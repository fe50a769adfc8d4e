"""The three tables. A new op, method or family is a new row here; the tests need no edit."""
import dataclasses
import math

import cases_engine
import cases_evicting
import cases_prefetch
import cases_static
import cases_tokens
import cases_tree
import torch
from world import DEVICE, World, first, integers

from torchsparsekv.ops.clusters.cluster_keys import Kmeans
from torchsparsekv.ops.clusters.views import Boundaries, Segments, Trigger, Units
from torchsparsekv.ops.index.block_bounds import ONE_SPREAD, VOLUMES
from torchsparsekv.ops.pariskv.encode_keys import encode
from torchsparsekv.ops.pariskv.rank_by_votes import candidate_capacity
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.rest.views import Rest
from torchsparsekv.ops.select._top import peaks_of
from torchsparsekv.ops.store.views import (
    Attention,
    BlockTable,
    Digests,
    HotBuffer,
    KVStore,
    Leaving,
    Lengths,
    Scored,
    Selection,
)
from torchsparsekv.state import RingPlan

FP8 = torch.float8_e4m3fn
I32 = torch.int32

# ---------------------------------------------------------------- ops: what they take, from a world; axes are picked


def _advance(w: World):
    seq_len = torch.tensor(max(w.lengths) - w.tokens)
    left_pad = (max(w.lengths) - w.length).to(I32)
    before = (seq_len - left_pad).clamp(min=0).to(I32)
    pad = torch.randint(0, 3, left_pad.shape, generator=w.g) if w.pick(False, True) else None
    zeros = torch.zeros_like(before)
    lengths = Lengths(zeros, before, zeros.clone(), w.begins(before), w.sink, w.interval)
    return (seq_len, left_pad, lengths, pad, w.tokens, w.rows - w.pick(0, 1, 2), w.window)


def _store(w: World, upto: torch.Tensor) -> KVStore:
    """Before this call. With a pool, or one without rows: what leaves that ring is forgotten."""
    store = KVStore(w.ring(w.start, w.previous_begin), w.pool(upto))
    return store if w.pick(True, False) else store._replace(pool=store.pool[:, :, :0].contiguous())


def _flush_ring(w: World):
    return (_store(w, w.previous_begin), w.lengths_view)


def _store_prompt(w: World):
    return (w.k, w.v, _store(w, w.start), w.lengths_view, _order(w), True)


def _order(w: World):
    """None, or a random order of the new tokens of every row that do not stay in the ring."""
    if not w.pick(True, False):
        return None
    order = torch.arange(w.tokens, dtype=I32).expand(w.batch, w.heads, -1).clone()
    for b, (n0, n, end) in enumerate(torch.stack([w.start, w.length, w.begin], 1).tolist()):
        first, last = max(n0, w.sink) - n + w.tokens, end - n + w.tokens
        for h in range(w.heads * (last > first)):
            order[b, h, first:last] = first + torch.randperm(last - first, generator=w.g)
    return order


def _block_bounds(w: World):
    volume = w.pick(*range(len(VOLUMES)))
    dtype = w.pick(torch.float32, FP8, torch.float16)
    lead = (w.batch, w.heads, w.blocks)
    one = VOLUMES[volume] in ONE_SPREAD
    spread = torch.zeros(*lead, 1) if one else torch.zeros(*lead, w.dim).to(dtype)
    origin = w.truth[:, :, -1, 0].float() * (1 - w.seed % 2)
    digests = Digests(torch.zeros(*lead, w.dim).to(dtype), spread, w.block, volume, origin)
    return (Leaving(w.k, w.pool(torch.maximum(w.begin, w.length))), digests, w.lengths_view)


def _bound_scores(w: World):
    box, dtype = w.pick(True, False), w.pick(torch.float32, FP8)
    keys = w.truth[:, :, :, 0].unflatten(2, (-1, w.block)).float()
    spread = torch.rand(*keys.shape[:3], w.dim if box else 1, generator=w.g)
    spread = spread.to(dtype) if box else spread
    volume = VOLUMES.index("box" if box else "ball")
    origin = torch.randn(*keys.shape[:2], w.dim, generator=w.g)
    return (w.q[:, :, :1], Digests(keys.mean(3).to(dtype), spread, w.block, volume, origin), w.lengths_view)


def _top_blocks(w: World):
    n = w.rows * w.pick(1, 24)  # for one program, or for several or the peaks
    few = torch.randint(-2, 3, (w.batch, w.heads, n), generator=w.g).float()  # many ties
    few[torch.rand(few.shape, generator=w.g) < 0.3] = -math.inf
    few[torch.rand(few.shape, generator=w.g) < 0.1] = math.nan
    names = torch.rand(few.shape, generator=w.g).argsort(-1).sort(-1).values.to(I32) * 3 + 1
    scores = few if w.pick(True, False) else torch.randn(few.shape, generator=w.g)
    k, ids = 1 + w.seed % (w.rows + 2), w.pick(names, None)
    peaks = peaks_of(scores) if w.pick(True, False) else None
    if ids is None or w.pick(True, False):
        return (Scored(scores, peaks), k, ids, None, 0, 0)
    return (Scored(scores, peaks), k, ids, w.begin, int(w.begin.float().median()), k + w.seed % 7)


def _encode_keys(w: World):
    m = w.pick(8, 4, 2)
    size = 1 << (w.dim - 1).bit_length()
    lead = (w.batch, w.heads, w.rows)
    ids, codes = torch.zeros(*lead, size // m, dtype=torch.uint8), torch.zeros(*lead, size // 2, dtype=torch.uint8)
    weights, counts = torch.zeros(*lead, size // m).half(), torch.ones(*lead[:2], size // m, 1 << m, dtype=I32)
    leaving = Leaving(integers(w.k), integers(w.pool(torch.maximum(w.begin, w.length))))
    return (leaving, Codes(ids, codes, weights, counts), w.lengths_view, m, w.seed)


def _encoded(w: World, m: int) -> Codes:
    """Of all rows; the counts are of how often each id occurs among the retrievable ones."""
    ids, codes, weights = encode(w.truth[:, :, :, 0], m, w.seed)
    counts = torch.zeros(w.batch, w.heads, ids.shape[3], 1 << m, dtype=I32)
    for b, end in enumerate(w.begin.tolist()):
        names = ids[b, :, w.sink : end].transpose(1, 2).long()
        counts[b].scatter_add_(2, names, torch.ones_like(names, dtype=I32))
    return Codes(ids, codes, weights, counts)


def _ratios(w: World) -> list[int]:
    """For rows of few keys and, picked, for the rest."""
    beta, rho = w.pick(100_000, 333_333, 1_000_000), w.pick(400_000, 1_000_000)
    return [7, 500_000, 600_000, 9, 300_000, 500_000, 30, 200_000, 700_000, beta, rho]


def _centroid_votes(w: World):
    m = w.pick(8, 4, 2)
    if DEVICE.type == "cpu":  # a program for each subspace, query and kv head: a minute in the interpreter
        m = max(m, 2 if w.dim <= 32 else 4 if w.dim <= 64 else 8)
    codes = _encoded(w, m)
    group = w.pick(1, w.group, 5, 11)
    if group * codes.ids.shape[3] > 32:  # here too
        group = 1
    q = integers(torch.randn(w.batch, w.heads * group, 1, w.dim, generator=w.g)).to(w.dtype)
    return (q, codes, w.lengths_view, _ratios(w), w.pick(True, False), w.seed)


def _coded(w: World, m: int) -> tuple[Codes, Lengths, BlockTable]:
    """Of rows that have a pool each, or share one."""
    if w.pick(True, False):
        return _encoded(w, m), w.lengths_view, BlockTable()
    return cases_engine.codes(w, m), *cases_engine.requests(w)


def _rank_by_votes(w: World):
    m = max(w.pick(8, 4, 2), 2 if w.dim <= 64 else 4 if w.dim <= 128 else 8)  # scores are one byte
    (codes, lengths, table), packs = _coded(w, m), w.pick(1, 2, 3)
    codes = codes._replace(counts=codes.counts.expand(w.batch, -1, -1, -1).contiguous())
    shape = (w.batch, w.heads, packs, 1 << m, codes.ids.shape[3], 4)
    votes = torch.randint(0, 7, shape, generator=w.g, dtype=torch.uint8)
    ratios, least, dense = _ratios(w), w.seed % 7, w.pick(0, w.rows // 2)
    capacity = candidate_capacity(w.rows, ratios, least, dense) + w.pick(0, 1)
    return (votes, codes, lengths, ratios, least, dense, capacity, table)


def _rerank(w: World):
    codes, _, table = _coded(w, w.pick(8, 4, 2))
    codes = codes._replace(counts=codes.counts.expand(w.batch, -1, -1, -1).contiguous())
    size = 1 << (w.dim - 1).bit_length()
    rotated = torch.randn(w.batch, w.heads, w.pick(1, w.group), size, generator=w.g)
    empty = torch.full((w.batch, w.heads, w.pick(0, 70)), -1)
    candidates = torch.cat([w.chosen(max(1, w.blocks // 2)), empty], 2)
    return (rotated, codes, candidates.to(I32).contiguous(), table)


def _attention_mass(w: World):
    store = KVStore(w.ring(w.length, w.begin), w.pool(w.begin))
    return (w.q[:, :, :1], store, w.lengths_view, w.block, Attention(w.dim**-0.5, w.pick(0.0, 5.0)))


def _filter_scores(w: World):
    attention = Attention(w.dim**-0.5, w.pick(0.0, 5.0))
    return (w.q[:, :, :1], w.pool(w.length), w.lengths_view, w.sink, w.window, attention, w.pick(False, True))


def _random_scores(w: World):
    return (w.lengths_view, w.heads, w.blocks, w.block, w.seed * 4_294_967)


def _fetch(w: World):
    n = max(1, w.blocks // 3)
    slots = min(w.blocks, n + w.seed % (n + 1))
    lead = (w.batch, w.heads)
    block_of = torch.full((*lead, slots), -1, dtype=I32)
    slot_of = torch.full((*lead, w.blocks), -1, dtype=I32)
    rows = torch.full((*lead, slots, w.block, 2, w.dim), torch.nan, dtype=w.dtype)
    pages = w.truth.unflatten(2, (-1, w.block))
    for b in range(w.batch):
        for h in range(w.heads):
            for slot, x in enumerate(torch.randperm(w.blocks, generator=w.g)[:slots].tolist()):
                if torch.rand((), generator=w.g) < 0.7:
                    block_of[b, h, slot], slot_of[b, h, x], rows[b, h, slot] = x, slot, pages[b, h, x]
    used = torch.randint(0, 2, (*lead, slots), generator=w.g, dtype=I32)
    hand = torch.randint(0, slots, lead, generator=w.g, dtype=I32)
    chosen = torch.randint(-1, slots, (*lead, n), generator=w.g, dtype=I32)
    now = torch.randint(0, 2, lead, generator=w.g, dtype=I32) if w.pick(False, True) else None
    hot = HotBuffer(rows, slot_of, block_of, used, hand, torch.zeros(lead, dtype=I32), chosen)
    return (Selection(w.chosen(n), now), w.truth.clone(), hot, w.stats())


def _frontier(w: World, length: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
    """Where the ring counts from per (row, head): `begin` or as much further back as the ring has room."""
    least = (length - (w.ring_rows - w.sink)).clamp(min=w.sink)[:, None]
    back = torch.randint(0, 2 * w.interval, (w.batch, w.heads), generator=w.g)
    return torch.maximum(begin[:, None] - back, least).to(I32)


def _units(w: World, frontier: torch.Tensor, *, most: int) -> Units:
    """Units of random sizes, empty ones too, that fill [sink, frontier), NaN behind them."""
    count = torch.randint(0, 7, frontier.shape, generator=w.g, dtype=I32)
    count[frontier > w.sink] += 1
    first = torch.full((w.batch, w.heads, most + 1), w.sink, dtype=I32)
    centroid = torch.full((w.batch, w.heads, most, w.dim), torch.nan, dtype=w.dtype)
    for b in range(w.batch):
        for h in range(w.heads):
            n, end = int(count[b, h]), int(frontier[b, h])
            first[b, h, : n + 1] = torch.randint(w.sink, end + 1, (n + 1,), generator=w.g).sort().values
            first[b, h, 0], first[b, h, n] = w.sink, end
            few = torch.randint(0, 4, (n,), generator=w.g)  # alike in part: ties
            centroid[b, h, :n] = integers(torch.randn(4, w.dim, generator=w.g) / 4)[few].to(w.dtype)
    return Units(first, centroid, count)


def _segments(w: World, length: torch.Tensor, begin: torch.Tensor):
    """Ring, units and segments of rows with so many tokens."""
    frontier = _frontier(w, length, begin)
    cuts = torch.randint(0, 2, (w.batch, w.heads, w.ring_rows - w.sink), generator=w.g, dtype=I32)
    newest = (length[:, None] - torch.randint(1, 6, frontier.shape, generator=w.g)).clamp(min=w.sink).to(I32)
    units = _units(w, frontier, most=w.rows + 8)
    return w.ring(length, frontier.amin(1)), units, Segments(cuts, newest, frontier)


def _find_boundary(w: World):
    ring, units, segments = _segments(w, w.length, w.begin)
    q = w.q[:, :, :1]
    previous = torch.randn(w.batch, 2, q.shape[1], w.dim, generator=w.g) + q[:, None, :, 0].float()
    lead = (w.batch, w.heads)
    seen = (w.length[:, None] - torch.randint(1, w.pick(2, 3), lead, generator=w.g)).to(I32)
    now, retrievals = (torch.randint(0, 2, lead, generator=w.g, dtype=I32) for _ in range(2))
    trigger = Trigger(previous, seen, now, retrievals)
    tau, memory = w.pick(0.7, -0.9, 0.2, 0.6, 0.8, 1.0), w.pick(0.0, 0.6, 1.0)
    rule = Boundaries(tau, w.pick(False, True), w.pick(1, 2, 3), w.ring_rows, memory)
    return (q, ring, units, segments, trigger, w.stats(), w.lengths_view, rule)


def _close_segments(w: World):
    return (*_segments(w, w.start, w.previous_begin), w.lengths_view, w.ring_rows)


def _cluster_keys(w: World):
    frontier = torch.minimum(w.start, w.begin)[:, None].clamp(min=w.sink).expand(-1, w.heads)
    units = _units(w, frontier, most=w.rows + 8)
    units = units._replace(centroid=units.centroid.nan_to_num(0))
    size, stretch = w.pick((2, 4), (1, 2), (4, 8), (2, 16), (3, 8), (3, 0), (1, 0))
    kmeans = Kmeans(size, stretch, w.pick(1, 2, 3), w.seed, False, w.pick(False, True))
    return (w.k, units, w.lengths_view, kmeans, True)


def _cluster_ring(w: World):
    """All that leaves at a step, or with a prompt; or nothing; several stretches of it too."""
    old = w.previous_begin if w.pick(True, False) else (w.start - w.window - w.interval).clamp(min=w.sink).int()
    lengths = w.lengths_view._replace(previous_ring_begin=torch.minimum(old, w.begin))
    size, stretch = w.pick((2, 4), (1, 3), (4, 7), (5, 3), (3, 40))
    units = _units(w, lengths.previous_ring_begin[:, None].expand(-1, w.heads), most=w.rows + 8)
    units = units._replace(centroid=units.centroid.nan_to_num(0))
    ring = integers(w.ring(w.start, lengths.previous_ring_begin))
    kmeans = Kmeans(size, stretch, w.pick(1, 2, 3), w.seed, False, w.pick(False, True))
    return (KVStore(ring, w.pool(w.length)), units, lengths, kmeans)


def _pick_units(w: World):
    units = _units(w, w.begin[:, None].expand(-1, w.heads), most=w.blocks + 8)
    now = (torch.rand(w.batch, w.heads, generator=w.g) < 0.8).to(I32)
    budget = 1 + w.seed % (w.rows + 2)
    return (integers(w.q[:, :, :1] / 8), units, now, torch.zeros_like(now), budget, w.dim**-0.5)


def _unit_means(w: World):
    old = torch.minimum(w.previous_begin, w.begin)
    end = w.begin if w.tokens > 1 else torch.minimum(w.begin, w.start.clamp(min=w.sink))
    end = torch.where(w.length > 0, end, w.sink)
    units = _units(w, end[:, None].expand(-1, w.heads), most=w.rows + 8)
    means = torch.zeros(w.batch, w.heads, w.rows + 8, 2, w.dim, dtype=_sums_in(w))
    order = torch.arange(w.tokens, dtype=I32).expand(w.batch, w.heads, -1).contiguous() if w.tokens > 1 else None
    leaving = Leaving(w.k, w.pool(w.start))
    lengths = w.lengths_view._replace(previous_ring_begin=old)
    return (leaving, w.v if w.tokens > 1 else None, units, means, lengths, order, True)


def _estimate_units(w: World):
    end = w.begin[:, None].expand(-1, w.heads)
    units = _units(w, end, most=w.blocks + 8)
    taken = torch.rand(w.batch, w.heads, w.rows, generator=w.g) < w.pick(0.3, 0.9, 0.0)
    taken &= (torch.arange(w.rows) >= w.sink) & (torch.arange(w.rows) < end[..., None])
    at = torch.arange(w.rows, dtype=I32).expand(w.batch, w.heads, -1)
    ids = torch.where(taken, at, w.rows).sort(-1).values
    ids = torch.where(ids < w.rows, ids, -1).to(I32)[..., : max(1, int(taken.sum(-1).max()))].contiguous()
    return (integers(w.q[:, :, :1] / 8), units, ids, w.pick(15204, 0, 1 << 16, 30000), w.dim**-0.5)


def _attention(w: World) -> Attention:
    return Attention(w.dim**-0.5, w.pick(0.0, 5.0), w.sink_logits() if w.pick(False, True) else None)


def _sparse_attention(w: World):
    hot = w.truth.unflatten(2, (-1, w.block)).contiguous()
    each = torch.arange(w.blocks, dtype=I32).expand(w.batch, w.heads, -1).contiguous()  # a block is in its own slot
    none, chosen = torch.zeros(w.batch, w.heads, dtype=I32), w.chosen(max(1, w.blocks // 3))
    hot = HotBuffer(hot, each, each.clone(), torch.zeros_like(each), none, none.clone(), chosen)
    frontier = _frontier(w, w.length, w.begin) if w.pick(False, True) else None
    ring = w.ring(w.length, w.begin if frontier is None else frontier.amin(1))
    kind = w.pick("none", "groups", "means")
    rest = Rest() if kind == "none" else _rest(w, w.begin) if kind == "groups" else _own_means(w)
    fill = torch.randint(0, w.block + 1, each.shape, generator=w.g, dtype=I32) if w.pick(False, True) else None
    if fill is not None and rest.group:
        frontier, rest = None, _filled_rest(w, fill)
    bias = None
    if w.pick(False, True):
        bias = torch.randn(w.batch, w.heads * w.group, chosen.shape[2], generator=w.g) * 3
        bias[torch.rand(bias.shape, generator=w.g) < 0.2] = -math.inf
    selection = Selection(ids=w.pick(chosen, None), frontier=frontier, fill=fill, bias=bias)
    rest = rest._replace(settled=w.pick(False, True))
    return (w.q[:, :, :1], ring, hot, w.lengths_view, selection, _attention(w), rest)


def _own_means(w: World) -> Rest:
    """Means of a method's own, NaN in rows that stand for no token."""
    tokens = torch.randint(0, 9, (w.batch, w.heads, 1 + w.seed % 70), generator=w.g, dtype=I32)
    means = torch.randn(*tokens.shape, 2, w.dim, generator=w.g).to(_sums_in(w))
    return Rest(means.masked_fill((tokens == 0)[..., None, None], torch.nan), 0, tokens)


def _rest(w: World, upto: torch.Tensor) -> Rest:
    """Sums of the tokens below `upto`, NaN where a group has none."""
    group = w.pick(4, 1, 32, 2)
    sums = torch.full((w.batch, w.heads, -(-w.rows // group), 2, w.dim), torch.nan, dtype=torch.float64)
    for b, end in enumerate(upto.tolist()):
        for g in range(w.sink // group, -(-end // group) if end > w.sink else 0):
            sums[b, :, g] = w.truth[b, :, max(g * group, w.sink) : min((g + 1) * group, end)].double().sum(1)
    return Rest((sums / group).to(_sums_in(w)), group)


def _sums_in(w: World) -> torch.dtype:
    return torch.float32 if w.dtype is torch.float32 else w.pick(torch.float16, torch.float32)


def _filled_rest(w: World, fill: torch.Tensor) -> Rest:
    """Sums of the rows that hold a token, by groups of whole blocks."""
    group = w.block * w.pick(2, 1, 8)
    there = torch.arange(w.block) < fill[..., None]
    rows = w.truth.double() * there.flatten(2)[..., None, None]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -w.rows % group))
    return Rest(rows.unflatten(2, (-1, group)).mean(3).to(_sums_in(w)), group)


def _append(w: World):
    rest = _begun(w) if w.pick(False, True) else Rest()
    return (*cases_static.append(w, _store(w, w.previous_begin)), rest)


def _begun(w: World) -> Rest:
    """The sums before this call: 0 where a group has no token yet."""
    rest = _rest(w, w.previous_begin)
    assert rest.sums is not None
    return rest._replace(sums=rest.sums.nan_to_num(0))


def _group_sums(w: World):
    rest, order = _begun(w), _order(w) if w.tokens > 1 else None
    pool = w.pool(torch.maximum(w.begin, w.start) if order is None else w.start)
    rows = None
    if w.tokens == 1 and w.pick(False, True):
        rows = torch.rand(w.batch, w.heads, w.rows, generator=w.g).argsort(-1)[..., : w.interval].to(I32).contiguous()
        pool = w.truth.clone()
    return (Leaving(w.k, pool), w.v, rest, w.lengths_view, order, True, rows)


def _dense_attention(w: World):
    return (w.q[:, :, :1], w.pool(w.length), w.lengths_view, _attention(w))


def _prompt_attention(w: World):
    attention = Attention(w.dim**-0.5, w.pick(0.0, 0.0, 5.0), w.sink_logits() if w.pick(False, False, True) else None)
    spans = [*w.start.tolist(), *w.length.tolist()] if w.pick(True, False) else None
    return (w.q, w.k, w.v, w.pool(w.start), w.lengths_view, attention, spans)


def _window_attention(w: World):
    w = dataclasses.replace(w, sink=0)
    return (w.q, w.k, w.v, w.ring(w.start, w.previous_begin), w.lengths_view, _attention(w), w.window)


OPS = {
    "advance": _advance,
    "append": _append,
    "flush_ring": _flush_ring,
    "store_prompt": _store_prompt,
    "spread_channels": lambda w: (w.q, w.k),
    "block_bounds": lambda w: cases_static.block_bounds(w, _block_bounds(w)),
    "bound_scores": lambda w: w.pick(
        lambda w: cases_static.bound_scores(w, _bound_scores(w)), cases_engine.bound_scores
    )(w),
    "top_blocks": _top_blocks,
    "encode_keys": _encode_keys,
    "centroid_votes": _centroid_votes,
    "rank_by_votes": _rank_by_votes,
    "rerank": _rerank,
    "attention_mass": _attention_mass,
    "filter_scores": _filter_scores,
    "find_boundary": _find_boundary,
    "close_segments": _close_segments,
    "cluster_keys": _cluster_keys,
    "cluster_ring": _cluster_ring,
    "unit_means": _unit_means,
    "estimate_units": _estimate_units,
    "pick_units": _pick_units,
    "observe": cases_static.observe,
    "copy_keys": cases_static.copy_keys,
    "choose_static": cases_static.choose_static,
    "static_target": cases_static.static_target,
    "snap_tokens": cases_static.snap_tokens,
    "add_prompt_attention": cases_evicting.add_prompt_attention,
    "keep_heaviest": cases_evicting.keep_heaviest,
    "evict_lightest": cases_evicting.evict_lightest,
    "add_attention": cases_evicting.add_attention,
    "keep_prompt_pages": cases_evicting.keep_prompt_pages,
    "stamp_pages": lambda w: cases_evicting.stamp_pages(w, _bound_scores(dataclasses.replace(w, pick=first))),
    "keep_leaving": cases_static.keep_leaving,
    "relocate": lambda w: cases_static.relocate(w, _fetch(w), _block_bounds),
    "update_static_set": lambda w: cases_static.update_static_set(w, _fetch(w), _block_bounds),
    "plant_tree": cases_tree.plant_tree,
    "insert_page": lambda w: cases_tree.insert_page(w, _fetch(w)),
    "top_tokens_of_last_queries": cases_tree.top_tokens_of_last_queries,
    "share_prompt": cases_tree.share_prompt,
    "share_step": lambda w: cases_tree.share_step(w, _fetch(w)),
    "visit_nodes": cases_tree.visit_nodes,
    "page_peaks": cases_tree.page_peaks,
    "union_pages": cases_tree.union_pages,
    "best_pages": cases_tree.best_pages,
    "random_scores": _random_scores,
    "query_drift_gate": cases_prefetch.query_drift_gate,
    "fetch": lambda w: (*_fetch(w), w.pick(None, w.q[:, :, :1]), _rest(w, w.begin).sums),
    "prefetch_async": lambda w: cases_prefetch.prefetch_async(w, _fetch(w)),
    "sparse_attention": _sparse_attention,
    "group_sums": _group_sums,
    "dense_attention": _dense_attention,
    "prompt_attention": _prompt_attention,
    "window_attention": _window_attention,
    **cases_engine.OPS,
    **cases_tokens.OPS,
}
# Ops that also take prompts.
MANY_TOKENS = {
    "advance", "flush_ring", "store_prompt", "spread_channels", "observe", "snap_tokens", "copy_keys",
    "close_segments", "cluster_keys", "cluster_ring", "plant_tree", "top_tokens_of_last_queries", "share_prompt",
    "block_bounds", "encode_keys", "prompt_attention", "group_sums", "unit_means", "add_prompt_attention",
    "keep_heaviest", "keep_prompt_pages", "window_attention", *cases_engine.MANY_TOKENS, *cases_tokens.MANY_TOKENS,
}  # fmt: skip

# ---------------------------------------------------------------- methods and families

METHODS = {
    "arkvale": dict(block_size=8),
    "pagemean": dict(block_size=8),
    "clusterkv": dict(cluster_size=4, every=10, new_clusters=2, rounds=2),
    "retroinfer": dict(cluster_size=4, stretch=16, every=10, new_clusters=2, rounds=2),
    "full": {},
    "h2o": {},
    "icecache": dict(page_size=4, r=0.25, least_view=8),
    "louiskv": dict(cluster_size=4, stretch=16, segment_min=2, segment_max=4, tau=0.1),
    "magicpig": dict(bits=3, tables=12),
    "omnikv": dict(wait_layers=0),
    "oracle": {},
    "pariskv": dict(update_interval=5, beta=1.0, rho=1.0, full_threshold=0),
    "pqcache": dict(m=4, bits=3, rounds=3),
    "prkv": dict(block_size=4, update_every=7, static_ratio=0.5),
    "quest": dict(block_size=4),
    "raas": dict(block_size=4),
    "random": dict(block_size=4),
    "prkv_static": dict(update_every=7, update_from="codes"),
    "snapkv": dict(observe=4, kernel_size=3),
    "shadowkv": dict(block_size=4, outliers=2),
    "streaming": dict(block_size=4),
}

# Where each takes long: all on a GPU; without one those whose prompts and steps differ most.
SEVERAL = METHODS if torch.cuda.is_available() else ("icecache", "louiskv", "pariskv", "quest")

SIZES = dict(
    num_hidden_layers=3, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=None, max_position_embeddings=512,
)  # fmt: skip
FAMILIES = {
    "llama": SIZES,
    "mistral": {**SIZES, "sliding_window": None},
    "qwen2": SIZES,
    "qwen3": SIZES,
}


def hyper_of(method: str, **common) -> dict:
    """What `method` is tested with, over what is `common` to all; a block size only where it has one."""
    own = common | METHODS[method]
    return own if method in IN_BLOCKS else {name: value for name, value in own.items() if name != "block_size"}


IN_BLOCKS = {"arkvale", "oracle", "pagemean", "prkv", "quest", "raas", "random", "shadowkv", "streaming"}
RING_PLAN = RingPlan(sink=4, window=6, interval=4)
