"""Choose the static set anew where it is due: the tokens that the latest queries attend to most.

With the queries q of the observation window (the latest tokens), and the keys of the sinks and the retrievable tokens:

    w[t, g, j] = softmax over j of (scale * q[t, g] . key[j]),  soft-capped where the model does that
    score[j]   = mean of w[t, g, j] over the tokens t of the window and the query heads g of the kv head
    set        = the `target` retrievable tokens with the largest scores, ascending; ties go to the lower row

Every query has a softmax of its own: averaging the queries first would choose other tokens. The extra logit of a model
with attention sinks is left out. A score that is not a number counts as 0, so that a set always has its full size.

A head is due if it has not chosen since the last prompt, if its last choice is `every` tokens old, or if more tokens
have become retrievable and its set is smaller than `target`. Other heads only set `updated` to 0. A row past its
capacity stays as it is.

PRKV, algorithm 1 (the choice of the static tokens).
"""
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.grid_barrier import grid_barrier, leave_grid_barrier, parts_of, phases
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import (
    LANES,
    cdiv,
    compiles,
    launch_early,
    next_power_of_2,
    shared_bytes,
    tl,
    triton,
    wait_for_previous,
)  # fmt: skip
from torchsparsekv.ops.attend._split import capped, soft_capped
from torchsparsekv.ops.index.copy_keys import COPY_UNIT, Coarse, Origin, copied, key_of, keys_in
from torchsparsekv.ops.index.observe import NOT_SINCE, NOT_YET
from torchsparsekv.ops.prkv.views import StaticSet
from torchsparsekv.ops.select._top import GROUP, store_peaks
from torchsparsekv.ops.select.top_blocks import best_of_peaks
from torchsparsekv.ops.store.rows import keys_of, row_at
from torchsparsekv.ops.store.views import Attention, KVStore, Lengths, Observed

NEVER = (1 << 31) - 1  # as `every`: choose once after each prompt
TILE = 64  # keys at a time
LOG2E = tl.constexpr(1.4426950408889634)
# One instruction. `tl.exp2` keeps numbers below 2 ** -126 and takes three instructions more.
EXP2 = "ex2.approx.ftz.f32 $0, $1;"
FP16_MAX = tl.constexpr(65504.0)
PHASES = 3
MOST = LANES // GROUP  # tokens of a set: one program holds as many groups of scores
ARRIVED, LEFT, DONE = (tl.constexpr(i) for i in range(3))  # the counters of `StaticSet.barrier`
COUNTERS = tl.constexpr(3)


class Resources(NamedTuple):
    """What one program may use.

    query_bytes: bytes of queries that are held at once. The keys are read once for each such part of the window.
    key_bytes: bytes of keys whose loads are in flight.
    warps: warps of the program.
    per_sm: programs that share a multiprocessor.
    """

    query_bytes: int
    key_bytes: int
    warps: int
    per_sm: int


SMALL, LARGE = Resources(32768, 16384, 8, 1), Resources(65536, 49152, 8, 1)
# Of two programs on a multiprocessor, one computes powers of two while the other multiplies. All programs wait for one
# another, so both must fit: they do if a key has PAIRED bytes (tests/tools/compile_kernels.py).
PAIR, PAIRED = Resources(32768, 49152, 4, 2), 256
ROOMY = 200_000  # a GPU with at least as many bytes of shared memory takes LARGE or PAIR, else SMALL


class Sizes(NamedTuple):
    """Sizes that the kernel takes at run time."""

    heads: int
    window: int  # tokens of the observation window
    ring_rows: int
    rows: int  # of the pool
    queries: int  # of a window and a kv head, rounded up to parts of `Compiled.part`
    groups: int  # of scores, each of GROUP tokens with one peak
    most: int  # tokens of a set


class Compiled(NamedTuple):
    """Sizes and options that the kernel is compiled for."""

    coarse: bool  # keys are read from the fp8 copy
    capped: bool  # logits are soft-capped
    group: int  # query heads of a kv head
    dim: int
    padded: int  # dim, rounded up to a power of two
    tile: int  # keys of a tile
    part: int  # queries that are held at once
    stages: int  # tiles in flight
    scores: int  # of a group with one peak
    groups: int  # Sizes.groups, rounded up to a power of two
    most: int  # Sizes.most, rounded up to a power of two
    exp2: str  # the instruction, or "" where programs are interpreted


