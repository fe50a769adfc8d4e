"""What remains of each group of the pool when a step has attended to some of its tokens exactly, in torch and Triton.

With `fill`, the first `fill` rows of a block of the pool hold tokens. Without it, the pool rows from the sinks up to
`ring_begin` do. Exact tokens are the tokens of the chosen blocks, and tokens of the pool that a head still reads in the
ring: the positions from the frontier of the head up to `ring_begin`.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import next_power_of_2, tl, triton
from torchsparsekv.ops.rest.views import Rest
from torchsparsekv.ops.store.rows import load_key, load_value, ring_row, ring_row_of, row_at
from torchsparsekv.ops.store.views import HotBuffer, Lengths

GROUPS = 32  # groups of a tile
TOKENS = 32  # exact tokens that a program takes out of a tile at once
CHOSEN = 1024  # blocks that a program looks through at once


def remaining(
    rest: Rest, ring: Tensor, hot: HotBuffer, lengths: Lengths, frontier: Tensor, fill: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The mean key and the mean value of what remains of each group, and the number of tokens that remain.

    frontier [batch, heads]: the first position that a head attends to in the ring.

    Returns: means [batch, heads, groups, 2, dim] in fp32, 0 where nothing remains; tokens [batch, heads, groups].
    """
    (sums, group, given), p, sink = rest[:3], hot.rows.shape[3], lengths.sink
    assert sums is not None
    if given is not None:
        return sums.float().masked_fill(given[..., None, None] <= 0, 0.0), given.long()
    groups, left = sums.shape[2], lengths.ring_begin.tolist()
    means = sums.float() * group
    tokens = torch.zeros(sums.shape[:3], dtype=torch.int64, device=sums.device)
    for b in range(sums.shape[0]):
        for h in range(sums.shape[1]):
            begin, slots = int(frontier[b, h]), hot.chosen[b, h]
            slots = slots[slots >= 0].long()
            at = (hot.block_of[b, h, slots].long()[:, None] * p + torch.arange(p)).flatten()
            if fill is None:
                held, found = torch.arange(sink, left[b]), (at >= sink) & (at < begin)
                near = torch.arange(begin, left[b])
            else:
                full = torch.arange(p) < fill[b, h][:, None]
                held, near, found = full.flatten().nonzero()[:, 0], torch.arange(0), full.flatten()[at]
            exact = torch.cat([at[found], near]) // group
            rows = [hot.rows[b, h, slots].flatten(0, 1)[found], ring[b, h, ring_row(near, sink, ring.shape[2])]]
            means[b, h].index_add_(0, exact, torch.cat(rows).float(), alpha=-1)
            tokens[b, h] = torch.bincount(held // group, minlength=groups)
            tokens[b, h] -= torch.bincount(exact, minlength=groups)
    return means_of(means, tokens)


def means_of(sums: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The means of `tokens` [batch, heads, groups] tokens with these sums, 0 where there is none; and `tokens`."""
    count = tokens[..., None, None]
    return (sums / count).masked_fill(count <= 0, 0.0), tokens


@triton.jit
def take_out(keys, values, count, rows, group, live, GROUPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Subtract the tokens at the row pointers `rows` [n] where `live` from groups number `group` [n] of a tile."""
    d = tl.arange(0, DP)[None, :]
    k = load_key(rows[:, None], d, live[:, None], d < D, D)  # [n, DP]
    v = load_value(rows[:, None], d, live[:, None], d < D, D)  # [n, DP]
    of = (tl.arange(0, GROUPS)[:, None] == group[None, :]) & live[None, :]  # [GROUPS, n]
    keys -= tl.dot(of.to(k.dtype), k, input_precision="ieee")
    values -= tl.dot(of.to(v.dtype), v, input_precision="ieee")
    return keys, values, count - tl.sum(of.to(tl.int32), 1)


@triton.jit
def places_between(chosen, block_of, n, low, high, NAMED: tl.constexpr, CHOSEN: tl.constexpr, P: tl.constexpr):
    """The first place of `chosen` [n] whose block has a token from `low` up to `high`, and the end of the last one.
    `chosen` has slots, or with NAMED blocks."""
    first, last = tl.zeros((), tl.int32) + n, tl.zeros((), tl.int32)
    for some in range(0, n, CHOSEN):
        j = some + tl.arange(0, CHOSEN)
        block = tl.load(chosen + j, mask=j < n, other=-1)
        if not NAMED:
            block = tl.load(block_of + block, mask=block >= 0, other=-1)
        here = (block >= 0) & (block * P < high) & (block * P + P > low)
        first = tl.minimum(first, tl.min(tl.where(here, j, n), 0))
        last = tl.maximum(last, tl.max(tl.where(here, j + 1, 0), 0))
    return first, last


@triton.jit
def remaining_tile(
    sums, ring, hot, chosen, block_of, fill, bh, tile, begin, left, sink, groups, ring_rows, slots, blocks, n,
    FILLED: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, CHOSEN: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Mean keys and values [GROUPS, DP] of what remains of the groups of a tile, and the numbers of tokens [GROUPS].

    With FILLED, `begin` and `left` are the end of the pool.

    First the program finds the first and the last place of `chosen` with a block of the tile. Then it goes through the
    places between the two, which are few if the ids ascend.
    """
    at, d = tile * GROUPS + tl.arange(0, GROUPS), tl.arange(0, DP)[None, :]
    low, high = tile * (GROUPS * GROUP), (tile + 1) * (GROUPS * GROUP)
    if FILLED:
        page = at[:, None] * (GROUP // P) + tl.arange(0, GROUP // P)[None, :]
        count = tl.sum(tl.load(fill + bh * blocks + page, mask=page < blocks, other=0), 1)
    else:
        count = tl.maximum(tl.minimum((at + 1) * GROUP, left) - tl.maximum(at * GROUP, sink), 0)
    row, there = row_at(sums, bh, at, groups, D)[:, None], ((count > 0) & (at < groups))[:, None]
    keys = load_key(row, d, there, d < D, D).to(tl.float32) * GROUP  # [GROUPS, DP]
    values = load_value(row, d, there, d < D, D).to(tl.float32) * GROUP  # [GROUPS, DP]
    first, last = places_between(chosen + bh * n, block_of + bh * slots, n, low, high, False, CHOSEN, P)
    for some in range(first * P, last * P, TOKENS):
        token = some + tl.arange(0, TOKENS)
        slot = tl.load(chosen + bh * n + token // P, mask=token < last * P, other=-1)
        block = tl.load(block_of + bh * slots + slot, mask=slot >= 0, other=-1)
        pos = block * P + token % P
        live = (block >= 0) & (pos >= low) & (pos < tl.minimum(high, begin))
        if not FILLED:
            live &= pos >= sink
        else:
            live &= token % P < tl.load(fill + bh * blocks + block, mask=block >= 0, other=0)
        rows = row_at(hot, bh, tl.maximum(slot, 0) * P + token % P, slots * P, D)
        keys, values, count = take_out(keys, values, count, rows, pos // GROUP - tile * GROUPS, live, GROUPS, D, DP)
    for some in range(tl.maximum(begin, low), tl.minimum(left, high), TOKENS):
        pos = some + tl.arange(0, TOKENS)
        live = pos < tl.minimum(left, high)
        rows = row_at(ring, bh, ring_row_of(pos, sink, ring_rows - sink), ring_rows, D)
        keys, values, count = take_out(keys, values, count, rows, pos // GROUP - tile * GROUPS, live, GROUPS, D, DP)
    most = tl.maximum(count, 1).to(tl.float32)[:, None]
    return keys / most, values / most, count


@triton.jit
def mean_tile(sums, tokens, bh, tile, groups, GROUPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """`remaining_tile` of means that a method makes itself: nothing is subtracted."""
    at, d = tile * GROUPS + tl.arange(0, GROUPS), tl.arange(0, DP)[None, :]
    count = tl.load(tokens + bh * groups + at, mask=at < groups, other=0)
    row, there = row_at(sums, bh, at, groups, D)[:, None], (count > 0)[:, None]
    return load_key(row, d, there, d < D, D), load_value(row, d, there, d < D, D), count


def tile_sizes(group: int, n: int) -> dict[str, int]:
    """The constants of tiles for `n` chosen blocks. GROUP is 0 without sums of groups."""
    chosen = min(CHOSEN, next_power_of_2(max(n, 1)))
    return dict(GROUP=group, GROUPS=GROUPS, TOKENS=TOKENS, CHOSEN=chosen)
