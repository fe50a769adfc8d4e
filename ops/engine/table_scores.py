"""Score the blocks of every request by bound_scores: the digests are by block id, found through the table.

    scores[r, h, i] = bound of q[r] for the digest of block table[r, i]

Blocks that cannot be selected (tables.py) score -inf.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.fp8 import FP8, FP8_MAX
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.engine.tables import check_one, check_tables, near_begin, near_begin_of
from torchsparsekv.ops.engine.views import OneQuery, Requests
from torchsparsekv.ops.index.block_bounds import UNBOUNDED, check_spread, unit_of
from torchsparsekv.ops.select._top import GROUP, peaks_of, store_peaks
from torchsparsekv.ops.select.bound_scores import bound, bounds_of, dot_type
from torchsparsekv.ops.store.views import Digests

BLOCKS = 64  # blocks of a program


def check(q, digests, requests) -> None:
    _check.heads(q, digests.centre)
    check_one(digests.centre)
    check_spread(digests)
    check_tables(requests, digests.block_size)


def reference(q: OneQuery, digests: Digests, requests: Requests) -> tuple[Tensor, Tensor]:
    """Score the blocks of every request by bound_scores: the digests are by block id, found through the table.

    Args:
        q: one query of each request [requests, q_heads, 1, dim].
        digests: of all blocks, centre and spread [1, heads, blocks, ...]; one origin for all [1, heads, dim].
        requests: lengths and tables.

    Returns:
        scores [requests, heads, places], and their peaks [requests, heads, groups] (ops/select/_top.py).

    Launches:
        One kernel of requests * heads x places / BLOCKS programs of 2 warps. A program without a block that can be
        selected stores -inf.
    """
    (centre, spread, block_size, _, origin), table = digests, requests.table
    place = torch.arange(table.shape[1], device=q.device)
    live = (place >= requests.sink // block_size) & (place < near_begin(requests, block_size)[:, None] // block_size)
    ids = torch.where(live, table, 0).long()
    centres, spreads = (t[0][:, ids].transpose(0, 1) for t in (centre, spread))
    scores = bound(q, centres, spreads, origin).masked_fill(~live[:, None], -torch.inf)
    return scores, peaks_of(scores)


@triton.jit
def _scores(
    q, centre, spread, origin, out, peaks, length, table, q_b, q_h, heads, blocks, places, groups, sink, window,
    BOX: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    BLOCKS: tl.constexpr, DOT: tl.constexpr, LIMIT: tl.constexpr, UNBOUNDED: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    place = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    end = near_begin_of(tl.load(length + b), sink, window, P) // P
    best = tl.full((BLOCKS,), float("-inf"), tl.float32)
    if (tl.program_id(1) * BLOCKS < end) & (tl.program_id(1) * BLOCKS + BLOCKS > sink // P):
        end = tl.minimum(end, places)
        block = tl.load(table + b * places + place, mask=place < end, other=0)
        s = bounds_of(
            q, q_b, q_h, b, h, centre, spread, origin, h, blocks, block, place, sink // P, end, BOX, G, GP, D, DP, DOT,
            LIMIT, UNBOUNDED, UNIT,
        )  # fmt: skip
        best = tl.max(s, 1)  # [BLOCKS]
    tl.store(out + bh * places + place, best, mask=place < places)
    store_peaks(peaks + bh * groups, best, tl.program_id(1) * BLOCKS, places, BLOCKS, GROUP)


def launch(q, digests, requests) -> tuple[Tensor, Tensor]:
    (centre, spread, block_size, _, origin), (length, table, sink, window) = digests, requests
    _, heads, blocks, d = centre.shape
    out, peaks = fake(q, digests, requests)
    group, (count, places) = q.shape[1] // heads, table.shape
    _scores[(count * heads, cdiv(places, BLOCKS))](
        q, centre, spread, origin, out, peaks, length, table, q.stride(0), q.stride(1), heads, blocks, places,
        peaks.shape[2], sink, window, BOX=spread.shape[-1] > 1, G=group, GP=max(16, next_power_of_2(group)), D=d,
        DP=next_power_of_2(d), P=block_size, BLOCKS=BLOCKS, DOT=dot_type(q, centre),
        LIMIT=FP8_MAX if spread.dtype == FP8 else 0.0, UNBOUNDED=UNBOUNDED,
        UNIT=unit_of(centre.dtype), GROUP=GROUP, num_warps=2,
    )  # fmt: skip
    return out, peaks


def fake(q, digests, requests) -> tuple[Tensor, Tensor]:
    (count, places), heads = requests.table.shape, digests.centre.shape[1]
    new = digests.centre.new_empty
    return (
        new((count, heads, places), dtype=torch.float32),
        new((count, heads, cdiv(places, GROUP)), dtype=torch.float32),
    )


table_scores = register("table_scores", reference, impls=(by_triton(launch),), fake=fake, check=check)
