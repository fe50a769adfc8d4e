"""Update the static set in one launch: block_bounds of the keys that left, choose_static, then relocate.

The three ops do what their own files say. The keys of the tokens that left the ring lie in the pool by now. Most steps
have nothing to do for any of the three, and one launch then takes less time than three.
"""
from typing import NamedTuple

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.fp8 import FP8_MAX
from torchsparsekv.ops._machinery.grid_barrier import phases
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, tl, triton, wait_for_previous
from torchsparsekv.ops.index import block_bounds
from torchsparsekv.ops.index.copy_keys import Coarse
from torchsparsekv.ops.prkv import choose_static, relocate
from torchsparsekv.ops.prkv.choose_static import choose_set
from torchsparsekv.ops.prkv.relocate import move_set
from torchsparsekv.ops.prkv.views import StaticSet
from torchsparsekv.ops.store.views import Attention, Digests, HotBuffer, KVStore, Leaving, Lengths, Observed

PHASES = 1 + choose_static.PHASES + relocate.PHASES
MOVING = tl.constexpr(1 + choose_static.PHASES)  # the first phase of relocate
MAX = tl.constexpr(FP8_MAX)


class Parts(NamedTuple):
    """The arguments of each of the three ops."""

    bounds: tuple
    choose: tuple
    move: tuple


def parts_of_update(observed, static, store, coarse, hot, digests, lengths, attention) -> Parts:
    batch, heads, _, _, d = store.ring.shape
    no_keys = observed.queries.new_empty(batch, heads, 0, d)
    return Parts(
        (Leaving(no_keys, store.pool), digests, lengths, coarse),
        (observed, static, store, coarse, None if coarse is None else digests.origin, lengths, attention),
        (static, store.pool, coarse, hot, digests, lengths.sink),
    )


def check(*args) -> None:
    for op, own in zip((block_bounds, choose_static, relocate), parts_of_update(*args)):
        op.check(*own)


def reference(
    observed: Observed, static: Changed[StaticSet], store: Changed[KVStore], coarse: Changed[Coarse | None],
    hot: Changed[HotBuffer], digests: Changed[Digests], lengths: Lengths, attention: Attention,
) -> None:  # fmt: skip
    """Update the static set in one launch: block_bounds of the keys that left, choose_static, then relocate.

    Args:
        observed: the observation window, queries [batch, window, q_heads, dim].
        static: the sets; `front_home` must be given.
        store: the sinks are read from the ring; rows of the pool move.
        coarse: the fp8 copy of the keys [batch, heads, rows, dim], or None. Keys that left the ring are copied to it.
        hot: the hot buffer; its copies of rows that move are kept equal to the pool.
        digests: of the blocks of `hot`. Blocks that left the ring get a digest, blocks that a move touches a new one.
        lengths: tokens from `previous_ring_begin` up to `ring_begin` left the ring in this step.
        attention: scale and soft cap of the model.

    Launches:
        One kernel with the grid of choose_static, whose phases are one of block_bounds, then those of choose_static and
        of relocate, with a grid barrier between two phases. Where no head is due, each program digests its share of
        the blocks that left, if there are any, and returns.
    """
    arguments = parts_of_update(observed, static, store, coarse, hot, digests, lengths, attention)
    for op, own in zip((block_bounds, choose_static, relocate), arguments):
        op.reference(*own)


@triton.jit
def _digest_leaving(queries, moved, lengths, heads, M: tl.constexpr):
    """Phase 0: digests of the blocks that left the ring, shared out among the programs of a head.

    Keys of the pool are converted to the type of the queries.
    """
    bh, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b, h = bh // heads, bh % heads
    n, old, new = tl.load(lengths.length + b), tl.load(lengths.previous_ring_begin + b), tl.load(lengths.ring_begin + b)
    for block in range(old // M.block_size + part, tl.where(n > 0, tl.cdiv(new, M.block_size), 0), parts):
        block_bounds.digest_block(
            queries, moved.pool, moved.centre, moved.spread, moved.origin, moved.coarse, block, old, n, n, b, h, bh,
            0, 0, 0, 0, moved.rows, moved.blocks, lengths.sink, M.ball,
            M.mean, M.limit, M.unit, M.coarse, MAX, M.block_size,
            M.dim, M.padded,
        )  # fmt: skip


@triton.jit
def _update_static_set(
    observed, static, ring, lengths, attention, scratch, sizes, moved, FIRST: tl.constexpr, LAST: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    if FIRST < 1:
        _digest_leaving(observed.queries, moved, lengths, sizes.heads, M)
    due = False
    if (FIRST < MOVING) & (LAST > 1):
        due = choose_set(
            observed, static, ring, moved.keys, moved.origin, lengths, attention, scratch, sizes, FIRST - 1, LAST - 1,
            True, C,
        )  # fmt: skip
    elif FIRST >= MOVING:  # a launch before this one has chosen the sets that were due
        due = tl.load(static.updated + tl.program_id(0)) != 0
    if LAST > MOVING:  # noqa: SIM102 (it is known when the kernel is compiled)
        if due:
            move_set(static, moved, lengths.sink, FIRST - MOVING, LAST - MOVING, M)


def launch(*args) -> None:
    _, choosing, (static, pool, coarse, hot, digests, _) = parts_of_update(*args)
    grid, given = choose_static.arguments(*choosing)
    del given["keys"], given["origin"]  # `moved` has them
    moved, layout = relocate.arguments(grid[1], static, pool, coarse, hot, digests)
    for phase in phases(pool.device, grid[1], PHASES):
        _update_static_set[grid](
            **given, moved=moved, M=layout, **phase, **launch_early(pool.device, grid[0] * grid[1])
        )


update_static_set = register("update_static_set", reference, impls=(by_triton(launch),), check=check)
