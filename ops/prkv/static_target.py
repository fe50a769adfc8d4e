"""How many tokens are to be static: as many as the first and the last query of the observation window agree on.

At the first step after a prompt, per query head, the `k` tokens with the largest weights for the first query of the
window and those for the last one; how many are in both, averaged over the query heads of the layer (or, `per_head`, of
a kv head), in whole intervals, rounded down, is `static.target` (PRKV, appendix G, formulas 4 and 5). Weights are in
the order of the products q.k, so these are what is compared; ties go to the lower row. On other steps nothing happens.

One launch (ops/_machinery/grid_barrier.py). In its phases a head's programs find the products, then share the query heads among them; the
last one to finish of those that decide together counts.
"""
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
from torchsparsekv.ops.prkv.views import Static
from torchsparsekv.ops.select._top import GROUP, store_peaks
from torchsparsekv.ops.select.top_blocks import best_of_peaks
from torchsparsekv.ops.store.views import Lengths, Observed, Pool

TILE = 64  # keys at a time
MATCHED = 16  # tokens of one of two lists that are looked for in the other at a time
PHASES = 2


def check(observed, static, pool, coarse, lengths, k, per_head) -> None:
    _check.heads(observed.queries.transpose(1, 2), pool)
    if not 0 < k <= static.ids.shape[2]:
        raise ValueError(f"k must be from 1 to the {static.ids.shape[2]} tokens that there is room for, got {k}")


def agreed(first: Tensor, last: Tensor, keys: Tensor, k: int) -> int:
    """Of one query head: how many of the k best keys for one query are among those for the other."""
    best = [(keys.float() @ x.float()).argsort(descending=True, stable=True)[:k] for x in (first, last)]
    return int(torch.isin(*best).sum())