class Scratch(NamedTuple):
    """Buffers for one launch, each per (row, kv head)."""

    peaks_of_query: Tensor  # [parts, queries]: the largest logit that each program has seen
    sums_of_query: Tensor  # [parts, queries]: the sum of 2 ** (logit - largest) of each program
    scores: Tensor  # [rows]
    peaks: Tensor  # [groups]
    listed: Tensor  # [most]: room for best_of_peaks


class Head(NamedTuple):
    """Which head a program works for, its share of the work, and how far the row of the head is."""

    b: Any
    h: Any
    bh: Any
    part: Any
    parts: Any
    length: Any
    end: Any  # the end of the retrievable tokens
    sink: Any


def check(observed, static, store, coarse, origin, lengths, attention) -> None:
    if (coarse is None) != (origin is None):
        raise ValueError("give coarse and its origin, both or neither")
    _check.heads(observed.queries.transpose(1, 2), store.pool)
    if static.ids.shape[2] > MOST:
        raise ValueError(f"a static set has at most {MOST} tokens, got room for {static.ids.shape[2]}")


def window_scores(queries: Tensor, keys: Tensor, attention: Attention) -> Tensor:
    """The scores [tokens] of one kv head, from queries [window, group, dim] and keys [tokens, dim]."""
    z = soft_capped(queries.float() @ keys.float().T * attention.scale, attention.softcap)
    return z.softmax(-1).mean((0, 1)).nan_to_num(nan=0.0)


def is_due(static: StaticSet, b: int, h: int, length: int, retrievable: int) -> bool:
    chosen_at, target, count = (int(t[b, h]) for t in (static.chosen_at, static.target, static.count))
    return chosen_at == NOT_YET or length - chosen_at >= static.every or count < min(target, retrievable)


def reference(
    observed: Observed, static: Changed[StaticSet], store: KVStore, coarse: Coarse | None,
    origin: Origin | None, lengths: Lengths, attention: Attention,
) -> None:  # fmt: skip
    """Choose the static set anew where it is due: the tokens that the latest queries attend to most.

    Args:
        observed: the observation window, queries [batch, window, q_heads, dim].
        static: the sets. Heads that are due get new `ids`, `count`, `chosen_at`; `updates` counts one more.
        store: the sinks are read from the ring, retrievable tokens from the pool.
        coarse: the fp8 copy of the keys [batch, heads, rows, dim]; it is read in place of the pool, which may be host
            memory. None: keys are read from the pool.
        origin: the origin of the copy [batch, heads, dim].
        lengths: retrievable tokens lie from `sink` up to `ring_begin`.
        attention: scale and soft cap of the model.

    Launches:
        One kernel of batch * heads x parts programs, all on the GPU at once, which meet at a grid barrier between its
        phases. 1: each program finds the sum of every query's softmax over its share of the tiles. 2: it adds these
        sums up and stores the scores of its tiles. 3: one program of a head takes the best scores. Where no head is
        due, every program reads a few numbers and returns.
    """
    (ring, pool), window, heads, sink = store, observed.queries.shape[1], store.pool.shape[1], lengths.sink
    for b, (n, end) in enumerate(torch.stack([lengths.length, lengths.ring_begin], 1).tolist()):
        static.updated[b] = 0
        if n <= 0:
            continue
        queries = observed.queries[b, : min(n, window)].unflatten(1, (heads, -1))
        for h in range(heads):
            if not is_due(static, b, h, n, end - sink):
                continue
            sinks = min(n, sink)
            retrievable = keys_in(pool, coarse, b, h, slice(sink, end))
            retrievable = retrievable.to(queries.dtype) if origin is None else retrievable + origin[b, h]
            keys = torch.cat([keys_of(ring[b, h, :sinks]).float(), retrievable.float()])
            scores = window_scores(queries[:, h], keys, attention)[sinks:]
            best = scores.argsort(descending=True, stable=True)[: int(static.target[b, h])].sort().values
            static.ids[b, h] = -1
            static.ids[b, h, : len(best)] = best + sink
            static.count[b, h], static.updated[b, h] = len(best), 1
            static.chosen_at[b, h] = n - (static.stagger[b, h] if static.chosen_at[b, h] == NOT_YET else 0)
            static.updates[b, h] += 1


