"""Select whole units by the attention that their centroids get, best first, until a budget of tokens is full.

    units are taken by falling score (_unit_scores.py), ties to the lower unit; of the unit that exceeds the budget only
    the first rows are taken

Launches, two per call:
    _logits   (row * kv head, parts): every part of a head's centroids leaves its logits, their maximum and exponential
              sum (_unit_scores.py).
    _choose   (row * kv head, chunks): every chunk ranks its units and keeps those that could still fit the budget. The
              last chunk of a head to finish chooses among the units that all chunks kept.
Programs of heads that do not retrieve now return at once; `_choose` fills their result with -1.

There is no sort. The score at which the budget is full is found by search: each round cuts the range of ranks to an
eighth, by the tokens of the units above each cut. Units of equal rank are taken in order. Sums of a search hold tokens
in 21 bits and units in the 11 bits above.

LouisKV, sections 4.1 and 4.3, and appendix B (one selection per query group).
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.clusters._unit_scores import UnitLogits, ranks_of, scores, sums_above
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.store.views import PerHead, Query

CHUNK, CHUNKS = 1024, 32  # units per chunk (twice as many where more than CHUNKS chunks would be needed)
MOST_ROWS = 1 << 21  # of a pool: a sum counts tokens in 21 bits


def check(q, units, retrieve_now, done_count, budget, scale) -> None:
    _check.heads(q, units.centroid)
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")


def reference(
    q: Query, units: Units, retrieve_now: PerHead, done_count: Changed[PerHead], budget: int, scale: float
) -> Tensor:
    """Select units for a budget of tokens.

    Args:
        q: [batch, q_heads, 1, dim].
        units: the index.
        retrieve_now: [batch, heads]; heads with 0 get no rows.
        done_count: [batch, heads], zeros: scratch of the kernel, zeros again afterwards.
        budget: tokens per kv head.
        scale: of the logits.

    Returns:
        [batch, heads, budget], int32: the selected pool rows in ascending order, -1 after them.
    """
    first, centroid, unit_count = units
    x = q[:, :, 0].unflatten(1, (centroid.shape[1], -1))
    out = torch.full((*centroid.shape[:2], budget), -1, dtype=torch.int32, device=q.device)
    for b, h in (retrieve_now * unit_count != 0).nonzero().tolist():
        count = int(unit_count[b, h])
        best = scores(x[b, h], centroid[b, h, :count], scale).argsort(descending=True, stable=True)
        begin, end = first[b, h, best], first[b, h, best + 1]
        room = (budget - (end - begin).cumsum(0) + (end - begin)).clamp(min=0)
        rows = [torch.arange(int(i), min(int(j), int(i + r))) for i, j, r in zip(begin, end, room)]
        chosen = torch.cat(rows).sort().values
        out[b, h, : len(chosen)] = chosen
    return out


@triton.jit
def _larger(a, b):
    """The maximum of two, for a scan."""
    return tl.maximum(a, b)


@triton.jit
def _survivors(keys, chunk_stats, offset, used, per_chunk, N: tl.constexpr):
    """Rank, size and place in `keys` of the survivors number `offset` to `offset` + N, in order of the units.

    A survivor is a unit that its chunk kept. Every chunk counts for `per_chunk` survivors; missing ones have size 0.
    """
    i = offset + tl.arange(0, N)
    chunk, slot = i // per_chunk, i % per_chunk
    place = chunk * N + slot
    kept = tl.load(chunk_stats + chunk, mask=chunk < used, other=0)
    key = tl.load(keys + place, mask=chunk < used, other=0)
    live = slot < kept
    return tl.where(live, (key >> 32).to(tl.int32), -2147483648), tl.where(live, key.to(tl.int32), 0), place


@triton.jit
def _unit_bit(n_survivors):
    """The count of one unit in a sum: 1 in the upper 11 bits, or 0 where there are too many units to count."""
    return tl.where(n_survivors < 2048, 1 << 21, 0)


@triton.jit
def _weight(size, n_survivors):
    """What a unit adds to a sum: its tokens in the lower 21 bits, itself in the upper 11."""
    return tl.where(size > 0, size + _unit_bit(n_survivors), 0).to(tl.uint32)


@triton.jit
def _tokens(weights):
    """The tokens of a sum of weights."""
    return (weights & 0x1FFFFF).to(tl.int32)


@triton.jit
def _cut(
    rank, weight, keys, chunk_stats, used, per_chunk, n_survivors, low, high, above_low, budget, enough,
    N: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """Narrow the ranks [low, high): units at or above `low` fill the budget, units at or above `high` do not.

    Stops when the units in between have equal ranks, or there is one, or at most `enough` tokens lie at or above `low`.
    Returns (low, high, weight at or above low, weight at or above high). Of `n_survivors` survivors the first N are
    passed as rank and weight; MORE reads the others from memory in every round.
    """
    above_high = tl.zeros((), tl.uint32)
    while (high - low > 1) & (_tokens(above_low) > enough) & ((above_low - above_high) >> 21 != 1):
        sums = sums_above(rank, weight, low, high)
        if MORE:
            for offset in range(N, n_survivors, N):
                next_rank, size, _ = _survivors(keys, chunk_stats, offset, used, per_chunk, N)
                sums += sums_above(next_rank, _weight(size, n_survivors), low, high)
        full = _tokens(sums) >= budget
        above_low = tl.min(tl.where(full, sums, above_low), 0)
        above_high = tl.max(tl.where(full, 0, sums), 0)
        step = (high - low + 7) >> 3
        low += tl.sum(full.to(tl.int32), 0) * step
        high = tl.minimum(low + step, high)
    return low, high, above_low, above_high


@triton.jit
def _keep(rank, begin, size, keys, begins, chunk_stats, budget, N: tl.constexpr):
    """Store the units of a chunk that its own better units do not push out of the budget, in order.

    These are all units at or above a rank from which on the chunk alone fills the budget. The search may stop while the
    units have up to 25 % more tokens than the budget, which saves rounds.

    chunk_stats [5, chunks]: the number of kept units, their tokens, the lowest rank that can be in the result, and the
    lowest and the highest kept rank.
    """
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    rank = tl.where(size > 0, rank, -2147483648)
    weight = _weight(size, N)
    lowest, highest = tl.min(tl.where(size > 0, rank, 2147483647), 0), tl.max(rank, 0)
    low, _, kept_weight, _ = _cut(
        rank, weight, keys, chunk_stats, 1, 1, N, lowest.to(tl.int64), highest.to(tl.int64) + 1, tl.sum(weight, 0),
        budget, budget + budget // 4, N, False,
    )  # fmt: skip
    low = low.to(tl.int32)
    keep = (size > 0) & (rank >= low)
    place = chunk * N + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(keys + place, rank.to(tl.int64) << 32 | size.to(tl.int64), mask=keep)
    tl.store(begins + place, begin, mask=keep)
    tokens = _tokens(kept_weight)
    chunk_stats += chunk
    tl.store(chunk_stats, tl.sum(keep.to(tl.int32), 0))
    tl.store(chunk_stats + chunks, tokens)
    tl.store(chunk_stats + 2 * chunks, tl.where(tokens >= budget, low, -2147483648))
    tl.store(chunk_stats + 3 * chunks, low)
    tl.store(chunk_stats + 4 * chunks, highest)


@triton.jit
def _choose_rows(
    keys, begins, chunk_stats, skips, out, used, budget, N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Choose among the survivors of all chunks of a head.

    If one chunk alone fills the budget from some rank on, then the whole head fills it from this rank or a higher one.
    """
    c, chunks = tl.arange(0, CHUNKS), tl.num_programs(1)
    mask = c < used
    kept, tokens = tl.load(chunk_stats + c, mask=mask, other=0), tl.load(chunk_stats + chunks + c, mask=mask, other=0)
    floor = tl.load(chunk_stats + 2 * chunks + c, mask=mask, other=-2147483648)
    lowest = tl.load(chunk_stats + 3 * chunks + c, mask=mask, other=2147483647)
    highest = tl.load(chunk_stats + 4 * chunks + c, mask=mask, other=-2147483648)
    per_chunk = tl.maximum(tl.max(kept, 0), 1)
    low = tl.maximum(tl.max(floor, 0), tl.min(lowest, 0)).to(tl.int64)
    n_survivors = used * per_chunk
    total_weight = (tl.sum(kept, 0) * _unit_bit(n_survivors) + tl.sum(tokens, 0)).to(tl.uint32)
    rank, size, _ = _survivors(keys, chunk_stats, 0, used, per_chunk, N)
    low, high, _, above = _cut(
        rank, _weight(size, n_survivors), keys, chunk_stats, used, per_chunk, n_survivors, low,
        tl.max(highest, 0).to(tl.int64) + 1, total_weight, budget, budget, N, True,
    )  # fmt: skip
    room = budget - _tokens(above)
    _write(keys, begins, chunk_stats, skips, out, used, per_chunk, low.to(tl.int32), high.to(tl.int32), room, budget, N)


