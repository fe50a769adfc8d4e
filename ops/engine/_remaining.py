"""The estimate of the rest (ops/rest/__init__.py) in an engine: what remains of the blocks of each request when a step
has attended to some of their tokens exactly, in torch and Triton."""
import itertools

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import tl, triton
from torchsparsekv.ops.engine.views import BlockRest, Listing
from torchsparsekv.ops.rest._remaining import means_of, places_between, take_out
from torchsparsekv.ops.store.rows import load_key, load_value, row_at
from torchsparsekv.ops.store.views import Lengths


def remaining_of_blocks(rest: BlockRest, pool: Tensor, listing: Listing, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """`remaining` for the requests of an engine: groups are the blocks of their tables, and exact tokens are those of
    the selected units."""
    (sums, group, table, selected), unit = rest, pool.shape[3]
    assert sums is not None
    assert table is not None
    assert selected is not None
    first = torch.arange(table.shape[1], device=table.device) * group
    held = (lengths.ring_begin[:, None].clamp(max=first + group) - first.clamp(min=lengths.sink)).clamp(min=0)
    tokens = held[:, None].expand(-1, pool.shape[1], -1).clone()  # [requests, heads, groups]
    means = sums[0][:, table.clamp(min=0).long()].transpose(0, 1).float() * group
    for b, h in itertools.product(*map(range, tokens.shape[:2])):
        units, places = selected[b, h].long(), listing.ids[b, h, listing.ids.shape[2] - selected.shape[2] :].long()
        units, places = units[places >= 0], places[places >= 0]
        of = (units[:, None] * unit + torch.arange(unit, device=units.device)).flatten() // group
        means[b, h].index_add_(0, of, pool[0, h, places].flatten(0, 1).float(), alpha=-1)
        tokens[b, h] -= torch.bincount(of, minlength=tokens.shape[2])
    means = means.masked_fill((held == 0)[:, None, :, None, None], 0.0)
    return means_of(means, tokens)


@triton.jit
def block_tile(
    sums, rows, listed, selected, table, bh, h, tile, end, sink, blocks, places, pool_rows, k, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, TOKENS: tl.constexpr, CHOSEN: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """`remaining_tile` of a request of an engine: groups are the blocks of its `table` [places], and exact tokens are
    those of its `selected` [k] units of the text. `listed` [k] has their places in `rows`."""
    at, d = tile * GROUPS + tl.arange(0, GROUPS), tl.arange(0, DP)[None, :]
    low, high = tile * (GROUPS * GROUP), (tile + 1) * (GROUPS * GROUP)
    count = tl.maximum(tl.minimum((at + 1) * GROUP, end) - tl.maximum(at * GROUP, sink), 0)
    live = (count > 0) & (at < places)
    block = tl.load(table + at, mask=live, other=0)
    row, there = row_at(sums, h, block, blocks, D)[:, None], live[:, None]
    keys = load_key(row, d, there, d < D, D).to(tl.float32) * GROUP  # [GROUPS, DP]
    values = load_value(row, d, there, d < D, D).to(tl.float32) * GROUP  # [GROUPS, DP]
    first, last = places_between(selected, selected, k, low, high, True, CHOSEN, P)
    for some in range(first * P, last * P, TOKENS):
        token = some + tl.arange(0, TOKENS)
        unit = tl.load(selected + token // P, mask=token < last * P, other=-1)
        pos = unit * P + token % P
        exact = (unit >= 0) & (pos >= low) & (pos < high)
        place = tl.load(listed + token // P, mask=exact, other=-1)
        exact &= place >= 0
        its = row_at(rows, h, tl.maximum(place, 0).to(tl.int64) * P + token % P, pool_rows, D)
        keys, values, count = take_out(keys, values, count, its, pos // GROUP - tile * GROUPS, exact, GROUPS, D, DP)
    most = tl.maximum(count, 1).to(tl.float32)[:, None]
    return keys / most, values / most, count
