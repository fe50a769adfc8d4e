"""The keys whose subspaces collide most with the query: a fixed share of them, found without sorting (ParisKV, eq. 15).

The score of a key is the sum of the votes of its centroids (ops/pariskv/centroid_votes.py), or the largest such sum of
the query heads where these choose apart.

The best ceil(beta * n) keys are returned in ascending order, ties to the lower index, -1 behind them: at least `least`
(or all, if they are fewer), and all n of them where n <= `dense`. `ratios` says beta and rho for a row of n keys, in
millionths: (below, beta, rho) three times, for n < below, then (beta, rho) for the rest.
"""
import functools
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops._machinery.triton import (
    cdiv,
    launch_early,
    next_power_of_2,
    sm_count,
    tl,
    triton,
    wait_for_previous,
)
from torchsparsekv.ops.pariskv import centroid_votes as _votes
from torchsparsekv.ops.pariskv.centroid_votes import ONE, by_length, by_length_of, pair
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.store.views import Lengths

Votes = Annotated[Tensor, Of("batch heads packs centroids spaces 4", torch.uint8)]
MOST_SPACES = 254 // len(_votes.PERCENT)  # scores are one byte, and one value is kept for keys that do not count
CHUNK = 2048  # keys at a time: 32 KiB of ids
TILE = 4096  # scores compacted at a time
RESIDENT = 2  # programs per multiprocessor, each with a span of keys: what starts and ends one is paid once a span
# What csrc/rank_by_votes.cu is for; other shapes are left to Triton.
NATIVE_PACKS = 3  # tables of 32 KiB in the shared memory of a program
NATIVE_STEP = 1024  # threads of a program, which share a table, and keys at a time
NATIVE_FIXED = 4096  # as many keys as could be scored while a program starts and ends
# Bytes of shared memory that leave a multiprocessor no room for a second program, with the share of its memory that
# ops/_machinery/cuda.py asks for: of a grid of one round, launched early, programs crowd where the kernel before ends first.
ALONE = 60_000


def check(votes, codes, lengths, ratios, least, dense, capacity) -> None:
    rows, spaces = codes.ids.shape[2:]
    _votes.check_ratios(ratios)
    if capacity < candidate_capacity(rows, ratios, least, dense):
        raise ValueError(f"{capacity} candidates do not hold what {rows} rows can give")
    if spaces > MOST_SPACES:
        raise ValueError(f"{spaces} subspaces are too many for scores of one byte")


def candidates_of(n: int, ratios: list[int], least: int, dense: int) -> int:
    return n if n <= dense else min(n, max(cdiv(n * pair(n, ratios)[0], ONE), least))


def candidate_capacity(rows: int, ratios: list[int], least: int, dense: int) -> int:
    """The most candidates that any row of up to `rows` keys has: at the end of a range of lengths."""
    ends = [rows, dense, *(below - 1 for below in ratios[:9:3])]
    return max(1, *(candidates_of(min(n, rows), ratios, least, dense) for n in ends if n >= 0))


def reference(
    votes: Votes, codes: Codes, lengths: Lengths, ratios: list[int], least: int, dense: int, capacity: int
) -> Tensor:
    batch, heads = codes.ids.shape[:2]
    out = torch.full((batch, heads, capacity), -1, dtype=torch.int32)
    for b in range(batch):
        sink, end = lengths.sink, int(lengths.ring_begin[b])
        n = max(end - sink, 0)
        if n == 0:
            continue
        table = votes[b].permute(0, 1, 4, 3, 2).flatten(1, 2).long()  # [heads, fields, spaces, centroids]
        names = codes.ids[b, :, sink:end].transpose(1, 2).long()
        names = names[:, None].expand(-1, table.shape[1], -1, -1)
        score = table.gather(-1, names).sum(2).amax(1)
        best = score.argsort(dim=-1, descending=True, stable=True)[:, : candidates_of(n, ratios, least, dense)]
        out[b, :, : best.shape[1]] = sink + best.sort(-1).values
    return out


@triton.jit
def _span(end, CHUNK: tl.constexpr):
    """Keys per program: the rows in use, not the capacity, are dealt out, in whole chunks."""
    return tl.cdiv(tl.cdiv(end, tl.num_programs(1)), CHUNK) * CHUNK


