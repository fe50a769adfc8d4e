"""Choose whole units by the attention their centroids get, best first, until a budget of tokens is full.

A unit's score is softmax(scale * q.centroid) over the units of the head, averaged over the query heads of the group
(compared by the logarithm of their sum, which cannot underflow). Units are taken by descending score, ties to the lower
one; of the one that does not fit any more the first rows are taken. Returns those rows in ascending order, int32
[batch, kv_heads, budget], -1 behind them; of heads whose `retrieve_now` is 0, nothing but -1.

Two launches: programs share the centroids of a head and leave logits; then every chunk of units drops those that its
own better ones keep out, and the last chunk of the head to finish chooses from what is left, a few units of each. No
sort: the score at which the budget is full is found by search, an eighth of the range a round, over the tokens of the
units that reach it; equal units in order. Sums of a search hold tokens in 21 bits and units in the 11 above.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import (
    cdiv,
    launch_early,
    next_power_of_2,
    sm_count,
    tl,
    triton,
    wait_for_previous,
)
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.store.views import PerHead, Query

UNITS, BYTES = 64, 1 << 14  # centroids of a step at most, and what they take
AHEAD, RESIDENT = 4, 2  # steps in flight, and programs on a multiprocessor: what keeps the memory busy
CHUNK, CHUNKS = 1024, 32  # units that are ranked together; twice as many where there would be more chunks than this
MOST_ROWS = 1 << 21  # of a pool: tokens in a sum


def check(q, units, retrieve_now, done_count, budget, scale) -> None:
    _check.heads(q, units.centroid)
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")


def scores(q: Tensor, centroid: Tensor, scale: float) -> Tensor:
    """Of one head: the logarithm of the summed softmax, q [group, head_dim] against centroids [units, head_dim].

    In fp64, then rounded: vectorised loops end in scalar ones that round otherwise, and equal units must stay equal.
    """
    z = (q.float() @ centroid.float().T * scale).double()
    return (z - z.logsumexp(-1, keepdim=True)).logsumexp(0).float()


def reference(
    q: Query, units: Units, retrieve_now: PerHead, done_count: Changed[PerHead], budget: int, scale: float
) -> Tensor:
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
    return tl.maximum(a, b)


@triton.jit
def _logits(
    q, centroid, unit_count, retrieve_now, logits, tops, totals, q_b, q_h, heads, most, scale, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, UNITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q.centroid of this program's share of the units, [units, G]; its largest, and the sum of exponentials."""
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    b, h = bh // heads, bh % heads
    count = tl.load(unit_count + bh)
    if (tl.load(retrieve_now + bh) != 0) & (count > 0):
        g, d = tl.arange(0, GP), tl.arange(0, DP)
        x = q + b * q_b + (h * G + g[None, :]) * q_h + d[:, None]
        x = tl.load(x, mask=(g < G)[None, :] & (d < D)[:, None], other=0.0)
        centroid, logits = centroid + bh * most * D, logits + bh * most * G
        # One running sum per place of a step: warps meet once, behind the loop. Where no unit was, the top is finite.
        top, total = tl.full((UNITS, GP), -1e38, tl.float32), tl.zeros((UNITS, GP), tl.float32)
        for tile in range(part, tl.cdiv(count, UNITS), parts):
            u = tile * UNITS + tl.arange(0, UNITS)
            live = (u < count)[:, None]
            c = tl.load(centroid + u.to(tl.int64)[:, None] * D + d[None, :], mask=live & (d < D)[None, :], other=0.0)
            z = tl.dot(c, x, input_precision="ieee") * scale
            tl.store(logits + u[:, None] * G + g[None, :], z, mask=live & (g < G)[None, :])
            z = tl.where(live, z, float("-inf"))
            peak = tl.maximum(top, z)
            total = total * tl.exp(top - peak) + tl.exp(z - peak)
            top = peak
        at, peak = (bh * parts + part) * G + g, tl.max(top, 0)
        tl.store(tops + at, peak, mask=g < G)
        tl.store(totals + at, tl.sum(total * tl.exp(top - peak[None, :]), 0), mask=g < G)


