"""The three tables. A new op, method or family is a new row here; the tests need no edit."""
import math

import torch
from world import World

from torchsparsekv.ops._top import peaks_of
from torchsparsekv.ops.index.encode_keys import encode
from torchsparsekv.ops.select.collide import candidate_capacity
from torchsparsekv.state import Timeline

FP8 = torch.float8_e4m3fn


# ---------------------------------------------------------------- ops: arguments from a world, in schema order


def _advance(w: World):
    seq_len = torch.tensor(max(w.lengths) - w.tokens)
    left_pad = (max(w.lengths) - w.length).to(torch.int32)
    before = (seq_len - left_pad).clamp(min=0).to(torch.int32)
    pad = torch.randint(0, 3, left_pad.shape, generator=w.g) if w.seed % 2 else None
    return (
        seq_len, torch.zeros_like(before), before, torch.zeros_like(before), w.frontier(before), left_pad, pad,
        w.tokens, w.rows - w.seed % 3, w.sink, w.window, w.interval,
    )  # fmt: skip


def _append(w: World):
    ring, pool = w.ring(w.start, w.leaving), w.pool(w.leaving)
    return (w.k, w.v, ring, pool, w.stats(), w.length, w.leaving, w.retired, w.sink, w.interval)


def _store_prompt(w: World):
    ring, pool = w.ring(w.start, w.leaving), w.pool(w.leaving)
    return (w.k, w.v, ring, pool, w.start, w.length, w.leaving, w.retired, _order(w), w.sink, True)


def _order(w: World):
    """None, or a random order of the new tokens of every row that do not stay in the ring."""
    if w.seed % 2:
        return None
    order = torch.arange(w.tokens, dtype=torch.int32).expand(w.batch, w.heads, -1).clone()
    for b, (n0, n, end) in enumerate(torch.stack([w.start, w.length, w.retired], 1).tolist()):
        first, last = max(n0, w.sink) - n + w.tokens, end - n + w.tokens
        for h in range(w.heads * (last > first)):
            order[b, h, first:last] = first + torch.randperm(last - first, generator=w.g)
    return order


