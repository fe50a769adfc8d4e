"""Find how many tokens the static set is to have: as many as two queries of the observation window agree on.

At the first step after a prompt, with the first and the last query of the window, and the k retrievable tokens of
each that have the largest products q.key (ties go to the lower row):

    agreed[g] = |top_k(first[g]) & top_k(last[g])|,  for each query head g
    target    = mean of agreed[g] over the query heads of the layer, or `per_head` of a kv head,
                rounded down to whole intervals

A softmax keeps the order of the products, so the tokens with the largest products have the largest weights.

PRKV, appendix G, formulas 4 and 5.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.grid_barrier import grid_barrier, leave_grid_barrier, parts_of, phases
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.index.copy_keys import Coarse, copied, key_of, keys_in
from torchsparsekv.ops.index.observe import NOT_SINCE, NOT_YET
from torchsparsekv.ops.prkv.choose_static import ARRIVED, COUNTERS, DONE, LEFT
from torchsparsekv.ops.prkv.views import StaticSet
from torchsparsekv.ops.select._top import GROUP, store_peaks
from torchsparsekv.ops.select.top_blocks import best_of_peaks
from torchsparsekv.ops.store.views import Lengths, Observed, Pool

TILE = 64  # keys at a time
MATCHED = 16  # tokens of one list that are looked for in the other list at a time
PHASES = 2


class Scratch(NamedTuple):
    """Buffers for one launch. The products of the first query come before those of the last query, each for all query
    heads."""

    scores: Tensor  # [batch * heads, 2 * group, rows]: the products
    peaks: Tensor  # [batch * heads, 2 * group, groups]
    lists: Tensor  # [batch * heads, parts, 2, best]: the best tokens for the first and the last query
    listed: Tensor  # [batch * heads, parts, best]: room for best_of_peaks
    agreed: Tensor  # [batch * heads, group]


class Compiled(NamedTuple):
    """Sizes and options that the kernel is compiled for."""

    per_head: bool
    coarse: bool  # keys are read from the fp8 copy
    group: int  # query heads of a kv head
    pairs: int  # 2 * group, rounded up to a power of two
    interval: int
    dim: int
    padded: int  # dim, rounded up to a power of two
    tile: int
    scores: int  # of a group with one peak
    groups: int  # groups of scores, rounded up to a power of two
    best: int  # k, rounded up to a power of two
    deciding: int  # query heads of the layer, rounded up to a power of two
    matched: int  # MATCHED


def check(observed, static, pool, coarse, lengths, k, per_head) -> None:
    _check.heads(observed.queries.transpose(1, 2), pool)
    if not 0 < k <= static.ids.shape[2]:
        raise ValueError(f"k must be from 1 to the {static.ids.shape[2]} tokens that there is room for, got {k}")


def agreed(first: Tensor, last: Tensor, keys: Tensor, k: int) -> int:
    """How many of the k best keys [tokens, dim] for one query [dim] are among the k best for the other query."""
    best = [(keys.float() @ x.float()).argsort(descending=True, stable=True)[:k] for x in (first, last)]
    return int(torch.isin(*best).sum())


def reference(
    observed: Observed, static: Changed[StaticSet], pool: Pool, coarse: Coarse | None, lengths: Lengths, k: int,
    per_head: bool,
) -> None:  # fmt: skip
    """Find how many tokens the static set is to have: as many as two queries of the observation window agree on.

    Args:
        observed: the observation window, queries [batch, window, q_heads, dim].
        static: the sets; `target` of heads that have not chosen since the last prompt is set.
        pool: [batch, heads, rows, 2, dim].
        coarse: the fp8 copy of the keys [batch, heads, rows, dim], read in place of the pool. None: the pool is read.
            The order of the products of a query does not depend on the origin and the unit of the copy.
        lengths: retrievable tokens lie from `sink` up to `ring_begin`; targets are multiples of `interval`.
        k: how many best tokens of each query are compared; at most the room of a set.
        per_head: each kv head has a target of its own, else the layer has one.

    Launches:
        One kernel of batch * heads x parts programs, all on the GPU at once, which meet at a grid barrier between its
        phases. 1: each program stores the products of its tiles of keys. 2: it compares the lists of its share of the
        query heads; the last program to finish stores the target. On all other steps a program returns after reading
        `chosen_at`.
    """
    (queries,), heads = observed, pool.shape[1]
    window, group = queries.shape[1], queries.shape[2] // heads
    for b, (n, end) in enumerate(torch.stack([lengths.length, lengths.ring_begin], 1).tolist()):
        if n <= 0 or static.chosen_at[b, 0] != NOT_YET:
            continue
        first, last = queries[b, max(n - window, 0) % window], queries[b, (n - 1) % window]
        retrievable = keys_in(pool, coarse, b, slice(None), slice(lengths.sink, end)).to(queries.dtype)
        keys = retrievable.float().repeat_interleave(group, 0)
        counts = torch.tensor([agreed(*x, k) for x in zip(first, last, keys)])
        counts = counts.view((heads, group) if per_head else (1, heads * group))
        target = counts.sum(1) // (counts.shape[1] * lengths.interval) * lengths.interval
        static.target[b] = target.to(torch.int32)


@triton.jit
def _products(
    queries, keys, scratch, b, h, bh, part, parts, n, end, sink, heads, window, rows, groups, C: tl.constexpr
):
    """Phase 1: the products of the keys of this program's tiles with the first query of the window (rows 0 to group of
    `scratch.scores`) and with the last query (the rows after these)."""
    g, d, i = tl.arange(0, C.pairs), tl.arange(0, C.padded), tl.arange(0, C.tile)
    m = (g < 2 * C.group)[:, None] & (d < C.dim)[None, :]
    token = tl.where(g < C.group, tl.maximum(n - window, 0), n - 1)
    queries += b * window * heads * C.group * C.dim
    row = (token % window) * (heads * C.group * C.dim) + (h * C.group + g % C.group) * C.dim
    x = tl.load(queries + row[:, None] + d[None, :], mask=m, other=0.0)  # [pairs, padded]
    for tile in range(part, tl.cdiv(rows, C.tile), parts):
        pos = tile * C.tile + i
        live = (pos >= sink) & (pos < end)
        k = key_of(keys, bh, pos[:, None], d[None, :], live[:, None], rows, C.dim, C.coarse).to(x.dtype)
        z = tl.dot(x, tl.trans(k), input_precision="ieee")  # [pairs, tile]
        z = tl.where(live[None, :], z, float("-inf"))
        for pair in range(2 * C.group):
            product = tl.max(tl.where((g == pair)[:, None], z, float("-inf")), 0)
            at = bh * 2 * C.group + pair
            tl.store(scratch.scores + at * rows + pos, product, mask=pos < rows)
            store_peaks(scratch.peaks + at * groups, product, tile * C.tile, rows, C.tile, C.scores)


@triton.jit
def _count_agreed(scores, peaks, lists, listed, rows, groups, k, C: tl.constexpr):
    """How many tokens both lists of a query head have. `scores` are the products of the first query; those of the last
    query lie `group` rows further on."""
    best_of_peaks(scores, peaks, lists, listed, rows, groups, k, C.best, C.scores, C.groups, C.best)
    tl.debug_barrier()
    scores, peaks = scores + C.group * rows, peaks + C.group * groups
    best_of_peaks(scores, peaks, lists + C.best, listed, rows, groups, k, C.best, C.scores, C.groups, C.best)
    tl.debug_barrier()
    one = tl.load(lists + tl.arange(0, C.best))
    count = 0
    for first in range(0, C.best, C.matched):
        other = tl.load(lists + C.best + first + tl.arange(0, C.matched))
        same = (one[:, None] == other[None, :]) & (one >= 0)[:, None]
        count += tl.sum(tl.sum(same.to(tl.int32), 1), 0)
    return count


@triton.jit
def _target(
    observed, static, keys, lengths, scratch, heads, window, rows, groups, k, FIRST: tl.constexpr, LAST: tl.constexpr,
    C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b, h, sink = bh // heads, bh % heads, lengths.sink
    n, end = tl.load(lengths.length + b), tl.load(lengths.ring_begin + b)
    barrier = static.barrier + bh * COUNTERS
    if (n > 0) & (tl.load(static.chosen_at + bh) == NOT_SINCE):
        if FIRST == 0:
            _products(
                observed.queries, keys, scratch, b, h, bh, part, parts, n, end, sink, heads, window, rows, groups, C
            )
        if LAST > 1:
            if FIRST < 1:
                grid_barrier(barrier + ARRIVED, parts)
                leave_grid_barrier(barrier + ARRIVED, barrier + LEFT, parts)
            for g in range(part, C.group, parts):
                at = bh * 2 * C.group + g
                program = bh * parts + part
                count = _count_agreed(
                    scratch.scores + at * rows, scratch.peaks + at * groups, scratch.lists + program * 2 * C.best,
                    scratch.listed + program * C.best, rows, groups, k, C,
                )  # fmt: skip
                tl.store(scratch.agreed + bh * C.group + g, count)
                tl.debug_barrier()
            first, deciding = b * heads, heads
            if C.per_head:
                first, deciding = bh, 1
            done = static.barrier + first * COUNTERS + DONE
            tl.debug_barrier()
            if tl.atomic_add(done, 1) == deciding * parts - 1:  # all heads that decide together have counted
                i = tl.arange(0, C.deciding)
                total = tl.sum(tl.load(scratch.agreed + first * C.group + i, mask=i < deciding * C.group, other=0), 0)
                target = (total // (deciding * C.group * C.interval) * C.interval).to(tl.int32) + 0 * i
                tl.store(static.target + first + i, target, mask=i < deciding)
                tl.store(done, 0)


def launch(observed, static, pool, coarse, lengths, k, per_head) -> None:
    (queries,) = observed
    (batch, heads, rows), d = pool.shape[:3], queries.shape[3]
    window, group, all_heads = queries.shape[1], queries.shape[2] // heads, batch * heads
    parts = parts_of(pool.device, all_heads, cdiv(rows, TILE))
    groups, best = cdiv(rows, GROUP), max(MATCHED, next_power_of_2(k))
    new = lambda *shape, dtype=torch.int32: torch.empty(shape, dtype=dtype, device=pool.device)  # noqa: E731
    scores, peaks = (new(all_heads, 2 * group, n, dtype=torch.float32) for n in (rows, groups))
    scratch = Scratch(
        scores, peaks, new(all_heads, parts, 2, best), new(all_heads, parts, best), new(all_heads, group)
    )
    compiled = Compiled(
        per_head=per_head, coarse=coarse is not None, group=group, pairs=max(16, next_power_of_2(2 * group)),
        interval=lengths.interval, dim=d, padded=next_power_of_2(d), tile=TILE, scores=GROUP,
        groups=next_power_of_2(groups), best=best, deciding=next_power_of_2(heads * group), matched=MATCHED,
    )  # fmt: skip
    for phase in phases(pool.device, parts, PHASES):
        _target[(all_heads, parts)](
            observed, static, copied(pool, coarse), lengths, scratch, heads, window, rows, groups, k, **phase,
            C=compiled, num_warps=8, num_stages=1, **launch_early(pool.device, all_heads * parts),
        )  # fmt: skip


static_target = register("static_target", reference, impls=(by_triton(launch),), check=check)
