"""Write the newest token of every sequence into the ring, and copy the tokens that leave the ring into the pool.

    ring[ring_row(length - 1)] = (k, v)
    pool[previous_ring_begin : ring_begin] = the ring rows of these positions
    observed[(length - 1) % window] = q         if the method keeps the latest queries
    rest.sums[g] += (sum of the leaving rows of group g) / group    if the step estimates the rest

A pool without rows takes nothing. Rows with length -1 or 0 change nothing.

Args:
    token: k, v [batch, heads, 1, dim]; q [batch, q_heads, 1, dim] if `observed` is given.
    store: ring and pool, both changed.
    stats: adds 1 to steps, length to context, and the tokens that attention reads in the ring to in_ring.
    observed [batch, window, q_heads, dim]: the latest queries (ops/index/observe.py).
    rest: sums [batch, heads, groups, 2, dim], changed for the groups of the leaving tokens.

Launches: batch * heads * cdiv(interval, TILE) programs. In most steps no token leaves, and only the first program of
each head has work; every `interval` steps each program copies up to TILE rows, straight into host memory if the pool is
there. With `rest` a program also adds up the groups whose first leaving token is among its rows.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.rest.views import NO_REST, Rest, check_groups
from torchsparsekv.ops.store.rows import (
    CONTEXT,
    IN_RING,
    STEPS,
    add_count,
    as_stored,
    count,
    in_row,
    new_row,
    ring_row,
    ring_row_of,
    row_at,
    row_width,
    rows_of,
    store_row,
)  # fmt: skip
from torchsparsekv.ops.store.views import KVStore, Lengths, ObservedQueries, Stats, Token

TILE = 16  # rows a program copies at once: 8 KiB at head_dim 128 in bf16, which saturates writes to the host


def check(token, store, stats, lengths, observed=None, rest=NO_REST) -> None:
    if rest.sums is not None:
        check_groups(rest, store.pool.shape[2])
    if store.ring.shape[2] < lengths.sink + lengths.interval:
        raise ValueError(
            f"a ring of {store.ring.shape[2]} rows cannot hold {lengths.sink} sink rows and the "
            f"{lengths.interval} rows that leave together"
        )
    if (token.q is None) != (observed is None):
        raise ValueError("give token.q and observed, both or neither")
    if token.q is not None:
        _check.heads(token.q, store.ring)


def reference(
    token: Token, store: Changed[KVStore], stats: Changed[Stats], lengths: Lengths,
    observed: Changed[ObservedQueries | None] = None, rest: Changed[Rest] = NO_REST,
) -> None:  # fmt: skip
    (k, v, q), (ring, pool), sink = token, store, lengths.sink
    for b in range(k.shape[0]):
        n, old, new = (int(t[b]) for t in (lengths.length, lengths.previous_ring_begin, lengths.ring_begin))
        if n <= 0:
            continue
        at = int(ring_row(torch.tensor(n - 1), sink, ring.shape[2]))
        ring[b, :, at] = rows_of(k[b, :, 0], v[b, :, 0])
        if new > old and pool.shape[2]:
            leaving = ring[b, :, ring_row(torch.arange(old, new), sink, ring.shape[2])]
            pool[b, :, old:new] = as_stored(leaving, pool)
            _add(leaving.float(), old, rest._replace(sums=None if rest.sums is None else rest.sums[b]))
        if q is not None and observed is not None:
            observed[b, (n - 1) % observed.shape[1]] = q[b, :, 0]
        count(stats.counts[b], steps=1, context=n, in_ring=min(n, sink) + max(n - new, 0))


def _add(leaving: Tensor, first: int, rest: Rest) -> None:
    """Add the rows [heads, tokens, 2, dim] of the positions from `first` on to the sums of a row of the batch."""
    sums, group = rest[:2]
    if sums is not None:
        of = torch.arange(first, first + leaving.shape[1], device=sums.device) // group
        sums.copy_(sums.float().index_add(1, of, leaving / group))


@triton.jit
def _keep(
    q, queries, b, h, n, q_b, q_h, heads, window, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """Store the queries of the group of kv head `h` in the observation window. The program loads them before it knows
    that the row has a token, so that it waits for memory only once."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    there = (d < D)[None, :]
    x = tl.load(q + b * q_b + (h * G + g[:, None]) * q_h + d[None, :], mask=(g < G)[:, None] & there, other=0.0)
    kept = (b * window + (n - 1) % window) * heads * G + h * G + g
    tl.store(queries + kept[:, None] * D + d[None, :], x, mask=(g < tl.where(n > 0, G, 0))[:, None] & there)