def _block_bounds(w: World):
    box = w.seed % 2 == 0
    dtype = (torch.float32, FP8, torch.float16)[w.seed // 2 % 3]
    lead = (w.batch, w.heads, w.blocks)
    centre = torch.zeros(*lead, w.dim).to(dtype)
    spread = torch.zeros(*lead, w.dim).to(dtype) if box else torch.zeros(*lead, 1)
    args = (w.start, w.length, w.leaving, w.retired, w.interval, w.block)
    return (w.k, w.pool(torch.maximum(w.retired, w.length)), centre, spread, *args)


def _bound_scores(w: World):
    box = w.seed % 2 == 0
    dtype = (torch.float32, FP8)[w.seed // 2 % 2]
    keys = w.truth[:, :, :, 0].unflatten(2, (-1, w.block)).float()
    spread = torch.rand(*keys.shape[:3], w.dim if box else 1, generator=w.g)
    spread = spread.to(dtype) if box else spread
    q = w.q[:, :, :1]
    return (q, keys.mean(3).to(dtype), spread, w.retired, w.sink, w.block)


def _top_blocks(w: World):
    n = w.rows * (1, 24)[w.seed // 2 % 2]  # for one program, or for several or the peaks
    few = torch.randint(-2, 3, (w.batch, w.heads, n), generator=w.g).float()  # many ties
    few[torch.rand(few.shape, generator=w.g) < 0.3] = -math.inf
    few[torch.rand(few.shape, generator=w.g) < 0.1] = math.nan
    names = torch.rand(few.shape, generator=w.g).argsort(-1).sort(-1).values.to(torch.int32) * 3 + 1
    scores = few if w.seed % 2 else torch.randn(few.shape, generator=w.g)
    k, ids = 1 + w.seed % (w.rows + 2), None if w.seed % 3 == 1 else names
    peaks = None if w.seed % 5 == 1 else peaks_of(scores)
    if ids is None or w.seed % 4 == 0:
        return (scores, k, peaks, ids)
    return (scores, k, peaks, ids, w.retired, int(w.retired.float().median()), k + w.seed % 7)


def _integers(x: torch.Tensor) -> torch.Tensor:
    """Small integers: their sums of products are exact in any order, so no sign, cell or tie differs by rounding."""
    return (x * 8).round()


def _encode_keys(w: World):
    m = (8, 4, 2)[w.seed % 3]
    size = 1 << (w.dim - 1).bit_length()
    lead = (w.batch, w.heads, w.rows)
    ids, codes = torch.zeros(*lead, size // m, dtype=torch.uint8), torch.zeros(*lead, size // 2, dtype=torch.uint8)
    weights, counts = torch.zeros(*lead, size // m).half(), torch.ones(*lead[:2], size // m, 1 << m, dtype=torch.int32)
    pool = _integers(w.pool(torch.maximum(w.retired, w.length)))
    times = (w.start, w.length, w.leaving, w.retired)
    return (_integers(w.k), pool, ids, codes, weights, counts, *times, w.interval, m, w.seed)


def _encoded(w: World, m: int):
    """Ids, codes and weights of all rows, and how often each id occurs among the retrievable ones."""
    ids, codes, weights = encode(w.truth[:, :, :, 0], m, w.seed)
    counts = torch.zeros(w.batch, w.heads, ids.shape[3], 1 << m, dtype=torch.int32)
    for b, end in enumerate(w.retired.tolist()):
        names = ids[b, :, w.sink : end].transpose(1, 2).long()
        counts[b].scatter_add_(2, names, torch.ones_like(names, dtype=torch.int32))
    return ids, codes, weights, counts


def _earn_points(w: World):
    _, _, _, counts = _encoded(w, (8, 4, 2)[w.seed % 3])
    group = (1, w.group, 5, 11)[w.seed // 3 % 4]
    q = _integers(torch.randn(w.batch, w.heads * group, 1, w.dim, generator=w.g)).to(w.dtype)
    ratios = [7, 500_000, 600_000, 9, 300_000, 500_000, 30, 200_000, 700_000, 0, (400_000, 1_000_000)[w.seed // 5 % 2]]
    return (q, counts, w.retired, w.sink, ratios, w.seed % 2 == 0, w.seed)


def _collide(w: World):
    m = max((8, 4, 2)[w.seed % 3], 2 if w.dim <= 64 else 4 if w.dim <= 128 else 8)  # scores are one byte
    ids = _encoded(w, m)[0]
    packs = 1 + w.seed // 3 % 3
    earned = torch.randint(0, 7, (w.batch, w.heads, packs, 1 << m, ids.shape[3], 4), generator=w.g, dtype=torch.uint8)
    beta, rho = (100_000, 333_333, 1_000_000)[w.seed // 2 % 3], (400_000, 1_000_000)[w.seed // 5 % 2]
    ratios = [7, 500_000, 600_000, 9, 300_000, 500_000, 30, 200_000, 700_000, beta, rho]
    least, dense = w.seed % 7, (0, w.rows // 2)[w.seed // 7 % 2]
    capacity = candidate_capacity(w.rows, ratios, least, dense) + w.seed % 2
    return (earned, ids, w.retired, w.sink, ratios, least, dense, capacity)


def _rerank(w: World):
    _, codes, weights, _ = _encoded(w, (8, 4, 2)[w.seed % 3])
    size = 1 << (w.dim - 1).bit_length()
    rotated = torch.randn(w.batch, w.heads, (1, w.group)[w.seed // 3 % 2], size, generator=w.g)
    candidates = torch.cat([w.chosen(max(1, w.blocks // 2)), torch.full((w.batch, w.heads, 70 * (w.seed % 2)), -1)], 2)
    return (rotated, codes, weights, candidates.to(torch.int32).contiguous())


def _attention_mass(w: World):
    past = (w.pool(w.retired), w.ring(w.length, w.retired), w.length, w.retired)
    return (w.q[:, :, :1], *past, w.sink, w.block, w.dim**-0.5, 0.0)


def _random_scores(w: World):
    return (w.length, w.retired, w.heads, w.blocks, w.sink, w.block, w.seed * 4_294_967)


def _fetch(w: World):
    n = max(1, w.blocks // 3)
    places = min(w.blocks, n + w.seed % (n + 1))
    lead = (w.batch, w.heads)
    resident = torch.full((*lead, places), -1, dtype=torch.int32)
    table = torch.full((*lead, w.blocks), -1, dtype=torch.int32)
    hot = torch.full((*lead, places, w.block, 2, w.dim), torch.nan, dtype=w.dtype)
    pages = w.truth.unflatten(2, (-1, w.block))
    for b in range(w.batch):
        for h in range(w.heads):
            for place, x in enumerate(torch.randperm(w.blocks, generator=w.g)[:places].tolist()):
                if torch.rand((), generator=w.g) < 0.7:
                    resident[b, h, place], table[b, h, x], hot[b, h, place] = x, place, pages[b, h, x]
    age = torch.randint(0, 4, (*lead, places), generator=w.g, dtype=torch.int32)
    return (w.chosen(n), w.truth, hot, table, resident, age, torch.zeros(lead, dtype=torch.int32), w.stats())


def _refetch(w: World):
    blocks, *rest = _fetch(w)
    wanted = torch.randint(0, 2, blocks.shape[:2], generator=w.g, dtype=torch.int32)
    return (wanted, blocks, *rest, torch.randint(-1, 3, blocks.shape, generator=w.g, dtype=torch.int32))


def _frontier(w: World, length: torch.Tensor, retired: torch.Tensor) -> torch.Tensor:
    """Where the ring begins per (row, head): `retired` or as much further back as the ring has room."""
    least = (length - (w.ring_rows - w.sink)).clamp(min=w.sink)[:, None]
    back = torch.randint(0, 2 * w.interval, (w.batch, w.heads), generator=w.g)
    return torch.maximum(retired[:, None] - back, least).to(torch.int32)


def _units(w: World, frontier: torch.Tensor, *, most: int):
    """Units of random sizes, empty ones too, that fill [sink, frontier): (units, first, centroid), NaN behind them."""
    units = torch.randint(0, 7, frontier.shape, generator=w.g, dtype=torch.int32)
    units[frontier > w.sink] += 1
    first = torch.full((w.batch, w.heads, most + 1), w.sink, dtype=torch.int32)
    centroid = torch.full((w.batch, w.heads, most, w.dim), torch.nan, dtype=w.dtype)
    for b in range(w.batch):
        for h in range(w.heads):
            count, end = int(units[b, h]), int(frontier[b, h])
            first[b, h, : count + 1] = torch.randint(w.sink, end + 1, (count + 1,), generator=w.g).sort().values
            first[b, h, 0], first[b, h, count] = w.sink, end
            few = torch.randint(0, 4, (count,), generator=w.g)  # alike in part: ties
            centroid[b, h, :count] = _integers(torch.randn(4, w.dim, generator=w.g) / 4)[few].to(w.dtype)
    return units, first, centroid


def _segments(w: World, length: torch.Tensor, retired: torch.Tensor):
    """Ring, cuts, begun, frontier, units, first, centroid of rows with so many tokens."""
    turn = w.ring_rows - w.sink
    frontier = _frontier(w, length, retired)
    cuts = torch.randint(0, 2, (w.batch, w.heads, turn), generator=w.g, dtype=torch.int32)
    begun = (length[:, None] - torch.randint(1, 6, frontier.shape, generator=w.g)).clamp(min=w.sink).to(torch.int32)
    units = _units(w, frontier, most=w.rows + 8)
    return (w.ring(length, frontier.amin(1)), cuts, begun, frontier, *units)


def _find_boundary(w: World):
    ring, *state = _segments(w, w.length, w.retired)
    q = w.q[:, :, :1]
    previous = torch.randn(w.batch, 2, q.shape[1], w.dim, generator=w.g) + q[:, None, :, 0].float()
    lead = (w.batch, w.heads)
    seen = (w.length[:, None] - torch.randint(1, 2 + w.seed % 2, lead, generator=w.g)).to(torch.int32)
    wanted, retrievals = (torch.randint(0, 2, lead, generator=w.g, dtype=torch.int32) for _ in range(2))
    tau = (-0.9, 0.2, 0.6, 0.7, 0.8, 1.0)[w.seed % 6]
    return (
        q, ring, previous.to(w.dtype), seen, *state, wanted, retrievals, w.stats(), w.length, w.retired, w.sink, tau,
        w.seed % 4 == 0, 1 + w.seed % 3, w.ring_rows,
    )  # fmt: skip


def _settle_segments(w: World):
    return (*_segments(w, w.start, w.leaving), w.start, w.length, w.retired, w.sink, w.ring_rows)


def _cluster_keys(w: World):
    units, first, centroid = _units(w, torch.minimum(w.start, w.retired)[:, None].clamp(min=w.sink).expand(-1, w.heads),
                                    most=w.rows + 8)  # fmt: skip
    size, stretch = ((2, 4), (1, 2), (4, 8), (2, 16))[w.seed % 4]
    times = (w.start, w.length, w.retired)
    return (w.k, units, first, centroid.nan_to_num(0), *times, w.sink, size, stretch, 1 + w.seed % 3, w.seed, True)


def _pick_units(w: World):
    units, first, centroid = _units(w, w.retired[:, None].expand(-1, w.heads), most=w.blocks + 8)
    wanted = (torch.rand(w.batch, w.heads, generator=w.g) < 0.8).to(torch.int32)
    budget = 1 + w.seed % (w.rows + 2)
    return (_integers(w.q[:, :, :1] / 8), centroid, first, units, wanted, torch.zeros_like(units), budget, w.dim**-0.5)


def _sparse_attention(w: World):
    n = max(1, w.blocks // 3)
    hot = w.truth.unflatten(2, (-1, w.block)).contiguous()
    sinks = w.sinks() if w.seed % 2 else None
    cap = (0.0, 5.0)[w.seed // 2 % 2]
    q = w.q[:, :, :1]
    retired = w.retired
    if w.seed % 3 == 0:  # one frontier per head, further back by what the ring still holds
        back = torch.randint(0, w.interval, (w.batch, w.heads), generator=w.g, dtype=torch.int32)
        room = w.ring_rows - w.sink - (w.length - w.retired)[:, None]
        retired = torch.maximum(retired[:, None] - back.clamp(max=room), torch.tensor(w.sink)).to(torch.int32)
    ring = w.ring(w.length, retired if retired.dim() == 1 else retired.amin(1))
    return (q, ring, hot, w.chosen(n), w.length, retired, sinks, w.sink, w.dim**-0.5, cap)


def _dense_attention(w: World):
    sinks = w.sinks() if w.seed % 2 else None
    cap = (0.0, 5.0)[w.seed // 2 % 2]
    return (w.q[:, :, :1], w.pool(w.length), w.length, sinks, w.dim**-0.5, cap)


def _prompt_attention(w: World):
    sinks = w.sinks() if w.seed % 5 == 0 else None
    spans = [*w.start.tolist(), *w.length.tolist()] if w.seed % 2 else None
    return (w.q, w.k, w.v, w.pool(w.start), w.start, w.length, sinks, w.dim**-0.5, 0.0, spans)


OPS = {
    "advance": _advance,
    "append": _append,
    "store_prompt": _store_prompt,
    "block_bounds": _block_bounds,
    "bound_scores": _bound_scores,
    "top_blocks": _top_blocks,
    "encode_keys": _encode_keys,
    "earn_points": _earn_points,
    "collide": _collide,
    "rerank": _rerank,
    "attention_mass": _attention_mass,
    "find_boundary": _find_boundary,
    "settle_segments": _settle_segments,
    "cluster_keys": _cluster_keys,
    "pick_units": _pick_units,
    "random_scores": _random_scores,
    "fetch": _fetch,
    "refetch": _refetch,
    "sparse_attention": _sparse_attention,
    "dense_attention": _dense_attention,
    "prompt_attention": _prompt_attention,
}
# Ops that also take prompts.
MANY_TOKENS = {
    "advance", "store_prompt", "settle_segments", "cluster_keys", "block_bounds", "encode_keys", "prompt_attention",
}  # fmt: skip

# ---------------------------------------------------------------- methods and families

METHODS = {
    "arkvale": dict(block_size=8),
    "clusterkv": dict(block_size=1, cluster_size=4, stretch=16, run=3),
    "full": {},
    "louiskv": dict(block_size=1, cluster_size=4, stretch=16, segment_min=2, segment_max=4, tau=0.1),
    "oracle": {},
    "pariskv": dict(block_size=1, update_interval=5, beta=1.0, rho=1.0, full_threshold=0),
    "quest": dict(block_size=4),
    "random": dict(block_size=4),
    "streaming": dict(block_size=4),
}

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

TIMELINE = Timeline(sink=4, window=6, interval=4)