@triton.jit
def _ranks(logits, tops, totals, u, live, parts, G: tl.constexpr, GR: tl.constexpr, PARTS: tl.constexpr):
    """Of every unit an integer in the order of the scores."""
    g, p = tl.arange(0, GR), tl.arange(0, PARTS)
    m = (p < parts)[:, None] & (g < G)[None, :]
    top = tl.load(tops + p[:, None] * G + g[None, :], mask=m, other=float("-inf"))
    total = tl.load(totals + p[:, None] * G + g[None, :], mask=m, other=0.0)
    z = tl.load(logits + u[:, None] * G + g[None, :], mask=live[:, None] & (g < G)[None, :], other=0.0)
    peak = tl.where(g < G, tl.max(top, 0), 0.0)
    whole = peak + tl.log(tl.where(g < G, tl.sum(total * tl.exp(top - peak[None, :]), 0), 1.0))
    z = tl.where((g < G)[None, :], z - whole[None, :], float("-inf"))
    best = tl.max(z, 1)
    score = best + tl.log(tl.sum(tl.exp(z - best[:, None]), 1))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _survivors(keys, notes, at, used, slots, N: tl.constexpr):
    """Rank, size and place of N of the units that the chunks kept, in order; every chunk takes up `slots` of them."""
    i = at + tl.arange(0, N)
    chunk, slot = i // slots, i % slots
    place = chunk * N + slot
    kept = tl.load(notes + chunk, mask=chunk < used, other=0)
    key = tl.load(keys + place, mask=chunk < used, other=0)
    live = slot < kept
    return tl.where(live, (key >> 32).to(tl.int32), -2147483648), tl.where(live, key.to(tl.int32), 0), place


@triton.jit
def _one(lanes):
    """What a unit adds to a sum beside its tokens: nothing where there are too many to count in 11 bits."""
    return tl.where(lanes < 2048, 1 << 21, 0)


@triton.jit
def _weight(size, lanes):
    return tl.where(size > 0, size + _one(lanes), 0).to(tl.uint32)


@triton.jit
def _tokens(reach):
    return (reach & 0x1FFFFF).to(tl.int32)


@triton.jit
def _reach(rank, weight, low, high):
    """What the units weigh that reach each of the eight ranks which part [low, high); the last of them is `high`."""
    step = (high - low + 7) >> 3
    ways = tl.minimum(low + step * (1 + tl.arange(0, 8)), high).to(tl.int32)
    return tl.sum(tl.where(rank[None, :] >= ways[:, None], weight[None, :], 0), 1)


@triton.jit
def _cut(
    rank, weight, keys, notes, used, slots, lanes, low, high, at_low, budget, enough, N: tl.constexpr,
    MORE: tl.constexpr,
):  # fmt: skip
    """Narrow [low, high) to where the budget gets full: tokens from `low` on fill it, those from `high` on do not.

    Ends where all units in between are equal, or one, or no more than `enough` tokens reach `low`; so it does at once
    if there are no more. Returns also what the units weigh that reach either end. Of `lanes` survivors the first N are
    here as rank and weight, more of them are read in every round.
    """
    at_high = tl.zeros((), tl.uint32)
    while (high - low > 1) & (_tokens(at_low) > enough) & ((at_low - at_high) >> 21 != 1):
        reach = _reach(rank, weight, low, high)
        if MORE:
            for at in range(N, lanes, N):
                next_rank, size, _ = _survivors(keys, notes, at, used, slots, N)
                reach += _reach(next_rank, _weight(size, lanes), low, high)
        full = _tokens(reach) >= budget
        at_low = tl.min(tl.where(full, reach, at_low), 0)
        at_high = tl.max(tl.where(full, 0, reach), 0)
        step = (high - low + 7) >> 3
        low += tl.sum(full.to(tl.int32), 0) * step
        high = tl.minimum(low + step, high)
    return low, high, at_low, at_high