@triton.jit(do_not_specialize=["ring_rows"])
def _append(
    k, v, q, ring, pool, counts, queries, sums, length, previous_ring_begin, ring_begin, k_b, k_h, v_b, v_h, q_b, q_h,
    heads, ring_rows, pool_rows, groups, sink, window, KEEP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    b, h = bh // heads, bh % heads
    n = tl.load(length + b)
    old, new = tl.load(previous_ring_begin + b), tl.load(ring_begin + b)
    if KEEP:  # noqa: SIM102 (KEEP is a constant of the compilation)
        if part == 0:
            _keep(q, queries, b, h, n, q_b, q_h, heads, window, G, GP, D, DP)
    if n > 0:
        span = ring_rows - sink
        c = tl.arange(0, ROW)
        live = in_row(c, D)
        newest = new_row(k + b * k_b + h * k_h, v + b * v_b + h * v_h, c, D)
        ring = row_at(ring, bh, 0, ring_rows, D)
        if part == 0:
            tl.store(row_at(ring, 0, ring_row_of(n - 1, sink, span), ring_rows, D) + c, newest, mask=live)
            add_count(counts, bh, STEPS, 1)
            add_count(counts, bh, CONTEXT, n)
            add_count(counts, bh, IN_RING, tl.minimum(n, sink) + tl.maximum(n - new, 0))
        if (old + part * TILE < new) & (pool_rows > 0):
            pos = old + part * TILE + tl.arange(0, TILE)
            m = (pos < new)[:, None] & live[None, :]
            at = ring_row_of(pos, sink, span)
            rows = tl.load(row_at(ring, 0, at[:, None], ring_rows, D) + c[None, :], mask=m, other=0.0)
            # With window 0 the newest token leaves in the same step, and another program may still write its ring row.
            rows = tl.where((pos == n - 1)[:, None], newest[None, :], rows)
            to = row_at(pool, bh, pos[:, None], pool_rows, D)
            store_row(to, c[None, :], rows, (pos < new)[:, None], live[None, :], D)
            if GROUP > 0:
                first, end = old + part * TILE, tl.minimum(new, old + part * TILE + TILE)
                begun = tl.where(part == 0, old // GROUP, tl.cdiv(first, GROUP))
                for g in range(begun, tl.cdiv(end, GROUP)):
                    row = row_at(sums, bh, g, groups, D) + c
                    total = tl.zeros((ROW,), tl.float32)
                    for some in range(tl.maximum(g * GROUP, old), tl.minimum(g * GROUP + GROUP, new), TILE):
                        pos = some + tl.arange(0, TILE)
                        m = (pos < tl.minimum(g * GROUP + GROUP, new))[:, None] & live[None, :]
                        at = ring_row_of(pos, sink, span)
                        rows = tl.load(row_at(ring, 0, at[:, None], ring_rows, D) + c[None, :], mask=m, other=0.0)
                        rows = tl.where((pos == n - 1)[:, None] & m, newest[None, :], rows)
                        total += tl.sum(rows.to(tl.float32), 0)
                    total = tl.load(row, mask=live, other=0.0).to(tl.float32) + total / GROUP
                    tl.store(row, total.to(sums.dtype.element_ty), mask=live)


def launch(token, store, stats, lengths, observed=None, rest=NO_REST) -> None:
    (k, v, q), (ring, pool), (sums, rest_group) = token, store, rest[:2]
    batch, heads, ring_rows, _, d = ring.shape
    parts, keep = cdiv(lengths.interval, TILE), q is not None
    q, queries = (q, observed) if keep else (k, k)  # without KEEP the kernel reads neither
    group = q.shape[1] // heads
    _append[(batch * heads, parts)](
        k, v, q, ring, pool, stats.counts, queries, ring if sums is None else sums, lengths.length,
        lengths.previous_ring_begin, lengths.ring_begin, *k.stride()[:2], *v.stride()[:2], *q.stride()[:2], heads,
        ring_rows, pool.shape[2], 0 if sums is None else sums.shape[2], lengths.sink, queries.shape[1], KEEP=keep,
        G=group, GP=next_power_of_2(group), D=d, DP=next_power_of_2(d), ROW=next_power_of_2(row_width(d)), TILE=TILE,
        GROUP=rest_group, **launch_early(ring.device, batch * heads * parts),
    )  # fmt: skip


append = register("append", reference, impls=(by_triton(launch),), check=check)