@triton.jit
def _by_space(table, B: tl.constexpr, SIZE: tl.constexpr):
    """The votes of the centroids in subspace 0, then in 1 and so on. Threads look up one subspace at a time: in the
    order of the table, by centroid, all that they ask for would be in two banks of shared memory (16 subspaces)."""
    entry = tl.arange(0, SIZE)[:, None] * B + tl.arange(0, B)[None, :]
    return tl.reshape(tl.trans(tl.load(table + entry)), (B * SIZE,))


@triton.jit
def _collide(
    ids, table, scores, reach, ring_begin, heads, rows, stride, sink, W: tl.constexpr, B: tl.constexpr,
    SIZE: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Score a span of keys; count how many of them reach each score."""
    wait_for_previous(PDL)
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    end = tl.load(ring_begin + bh // heads)
    span = _span(end, CHUNK)
    b, bins = tl.arange(0, B), tl.arange(0, BINS)
    ids += bh * rows * B  # 64-bit arithmetic on scalars only
    table += bh * (W * B * SIZE)
    votes = _by_space(table, B, SIZE)
    count = tl.zeros((BINS,), tl.int32)
    for first in range(part * span, tl.minimum(part * span + span, end), CHUNK):
        row = first + tl.arange(0, CHUNK)
        live = (row >= sink) & (row < end)
        name = tl.load(ids + row[:, None] * B + b[None, :], mask=live[:, None], other=0)
        at = tl.reshape(name.to(tl.int32) + b[None, :] * SIZE, (CHUNK * B,))
        best = tl.zeros((CHUNK,), tl.int32)
        for w in tl.static_range(W):
            if W > 1:
                votes = _by_space(table + w * B * SIZE, B, SIZE)
            got = tl.gather(votes, at, 0)  # from shared memory
            total = tl.sum(tl.reshape(got, (CHUNK, B)).to(tl.int32), 1)  # of up to 4 heads, a byte each
            best = tl.maximum(best, tl.maximum(total & 255, (total >> 8) & 255))
            best = tl.maximum(best, tl.maximum((total >> 16) & 255, (total >> 24) & 255))
        tl.store(scores + bh * stride + row, best.to(tl.uint8), mask=live)
        count += tl.histogram(tl.where(live, best, BINS - 1), BINS)
    if part * span < end:
        count = tl.where(bins <= 6 * B, count, 0)
        count = tl.sum(count, 0) - tl.cumsum(count, 0) + count
        tl.store(reach + (bh * BINS + bins) * parts + part, count)  # in a row what is added up


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
def _meeting(reach, part, parts, count, BINS: tl.constexpr, PARTS: tl.constexpr):
    """The score at which `count` keys are reached, how many at it fit in, and those above and at it before a part."""
    bins = tl.arange(0, BINS)
    total, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for p in range(0, parts, PARTS):
        of = (p + tl.arange(0, PARTS))[None, :]
        keys = tl.load(reach + bins[:, None] * tl.num_programs(1) + of, mask=of < parts, other=0)
        total += tl.sum(keys, 1)
        before += tl.sum(tl.where(of < part, keys, 0), 1)
    reached = tl.sum((total >= count).to(tl.int32), 0)  # totals fall, to 0 beyond the best score
    beyond, above = _sums(tl.where(bins == reached, total, 0), tl.where(bins == reached, before, 0))
    return reached - 1, count - beyond, above, tl.sum(tl.where(bins == reached - 1, before, 0), 0) - above


@triton.jit
def _compact(
    scores, reach, out, ring_begin, heads, stride, sink, least, dense, capacity, below0, below1, below2, beta0, beta1,
    beta2, beta3, BINS: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the candidates of a span to where those of the spans before it end."""
    wait_for_previous(PDL)
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    end = tl.load(ring_begin + bh // heads)
    span = _span(end, CHUNK)
    n = tl.maximum(end - sink, 0)
    beta = by_length_of(n, below0, below1, below2, beta0, beta1, beta2, beta3)
    count = _candidates(n, beta, least, dense)
    out, scores = out + bh * capacity, scores + bh * stride
    if (part * span < end) & (count > 0):
        stop = tl.minimum(part * span + span, end)
        row = part * span + tl.arange(0, TILE)
        whole = tl.cdiv(stop, 16) * 16  # 16 bytes at a time; what is not live is not looked at
        ahead = tl.load(scores + row, mask=row < whole, other=0)  # while the threshold is found
        threshold, room, above, ties = _meeting(reach + bh * BINS * parts, part, tl.cdiv(end, span), count, BINS, PARTS)
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


def _bins(spaces: int) -> int:
    """One beyond the best score, and the last for keys that do not count."""
    return next_power_of_2(len(_votes.PERCENT) * spaces + 2)


def _empty(ids: Tensor, parts: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """For the scores of the keys, for how many of each part's reach a score, and for the candidates."""
    new = lambda *shape, dtype: ids.new_empty((*ids.shape[:2], *shape), dtype=dtype)  # noqa: E731
    rows, bins = cdiv(ids.shape[2], 16) * 16, _bins(ids.shape[3])
    return new(rows, dtype=torch.uint8), new(parts, bins, dtype=torch.int32), new(capacity, dtype=torch.int32)


@functools.cache
def native_parts(all_heads: int, rows: int, multiprocessors: int) -> int:
    """Programs per head, a multiprocessor each, in rounds if need be: the number that should be done first."""
    rounds = lambda parts: cdiv(all_heads * parts, multiprocessors)  # noqa: E731
    most = max(1, min(cdiv(rows, NATIVE_STEP), multiprocessors))
    return min(range(1, most + 1), key=lambda parts: rounds(parts) * (cdiv(rows, parts) + NATIVE_FIXED))


def _fits(votes, codes, lengths, ratios, least, dense, capacity) -> _cuda.Module | str:
    packs, size, spaces = votes.shape[2:5]
    if size != 256 or spaces not in _votes.NATIVE_SPACES or packs > NATIVE_PACKS:
        return f"{spaces} subspaces of {size} centroids, {packs} entries of query heads"
    if not _cuda.aligned(votes, codes.ids):
        return "tensors are not aligned to 16 bytes"
    shape = dict(B=spaces, PACKS=packs, BINS=_bins(spaces), THREADS=NATIVE_STEP)
    return _cuda.load("rank_by_votes", votes.device, **shape)


def _launch_cuda(kernels, votes, codes, lengths, ratios, least, dense, capacity) -> Tensor:
    """csrc/rank_by_votes.cu"""
    ids, times = codes.ids, lengths.ring_begin
    batch, heads, rows, _ = ids.shape
    all_heads, packs = batch * heads, votes.shape[2]
    multiprocessors = sm_count(ids.device)
    parts = native_parts(all_heads, rows, multiprocessors)
    scores, reach, out = _empty(ids, parts, capacity)
    below, beta, _ = by_length(ratios)
    kernels.launch(
        "scores", (all_heads, parts, 1), NATIVE_STEP, ids, votes, scores, reach, times, heads, rows, scores.shape[2],
        lengths.sink, shared=packs * 256 * 32 * _votes.PACKED,
    )  # fmt: skip
    kernels.launch(
        "compact", (all_heads, parts, 1), NATIVE_STEP, scores, reach, out, times, heads, scores.shape[2], lengths.sink,
        least, dense, capacity, below + beta, shared=ALONE if all_heads * parts <= multiprocessors else 0,
    )  # fmt: skip
    return out


def _launch_triton(votes, codes, lengths, ratios, least, dense, capacity) -> Tensor:
    ids, times, sink = codes.ids, lengths.ring_begin, lengths.sink
    batch, heads, rows, spaces = ids.shape
    all_heads, (packs, size) = batch * heads, votes.shape[2:4]
    chunk = min(CHUNK, max(16, next_power_of_2(rows)))
    parts = max(1, min(cdiv(rows, chunk), cdiv(RESIDENT * sm_count(ids.device), all_heads)))
    tile = min(TILE, next_power_of_2(cdiv(cdiv(rows, parts), chunk) * chunk))
    scores, reach, out = _empty(ids, parts, capacity)
    below, beta, _ = by_length(ratios)
    _collide[(all_heads, parts)](
        ids, votes.view(torch.int32), scores, reach, times, heads, rows, scores.shape[2], sink, W=packs, B=spaces,
        SIZE=size, BINS=_bins(spaces), CHUNK=chunk, num_warps=max(4, chunk // 128),
        **launch_early(ids.device, all_heads * parts),
    )  # fmt: skip
    _compact[(all_heads, parts)](
        scores, reach, out, times, heads, scores.shape[2], sink, least, dense, capacity, *below, *beta,
        BINS=_bins(spaces), PARTS=32, CHUNK=chunk, TILE=tile, num_warps=max(4, tile // 512),
        **launch_early(ids.device, all_heads * parts),
    )  # fmt: skip
    return out


def fake(votes, codes, lengths, ratios, least, dense, capacity: int) -> Tensor:
    return codes.ids.new_empty((*codes.ids.shape[:2], capacity), dtype=torch.int32)


rank_by_votes = register(
    "rank_by_votes", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake, check=check
)