@triton.jit
def _filled(upto, room):
    """Rows of the result used so far: all tokens above the cut, and tokens at the cut up to `room`."""
    return ((upto & 0xFFFFFFFF) + tl.minimum(upto >> 32, room)).to(tl.int32)


@triton.jit
def _write(keys, begins, chunk_stats, skips, out, used, per_chunk, low, high, room, budget, N: tl.constexpr):
    """Write the pool rows of the chosen units.

    Entry i of the result is pool row i + skip(i), where skip(i) is the number of pool rows before it that were not
    chosen. `skips` holds this number at the first entry of every chosen unit. The number never falls, so a running
    maximum gives it for all entries.
    """
    before = tl.zeros((), tl.int64)  # low 32 bits: tokens above the cut; high 32 bits: at it
    for offset in range(0, used * per_chunk, N):
        rank, size, place = _survivors(keys, chunk_stats, offset, used, per_chunk, N)
        begin = tl.load(begins + place, mask=rank >= low, other=0)
        tokens = tl.where(rank >= high, size, 0).to(tl.int64)
        tokens += tl.where((rank >= low) & (rank < high), size, 0).to(tl.int64) << 32
        upto = before + tl.cumsum(tokens, 0)
        row, end = _filled(upto - tokens, room), _filled(upto, room)
        tl.store(skips + row, begin - row, mask=row < end)
        before += tl.sum(tokens, 0)
    tl.debug_barrier()
    filled, skipped, i = _filled(before, room), tl.zeros((), tl.int32), tl.arange(0, N)
    for offset in range(0, budget, N):
        skip = tl.load(skips + offset + i, mask=offset + i < budget, other=0)
        skip = tl.maximum(tl.associative_scan(skip, 0, _larger), skipped)
        skipped = tl.max(skip, 0)
        tl.store(out + offset + i, tl.where(offset + i < filled, offset + i + skip, -1), mask=offset + i < budget)