@triton.jit
def _keep(rank, begin, size, keys, begins, notes, budget, N: tl.constexpr):
    """Of one chunk, the units that the rest of it does not keep out, in order, and what `_choose_rows` asks of them.

    All that reach a rank from which on the budget is full; a quarter more saves rounds of the search.
    """
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    rank = tl.where(size > 0, rank, -2147483648)
    weight = _weight(size, N)
    least, most = tl.min(tl.where(size > 0, rank, 2147483647), 0), tl.max(rank, 0)
    low, _, reach, _ = _cut(
        rank, weight, keys, notes, 1, 1, N, least.to(tl.int64), most.to(tl.int64) + 1, tl.sum(weight, 0), budget,
        budget + budget // 4, N, False,
    )  # fmt: skip
    low = low.to(tl.int32)
    keep = (size > 0) & (rank >= low)
    place = chunk * N + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(keys + place, rank.to(tl.int64) << 32 | size.to(tl.int64), mask=keep)
    tl.store(begins + place, begin, mask=keep)
    tokens = _tokens(reach)
    notes += chunk
    tl.store(notes, tl.sum(keep.to(tl.int32), 0))
    tl.store(notes + chunks, tokens)
    tl.store(notes + 2 * chunks, tl.where(tokens >= budget, low, -2147483648))
    tl.store(notes + 3 * chunks, low)
    tl.store(notes + 4 * chunks, most)


