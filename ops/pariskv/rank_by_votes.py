"""Rank keys by the votes of their centroids, and return the best of them as candidates, without sorting.

    score[key] = max over query heads of  sum over subspaces s of  votes[head, s, id_s of the key]
    count = n if n <= dense, else min(n, max(ceil(beta * n), least))
    candidates = the `count` keys with the largest scores, ties to the lower position

n is the number of retrievable keys of the row. `ratios` is three times (below, beta, rho), for rows of n < below keys,
then (beta, rho) for longer rows. beta and rho are in millionths.

Launches, two per call, each (row * kv head, parts): the keys in use are dealt out to the parts as equal spans.
    _score     scores of a span, one byte each, and how many keys of the span have at least each score
    _compact   the score at which `count` is reached; candidates of a span go after those of the spans before it
csrc/rank_by_votes.cu has both kernels for subspaces of 8 dimensions; other shapes run on Triton. Rows without
retrievable keys get -1 only.

ParisKV, stage I of retrieval, equation 15.
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
from torchsparsekv.ops.pariskv.centroid_votes import MILLION, beta_and_rho, share_by_length, split_ratios
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.store.tables import check_table, places_of, pool_row_of, pool_rows, positions
from torchsparsekv.ops.store.views import OWN_POOLS, BlockTable, Lengths

Votes = Annotated[Tensor, Of("batch heads packs centroids spaces 4", torch.uint8)]
MOST_SPACES = 254 // len(_votes.PERCENT)  # a score is one byte, and a subspace gives up to 6 votes
CHUNK = 2048  # keys scored at a time: 32 KiB of ids
TILE = 4096  # scores compacted at a time
RESIDENT = 2  # programs per multiprocessor; each has one span of keys, so its start and end are paid once
# What csrc/rank_by_votes.cu supports; other shapes run on Triton.
NATIVE_PACKS = 3  # tables of votes, 32 KiB each, in the shared memory of a program
# Threads of a program, and keys that it scores at a time: 1024, or 512 for more heads than multiprocessors. Then two
# programs share a multiprocessor, and one starts or ends while the other scores: 456 heads of 32K take 87 us, not 99.
# Two programs with more tables do not fit shared memory, and with more subspaces they need too many registers.
NATIVE_STEP, NATIVE_HALF_STEP, HALF_STEP_SPACES = 1024, 512, 16
NATIVE_FIXED = 4096  # the start and the end of a program take as long as scoring this many keys
# Bytes of shared memory that keep a second program off a multiprocessor, given the share of its memory that
# ops/_machinery/cuda.py reserves. Without it the programs of a small grid, launched early, crowd on the multiprocessors
# where the kernel before ends first.
EXCLUSIVE_BYTES = 60_000


def check(votes, codes, lengths, ratios, least, dense, capacity, table=OWN_POOLS) -> None:
    rows, spaces = positions(codes.ids, table), codes.ids.shape[3]
    _votes.check_ratios(ratios)
    check_table(codes.ids, votes.shape[0], table)
    if capacity < candidate_capacity(rows, ratios, least, dense):
        raise ValueError(f"a capacity of {capacity} candidates is too small for {rows} rows")
    if spaces > MOST_SPACES:
        raise ValueError(f"{spaces} subspaces are too many for scores of one byte")


def candidates_of(n: int, ratios: list[int], least: int, dense: int) -> int:
    """The number of candidates of a row of n keys."""
    return n if n <= dense else min(n, max(cdiv(n * beta_and_rho(n, ratios)[0], MILLION), least))


def candidate_capacity(rows: int, ratios: list[int], least: int, dense: int) -> int:
    """The most candidates that a row of up to `rows` keys has: it is reached at the end of one of the ranges of n."""
    ends = [rows, dense, *(below - 1 for below in ratios[:9:3])]
    return max(1, *(candidates_of(min(n, rows), ratios, least, dense) for n in ends if n >= 0))


def ids_of_row(ids: Tensor, table: BlockTable, b: int, first: int, end: int) -> Tensor:
    """The ids [heads, tokens, spaces] of the positions from `first` up to `end` of row `b`."""
    if table.ids is None:
        return ids[b, :, first:end]
    own = table._replace(ids=table.ids[b : b + 1])
    return ids[0, :, pool_rows(torch.arange(first, end, device=ids.device)[None], own)[0]]


def reference(
    votes: Votes, codes: Codes, lengths: Lengths, ratios: list[int], least: int, dense: int, capacity: int,
    table: BlockTable = OWN_POOLS,
) -> Tensor:  # fmt: skip
    """Rank keys by votes.

    Args:
        votes: [batch, heads, packs, centroids, spaces, 4], of centroid_votes.
        codes: the index; only `ids` [pools, heads, rows, spaces] is read.
        lengths: positions per row.
        ratios: beta by the number of keys, in millionths (above).
        least: the fewest candidates of a row that has at least this many keys.
        dense: in rows of at most this many keys all keys are candidates.
        capacity: the width of the result, at least `candidate_capacity`.
        table: the blocks of each row, if rows share one pool.

    Returns:
        [batch, heads, capacity], int32: positions of the candidates in ascending order, -1 after them.
    """
    batch, heads = votes.shape[:2]
    out = torch.full((batch, heads, capacity), -1, dtype=torch.int32)
    for b in range(batch):
        sink, end = lengths.sink, int(lengths.ring_begin[b])
        n = max(end - sink, 0)
        if n == 0:
            continue
        of_heads = votes[b].permute(0, 1, 4, 3, 2).flatten(1, 2).long()  # [heads, queries, spaces, centroids]
        ids = ids_of_row(codes.ids, table, b, sink, end).transpose(1, 2).long()
        ids = ids[:, None].expand(-1, of_heads.shape[1], -1, -1)
        score = of_heads.gather(-1, ids).sum(2).amax(1)
        best = score.argsort(dim=-1, descending=True, stable=True)[:, : candidates_of(n, ratios, least, dense)]
        out[b, :, : best.shape[1]] = sink + best.sort(-1).values
    return out


@triton.jit
def _span(end, CHUNK: tl.constexpr):
    """Keys per program: the rows in use are divided among the programs, in whole chunks."""
    return tl.cdiv(tl.cdiv(end, tl.num_programs(1)), CHUNK) * CHUNK


@triton.jit
def _by_space(table, B: tl.constexpr, SIZE: tl.constexpr):
    """The table [SIZE, B] transposed and flattened: all votes of subspace 0, then of subspace 1, and so on.

    Threads look up one subspace at a time. In the order of the table all these votes would lie in two banks of shared
    memory (with 16 subspaces).
    """
    entry = tl.arange(0, SIZE)[:, None] * B + tl.arange(0, B)[None, :]
    return tl.reshape(tl.trans(tl.load(table + entry)), (B * SIZE,))


@triton.jit
def _score(
    ids, table, scores, at_least, ring_begin, blocks, heads, rows, stride, places, sink, W: tl.constexpr,
    B: tl.constexpr, SIZE: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Score a span of keys, and count how many of them have at least each score. `blocks` [batch, places] are the
    blocks of PAGE tokens of each row, if there is a table."""
    wait_for_previous(PDL)
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    end = tl.load(ring_begin + bh // heads)
    span = _span(end, CHUNK)
    b, bins = tl.arange(0, B), tl.arange(0, BINS)
    pool = bh
    if PAGE > 0:
        pool = bh % heads
    ids += pool * rows * B  # only scalars need 64-bit arithmetic
    table += bh * (W * B * SIZE)
    votes = _by_space(table, B, SIZE)
    count = tl.zeros((BINS,), tl.int32)
    for first in range(part * span, tl.minimum(part * span + span, end), CHUNK):
        row = first + tl.arange(0, CHUNK)
        live = (row >= sink) & (row < end)
        at = pool_row_of(blocks, bh // heads, places, row, live, PAGE)
        id_of = tl.load(ids + at[:, None] * B + b[None, :], mask=live[:, None], other=0)
        entry = tl.reshape(id_of.to(tl.int32) + b[None, :] * SIZE, (CHUNK * B,))
        best = tl.zeros((CHUNK,), tl.int32)
        for w in tl.static_range(W):
            if W > 1:
                votes = _by_space(table + w * B * SIZE, B, SIZE)
            found = tl.gather(votes, entry, 0)  # from shared memory
            total = tl.sum(tl.reshape(found, (CHUNK, B)).to(tl.int32), 1)  # of 4 query heads, a byte each
            best = tl.maximum(best, tl.maximum(total & 255, (total >> 8) & 255))
            best = tl.maximum(best, tl.maximum((total >> 16) & 255, (total >> 24) & 255))
        tl.store(scores + bh * stride + row, best.to(tl.uint8), mask=live)
        count += tl.histogram(tl.where(live, best, BINS - 1), BINS)
    if part * span < end:
        count = tl.where(bins <= 6 * B, count, 0)
        count = tl.sum(count, 0) - tl.cumsum(count, 0) + count
        # The counts of one score lie side by side: `_threshold` sums them.
        tl.store(at_least + (bh * BINS + bins) * parts + part, count)


@triton.jit
def _candidates(n, beta, least, dense):
    """`candidates_of`, of one row."""
    share = ((n.to(tl.int64) * beta + 999999) // 1000000).to(tl.int32)
    return tl.where(n <= dense, n, tl.minimum(n, tl.maximum(share, least)))


@triton.jit
def _sums(a, b):
    """The sums of a and of b, computed as one sum of 64-bit words: one reduction instead of two."""
    both = tl.sum((a.to(tl.int64) << 32) + b.to(tl.int64), 0)
    return (both >> 32).to(tl.int32), both.to(tl.int32)


@triton.jit
def _threshold(at_least, part, parts, count, BINS: tl.constexpr, PARTS: tl.constexpr):
    """Find the score at which `count` keys are reached.

    Returns this score, the number of keys of this score that still fit, and in the parts before `part` the numbers of
    keys above the score and of keys at the score.
    """
    bins = tl.arange(0, BINS)
    total, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for p in range(0, parts, PARTS):
        others = (p + tl.arange(0, PARTS))[None, :]
        counts = tl.load(at_least + bins[:, None] * tl.num_programs(1) + others, mask=others < parts, other=0)
        total += tl.sum(counts, 1)
        before += tl.sum(tl.where(others < part, counts, 0), 1)
    reached = tl.sum((total >= count).to(tl.int32), 0)  # `total` falls with the score, to 0 above the best score
    beyond, above = _sums(tl.where(bins == reached, total, 0), tl.where(bins == reached, before, 0))
    return reached - 1, count - beyond, above, tl.sum(tl.where(bins == reached - 1, before, 0), 0) - above


@triton.jit
def _compact(
    scores, at_least, out, ring_begin, heads, stride, sink, least, dense, capacity, below0, below1, below2, beta0,
    beta1, beta2, beta3, BINS: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the candidates of a span after those of the spans before it."""
    wait_for_previous(PDL)
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    end = tl.load(ring_begin + bh // heads)
    span = _span(end, CHUNK)
    n = tl.maximum(end - sink, 0)
    beta = share_by_length(n, below0, below1, below2, beta0, beta1, beta2, beta3)
    count = _candidates(n, beta, least, dense)
    out, scores = out + bh * capacity, scores + bh * stride
    if (part * span < end) & (count > 0):
        stop = tl.minimum(part * span + span, end)
        row = part * span + tl.arange(0, TILE)
        whole = tl.cdiv(stop, 16) * 16  # whole 16 bytes; scores of rows that are not live are ignored
        ahead = tl.load(scores + row, mask=row < whole, other=0)  # in flight while the threshold is found
        counts = at_least + bh * BINS * parts
        threshold, room, above, ties = _threshold(counts, part, tl.cdiv(end, span), count, BINS, PARTS)
        for first in range(part * span, stop, TILE):
            row = first + tl.arange(0, TILE)
            live = (row >= sink) & (row < stop)
            s = ahead.to(tl.int32)
            ahead = tl.load(scores + row + TILE, mask=row + TILE < whole, other=0)
            above_it, tie = live & (s > threshold), live & (s == threshold)
            both = above_it.to(tl.int32) + (tie.to(tl.int32) << 16)  # a tile has fewer than 2^15 keys
            upto = tl.cumsum(both, 0)
            above_upto, ties_upto = above + (upto & 0xFFFF), ties + (upto >> 16)
            place = above_upto + tl.minimum(ties_upto, room) - 1
            # -1 for keys that are not stored. Widened last: threads exchange the 32-bit number before the store.
            place = tl.where(above_it | (tie & (ties_upto <= room)), place, -1).to(tl.int64)
            tl.store(out + place, row, mask=place >= 0)
            found = tl.sum(both, 0)
            above += found & 0xFFFF
            ties += found >> 16
    for first in range(count + part * TILE, capacity, parts * TILE):
        empty = first + tl.arange(0, TILE)
        tl.store(out + empty, tl.full((TILE,), -1, tl.int32), mask=empty < capacity)


def _bins(spaces: int) -> int:
    """Bins of the counts: one per score, one above the best score, and the last for keys that do not count."""
    return next_power_of_2(len(_votes.PERCENT) * spaces + 2)


def _buffers(votes: Tensor, rows: int, parts: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers for the scores of up to `rows` keys, the counts `at_least` of every part, and the candidates."""
    new = lambda *shape, dtype: votes.new_empty((*votes.shape[:2], *shape), dtype=dtype)  # noqa: E731
    rows, bins = cdiv(rows, 16) * 16, _bins(votes.shape[4])
    return new(rows, dtype=torch.uint8), new(parts, bins, dtype=torch.int32), new(capacity, dtype=torch.int32)


def native_step(all_heads: int, multiprocessors: int, spaces: int, packs: int) -> int:
    """Threads of a program."""
    small = packs == 1 and spaces <= HALF_STEP_SPACES
    return NATIVE_HALF_STEP if all_heads > multiprocessors and small else NATIVE_STEP


@functools.cache
def native_parts(all_heads: int, rows: int, multiprocessors: int, step: int = NATIVE_STEP) -> int:
    """Programs per head, in rounds if needed: the number that takes the least time."""
    at_once = multiprocessors * NATIVE_STEP // step
    rounds = lambda parts: cdiv(all_heads * parts, at_once)  # noqa: E731
    most = max(1, min(cdiv(rows, step), multiprocessors))
    return min(range(1, most + 1), key=lambda parts: rounds(parts) * (cdiv(rows, parts) + NATIVE_FIXED))


def _fits(votes, codes, lengths, ratios, least, dense, capacity, table=OWN_POOLS) -> _cuda.Module | str:
    packs, size, spaces = votes.shape[2:5]
    if size != 256 or spaces not in _votes.NATIVE_SPACES or packs > NATIVE_PACKS:
        return f"{spaces} subspaces of {size} centroids, {packs} entries of query heads"
    if not _cuda.aligned(votes, codes.ids):
        return "tensors are not aligned to 16 bytes"
    step = native_step(votes.shape[0] * votes.shape[1], sm_count(votes.device), spaces, packs)
    shape = dict(B=spaces, PACKS=packs, BINS=_bins(spaces), THREADS=step, PAGE=table.block_size)
    return _cuda.load("rank_by_votes", votes.device, **shape)


def _launch_cuda(kernels, votes, codes, lengths, ratios, least, dense, capacity, table=OWN_POOLS) -> Tensor:
    """csrc/rank_by_votes.cu"""
    ids, times = codes.ids, lengths.ring_begin
    batch, heads, packs = votes.shape[:3]
    all_heads, rows = batch * heads, positions(ids, table)
    multiprocessors = sm_count(ids.device)
    step = native_step(all_heads, multiprocessors, ids.shape[3], packs)
    parts = native_parts(all_heads, rows, multiprocessors, step)
    scores, at_least, out = _buffers(votes, rows, parts, capacity)
    below, beta, _ = split_ratios(ratios)
    kernels.launch(
        "scores", (all_heads, parts, 1), step, ids, votes, scores, at_least, times, *places_of(table), heads,
        ids.shape[2], scores.shape[2], lengths.sink, shared=packs * 256 * 32 * _votes.HEADS_PER_ENTRY,
    )  # fmt: skip
    kernels.launch(
        "compact", (all_heads, parts, 1), step, scores, at_least, out, times, heads, scores.shape[2],
        lengths.sink, least, dense, capacity, below + beta,
        shared=EXCLUSIVE_BYTES if all_heads * parts <= multiprocessors else 0,
    )  # fmt: skip
    return out


def _launch_triton(votes, codes, lengths, ratios, least, dense, capacity, table=OWN_POOLS) -> Tensor:
    ids, times, sink = codes.ids, lengths.ring_begin, lengths.sink
    (batch, heads, packs, size, spaces), rows = votes.shape[:5], positions(ids, table)
    all_heads = batch * heads
    chunk = min(CHUNK, max(16, next_power_of_2(rows)))
    parts = max(1, min(cdiv(rows, chunk), cdiv(RESIDENT * sm_count(ids.device), all_heads)))
    tile = min(TILE, next_power_of_2(cdiv(cdiv(rows, parts), chunk) * chunk))
    scores, at_least, out = _buffers(votes, rows, parts, capacity)
    below, beta, _ = split_ratios(ratios)
    _score[(all_heads, parts)](
        ids, votes.view(torch.int32), scores, at_least, times, times if table.ids is None else table.ids, heads,
        ids.shape[2], scores.shape[2], 0 if table.ids is None else table.ids.shape[1], sink, W=packs, B=spaces,
        SIZE=size, BINS=_bins(spaces), CHUNK=chunk, PAGE=table.block_size, num_warps=max(4, chunk // 128),
        **launch_early(ids.device, all_heads * parts),
    )  # fmt: skip
    _compact[(all_heads, parts)](
        scores, at_least, out, times, heads, scores.shape[2], sink, least, dense, capacity, *below, *beta,
        BINS=_bins(spaces), PARTS=32, CHUNK=chunk, TILE=tile, num_warps=max(4, tile // 512),
        **launch_early(ids.device, all_heads * parts),
    )  # fmt: skip
    return out


def fake(votes, codes, lengths, ratios, least, dense, capacity: int, table=OWN_POOLS) -> Tensor:
    return votes.new_empty((*votes.shape[:2], capacity), dtype=torch.int32)


rank_by_votes = register(
    "rank_by_votes", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake, check=check
)