@triton.jit
def _load_queries(queries, first, head, sizes, C: tl.constexpr):
    """The queries of the window from number `first` on, [part, padded], and which of them exist, [part].

    Against fp8 keys, bf16 queries come in fp16: fp8 converts to fp16 faster. This changes only numbers beyond the range
    of fp16, and numbers below 2 ** -17.
    """
    d, r = tl.arange(0, C.padded), first + tl.arange(0, C.part)
    exists = r // C.group < tl.minimum(head.length, sizes.window)
    row = (head.b * sizes.window + r // C.group) * sizes.heads * C.group + head.h * C.group + r % C.group
    pointers = queries + row[:, None] * C.dim + d[None, :]
    x = tl.load(pointers, mask=exists[:, None] & (d < C.dim)[None, :], other=0.0)  # [part, padded]
    if C.coarse & (x.dtype == tl.bfloat16):
        x = tl.clamp(x.to(tl.float32), -FP16_MAX, FP16_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return x, exists


@triton.jit
def _shift(x, origin, bh, C: tl.constexpr):
    """The products [part] of the queries `x` with the origin of the copy of the keys; 0 without a copy."""
    if C.coarse:
        d = tl.arange(0, C.padded)
        o = tl.load(origin + bh * C.dim + d, mask=d < C.dim, other=0.0)
        return tl.sum(x.to(tl.float32) * o[None, :], 1)
    else:
        return tl.full((C.part,), 0.0, tl.float32)


@triton.jit
def _exp2(x, C: tl.constexpr):
    if C.exp2 != "":
        return tl.inline_asm_elementwise(C.exp2, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def _log2_factor(attention, CAPPED: tl.constexpr):
    """What the result of `_logits` is multiplied by, to be a logit in units of log(2)."""
    return LOG2E if CAPPED else attention.scale * LOG2E


@triton.jit
def _logits(
    x, shift, source, tile, bh, begin, end, rows, attention, BY_QUERY: tl.constexpr, IN_RING: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Products of the queries `x` and the keys of a tile, and which tokens of the tile lie in [begin, end).

    [tile, part], or BY_QUERY [part, tile]: the axis that is summed next lies within a thread. Soft-capped logits are
    scaled; without a soft cap `_log2_factor` has the scale. `source` is the ring (IN_RING), or what `copied` returns.
    `shift` is what `_shift` returns.
    """
    d, pos = tl.arange(0, C.padded), tile * C.tile + tl.arange(0, C.tile)
    live = (pos >= begin) & (pos < end)
    if IN_RING:
        pointers = row_at(source, bh, pos[:, None], rows, C.dim) + d[None, :]
        k = tl.load(pointers, mask=live[:, None] & (d < C.dim)[None, :], other=0.0)  # [tile, padded]
    else:
        k = key_of(source, bh, pos[:, None], d[None, :], live[:, None], rows, C.dim, C.coarse)  # [tile, padded]
    k = k.to(x.dtype)
    if BY_QUERY:
        z = tl.dot(x, tl.trans(k), input_precision="ieee")
    else:
        z = tl.dot(k, tl.trans(x), input_precision="ieee")
    if C.coarse and not IN_RING:
        z = z * COPY_UNIT + (shift[:, None] if BY_QUERY else shift[None, :])
    if C.capped:
        z = capped(z * attention.scale, attention.softcap)
    return z, live


@triton.jit
def _add_tile(z, live, factor, peak, total, C: tl.constexpr):
    """The online softmax: largest logit and sum of 2 ** (logit - largest) of each query, with logits z [part, tile]."""
    z = tl.where(live[None, :], z, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(z, 1) * factor)
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, total * tl.exp2(peak - safe) + tl.sum(_exp2(z * factor - safe[:, None], C), 1)


@triton.jit
def _sum_softmax(queries, ring, keys, origin, scratch, head, attention, sizes, C: tl.constexpr):
    """Phase 1: over this program's tiles, the largest logit of every query and the sum of 2 ** (logit - largest)."""
    factor, end, sink = _log2_factor(attention, C.capped), head.end, head.sink
    for first in range(0, sizes.queries, C.part):
        x, _ = _load_queries(queries, first, head, sizes, C)
        shift = _shift(x, origin, head.bh, C)
        peak, total = tl.full((C.part,), float("-inf"), tl.float32), tl.full((C.part,), 0.0, tl.float32)
        sinks = tl.where(head.part == head.parts - 1, tl.minimum(head.length, sink), 0)  # the last program adds them
        for tile in tl.range(tl.cdiv(sinks, C.tile), num_stages=1):
            z, live = _logits(x, shift, ring, tile, head.bh, 0, sinks, sizes.ring_rows, attention, True, True, C)
            peak, total = _add_tile(z, live, factor, peak, total, C)
        for tile in tl.range(sink // C.tile + head.part, tl.cdiv(end, C.tile), head.parts, num_stages=C.stages):
            z, live = _logits(x, shift, keys, tile, head.bh, sink, end, sizes.rows, attention, True, False, C)
            peak, total = _add_tile(z, live, factor, peak, total, C)
        i = (head.bh * head.parts + head.part) * sizes.queries + first + tl.arange(0, C.part)
        tl.store(scratch.peaks_of_query + i, peak)
        tl.store(scratch.sums_of_query + i, total)


@triton.jit
def _log_sums(scratch, i, exists, parts, step, C: tl.constexpr):
    """log2 of the sum of every query's softmax, [part], from what all programs of the head stored; infinity where there
    is no query. `i` is where the first program stored its results; the next program stored `step` further."""
    peak = tl.full((C.part,), float("-inf"), tl.float32)
    for other in range(parts):
        peak = tl.maximum(peak, tl.load(scratch.peaks_of_query + i + other * step))
    total = tl.full((C.part,), 0.0, tl.float32)
    for other in range(parts):
        away = tl.where(exists, tl.load(scratch.peaks_of_query + i + other * step) - peak, 0.0)
        total += tl.load(scratch.sums_of_query + i + other * step) * tl.exp2(away)
    return tl.where(exists, peak + tl.log2(tl.where(exists, total, 1.0)), float("inf"))


@triton.jit
def _score_tokens(queries, keys, origin, scratch, head, attention, sizes, C: tl.constexpr):
    """Phase 2: scores and peaks of all tiles of this program, -inf after the last retrievable token."""
    i, tiles, factor = tl.arange(0, C.tile), tl.cdiv(head.end, C.tile), _log2_factor(attention, C.capped)
    part, parts, rows = head.part, head.parts, sizes.rows
    scores, peaks = scratch.scores + head.bh * rows, scratch.peaks + head.bh * sizes.groups
    for first in range(0, sizes.queries, C.part):
        x, exists = _load_queries(queries, first, head, sizes, C)
        shift = _shift(x, origin, head.bh, C)
        stored = head.bh * parts * sizes.queries + first + tl.arange(0, C.part)
        log_sum = _log_sums(scratch, stored, exists, parts, sizes.queries, C)
        for tile in tl.range(part, tiles, parts, num_stages=C.stages):
            z, live = _logits(x, shift, keys, tile, head.bh, head.sink, head.end, rows, attention, False, False, C)
            pos = tile * C.tile + i
            mass = tl.sum(_exp2(z * factor - log_sum[None, :], C), 1)  # [tile]
            mass += tl.load(scores + pos, mask=live & (first > 0), other=0.0)
            # Only the sum over all queries is checked for NaN.
            mass = tl.where((mass == mass) | (first + C.part < sizes.queries), mass, 0.0)
            mass = tl.where(live, mass, float("-inf"))
            tl.store(scores + pos, mass, mask=pos < rows)
            store_peaks(peaks, mass, tile * C.tile, rows, C.tile, C.scores)
    nothing = tl.full((C.tile,), float("-inf"), tl.float32)
    for tile in range(part + tl.cdiv(tl.maximum(tiles - part, 0), parts) * parts, tl.cdiv(rows, C.tile), parts):
        tl.store(scores + tile * C.tile + i, nothing, mask=tile * C.tile + i < rows)
        store_peaks(peaks, nothing, tile * C.tile, rows, C.tile, C.scores)


@triton.jit
def choose_set(
    observed, static, ring, keys, origin, lengths, attention, scratch, sizes, FIRST: tl.constexpr, LAST: tl.constexpr,
    STAY: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Phases FIRST to LAST of choosing the set of one head; returns whether the head is due.

    STAY: the programs of the head meet again after the last phase. A FIRST below 0 says that the launch does other work
    before, which all programs of a head have to finish.
    """
    bh = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    b, h, sink = bh // sizes.heads, bh % sizes.heads, lengths.sink
    n, end, count = tl.load(lengths.length + b), tl.load(lengths.ring_begin + b), tl.load(static.count + bh)
    chosen_at, target = tl.load(static.chosen_at + bh), tl.load(static.target + bh)
    was_updated = tl.load(static.updated + bh)
    barrier = static.barrier + bh * COUNTERS
    head = Head(b, h, bh, part, parts, n, end, sink)
    full = tl.minimum(target, end - sink)
    due = (n > 0) & ((chosen_at == NOT_SINCE) | (n - chosen_at >= static.every) | (count < full))
    if (FIRST <= 0) & (part == 0) & (was_updated != due.to(tl.int32)):
        tl.store(static.updated + bh, due.to(tl.int32))
    if due:
        if FIRST < 0:
            grid_barrier(barrier + ARRIVED, parts)
        if FIRST <= 0:
            _sum_softmax(observed.queries, ring, keys, origin, scratch, head, attention, sizes, C)
        if (FIRST <= 1) & (LAST > 1):
            if FIRST < 1:
                grid_barrier(barrier + ARRIVED, parts)
            _score_tokens(observed.queries, keys, origin, scratch, head, attention, sizes, C)
        if (FIRST <= 2) & (LAST > 2):
            if FIRST < 2:
                grid_barrier(barrier + ARRIVED, parts)
                if not STAY:
                    leave_grid_barrier(barrier + ARRIVED, barrier + LEFT, parts)
            if part == 0:
                best_of_peaks(
                    scratch.scores + bh * sizes.rows, scratch.peaks + bh * sizes.groups, static.ids + bh * sizes.most,
                    scratch.listed + bh * C.most, sizes.rows, sizes.groups, target, sizes.most, C.scores, C.groups,
                    C.most,
                )  # fmt: skip
                tl.store(static.count + bh, full)
                stagger = tl.load(static.stagger + bh)
                tl.store(static.chosen_at + bh, tl.where(chosen_at == NOT_SINCE, n - stagger, n))
                tl.store(static.updates + bh, tl.load(static.updates + bh) + 1)
    return due


@triton.jit
def _choose(
    observed, static, ring, keys, origin, lengths, attention, scratch, sizes, FIRST: tl.constexpr, LAST: tl.constexpr,
    C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    choose_set(observed, static, ring, keys, origin, lengths, attention, scratch, sizes, FIRST, LAST, False, C)


def _resources(device: torch.device, row_bytes: int) -> Resources:
    if shared_bytes(device) < ROOMY:
        return SMALL
    return PAIR if row_bytes == PAIRED else LARGE


def arguments(observed, static, store, coarse, origin, lengths, attention) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and the arguments of `_choose` by name, except its phases."""
    (queries,), (ring, pool) = observed, store
    (batch, heads, rows), d = pool.shape[:3], queries.shape[3]
    window, group, most = queries.shape[1], queries.shape[2] // heads, static.ids.shape[2]
    row_bytes = next_power_of_2(d) * queries.element_size()
    may = _resources(pool.device, row_bytes)
    parts = parts_of(pool.device, batch * heads, cdiv(rows, TILE), may.per_sm)
    part = max(16, min(may.query_bytes // row_bytes, next_power_of_2(window * group)))
    padded_queries, groups = cdiv(window * group, part) * part, cdiv(rows, GROUP)
    compiled = Compiled(
        coarse=coarse is not None, capped=attention.softcap > 0, group=group, dim=d, padded=next_power_of_2(d),
        tile=TILE, part=part, stages=max(1, min(3, may.key_bytes // (TILE * row_bytes))), scores=GROUP,
        groups=next_power_of_2(groups), most=next_power_of_2(most), exp2=EXP2 if compiles(pool.device) else "",
    )  # fmt: skip
    new = lambda *shape, dtype=torch.float32: torch.empty((batch * heads, *shape), dtype=dtype, device=pool.device)  # noqa: E731
    scratch = Scratch(
        new(parts, padded_queries), new(parts, padded_queries), new(rows), new(groups),
        new(compiled.most, dtype=torch.int32),
    )  # fmt: skip
    return (batch * heads, parts), dict(
        observed=observed, static=static, ring=ring, keys=copied(pool, coarse),
        origin=ring if origin is None else origin, lengths=lengths, attention=attention, scratch=scratch,
        sizes=Sizes(heads, window, ring.shape[2], rows, padded_queries, groups, most), C=compiled,
        num_warps=may.warps,
    )  # fmt: skip


def launch(*args) -> None:
    grid, given = arguments(*args)
    device = given["keys"].device
    for phase in phases(device, grid[1], PHASES):
        _choose[grid](**given, **phase, **launch_early(device, grid[0] * grid[1]))


choose_static = register("choose_static", reference, impls=(by_triton(launch),), check=check)