@triton.jit
def _choose_rows(
    keys, begins, notes, skips, out, used, budget, N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """From what the chunks of a head kept. No chunk can fill the budget from a higher rank on than the head can."""
    c, chunks = tl.arange(0, CHUNKS), tl.num_programs(1)
    m = c < used
    kept, tokens = tl.load(notes + c, mask=m, other=0), tl.load(notes + chunks + c, mask=m, other=0)
    floor = tl.load(notes + 2 * chunks + c, mask=m, other=-2147483648)
    least = tl.load(notes + 3 * chunks + c, mask=m, other=2147483647)
    most = tl.load(notes + 4 * chunks + c, mask=m, other=-2147483648)
    slots = tl.maximum(tl.max(kept, 0), 1)
    low = tl.maximum(tl.max(floor, 0), tl.min(least, 0)).to(tl.int64)
    lanes = used * slots
    reach = (tl.sum(kept, 0) * _one(lanes) + tl.sum(tokens, 0)).to(tl.uint32)
    rank, size, _ = _survivors(keys, notes, 0, used, slots, N)
    low, high, _, above = _cut(
        rank, _weight(size, lanes), keys, notes, used, slots, lanes, low, tl.max(most, 0).to(tl.int64) + 1, reach,
        budget, budget, N, True,
    )  # fmt: skip
    room = budget - _tokens(above)
    _write(keys, begins, notes, skips, out, used, slots, low.to(tl.int32), high.to(tl.int32), room, budget, N)


@triton.jit
def _filled(upto, room):
    """Rows of the result that units take up: those above the cut all theirs, those at it what room there is."""
    return ((upto & 0xFFFFFFFF) + tl.minimum(upto >> 32, room)).to(tl.int32)


@triton.jit
def _write(keys, begins, notes, skips, out, used, slots, low, high, room, budget, N: tl.constexpr):
    """The rows of the chosen units. Row number i of the result is i and the rows skipped before it, which `skips` has
    at the first row of every chosen unit and which only grow."""
    before = tl.zeros((), tl.int64)  # tokens above the cut and, beyond 32 bits, at it
    for at in range(0, used * slots, N):
        rank, size, place = _survivors(keys, notes, at, used, slots, N)
        begin = tl.load(begins + place, mask=rank >= low, other=0)
        own = tl.where(rank >= high, size, 0).to(tl.int64)
        own += tl.where((rank >= low) & (rank < high), size, 0).to(tl.int64) << 32
        upto = before + tl.cumsum(own, 0)
        row, end = _filled(upto - own, room), _filled(upto, room)
        tl.store(skips + row, begin - row, mask=row < end)
        before += tl.sum(own, 0)
    tl.debug_barrier()
    filled, skipped, i = _filled(before, room), tl.zeros((), tl.int32), tl.arange(0, N)
    for at in range(0, budget, N):
        skip = tl.load(skips + at + i, mask=at + i < budget, other=0)
        skip = tl.maximum(tl.associative_scan(skip, 0, _larger), skipped)
        skipped = tl.max(skip, 0)
        tl.store(out + at + i, tl.where(at + i < filled, at + i + skip, -1), mask=at + i < budget)


@triton.jit
def _fill(row, value, budget, part, parts, N: tl.constexpr):
    """This program's share of a row of the result."""
    i = tl.arange(0, N)
    for at in range(part * N, budget, parts * N):
        tl.store(row + at + i, tl.full((N,), value, tl.int32), mask=at + i < budget)


@triton.jit
def _choose(
    logits, tops, totals, first, unit_count, retrieve_now, done_count, out, keys, begins, notes, skips, most, budget,
    parts, G: tl.constexpr, GR: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    count = tl.load(unit_count + bh)
    if (tl.load(retrieve_now + bh) != 0) & (count > 0):
        used = tl.cdiv(count, N)
        if chunk < used:
            keys, begins, notes = keys + bh * chunks * N, begins + bh * chunks * N, notes + bh * chunks * 5
            u = chunk * N + tl.arange(0, N)
            live, starts = u < count, first + bh * (most + 1) + u
            begin = tl.load(starts, mask=live, other=0)
            size = tl.load(starts + 1, mask=live, other=0) - begin
            sums = bh * parts * G
            rank = _ranks(logits + bh * most * G, tops + sums, totals + sums, u, live, parts, G, GR, PARTS)
            _fill(skips + bh * budget, 0, budget, chunk, used, N)
            _keep(rank, begin, size, keys, begins, notes, budget, N)
            tl.debug_barrier()
            if tl.atomic_add(done_count + bh, 1) == used - 1:  # every chunk of this head has left its survivors
                _choose_rows(keys, begins, notes, skips + bh * budget, out + bh * budget, used, budget, N, CHUNKS)
                tl.store(done_count + bh, 0)
    else:
        _fill(out + bh * budget, -1, budget, chunk, chunks, N)


def launch(q, units, retrieve_now, done_count, budget, scale) -> Tensor:
    first, centroid, unit_count = units
    batch, heads, most, d = centroid.shape
    rows, group, wide = batch * heads, q.shape[1] // heads, next_power_of_2(d)
    step = max(16, min(UNITS, BYTES // (wide * q.element_size())))
    parts = max(1, min(cdiv(most, step), RESIDENT * sm_count(q.device) // rows))  # one wave
    lanes = min(next_power_of_2(cdiv(most, CHUNKS)), 2 * CHUNK)
    lanes = max(16, min(max(lanes, CHUNK), next_power_of_2(most)))
    chunks = cdiv(most, lanes)
    new = lambda n, dtype=torch.int32: torch.empty(rows * n, dtype=dtype, device=q.device)  # noqa: E731
    logits, sums = new(most * group, torch.float32), new(2 * parts * group, torch.float32).view(2, -1)
    _logits[(rows, parts)](
        q, centroid, unit_count, retrieve_now, logits, *sums, q.stride(0), q.stride(1), heads, most, scale, G=group,
        GP=max(16, next_power_of_2(group)), D=d, DP=wide, UNITS=step, num_warps=4, num_stages=AHEAD,
        **launch_early(q.device, rows * parts),
    )  # fmt: skip
    keys, begins, notes, skips = new(chunks * lanes, torch.int64), new(chunks * lanes), new(chunks * 5), new(budget)
    out = new(budget).view(batch, heads, budget)
    _choose[(rows, chunks)](
        logits, *sums, first, unit_count, retrieve_now, done_count, out, keys, begins, notes, skips, most, budget,
        parts, G=group, GR=next_power_of_2(group), PARTS=next_power_of_2(parts), N=lanes,
        CHUNKS=next_power_of_2(chunks), num_warps=max(1, lanes // 256), **launch_early(q.device, rows * chunks),
    )  # fmt: skip
    return out


def fake(q, units, retrieve_now, done_count, budget: int, scale) -> Tensor:
    return q.new_empty((*units.centroid.shape[:2], budget), dtype=torch.int32)


pick_units = register("pick_units", reference, impls=(by_triton(launch),), fake=fake, check=check)
