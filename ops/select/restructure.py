"""Choose the static set anew where it is due, and let it move to the front: choose_static and relocate in one launch.

What both do is said there. At most steps neither has anything to do, and then a launch is what they cost.
"""
from torchsparsekv.ops._impl import triton as by_triton
from torchsparsekv.ops._meet import phases
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._signature import Changed
from torchsparsekv.ops._triton import chain, chained, tl, triton
from torchsparsekv.ops.index import relocate as moving
from torchsparsekv.ops.select import choose_static as choosing
from torchsparsekv.ops.store.views import (
    Attention,
    CopiedStore,
    Digests,
    Far,
    Hot,
    Lengths,
    Observed,
    Static,
    Store,
)

PHASES = choosing.PHASES + moving.PHASES
MOVING = tl.constexpr(choosing.PHASES)  # the first phase of what comes second


def apart(observed, static, store, hot, digests, lengths, attention) -> tuple[tuple, tuple]:
    """What the one op takes, and what the other does."""
    ring, pool, coarse = store
    first = (observed, static, Store(ring, pool), coarse, lengths, attention)
    return first, (static, Far(pool), coarse, hot, digests, lengths.sink)


def check(*things) -> None:
    first, second = apart(*things)
    choosing.check(*first)
    moving.check(*second)


def reference(
    observed: Observed, static: Changed[Static], store: Changed[CopiedStore], hot: Changed[Hot],
    digests: Changed[Digests], lengths: Lengths, attention: Attention,
) -> None:  # fmt: skip
    first, second = apart(observed, static, store, hot, digests, lengths, attention)
    choosing.reference(*first)
    moving.reference(*second)


@triton.jit
def _restructure(
    queries, ids, count, target, updated, at, lead, every, updates, arrived, gone, ring, keys, length, ring_begin,
    tops, totals, scores, peaks, listed, heads, sink, window, ring_rows, rows, scale, softcap, padded, groups,
    most, away, pool, hot, coarse, centre, spread, slot_of, block_of, plan, blocks, slots, FIRST: tl.constexpr,
    LAST: tl.constexpr, CAPPED: tl.constexpr, COARSE: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr, Q: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr,
    L: tl.constexpr, ASM: tl.constexpr, SAME: tl.constexpr, BALL: tl.constexpr, MEAN: tl.constexpr,
    LIMIT: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
    BITS: tl.constexpr, LOOKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    if FIRST < MOVING:
        due = choosing.choose_anew(
            queries, ids, count, target, updated, at, lead, every, updates, arrived, gone, ring, keys, length,
            ring_begin, tops, totals, scores, peaks, listed, heads, sink, window, ring_rows, rows, scale,
            softcap, padded, groups, most, FIRST, LAST, True, CAPPED, COARSE, G, D, DP, TILE, Q, STAGES, GROUP, N,
            L, ASM,
        )  # fmt: skip
    else:  # what was due has been chosen, in a launch before
        due = tl.load(updated + tl.program_id(0)) != 0
    if LAST > MOVING:  # noqa: SIM102 (one is known when it is compiled)
        if due:
            moving.move(
                ids, count, arrived, gone, away, pool, hot, coarse, keys, centre, spread, slot_of, block_of, plan, most,
                sink, rows, blocks, slots, FIRST - MOVING, LAST - MOVING, SAME, COARSE, BALL, MEAN, LIMIT, P, D, DP,
                WIDTH, ROW, ROWS, K, BITS, LOOKED,
            )  # fmt: skip


def launch(*things) -> None:
    first, second = apart(*things)
    grid, given = choosing.arguments(*first)
    given |= moving.arguments(grid[1], *second)
    device = given["queries"].device
    for phase in phases(device, grid[1], PHASES):
        _restructure[grid](**given, **phase, **chained(device, grid[0] * grid[1]))


restructure = register("restructure", reference, impls=(by_triton(launch),), check=check)
