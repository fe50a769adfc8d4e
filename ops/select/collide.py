"""The keys whose subspaces collide most with the query: a fixed share of them, found without sorting (ParisKV, eq. 15).

In every subspace the keys are ranked by the score of their centroid against the query. A key gets 6, 5, 4, 3, 2 or 1
points if the keys of strictly better centroids are fewer than 5, 15, 30, 50, 75 or 100 % of the first `rho` of all n
retrievable keys (rounded up); buckets are never split, so equal centroid scores earn the same. Its score is the sum
over the subspaces, or the largest such sum of the query heads where `rotated` has several.

The best ceil(beta * n) keys are returned in ascending order, ties to the lower index, -1 behind them: at least `least`
(or all, if they are fewer), and all n of them where n <= `dense`. `ratios` says beta and rho for a row of n keys, in
millionths: (below, beta, rho) three times, for n < below, then (beta, rho) for the rest.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import cdiv, next_power_of_2, tl, triton

SCHEMA = (
    "(Tensor rotated, Tensor ids, Tensor counts, Tensor retired, int sink, int[] ratios, int least, int dense, "
    "int capacity) -> Tensor"
)
PERCENT = (5, 15, 30, 50, 75, 100)
ONE = 1_000_000
MOST_SPACES = 254 // len(PERCENT)  # scores are one byte, and one value is kept for keys that do not count
CHUNK = 1024  # keys per program: 16 KiB of ids; 1024 programs at 128K keys and 8 heads
PACKED = 8  # query heads whose points (4 bits) share a table entry


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
def _points(
    rotated, counts, table, totals, retired, heads, sink, below0, below1, below2, rho0, rho1, rho2, rho3,
    F: tl.constexpr, W: tl.constexpr, B: tl.constexpr, M: tl.constexpr, BINS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One subspace of one head: what each centroid earns, a nibble per query head."""
    bh, space, w = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    size: tl.constexpr = 1 << M
    if (space == 0) & (w == 0):
        tl.store(totals + bh * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
    n = tl.maximum(tl.load(retired + bh // heads) - sink, 0)
    rho = _by_length(n, below0, below1, below2, rho0, rho1, rho2, rho3)
    c = tl.arange(0, size)
    counts += (bh * B + space) * size
    packed = tl.zeros((size,), tl.int32)
    for i in range(tl.minimum(F - w * 8, 8)):
        x = rotated + ((bh * F + w * 8 + i) * B + space) * M
        s = _score(x, c, M)
        before = tl.zeros((size,), tl.int32)
        for part in range(0, size, STEP):
            o = part + tl.arange(0, STEP)
            better = _score(x, o, M)[None, :] > s[:, None]
            before += tl.sum(tl.where(better, tl.load(counts + o)[None, :], 0), 1)
        earned = (before < _limit(n, rho, 5)).to(tl.int32) + (before < _limit(n, rho, 15)).to(tl.int32)
        earned += (before < _limit(n, rho, 30)).to(tl.int32) + (before < _limit(n, rho, 50)).to(tl.int32)
        earned += (before < _limit(n, rho, 75)).to(tl.int32) + (before < _limit(n, rho, 100)).to(tl.int32)
        packed = packed | (earned << (4 * i))
    tl.store(table + ((bh * W + w) * B + space) * size + c, packed.to(table.dtype.element_ty))


@triton.jit
def _collide(
    ids, table, scores, reach, totals, retired, heads, rows, sink, chunks, F: tl.constexpr, W: tl.constexpr,
    B: tl.constexpr, SIZE: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Score the keys of a chunk; count how many of them reach each score."""
    bh, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(retired + bh // heads)
    if part * CHUNK < end:
        row = part * CHUNK + tl.arange(0, CHUNK)
        live = (row >= sink) & (row < end)
        b = tl.arange(0, B)[None, :]
        ids += bh * rows * B  # 64-bit arithmetic on scalars only: offsets of 16K lookups live in registers
        table += bh * (W * B * SIZE)
        name = tl.load(ids + row[:, None] * B + b, mask=live[:, None], other=0).to(tl.int32)
        best = tl.zeros((CHUNK,), tl.int32)
        for w in tl.static_range(W):
            earned = tl.load(table + (w * B + b) * SIZE + name).to(tl.int32)
            even = tl.sum(earned & 0x0F0F0F0F, 1)  # the sums of up to 4 heads side by side, a byte each
            best = tl.maximum(best, even & 255)
            if F > 1:
                odd = tl.sum((earned >> 4) & 0x0F0F0F0F, 1)
                best = tl.maximum(best, odd & 255)
                if F > 2:
                    best = tl.maximum(best, tl.maximum((even >> 8) & 255, (odd >> 8) & 255))
                if F > 4:
                    best = tl.maximum(best, tl.maximum((even >> 16) & 255, (odd >> 16) & 255))
                    best = tl.maximum(best, tl.maximum((even >> 24) & 255, (odd >> 24) & 255))
        tl.store(scores + bh * rows + row, best.to(tl.uint8), mask=live)
        bins = tl.arange(0, BINS)
        count = tl.histogram(tl.where(live, best, BINS - 1), BINS)
        count = tl.where(bins <= 6 * B, count, 0)
        count = tl.sum(count, 0) - tl.cumsum(count, 0) + count
        tl.store(reach + (bh * BINS + bins) * chunks + part, count)
        tl.atomic_add(totals + bh * BINS + bins, count, mask=bins <= 6 * B)


@triton.jit
def _compact(
    scores, reach, totals, out, retired, heads, rows, sink, chunks, least, dense, capacity, tail, below0, below1,
    below2, beta0, beta1, beta2, beta3, B: tl.constexpr, BINS: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Write the candidates of a chunk to where those of the chunks before it end."""
    bh, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(retired + bh // heads)
    n = tl.maximum(end - sink, 0)
    beta = _by_length(n, below0, below1, below2, beta0, beta1, beta2, beta3)
    share = ((n.to(tl.int64) * beta + 999999) // 1000000).to(tl.int32)
    count = tl.where(n <= dense, n, tl.minimum(n, tl.maximum(share, least)))
    out += bh * capacity
    if (part * CHUNK < end) & (count > 0):
        bins = tl.arange(0, BINS)
        total = tl.load(totals + bh * BINS + bins)
        threshold = tl.sum(((bins <= 6 * B) & (total >= count)).to(tl.int32), 0) - 1
        room = count - tl.sum(tl.where(bins == threshold + 1, total, 0), 0)  # for keys at the threshold
        p = tl.arange(0, CP)
        before = reach + (bh * BINS + threshold) * chunks + p
        above_before = tl.sum(tl.load(before + chunks, mask=p < part, other=0), 0)
        ties_before = tl.sum(tl.load(before, mask=p < part, other=0), 0) - above_before
        row = part * CHUNK + tl.arange(0, CHUNK)
        live = (row >= sink) & (row < end)
        s = tl.load(scores + bh * rows + row, mask=live, other=0).to(tl.int32)
        tie = live & (s == threshold)
        take = live & ((s > threshold) | (tie & (ties_before + tl.cumsum(tie.to(tl.int32), 0) <= room)))
        place = above_before + tl.minimum(ties_before, room) + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(out + place, row, mask=take)
    for at in range(part * tail, part * tail + tail, TAIL):
        empty = at + tl.arange(0, TAIL)
        m = (empty >= count) & (empty < capacity) & (empty < part * tail + tail)
        tl.store(out + empty, tl.full((TAIL,), -1, tl.int32), mask=m)


def cuda(rotated, ids, counts, retired, sink, ratios, least, dense, capacity) -> Tensor:
    batch, heads, rows, spaces = ids.shape
    fields, size = rotated.shape[2], counts.shape[3]
    m = size.bit_length() - 1
    packs = cdiv(fields, PACKED)
    chunk = min(CHUNK, max(16, next_power_of_2(rows)))
    chunks = cdiv(rows, chunk)
    bins = next_power_of_2(6 * spaces + 2)  # one beyond the best score, and the last for keys that do not count
    new = lambda shape, dtype: torch.empty(shape, dtype=dtype, device=ids.device)  # noqa: E731
    # The smaller the entries, the fewer cache lines a lookup touches.
    entry = torch.uint8 if fields <= 2 else torch.int16 if fields <= 4 else torch.int32
    table = new((batch * heads, packs, spaces, size), entry)
    totals, reach = new((batch * heads, bins), torch.int32), new((batch * heads, bins, chunks), torch.int32)
    scores, out = new((batch, heads, rows), torch.uint8), new((batch, heads, capacity), torch.int32)
    below, beta, rho = ratios[:9:3], (*ratios[1:9:3], ratios[9]), (*ratios[2:9:3], ratios[10])
    _points[(batch * heads, spaces, packs)](
        rotated, counts, table, totals, retired, heads, sink, *below, *rho, F=fields, W=packs, B=spaces, M=m, BINS=bins,
        STEP=min(32, size), num_warps=8 if size == 256 else 1,
    )  # fmt: skip
    _collide[(batch * heads, chunks)](
        ids, table, scores, reach, totals, retired, heads, rows, sink, chunks, F=fields, W=packs, B=spaces, SIZE=size,
        BINS=bins, CHUNK=chunk, num_warps=8 if chunk == CHUNK else 4,
    )  # fmt: skip
    tail = cdiv(capacity, chunks)
    _compact[(batch * heads, chunks)](
        scores, reach, totals, out, retired, heads, rows, sink, chunks, least, dense, capacity, tail, *below, *beta,
        B=spaces, BINS=bins, CP=next_power_of_2(chunks), CHUNK=chunk, TAIL=min(1024, next_power_of_2(tail)),
        num_warps=8 if chunk == CHUNK else 4,
    )  # fmt: skip
    return out


def fake(rotated: Tensor, ids: Tensor, counts, retired, sink, ratios, least, dense, capacity: int) -> Tensor:
    return ids.new_empty((*ids.shape[:2], capacity), dtype=torch.int32)


collide = register("collide", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
