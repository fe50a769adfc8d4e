"""What the ops of an engine take, from a world: its rows are requests, their blocks lie anywhere in one pool."""
import importlib

import torch
from world import World, integers

from torchsparsekv.ops.engine.tables import lengths_of
from torchsparsekv.ops.engine.views import BlockRest, Copies, Listing, SharedHot
from torchsparsekv.ops.index.block_bounds import ONE_SPREAD, VOLUMES
from torchsparsekv.ops.pariskv.encode_keys import encode
from torchsparsekv.ops.pariskv.views import Codes, Counted
from torchsparsekv.ops.rest.views import Rest
from torchsparsekv.ops.store.views import Attention, BlockTable, Digests, Lengths

I32 = torch.int32
LIST_UNITS = importlib.import_module("torchsparsekv.ops.engine.list_units")


def requests(w: World) -> tuple[Lengths, BlockTable]:
    """Random ids, the first ones of a request those of another where they begin alike; one request may be padding."""
    ids = torch.randperm(w.batch * w.blocks + 3, generator=w.g)[: w.batch * w.blocks].view(w.batch, -1).to(I32)
    shared = w.pick(0, 1, w.blocks // 2)
    ids[:, :shared] = ids[:1, :shared]
    length = w.length.clamp(min=0)  # what has no tokens is padding
    length[-1] = w.pick(int(length[-1]), 0)
    return lengths_of(length, w.sink, w.window, w.interval), BlockTable(ids.contiguous(), w.block)


def blocks_of(w: World) -> int:
    return w.batch * w.blocks + 3


def pool(w: World) -> torch.Tensor:
    shape = (1, w.heads, blocks_of(w) * w.block, 2, w.dim)
    return torch.randn(shape, generator=w.g).to(w.dtype)


def _written(w: World):
    """Tokens of some requests in a row, in blocks anywhere; some are not stored."""
    rows, to, block = pool(w), [], torch.randperm(blocks_of(w), generator=w.g)
    for own in block[: len(block) // w.batch * w.batch].view(w.batch, -1).tolist():  # no two write to one block
        first = int(torch.randint(0, w.block, (), generator=w.g))
        place = range(first, min(first + w.tokens, len(own) * w.block))
        to += [own[p // w.block] * w.block + p % w.block for p in place]
    to = torch.tensor(to)
    to[torch.rand(len(to), generator=w.g) < w.pick(0.0, 0.3)] = -1
    k, v = (w.heads_last(w.heads, len(to)).transpose(1, 2)[0] for _ in range(2))
    rows[0, :, to[to >= 0]] = torch.nan
    return k, v, to, rows


def write_tokens(w: World):
    k, v, to, rows = _written(w)
    hot = _hot(w, rows, 3)
    return (k, v, to, rows, Copies(hot.rows, hot.slot_of) if w.pick(True, False) else Copies())


def filled_bounds(w: World):
    k, _, to, rows = _written(w)
    volume, dtype = w.pick(*range(len(VOLUMES))), w.pick(torch.float32, torch.float8_e4m3fn, torch.float16)
    return (k, to, rows, _digests(w, volume, dtype))


def _digests(w: World, volume: int, dtype: torch.dtype) -> Digests:
    lead, one = (1, w.heads, blocks_of(w)), VOLUMES[volume] in ONE_SPREAD
    spread = torch.rand(*lead, 1 if one else w.dim, generator=w.g)
    centre = torch.randn(*lead, w.dim, generator=w.g).to(dtype)
    origin = torch.randn(1, w.heads, w.dim, generator=w.g) + w.pick(torch.nan, 0.0)
    return Digests(centre, spread if one else spread.to(dtype), w.block, volume, origin)


def bound_scores(w: World):
    """Of rows that share one pool; their digests are of all volumes."""
    volume, dtype = w.pick(*range(len(VOLUMES))), w.pick(torch.float32, torch.float8_e4m3fn)
    digests, (lengths, table) = _digests(w, volume, dtype), requests(w)
    return (w.q[:, :, :1], digests._replace(origin=digests.origin.nan_to_num(2.0)), lengths, None, table)


def codes(w: World, m: int) -> Codes:
    """Of all rows of one pool, with no counts."""
    found = encode(pool(w)[:, :, :, 0], m, w.seed)
    size = found[0].shape[3] * m
    return Codes(*(t.contiguous() for t in found), torch.zeros(1, w.heads, size // m, 1 << m, dtype=I32))


def encode_tokens(w: World):
    k, _, to, _ = _written(w)
    m = w.pick(8, 4, 2)
    return (integers(k), to, _blank(codes(w, m)), _uses(w), m, w.seed)


def _blank(codes: Codes) -> Codes:
    return codes._replace(ids=codes.ids * 0, codes=codes.codes * 0, weights=codes.weights * 0)


def _uses(w: World) -> torch.Tensor:
    return torch.randint(0, 3, (1, blocks_of(w)), generator=w.g, dtype=I32)


def count_ids(w: World):
    """Some counts end at an earlier position in the same block or in another one; others are of other uses."""
    m = w.pick(8, 4, 2)
    ids, (lengths, table), uses = codes(w, m).ids, requests(w), _uses(w)
    sizes = w.batch + w.pick(0, 2), w.heads, ids.shape[3]
    random = lambda most: torch.randint(0, most, sizes, generator=w.g, dtype=I32)  # noqa: E731
    ends, blocks = random(w.blocks * w.block), random(blocks_of(w))
    for b in range(w.batch):
        own = table.ids[b, (ends[b] - 1).clamp(min=0) // w.block]
        blocks[b] = torch.where(torch.rand(blocks[b].shape, generator=w.g) < 0.8, own, blocks[b])
    then = torch.where(torch.rand(sizes, generator=w.g) < 0.8, uses[0, blocks], random(3))
    counts = torch.randint(0, 99, (*sizes, 1 << m), generator=w.g, dtype=I32)
    return (ids, lengths, table, Counted(counts, ends, blocks, then, uses))


def list_units(w: World):
    """Units are blocks, or parts of them."""
    (lengths, table), unit = requests(w), w.pick(w.block, 1)
    chosen = torch.full((w.batch, w.heads, max(1, w.blocks // 3)), -1, dtype=I32)
    for b, end in enumerate((lengths.ring_begin // unit).tolist()):
        for h in range(w.heads):
            some = torch.randperm(end - w.sink // unit, generator=w.g)[: chosen.shape[2]] + w.sink // unit
            chosen[b, h, : len(some)] = some.sort().values
    return (chosen, lengths, table, w.window, unit)


def _listed(w: World) -> torch.Tensor:
    ids = torch.randint(-1, blocks_of(w), (w.batch, w.heads, max(1, w.blocks // 3)), generator=w.g)
    return torch.where(torch.rand(ids.shape, generator=w.g) < 0.3, -1, ids).to(I32)


def _hot(w: World, pool: torch.Tensor, slots: int) -> SharedHot:
    blocks, pages = blocks_of(w), pool.unflatten(2, (-1, w.block))
    block_of, slot_of = torch.full((1, w.heads, slots), -1, dtype=I32), torch.full((1, w.heads, blocks), -1, dtype=I32)
    rows = torch.full((1, w.heads, slots, *pages.shape[3:]), torch.nan, dtype=w.dtype)
    for h in range(w.heads):
        for slot, x in enumerate(torch.randperm(blocks, generator=w.g)[:slots].tolist()):
            if torch.rand((), generator=w.g) < 0.7:
                block_of[0, h, slot], slot_of[0, h, x], rows[0, h, slot] = x, slot, pages[0, h, x]
    used = torch.randint(0, 2, block_of.shape, generator=w.g, dtype=I32)
    hand = torch.randint(0, slots, (1, w.heads), generator=w.g, dtype=I32)
    return SharedHot(rows, slot_of, block_of, used, hand)


def fetch_shared(w: World):
    rows, ids = pool(w), _listed(w)
    return (ids, rows, _hot(w, rows, ids.shape[0] * ids.shape[2] + w.pick(0, 5)))


def listed_attention(w: World):
    """As a step lists them, with the rest; or any lists without it."""
    out = torch.full_like(w.q[:, :, :1].contiguous(), torch.nan)
    rows, attention = pool(w).unflatten(2, (-1, w.block)), _attention(w)
    if w.pick(False, True) and w.sink % w.block == w.interval % w.block == 0:
        selected, lengths, table, window, unit = list_units(w)
        listing = Listing(*LIST_UNITS.reference(selected, lengths, table, window, unit))
        rows = rows.flatten(2, 3).unflatten(2, (-1, unit))
        rest = BlockRest(sums_of(rows, w.block), w.block, table.ids, selected)
        return (w.q[:, :, :1], rows, listing, lengths, attention, out, rest)
    lengths = requests(w)[0]
    ids = torch.where(lengths.length[:, None, None] > 0, _listed(w), -1)
    fill = torch.randint(0, w.block + 1, ids.shape, generator=w.g, dtype=I32)
    return (w.q[:, :, :1], rows, Listing(ids, fill), lengths, attention, out, BlockRest())


def sums_of(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Of blocks of the pool rows [1, heads, units, unit, 2, dim]."""
    means = rows.float().flatten(2, 3).unflatten(2, (-1, block)).mean(3)
    return means if rows.dtype is torch.float32 else means.half()


def filled_sums(w: World):
    k, v, to, rows = _written(w)
    rows[0, :, to[to >= 0]] = 9.0  # the kernel may multiply what it does not use by 0
    sums = torch.full_like(sums_of(rows.unflatten(2, (-1, w.block)), w.block), 7.0)
    return (k, v, to, rows, Rest(sums, w.block))


def _attention(w: World) -> Attention:
    return Attention(w.dim**-0.5, w.pick(0.0, 5.0), w.sink_logits() if w.pick(False, True) else None)


def table_prompt(w: World):
    past = w.pick(min(w.lengths[0], w.blocks * w.block), 0)
    q, k, v = (t[0].transpose(0, 1) for t in (w.q, w.k, w.v))
    attention = Attention(w.dim**-0.5, w.pick(0.0, 0.0, 5.0), w.sink_logits() if w.pick(False, False, True) else None)
    return (q, k, v, pool(w), requests(w)[1].ids[0], past, w.block, attention)


OPS = {
    "write_tokens": write_tokens,
    "filled_bounds": filled_bounds,
    "filled_sums": filled_sums,
    "encode_tokens": encode_tokens,
    "count_ids": count_ids,
    "list_units": list_units,
    "fetch_shared": fetch_shared,
    "listed_attention": listed_attention,
    "table_prompt": table_prompt,
}
MANY_TOKENS = {"write_tokens", "filled_bounds", "filled_sums", "encode_tokens", "table_prompt"}
