"""The keys whose subspaces collide most with the query: a fixed share of them, found without sorting (ParisKV, eq. 15).

In every subspace the keys are ranked by the score of their centroid against the query. A key gets 6, 5, 4, 3, 2 or 1
points if the keys of strictly better centroids are fewer than 5, 15, 30, 50, 75 or 100 % of the first `rho` of all n
retrievable keys (rounded up); buckets are never split, so equal centroid scores earn the same. Its score is the sum
over the subspaces, or the largest such sum of the query heads where `rotated` has several.

The best ceil(beta * n) keys are returned in ascending order, ties to the lower index, -1 behind them: at least `least`
(or all, if they are fewer), and all n of them where n <= `dense`. `ratios` says beta and rho for a row of n keys, in
millionths: (below, beta, rho) three times, for n < below, then (beta, rho) for the rest.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops import _check, _cuda
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import cdiv, chain, chained, next_power_of_2, sm_count, tl, triton

SCHEMA = (
    "(Tensor rotated, Tensor ids, Tensor counts, Tensor retired, int sink, int[] ratios, int least, int dense, "
    "int capacity) -> Tensor"
)
PERCENT = (5, 15, 30, 50, 75, 100)
ONE = 1_000_000
MOST_SPACES = 254 // len(PERCENT)  # scores are one byte, and one value is kept for keys that do not count
CHUNK = 2048  # keys at a time: 32 KiB of ids
TILE = 4096  # scores compacted at a time
RESIDENT = 2  # programs per multiprocessor, each with a span of keys: what starts and ends one is paid once a span
PACKED = 4  # query heads whose points share a table entry, a byte each
# What csrc/collide.cu is for; other shapes are left to Triton.
NATIVE_SPACES = (8, 16, 32)
NATIVE_PACKS = 3  # tables of 32 KiB in the shared memory of a program
NATIVE_STEP = 512  # keys at a time


def check(rotated, ids, counts, retired, sink, ratios, least, dense, capacity) -> None:
    _check.dtype((torch.float32,), rotated=rotated)
    _check.dtype((torch.uint8,), ids=ids)
    _check.dtype((torch.int32,), counts=counts)
    _check.contiguous(rotated=rotated, ids=ids, counts=counts)
    _check.counters(ids.shape[0], retired=retired)
    spaces = ids.shape[3]
    m = rotated.shape[3] // spaces
    _check.shape((*ids.shape[:2], spaces, 1 << m), counts=counts)
    _check.shape((*ids.shape[:2], rotated.shape[2], spaces * m), rotated=rotated)
    if len(ratios) != 11 or min(ratios) < 0 or max(*ratios[1:9:3], *ratios[2:9:3], *ratios[9:]) > ONE:
        raise ValueError(f"ratios must be three of (below, beta, rho) and (beta, rho), in millionths, got {ratios}")
    if capacity < candidate_capacity(ids.shape[2], ratios, least, dense):
        raise ValueError(f"{capacity} candidates do not hold what {ids.shape[2]} rows can give")
    if spaces > MOST_SPACES:
        raise ValueError(f"{spaces} subspaces are too many for scores of one byte")


def pair(n: int, ratios: list[int]) -> tuple[int, int]:
    """(beta, rho) of a row of n keys."""
    for below, beta, rho in zip(ratios[:9:3], ratios[1:9:3], ratios[2:9:3]):
        if n < below:
            return beta, rho
    return ratios[9], ratios[10]


def candidates_of(n: int, ratios: list[int], least: int, dense: int) -> int:
    return n if n <= dense else min(n, max(cdiv(n * pair(n, ratios)[0], ONE), least))


def candidate_capacity(rows: int, ratios: list[int], least: int, dense: int) -> int:
    """The most candidates that any row of up to `rows` keys has: at the end of a range of lengths."""
    ends = [rows, dense, *(below - 1 for below in ratios[:9:3])]
    return max(1, *(candidates_of(min(n, rows), ratios, least, dense) for n in ends if n >= 0))


def proxies(rotated: Tensor, spaces: int, centroids: int) -> Tensor:
    """The score of every sign pattern in every subspace: rotated [..., spaces * m] -> [..., spaces, 2^m]."""
    x = rotated.unflatten(-1, (spaces, -1))
    bits = torch.arange(centroids, device=x.device)[:, None] >> torch.arange(x.shape[-1], device=x.device) & 1
    return x @ (2.0 * bits - 1).T


def points(proxy: Tensor, counts: Tensor, n: int, rho: int) -> Tensor:
    """What each centroid earns, given its score and the number of its keys (both [..., spaces, centroids])."""
    score, order = proxy.sort(-1, descending=True)
    before = counts.expand_as(order).gather(-1, order).cumsum(-1)
    before = torch.nn.functional.pad(before, (1, 0))[..., :-1]
    first = torch.searchsorted(-score, -score)  # of a run of equal scores
    before = torch.empty_like(before).scatter_(-1, order, before.gather(-1, first))
    limits = torch.tensor([cdiv(n * rho * p, 100 * ONE) for p in PERCENT], device=proxy.device)
    return (before[..., None] < limits).sum(-1)


def reference(rotated, ids, counts, retired, sink, ratios, least, dense, capacity) -> Tensor:
    batch, heads, _, spaces = ids.shape
    out = torch.full((batch, heads, capacity), -1, dtype=torch.int32)
    for b in range(batch):
        end = int(retired[b])
        n = max(end - sink, 0)
        if n == 0:
            continue
        tally = counts[b][:, None]
        earned = points(proxies(rotated[b], spaces, tally.shape[-1]), tally, n, pair(n, ratios)[1])
        names = ids[b, :, sink:end].transpose(1, 2).long()
        names = names[:, None].expand(-1, earned.shape[1], -1, -1)
        score = earned.gather(-1, names).sum(2).amax(1)
        best = score.argsort(dim=-1, descending=True, stable=True)[:, : candidates_of(n, ratios, least, dense)]
        out[b, :, : best.shape[1]] = sink + best.sort(-1).values
    return out


@triton.jit
def _by_length(n, below0, below1, below2, at0, at1, at2, at3):
    return tl.where(n < below0, at0, tl.where(n < below1, at1, tl.where(n < below2, at2, at3))).to(tl.int64)


@triton.jit
def _limit(n, rho, percent):
    return ((n.to(tl.int64) * rho * percent + 99999999) // 100000000).to(tl.int32)


@triton.jit
def _score(rotated, c, M: tl.constexpr):
    s = tl.zeros(c.shape, tl.float32)
    for j in tl.static_range(M):
        x = tl.load(rotated + j)
        s += tl.where(((c >> j) & 1) != 0, x, -x)
    return s


@triton.jit
def _earned(before, n, rho):
    """Points of centroids by the number of keys that strictly better ones have."""
    earned = (before < _limit(n, rho, 5)).to(tl.int32) + (before < _limit(n, rho, 15)).to(tl.int32)
    earned += (before < _limit(n, rho, 30)).to(tl.int32) + (before < _limit(n, rho, 50)).to(tl.int32)
    return earned + (before < _limit(n, rho, 75)).to(tl.int32) + (before < _limit(n, rho, 100)).to(tl.int32)


@triton.jit
def _points(
    rotated, counts, table, totals, retired, heads, sink, below0, below1, below2, rho0, rho1, rho2, rho3,
    F: tl.constexpr, W: tl.constexpr, B: tl.constexpr, M: tl.constexpr, BINS: tl.constexpr, PACK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One subspace of one query head: what each centroid earns, a byte of its table entry.

    Opposite patterns have opposite scores, so that comparing the absolute scores of the pairs says all: a quarter of
    the comparisons. And where the better ones of all pairs have keys enough, the others earn nothing.
    """
    chain(PDL)
    bh, space, f = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    size: tl.constexpr = 1 << M
    half: tl.constexpr = 1 << (M - 1)
    if (space == 0) & (f == 0):
        tl.store(totals + bh * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
    c = tl.arange(0, half)
    up, down = tl.zeros((half,), tl.int32), tl.zeros((half,), tl.int32)
    if f < F:  # beyond it is padding of the entry
        counts += (bh * B + space) * size
        s = _score(rotated + ((bh * F + f) * B + space) * M, c, M)
        c = tl.where(s < 0, size - 1 - c, c)
        s = tl.abs(s)
        better, worse = tl.load(counts + c), tl.load(counts + size - 1 - c)
        n = tl.maximum(tl.load(retired + bh // heads) - sink, 0)
        rho = _by_length(n, below0, below1, below2, rho0, rho1, rho2, rho3)
        up += _earned(tl.sum(tl.where(s[:, None] > s[None, :], better[:, None], 0), 0), n, rho)
        whole = tl.sum(better, 0)
        if whole < _limit(n, rho, 100):
            down += _earned(whole + tl.sum(tl.where(s[:, None] < s[None, :], worse[:, None], 0), 0), n, rho)
        down = tl.where(s == 0, up, down)
    table += ((bh * W + f // PACK) * B + space) * size * PACK + f % PACK
    tl.store(table + c * PACK, up.to(tl.uint8))
    tl.store(table + (size - 1 - c) * PACK, down.to(tl.uint8))


@triton.jit
def _span(end, CHUNK: tl.constexpr):
    """Keys per program: the rows in use, not the capacity, are dealt out, in whole chunks."""
    return tl.cdiv(tl.cdiv(end, tl.num_programs(1)), CHUNK) * CHUNK


@triton.jit
def _collide(
    ids, table, scores, reach, totals, retired, heads, rows, stride, sink, F: tl.constexpr, W: tl.constexpr,
    B: tl.constexpr, SIZE: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Score a span of keys; count how many of them reach each score."""
    chain(PDL)
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    end = tl.load(retired + bh // heads)
    span = _span(end, CHUNK)
    b, bins = tl.arange(0, B), tl.arange(0, BINS)
    ids += bh * rows * B  # 64-bit arithmetic on scalars only
    table += bh * (W * B * SIZE)
    entry = tl.arange(0, B * SIZE)
    points = tl.load(table + entry)
    count = tl.zeros((BINS,), tl.int32)
    for first in range(part * span, tl.minimum(part * span + span, end), CHUNK):
        row = first + tl.arange(0, CHUNK)
        live = (row >= sink) & (row < end)
        name = tl.load(ids + row[:, None] * B + b[None, :], mask=live[:, None], other=0)
        at = tl.reshape(name.to(tl.int32) + b[None, :] * SIZE, (CHUNK * B,))
        best = tl.zeros((CHUNK,), tl.int32)
        for w in tl.static_range(W):
            if W > 1:
                points = tl.load(table + w * B * SIZE + entry)
            earned = tl.gather(points, at, 0)  # from shared memory
            total = tl.sum(tl.reshape(earned, (CHUNK, B)).to(tl.int32), 1)  # of up to 4 heads, a byte each
            best = tl.maximum(best, total & 255)
            if F > 1:
                best = tl.maximum(best, (total >> 8) & 255)
            if F > 2:
                best = tl.maximum(best, tl.maximum((total >> 16) & 255, (total >> 24) & 255))
        tl.store(scores + bh * stride + row, best.to(tl.uint8), mask=live)
        count += tl.histogram(tl.where(live, best, BINS - 1), BINS)
    if part * span < end:
        count = tl.where(bins <= 6 * B, count, 0)
        count = tl.sum(count, 0) - tl.cumsum(count, 0) + count
        tl.store(reach + (bh * BINS + bins) * parts + part, count)
        tl.atomic_add(totals + bh * BINS + bins, count, mask=bins <= 6 * B)


@triton.jit
def _candidates(n, beta, least, dense):
    """As `candidates_of`."""
    share = ((n.to(tl.int64) * beta + 999999) // 1000000).to(tl.int32)
    return tl.where(n <= dense, n, tl.minimum(n, tl.maximum(share, least)))


@triton.jit
def _sums(a, b):
    """Of both, in the halves of a word: what counts is not work but how many steps wait for one another."""
    both = tl.sum((a.to(tl.int64) << 32) + b.to(tl.int64), 0)
    return (both >> 32).to(tl.int32), both.to(tl.int32)


@triton.jit
def _compact(
    scores, reach, totals, out, retired, heads, stride, sink, least, dense, capacity, below0, below1, below2, beta0,
    beta1, beta2, beta3, BINS: tl.constexpr, PP: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the candidates of a span to where those of the spans before it end."""
    chain(PDL)
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    end = tl.load(retired + bh // heads)
    bins, p = tl.arange(0, BINS), tl.arange(0, PP)
    total = tl.load(totals + bh * BINS + bins)  # of keys that reach a score: it falls, to 0 beyond the best
    fall = total - tl.load(totals + bh * BINS + bins + 1, mask=bins + 1 < BINS, other=0)
    span = _span(end, CHUNK)
    n = tl.maximum(end - sink, 0)
    beta = _by_length(n, below0, below1, below2, beta0, beta1, beta2, beta3)
    count = _candidates(n, beta, least, dense)
    out, scores = out + bh * capacity, scores + bh * stride
    if (part * span < end) & (count > 0):
        stop = tl.minimum(part * span + span, end)
        row = part * span + tl.arange(0, TILE)
        whole = tl.cdiv(stop, 16) * 16  # 16 bytes at a time; what is not live is not looked at
        ahead = tl.load(scores + row, mask=row < whole, other=0)  # while the threshold is found
        reached, beyond = _sums(total >= count, tl.where(total >= count, 0, fall))
        threshold, room = reached - 1, count - beyond  # for keys at the threshold, after those above it
        before = reach + (bh * BINS + threshold) * parts + p
        over = tl.load(before + parts, mask=p < part, other=0)
        ties, above = _sums(tl.load(before, mask=p < part, other=0) - over, over)
        for first in range(part * span, stop, TILE):
            row = first + tl.arange(0, TILE)
            live = (row >= sink) & (row < stop)
            s = ahead.to(tl.int32)
            ahead = tl.load(scores + row + TILE, mask=row + TILE < whole, other=0)
            more, tie = live & (s > threshold), live & (s == threshold)
            both = more.to(tl.int32) + (tie.to(tl.int32) << 16)  # a tile has fewer than 2^15 keys
            upto = tl.cumsum(both, 0)
            above_upto, ties_upto = above + (upto & 0xFFFF), ties + (upto >> 16)
            place = above_upto + tl.minimum(ties_upto, room) - 1
            # What decides about the store in one number, widened last: that is what threads exchange before it.
            place = tl.where(more | (tie & (ties_upto <= room)), place, -1).to(tl.int64)
            tl.store(out + place, row, mask=place >= 0)
            found = tl.sum(both, 0)
            above += found & 0xFFFF
            ties += found >> 16
    for first in range(count + part * TILE, capacity, parts * TILE):
        empty = first + tl.arange(0, TILE)
        tl.store(out + empty, tl.full((TILE,), -1, tl.int32), mask=empty < capacity)


def cuda(rotated, ids, counts, retired, sink, ratios, least, dense, capacity) -> Tensor:
    args = rotated, ids, counts, retired, sink, ratios, least, dense, capacity
    spaces, packs = ids.shape[3], cdiv(rotated.shape[2], PACKED)
    kernels = None
    if counts.shape[3] == 256 and spaces in NATIVE_SPACES and packs <= NATIVE_PACKS:
        kernels = _cuda.load("collide", ids.device, B=spaces, F=rotated.shape[2], BINS=_bins(spaces))
    return _by_cuda(kernels, *args) if kernels else _by_triton(*args)


def _bins(spaces: int) -> int:
    """One beyond the best score, and the last for keys that do not count."""
    return next_power_of_2(len(PERCENT) * spaces + 2)


class _Scratch(NamedTuple):
    """What the kernels leave to one another, for `parts` programs a head."""

    table: Tensor
    scores: Tensor
    reach: Tensor
    totals: Tensor
    out: Tensor


def _scratch(ids: Tensor, parts: int, entry: int, centroids: int, packs: int, capacity: int) -> _Scratch:
    lead, (rows, spaces) = ids.shape[:2], ids.shape[2:]
    new = lambda shape, dtype: torch.empty((*lead, *shape), dtype=dtype, device=ids.device)  # noqa: E731
    return _Scratch(
        new((packs, spaces, centroids * entry), torch.uint8), new((cdiv(rows, 16) * 16,), torch.uint8),
        new((_bins(spaces), parts), torch.int32), new((_bins(spaces),), torch.int32), new((capacity,), torch.int32),
    )  # fmt: skip


def _by_length_arguments(ratios: list[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Below which numbers of keys, and beta and rho there and beyond."""
    return tuple(ratios[:9:3]), (*ratios[1:9:3], ratios[9]), (*ratios[2:9:3], ratios[10])


def _by_cuda(kernels, rotated, ids, counts, retired, sink, ratios, least, dense, capacity) -> Tensor:
    """csrc/collide.cu"""
    batch, heads, rows, spaces = ids.shape
    fields = rotated.shape[2]
    packs, all_heads = cdiv(fields, PACKED), batch * heads
    parts = max(1, min(cdiv(rows, NATIVE_STEP), RESIDENT * sm_count(ids.device) // all_heads))
    s = _scratch(ids, parts, PACKED, 256, packs, capacity)
    below, beta, rho = _by_length_arguments(ratios)
    kernels.launch(
        "points", (all_heads, spaces, packs), 128 * min(fields, PACKED), rotated, counts, s.table, s.totals, retired,
        heads, sink, below + rho,
    )  # fmt: skip
    kernels.launch(
        "scores", (all_heads, parts, 1), 512, ids, s.table, s.scores, s.reach, s.totals, retired, heads, rows,
        s.scores.shape[2], sink, shared=packs * 256 * 32 * PACKED,
    )  # fmt: skip
    kernels.launch(
        "compact", (all_heads, parts, 1), 512, s.scores, s.reach, s.totals, s.out, retired, heads, s.scores.shape[2],
        sink, least, dense, capacity, below + beta,
    )  # fmt: skip
    return s.out


def _by_triton(rotated, ids, counts, retired, sink, ratios, least, dense, capacity) -> Tensor:
    batch, heads, rows, spaces = ids.shape
    fields, size = rotated.shape[2], counts.shape[3]
    packs, all_heads, bins = cdiv(fields, PACKED), batch * heads, _bins(spaces)
    chunk = min(CHUNK, max(16, next_power_of_2(rows)))
    parts = max(1, min(cdiv(rows, chunk), cdiv(RESIDENT * sm_count(ids.device), all_heads)))
    tile = min(TILE, next_power_of_2(cdiv(cdiv(rows, parts), chunk) * chunk))
    # The smaller the entries, the fewer bank conflicts of a lookup.
    pack = min(next_power_of_2(fields), PACKED)
    s = _scratch(ids, parts, pack, size, packs, capacity)
    entries = s.table.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[pack])
    below, beta, rho = _by_length_arguments(ratios)
    _points[(all_heads, spaces, packs * pack)](
        rotated, counts, s.table, s.totals, retired, heads, sink, *below, *rho, F=fields, W=packs, B=spaces,
        M=size.bit_length() - 1, BINS=bins, PACK=pack, num_warps=4 if size == 256 else 1,
        **chained(ids.device, all_heads * spaces * packs * pack),
    )  # fmt: skip
    _collide[(all_heads, parts)](
        ids, entries, s.scores, s.reach, s.totals, retired, heads, rows, s.scores.shape[2], sink, F=fields, W=packs,
        B=spaces, SIZE=size, BINS=bins, CHUNK=chunk, num_warps=max(4, chunk // 128),
        **chained(ids.device, all_heads * parts),
    )  # fmt: skip
    _compact[(all_heads, parts)](
        s.scores, s.reach, s.totals, s.out, retired, heads, s.scores.shape[2], sink, least, dense, capacity, *below,
        *beta, BINS=bins, PP=next_power_of_2(parts), CHUNK=chunk, TILE=tile, num_warps=max(4, tile // 512),
        **chained(ids.device, all_heads * parts),
    )  # fmt: skip
    return s.out


def fake(rotated: Tensor, ids: Tensor, counts, retired, sink, ratios, least, dense, capacity: int) -> Tensor:
    return ids.new_empty((*ids.shape[:2], capacity), dtype=torch.int32)


collide = register("collide", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