def reference(
    observed: Observed, static: Changed[Static], pool: Pool, coarse: Coarse | None, lengths: Lengths, k: int,
    per_head: bool,
) -> None:  # fmt: skip
    (queries,), heads = observed, pool.shape[1]
    window, group = queries.shape[1], queries.shape[2] // heads
    for b, (n, end) in enumerate(torch.stack([lengths.length, lengths.ring_begin], 1).tolist()):
        if n <= 0 or static.at[b, 0] != NOT_YET:
            continue
        first, last = queries[b, max(n - window, 0) % window], queries[b, (n - 1) % window]
        behind = keys_in(pool, coarse, b, slice(None), slice(lengths.sink, end)).to(queries.dtype)
        keys = behind.float().repeat_interleave(group, 0)
        both = [agreed(*x, k) for x in zip(first, last, keys)]
        both = torch.tensor(both).view((heads, group) if per_head else (1, heads * group))
        static.target[b] = (both.sum(1) // (both.shape[1] * lengths.interval) * lengths.interval).to(torch.int32)


@triton.jit
def _products(
    queries, pool, scores, peaks, bh, h, part, parts, n, end, sink, window, rows, groups, queries_h,
    COARSE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Of all keys with the first query of the window (rows 0 to G of `scores`) and the last, of each query head."""
    g, d, i = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, TILE)
    m = (g < 2 * G)[:, None] & (d < D)[None, :]
    token = tl.where(g < G, tl.maximum(n - window, 0), n - 1)
    kept = (token % window) * queries_h + (h * G + g % G) * D
    x = tl.load(queries + kept[:, None] + d[None, :], mask=m, other=0.0)
    for tile in range(part, tl.cdiv(rows, TILE), parts):
        pos = tile * TILE + i
        live = (pos >= sink) & (pos < end)
        k = key_of(pool, bh, pos[:, None], d[None, :], live[:, None], rows, D, COARSE).to(x.dtype)
        z = tl.dot(x, tl.trans(k), input_precision="ieee")
        z = tl.where(live[None, :], z, float("-inf"))
        for one in range(2 * G):
            mine = tl.max(tl.where((g == one)[:, None], z, float("-inf")), 0)
            at = bh * 2 * G + one
            tl.store(scores + at * rows + pos, mine, mask=pos < rows)
            store_peaks(peaks + at * groups, mine, tile * TILE, rows, TILE, GROUP)


@triton.jit
def _agree(
    scores, peaks, lists, scratch, rows, groups, k, GROUP: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    L: tl.constexpr, MATCHED: tl.constexpr,
):  # fmt: skip
    """Of one query head, whose products are at `scores` and, of the other query, G further on."""
    best_of_peaks(scores, peaks, lists, scratch, rows, groups, k, L, GROUP, N, L)
    tl.debug_barrier()
    best_of_peaks(scores + G * rows, peaks + G * groups, lists + L, scratch, rows, groups, k, L, GROUP, N, L)
    tl.debug_barrier()
    mine = tl.load(lists + tl.arange(0, L))
    both = 0
    for first in range(0, L, MATCHED):
        other = tl.load(lists + L + first + tl.arange(0, MATCHED))
        alike = (mine[:, None] == other[None, :]) & (mine >= 0)[:, None]
        both += tl.sum(tl.sum(alike.to(tl.int32), 1), 0)
    return both


@triton.jit
def _target(
    queries, target, last, done, arrived, gone, pool, length, ring_begin, scores, peaks, lists, scratch, both, heads,
    sink, window, rows, groups, k, FIRST: tl.constexpr, LAST: tl.constexpr, PER_HEAD: tl.constexpr,
    COARSE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, L: tl.constexpr, HG: tl.constexpr, MATCHED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b, h = bh // heads, bh % heads
    n, end = tl.load(length + b), tl.load(ring_begin + b)
    if (n > 0) & (tl.load(last + bh) == NOT_SINCE):
        if FIRST == 0:
            _products(
                queries + b * window * heads * G * D, pool, scores, peaks, bh, h, part, parts, n, end, sink, window,
                rows, groups, heads * G * D, COARSE, G, GP, D, DP, TILE, GROUP,
            )  # fmt: skip
        if LAST > 1:
            if FIRST < 1:
                grid_barrier(arrived + bh, parts)
                leave_grid_barrier(arrived + bh, gone + bh, parts)
            for g in range(part, G, parts):
                at = bh * 2 * G + g
                own = bh * parts + part
                count = _agree(
                    scores + at * rows, peaks + at * groups, lists + own * 2 * L, scratch + own * L, rows, groups, k,
                    GROUP, G, N, L, MATCHED,
                )  # fmt: skip
                tl.store(both + bh * G + g, count)
                tl.debug_barrier()
            first, among = b * heads, heads
            if PER_HEAD:
                first, among = bh, 1
            tl.debug_barrier()
            if tl.atomic_add(done + first, 1) == among * parts - 1:  # all heads that decide together have counted
                i = tl.arange(0, HG)
                total = tl.sum(tl.load(both + first * G + i, mask=i < among * G, other=0), 0)
                tl.store(target + first + i, (total // (among * G * P) * P).to(tl.int32) + 0 * i, mask=i < among)
                tl.store(done + first, 0)


def launch(observed, static, pool, coarse, lengths, k, per_head) -> None:
    (queries,) = observed
    (batch, heads, rows), d = pool.shape[:3], queries.shape[3]
    group, all_heads = queries.shape[2] // heads, batch * heads
    parts = parts_of(pool.device, all_heads, cdiv(rows, TILE))
    groups, lanes = cdiv(rows, GROUP), max(MATCHED, next_power_of_2(k))
    new = lambda *shape, dtype=torch.int32: torch.empty(shape, dtype=dtype, device=pool.device)  # noqa: E731
    scores, peaks = (new(all_heads, 2 * group, n, dtype=torch.float32) for n in (rows, groups))
    lists, scratch, both = new(all_heads, parts, 2, lanes), new(all_heads, parts, lanes), new(all_heads, group)
    for phase in phases(pool.device, parts, PHASES):
        _target[(all_heads, parts)](
            queries, static.target, static.at, static.done, static.arrived, static.gone, copied(pool, coarse),
            lengths.length, lengths.ring_begin, scores, peaks, lists, scratch, both, heads, lengths.sink,
            queries.shape[1], rows, groups, k, **phase, PER_HEAD=per_head, COARSE=coarse is not None, G=group,
            GP=max(16, next_power_of_2(2 * group)), P=lengths.interval, D=d, DP=next_power_of_2(d), TILE=TILE,
            GROUP=GROUP, N=next_power_of_2(groups), L=lanes,
            HG=next_power_of_2(heads * group), MATCHED=MATCHED, num_warps=8, num_stages=1,
            **launch_early(pool.device, all_heads * parts),
        )  # fmt: skip


static_target = register("static_target", reference, impls=(by_triton(launch),), check=check)