@triton.jit
def _fill(row, value, budget, part, parts, N: tl.constexpr):
    """Fill this program's part of a row of the result with `value`."""
    i = tl.arange(0, N)
    for offset in range(part * N, budget, parts * N):
        tl.store(row + offset + i, tl.full((N,), value, tl.int32), mask=offset + i < budget)


@triton.jit
def _choose(
    logits, tops, totals, first, unit_count, retrieve_now, done_count, out, keys, begins, chunk_stats, skips, capacity,
    budget, parts, G: tl.constexpr, GR: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Keep the units of this chunk that may be chosen; the last chunk of a head to finish chooses."""
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    count = tl.load(unit_count + bh)
    if (tl.load(retrieve_now + bh) != 0) & (count > 0):
        used = tl.cdiv(count, N)
        if chunk < used:
            keys, begins, chunk_stats = keys + bh * chunks * N, begins + bh * chunks * N, chunk_stats + bh * chunks * 5
            u = chunk * N + tl.arange(0, N)
            live, starts = u < count, first + bh * (capacity + 1) + u
            begin = tl.load(starts, mask=live, other=0)
            size = tl.load(starts + 1, mask=live, other=0) - begin
            sums = bh * parts * G
            rank = ranks_of(logits + bh * capacity * G, tops + sums, totals + sums, u, live, parts, G, GR, PARTS)
            _fill(skips + bh * budget, 0, budget, chunk, used, N)
            _keep(rank, begin, size, keys, begins, chunk_stats, budget, N)
            tl.debug_barrier()
            if tl.atomic_add(done_count + bh, 1) == used - 1:  # all chunks of this head are done
                _choose_rows(keys, begins, chunk_stats, skips + bh * budget, out + bh * budget, used, budget, N, CHUNKS)
                tl.store(done_count + bh, 0)
    else:
        _fill(out + bh * budget, -1, budget, chunk, chunks, N)


def launch(q, units, retrieve_now, done_count, budget, scale) -> Tensor:
    first, centroid, unit_count = units
    batch, heads, capacity, _ = centroid.shape
    rows, found = batch * heads, UnitLogits(q, centroid, unit_count, retrieve_now, scale)
    chunk_size = min(next_power_of_2(cdiv(capacity, CHUNKS)), 2 * CHUNK)
    chunk_size = max(16, min(max(chunk_size, CHUNK), next_power_of_2(capacity)))
    chunks = cdiv(capacity, chunk_size)
    new = lambda n, dtype=torch.int32: torch.empty(rows * n, dtype=dtype, device=q.device)  # noqa: E731
    keys, begins = new(chunks * chunk_size, torch.int64), new(chunks * chunk_size)
    chunk_stats, skips = new(chunks * 5), new(budget)
    out = new(budget).view(batch, heads, budget)
    _choose[(rows, chunks)](
        found.logits, found.tops, found.totals, first, unit_count, retrieve_now, done_count, out, keys, begins,
        chunk_stats, skips, capacity, budget, found.parts, N=chunk_size, CHUNKS=next_power_of_2(chunks),
        num_warps=max(1, chunk_size // 256), **found.shape(), **launch_early(q.device, rows * chunks),
    )  # fmt: skip
    return out


def fake(q, units, retrieve_now, done_count, budget: int, scale) -> Tensor:
    return q.new_empty((*units.centroid.shape[:2], budget), dtype=torch.int32)


pick_units = register("pick_units", reference, impls=(by_triton(launch),), fake=fake, check=check)
