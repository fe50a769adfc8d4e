"""Choose, now and then, the tokens that are attended to whatever the query: those that the latest queries looked at.

The observation window are the queries of the latest tokens (`observed`). Per query head their attention weights over
all that came before the ring (the sinks and what can be retrieved) are a softmax each; their mean over the window and
over the query heads of a kv head is the score of a token, and the `target` best that can be retrieved are the static
set (PRKV, algorithm 1; ties go to the lower row). Averaging the queries first would find another set. An extra logit of
the model does not count. A score that is no number counts as 0, so that a set has as many tokens as it says.

A head is due if it has not chosen since the last prompt, if it has not for `every` tokens, and when more tokens can be
retrieved but the set is not full yet. On other steps nothing is read but that, and `updated` is 0. Rows that are past
their capacity are left alone.

With a `coarse` copy of the keys (ops/index/copy_keys.py) that is read in place of the pool, which may be host memory.

One launch for all of it (ops/_machinery/grid_barrier.py). In its phases a head's programs find the logarithm of the sum of every softmax,
then the scores, and one of them takes the best.
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
from torchsparsekv.ops.index.copy_keys import Coarse, copied, key_of, keys_in
from torchsparsekv.ops.index.observe import NOT_SINCE, NOT_YET
from torchsparsekv.ops.prkv.views import Static
from torchsparsekv.ops.select._top import GROUP, store_peaks
from torchsparsekv.ops.select.top_blocks import best_of_peaks
from torchsparsekv.ops.store.rows import keys_of, row_at
from torchsparsekv.ops.store.views import Attention, KVStore, Lengths, Observed

NEVER = (1 << 31) - 1  # as `every`: once after each prompt
TILE = 64  # keys at a time
LOG2E = tl.constexpr(1.4426950408889634)
# One instruction. Without flushing what is below 2 ** -126, as `tl.exp2` does not, it takes three more.
EXP2 = "ex2.approx.ftz.f32 $0, $1;"
FP16_MAX = tl.constexpr(65504.0)
PHASES = 3
READ = ("ids", "count", "target", "updated", "at", "lead", "every", "updates", "arrived", "gone")  # of Static
MOST = LANES // GROUP  # tokens of a set: a program looks at as many groups of scores


class Share(NamedTuple):
    """What a program has: bytes of the window's queries, for which keys are read once, and of keys that are on their
    way; warps; and how many like it share a multiprocessor."""

    query_bytes: int
    key_bytes: int
    warps: int
    beside: int


SMALL, LARGE = Share(32768, 16384, 8, 1), Share(65536, 49152, 8, 1)
# Of two programs on a multiprocessor, one takes powers of two while the other multiplies. Both have to fit, since all
# programs wait for one another: so only where rows have PAIRED bytes (tests/tools/compile_kernels.py).
PAIR, PAIRED = Share(32768, 49152, 4, 2), 256
ROOMY = 200_000  # bytes of shared memory of a GPU that has more than SMALL


def check(observed, static, store, coarse, lengths, attention) -> None:
    _check.heads(observed.queries.transpose(1, 2), store.pool)
    if static.ids.shape[2] > MOST:
        raise ValueError(f"a static set has at most {MOST} tokens, got room for {static.ids.shape[2]}")


def window_scores(queries: Tensor, keys: Tensor, attention: Attention) -> Tensor:
    """The definition, of one head: queries [window, group, dim], keys [tokens, dim]; scores [tokens]."""
    z = soft_capped(queries.float() @ keys.float().T * attention.scale, attention.softcap)
    return z.softmax(-1).mean((0, 1)).nan_to_num(nan=0.0)


def reference(
    observed: Observed, static: Changed[Static], store: KVStore, coarse: Coarse | None, lengths: Lengths,
    attention: Attention,
) -> None:  # fmt: skip
    (ring, pool), window, heads, sink = store, observed.queries.shape[1], store.pool.shape[1], lengths.sink
    for b, (n, end) in enumerate(torch.stack([lengths.length, lengths.ring_begin], 1).tolist()):
        static.updated[b] = 0
        if n <= 0:
            continue
        seen = observed.queries[b, : min(n, window)].unflatten(1, (heads, -1))
        for h in range(heads):
            count, target, _, at, lead, every = (int(t[b, h]) for t in static[1:7])
            if not (at == NOT_YET or n - at >= every or count < min(target, end - sink)):
                continue
            held = min(n, sink)
            behind = keys_in(pool, coarse, b, h, slice(sink, end)).to(seen.dtype)
            keys = torch.cat([keys_of(ring[b, h, :held]).float(), behind.float()])
            scores = window_scores(seen[:, h], keys, attention)[held:]
            best = scores.argsort(descending=True, stable=True)[:target].sort().values
            static.ids[b, h] = -1
            static.ids[b, h, : len(best)] = best + sink
            static.count[b, h], static.updated[b, h] = len(best), 1
            static.at[b, h] = n - (lead if at == NOT_YET else 0)
            static.updates[b, h] += 1


@triton.jit
def _asking(
    queries, first, b, h, n, heads, window, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, Q: tl.constexpr,
    COARSE: tl.constexpr,
):  # fmt: skip
    """Q queries of the window from `first` on, and which of them there are. For COARSE keys those in bf16 come in fp16,
    which such keys are sooner turned into; all but the largest, and those below 2 ** -17, are the same in it."""
    d, r = tl.arange(0, DP), first + tl.arange(0, Q)
    there = r // G < tl.minimum(n, window)
    at = queries + ((b * window + r // G) * heads * G + h * G + r % G)[:, None] * D + d[None, :]
    x = tl.load(at, mask=there[:, None] & (d < D)[None, :], other=0.0)
    if COARSE & (x.dtype == tl.bfloat16):
        x = tl.clamp(x.to(tl.float32), -FP16_MAX, FP16_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return x, there


@triton.jit
def _exp2(x, ASM: tl.constexpr):
    if ASM != "":
        return tl.inline_asm_elementwise(ASM, "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def _unit(scale, CAPPED: tl.constexpr):
    """What `_logits` are to be multiplied by, to be in units of log(2)."""
    return LOG2E if CAPPED else scale * LOG2E


@triton.jit
def _logits(
    x, source, tile, bh, begin, end, rows, scale, softcap, BY_QUERY: tl.constexpr, IN_RING: tl.constexpr,
    CAPPED: tl.constexpr, COARSE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of the queries `x` and a tile of tokens, [TILE, Q] or, BY_QUERY, [Q, TILE]: what is summed up lies in a thread.
    Not scaled yet, but where they are CAPPED: `_unit`. And which tokens lie in [begin, end). IN_RING: `source` is the
    ring, else what `copied` says."""
    d, pos = tl.arange(0, DP), tile * TILE + tl.arange(0, TILE)
    live = (pos >= begin) & (pos < end)
    if IN_RING:
        at = row_at(source, bh, pos[:, None], rows, D) + d[None, :]
        k = tl.load(at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    else:
        k = key_of(source, bh, pos[:, None], d[None, :], live[:, None], rows, D, COARSE)
    k = k.to(x.dtype)
    if BY_QUERY:
        z = tl.dot(x, tl.trans(k), input_precision="ieee")
    else:
        z = tl.dot(k, tl.trans(x), input_precision="ieee")
    if CAPPED:
        z = capped(z * scale, softcap)
    return z, live


@triton.jit
def _fold(z, live, unit, top, total, ASM: tl.constexpr):
    """A tile of logits [Q, TILE] into the largest of every query, and the sum of 2 ** (logit - largest)."""
    z = tl.where(live[None, :], z, float("-inf"))
    peak = tl.maximum(top, tl.max(z, 1) * unit)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, total * tl.exp2(top - safe) + tl.sum(_exp2(z * unit - safe[:, None], ASM), 1)


@triton.jit
def _sum_up(
    queries, ring, pool, tops, totals, b, h, bh, part, parts, heads, n, end, sink, window, ring_rows, rows, scale,
    softcap, padded, CAPPED: tl.constexpr, COARSE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, Q: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Of every query the largest logit over the tiles of this program, and the sum of 2 ** (logit - largest)."""
    unit = _unit(scale, CAPPED)
    for first in range(0, padded, Q):
        x, _ = _asking(queries, first, b, h, n, heads, window, G, D, DP, Q, COARSE)
        top, total = tl.full((Q,), float("-inf"), tl.float32), tl.zeros((Q,), tl.float32)
        held = tl.where(part == parts - 1, tl.minimum(n, sink), 0)  # one of the programs sees the sinks
        for tile in tl.range(tl.cdiv(held, TILE), num_stages=1):
            z, live = _logits(
                x, ring, tile, bh, 0, held, ring_rows, scale, softcap, True, True, CAPPED, False, D, DP, TILE
            )
            top, total = _fold(z, live, unit, top, total, ASM)
        for tile in tl.range(sink // TILE + part, tl.cdiv(end, TILE), parts, num_stages=STAGES):
            z, live = _logits(
                x, pool, tile, bh, sink, end, rows, scale, softcap, True, False, CAPPED, COARSE, D, DP, TILE
            )
            top, total = _fold(z, live, unit, top, total, ASM)
        at = (bh * parts + part) * padded + first + tl.arange(0, Q)
        tl.store(tops + at, top)
        tl.store(totals + at, total)


@triton.jit
def _log_sums(tops, totals, at, there, parts, padded, Q: tl.constexpr):
    """Of the queries there are the log2 of the sum, from what all programs found; of the others infinity."""
    top = tl.full((Q,), float("-inf"), tl.float32)
    for other in range(parts):
        top = tl.maximum(top, tl.load(tops + at + other * padded))
    total = tl.zeros((Q,), tl.float32)
    for other in range(parts):
        away = tl.where(there, tl.load(tops + at + other * padded) - top, 0.0)
        total += tl.load(totals + at + other * padded) * tl.exp2(away)
    return tl.where(there, top + tl.log2(tl.where(there, total, 1.0)), float("inf"))


@triton.jit
def _score(
    queries, pool, tops, totals, scores, peaks, b, h, bh, part, parts, heads, n, end, sink, window, rows, scale,
    softcap, padded, groups, CAPPED: tl.constexpr, COARSE: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr, Q: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Scores and peaks of all tiles of this program, also of those behind the last token."""
    i, tiles, unit = tl.arange(0, TILE), tl.cdiv(end, TILE), _unit(scale, CAPPED)
    for first in range(0, padded, Q):
        x, there = _asking(queries, first, b, h, n, heads, window, G, D, DP, Q, COARSE)
        whole = _log_sums(tops, totals, bh * parts * padded + first + tl.arange(0, Q), there, parts, padded, Q)
        for tile in tl.range(part, tiles, parts, num_stages=STAGES):
            z, live = _logits(
                x, pool, tile, bh, sink, end, rows, scale, softcap, False, False, CAPPED, COARSE, D, DP, TILE
            )
            pos = tile * TILE + i
            mass = tl.sum(_exp2(z * unit - whole[None, :], ASM), 1)
            mass += tl.load(scores + bh * rows + pos, mask=live & (first > 0), other=0.0)
            mass = tl.where((mass == mass) | (first + Q < padded), mass, 0.0)  # the sum of all is what may be no number
            mass = tl.where(live, mass, float("-inf"))
            tl.store(scores + bh * rows + pos, mass, mask=pos < rows)
            store_peaks(peaks + bh * groups, mass, tile * TILE, rows, TILE, GROUP)
    nothing = tl.full((TILE,), float("-inf"), tl.float32)
    for tile in range(part + tl.cdiv(tl.maximum(tiles - part, 0), parts) * parts, tl.cdiv(rows, TILE), parts):
        tl.store(scores + bh * rows + tile * TILE + i, nothing, mask=tile * TILE + i < rows)
        store_peaks(peaks + bh * groups, nothing, tile * TILE, rows, TILE, GROUP)


@triton.jit
def choose_anew(
    queries, ids, count, target, updated, at, lead, every, updates, arrived, gone, ring, keys, length, ring_begin, tops,
    totals, scores, peaks, listed, heads, sink, window, ring_rows, rows, scale, softcap, padded, groups, most,
    FIRST: tl.constexpr, LAST: tl.constexpr, STAY: tl.constexpr, CAPPED: tl.constexpr, COARSE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, Q: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, L: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """All phases of a head. Whether it is due; with STAY its programs are to meet again then. Phases before the first
    are what else the launch does."""
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b, h = bh // heads, bh % heads
    n, end, have = tl.load(length + b), tl.load(ring_begin + b), tl.load(count + bh)
    last, want, interval, told = tl.load(at + bh), tl.load(target + bh), tl.load(every + bh), tl.load(updated + bh)
    due = (n > 0) & ((last == NOT_SINCE) | (n - last >= interval) | (have < tl.minimum(want, end - sink)))
    if (FIRST <= 0) & (part == 0) & (told != due.to(tl.int32)):
        tl.store(updated + bh, due.to(tl.int32))
    if due:
        if FIRST < 0:
            grid_barrier(arrived + bh, parts)
        if FIRST <= 0:
            _sum_up(
                queries, ring, keys, tops, totals, b, h, bh, part, parts, heads, n, end, sink, window, ring_rows, rows,
                scale, softcap, padded, CAPPED, COARSE, G, D, DP, TILE, Q, STAGES, ASM,
            )  # fmt: skip
        if (FIRST <= 1) & (LAST > 1):
            if FIRST < 1:
                grid_barrier(arrived + bh, parts)
            _score(
                queries, keys, tops, totals, scores, peaks, b, h, bh, part, parts, heads, n, end, sink, window, rows,
                scale, softcap, padded, groups, CAPPED, COARSE, G, D, DP, TILE, Q, STAGES, GROUP, ASM,
            )  # fmt: skip
        if (FIRST <= 2) & (LAST > 2):
            if FIRST < 2:
                grid_barrier(arrived + bh, parts)
                if not STAY:
                    leave_grid_barrier(arrived + bh, gone + bh, parts)
            if part == 0:
                best_of_peaks(
                    scores + bh * rows, peaks + bh * groups, ids + bh * most, listed + bh * L, rows, groups, want,
                    most, GROUP, N, L,
                )  # fmt: skip
                tl.store(count + bh, tl.minimum(want, end - sink))
                tl.store(at + bh, tl.where(last == NOT_SINCE, n - tl.load(lead + bh), n))
                tl.store(updates + bh, tl.load(updates + bh) + 1)
    return due


@triton.jit
def _choose(
    queries, ids, count, target, updated, at, lead, every, updates, arrived, gone, ring, keys, length, ring_begin, tops,
    totals, scores, peaks, listed, heads, sink, window, ring_rows, rows, scale, softcap, padded, groups, most,
    FIRST: tl.constexpr, LAST: tl.constexpr, CAPPED: tl.constexpr, COARSE: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, Q: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, N: tl.constexpr, L: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    choose_anew(
        queries, ids, count, target, updated, at, lead, every, updates, arrived, gone, ring, keys, length,
        ring_begin, tops, totals, scores, peaks, listed, heads, sink, window, ring_rows, rows, scale, softcap,
        padded, groups, most, FIRST, LAST, False, CAPPED, COARSE, G, D, DP, TILE, Q, STAGES, GROUP, N, L, ASM,
    )  # fmt: skip


def _share(device: torch.device, row_bytes: int) -> Share:
    if shared_bytes(device) < ROOMY:
        return SMALL
    return PAIR if row_bytes == PAIRED else LARGE


def arguments(observed, static, store, coarse, lengths, attention) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and what `choose_anew` takes by name, but for its phases."""
    (queries,), (ring, pool) = observed, store
    (batch, heads, rows), d = pool.shape[:3], queries.shape[3]
    window, group, most = queries.shape[1], queries.shape[2] // heads, static.ids.shape[2]
    row_bytes = next_power_of_2(d) * queries.element_size()
    query_bytes, key_bytes, warps, beside = _share(pool.device, row_bytes)
    parts = parts_of(pool.device, batch * heads, cdiv(rows, TILE), beside)
    width = max(16, min(query_bytes // row_bytes, next_power_of_2(window * group)))
    stages = max(1, min(3, key_bytes // (TILE * row_bytes)))
    padded, groups, lanes = cdiv(window * group, width) * width, cdiv(rows, GROUP), next_power_of_2(most)
    new = lambda *shape, dtype=torch.float32: torch.empty((batch * heads, *shape), dtype=dtype, device=pool.device)  # noqa: E731
    return (batch * heads, parts), dict(
        queries=queries, **{name: getattr(static, name) for name in READ}, ring=ring, keys=copied(pool, coarse),
        length=lengths.length, ring_begin=lengths.ring_begin, tops=new(parts, padded), totals=new(parts, padded),
        scores=new(rows), peaks=new(groups), listed=new(lanes, dtype=torch.int32),
        heads=heads, sink=lengths.sink, window=window, ring_rows=ring.shape[2], rows=rows, scale=attention.scale,
        softcap=attention.softcap, padded=padded, groups=groups, most=most, CAPPED=attention.softcap > 0,
        COARSE=coarse is not None, G=group, D=d, DP=next_power_of_2(d), TILE=TILE, Q=width,
        STAGES=stages, GROUP=GROUP, N=next_power_of_2(groups), L=lanes, ASM=EXP2 if compiles(pool.device) else "",
        num_warps=warps,
    )  # fmt: skip


def launch(*things) -> None:
    grid, given = arguments(*things)
    device = given["queries"].device
    for phase in phases(device, grid[1], PHASES):
        _choose[grid](**given, **phase, **launch_early(device, grid[0] * grid[1]))


choose_static = register("choose_static", reference, impls=(by_triton(launch),), check=check)
