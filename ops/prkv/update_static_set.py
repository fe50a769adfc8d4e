"""Summarise what left in a decode step, choose the static set anew where it is due, and let it move to the front:
block_bounds, choose_static and relocate in one launch.

What they do is said there; the keys of what left are in the pool by now. At most steps none of them has anything to do,
and then a launch is what they cost.
"""
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.fp8 import FP8_MAX
from torchsparsekv.ops._machinery.grid_barrier import phases
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, tl, triton, wait_for_previous
from torchsparsekv.ops.index import block_bounds as bounding
from torchsparsekv.ops.index.copy_keys import Coarse
from torchsparsekv.ops.prkv import choose_static as choosing
from torchsparsekv.ops.prkv import relocate as moving
from torchsparsekv.ops.prkv.views import Static
from torchsparsekv.ops.store.views import Attention, Digests, Hot, KVStore, Leaving, Lengths, Observed

PHASES = 1 + choosing.PHASES + moving.PHASES
MOVING = tl.constexpr(1 + choosing.PHASES)  # the first phase of what comes last


def apart(observed, static, store, coarse, hot, digests, lengths, attention) -> tuple[tuple, tuple, tuple]:
    """The arguments of each of the three ops."""
    batch, heads, _, _, d = store.ring.shape
    no_keys = observed.queries.new_empty(batch, heads, 0, d)
    return (
        (Leaving(no_keys, store.pool), digests, lengths, coarse),
        (observed, static, store, coarse, lengths, attention),
        (static, store.pool, coarse, hot, digests, lengths.sink),
    )


def check(*things) -> None:
    for op, its in zip((bounding, choosing, moving), apart(*things)):
        op.check(*its)


def reference(
    observed: Observed, static: Changed[Static], store: Changed[KVStore], coarse: Changed[Coarse | None],
    hot: Changed[Hot], digests: Changed[Digests], lengths: Lengths, attention: Attention,
) -> None:  # fmt: skip
    arguments = apart(observed, static, store, coarse, hot, digests, lengths, attention)
    for op, its in zip((bounding, choosing, moving), arguments):
        op.reference(*its)


@triton.jit
def _summarise(
    like, pool, centre, spread, coarse, length, previous_ring_begin, ring_begin, heads, rows, blocks,
    COPY: tl.constexpr, BALL: tl.constexpr, MEAN: tl.constexpr, LIMIT: tl.constexpr, MAX: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """The blocks that left, shared out among the programs of a head. Keys count in the type of `like`."""
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b, h = bh // heads, bh % heads
    n, old, new = tl.load(length + b), tl.load(previous_ring_begin + b), tl.load(ring_begin + b)
    for block in range(old // P + part, tl.where(n > 0, tl.cdiv(new, P), 0), parts):
        bounding.digest_block(
            like, pool, centre, spread, coarse, block, n, n, b, h, bh, 0, 0, 0, 0, rows, blocks, BALL, MEAN, LIMIT,
            COPY, MAX, P, D, DP,
        )  # fmt: skip


@triton.jit
def _restructure(
    queries, ids, count, target, updated, at, lead, every, updates, arrived, gone, ring, keys, length,
    previous_ring_begin, ring_begin, tops, totals, scores, peaks, listed, heads, sink, window, ring_rows, rows, scale,
    softcap, padded, groups, most, away, pool, hot, coarse, centre, spread, slot_of, block_of, plan, blocks, slots,
    FIRST: tl.constexpr, LAST: tl.constexpr, CAPPED: tl.constexpr, COARSE: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, Q: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, ASM: tl.constexpr, SAME: tl.constexpr, BALL: tl.constexpr, MEAN: tl.constexpr,
    LIMIT: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
    BITS: tl.constexpr, LOOKED: tl.constexpr, MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    if FIRST < 1:
        _summarise(
            queries, pool, centre, spread, coarse, length, previous_ring_begin, ring_begin, heads, rows, blocks, COARSE,
            BALL, MEAN, LIMIT, MAX, P, D, DP,
        )  # fmt: skip
    due = False
    if (FIRST < MOVING) & (LAST > 1):
        due = choosing.choose_anew(
            queries, ids, count, target, updated, at, lead, every, updates, arrived, gone, ring, keys, length,
            ring_begin, tops, totals, scores, peaks, listed, heads, sink, window, ring_rows, rows, scale, softcap,
            padded, groups, most, FIRST - 1, LAST - 1, True, CAPPED, COARSE, G, D, DP, TILE, Q, STAGES, GROUP, N, L,
            ASM,
        )  # fmt: skip
    elif FIRST >= MOVING:  # what was due has been chosen, in a launch before
        due = tl.load(updated + tl.program_id(0)) != 0
    if LAST > MOVING:  # noqa: SIM102 (one is known when it is compiled)
        if due:
            moving.move(
                ids, count, arrived, gone, away, pool, hot, coarse, keys, centre, spread, slot_of, block_of, plan, most,
                sink, rows, blocks, slots, FIRST - MOVING, LAST - MOVING, SAME, COARSE, BALL, MEAN, LIMIT, P, D, DP,
                WIDTH, ROW, ROWS, K, BITS, LOOKED,
            )  # fmt: skip


def launch(*things) -> None:
    (*_, lengths, _), first, second = apart(*things)
    grid, given = choosing.arguments(*first)
    given |= moving.arguments(grid[1], *second)
    given |= dict(previous_ring_begin=lengths.previous_ring_begin, MAX=FP8_MAX)
    device = given["queries"].device
    for phase in phases(device, grid[1], PHASES):
        _restructure[grid](**given, **phase, **launch_early(device, grid[0] * grid[1]))


update_static_set = register("update_static_set", reference, impls=(by_triton(launch),), check=check)
