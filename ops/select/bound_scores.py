"""Score every block by the largest q.k that its volume allows (its digest, ops/index/block_bounds.py).

    box    score = max over the query heads of the group of  q.origin + unit (q.centre + |q|.spread)   (|q| per channel)
    ball   score = max over the query heads of the group of  q.origin + unit (q.centre + |q|_2 * spread)

A mean-box is scored as a box, and a mean as a ball with spread 0. q.origin is the same for all blocks, but differs
between the query heads of a group, which share a score. q.centre and |q|.spread are matrix products, so tensor cores
compute them while the digests stream in. Blocks without a retrievable token (the sinks, and blocks that have not left
the ring) score -inf.

Args:
    q [batch, q_heads, 1, dim]
    digests: centre [pools, heads, blocks, dim], spread [pools, heads, blocks, dim or 1], origin [pools, heads, dim].
    pinned [batch, heads]: if given, the blocks of the first `pinned` tokens after the sinks score +inf, so that every
        selection takes them, whatever their digests.
    table: the blocks of each row, if rows share one pool; its `block_size` is that of the digests. Score number i is
        then the score of block ids[b, i].

Returns: scores [batch, heads, blocks or places] and their peaks, one for every GROUP (ops/select/_top.py), fp32.
Launches: csrc/bound_scores.cu for fp8 digests and 16-bit queries without a table, with at most RESIDENT programs per
multiprocessor; else Triton with one program per (row, head, BLOCKS blocks).
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.fp8 import FP8, FP8_MAX
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import FLOATS, Of
from torchsparsekv.ops._machinery.triton import (
    cdiv,
    launch_early,
    next_power_of_2,
    sm_count,
    tl,
    triton,
    wait_for_previous,
)
from torchsparsekv.ops.index.block_bounds import UNBOUNDED, check_spread, unit_of
from torchsparsekv.ops.select._top import GROUP, peaks_of, store_peaks
from torchsparsekv.ops.store.tables import check_table
from torchsparsekv.ops.store.views import OWN_POOLS, BlockTable, Digests, Lengths, PerHead

AnyQuery = Annotated[Tensor, Of("batch q_heads 1 dim", FLOATS, strided=True)]
BLOCKS = 64  # per program: 16 KiB of fp8 digests; 8 heads with 2K blocks make enough programs for the whole GPU
# The shapes that csrc/bound_scores.cu takes; Triton takes the others.
NATIVE_DIMS = (64, 128, 256)
NATIVE_QUERIES = 2048  # group * dim at most: the registers hold the query heads of a kv head
NATIVE_GROUP = 16  # query heads of a kv head at most
NATIVE_WARPS = 8  # per program; a warp takes 16 blocks (a GROUP) at a time
RESIDENT = 2  # programs per multiprocessor: larger grids are not launched early


def check(q, digests, lengths, pinned=None, table=OWN_POOLS) -> None:
    _check.heads(q, digests.centre)
    check_spread(digests)
    check_table(digests.centre, q.shape[0], table)
    if table.ids is not None and table.block_size != digests.block_size:
        raise ValueError(f"digests of {digests.block_size} tokens do not fit a table of blocks of {table.block_size}")


def _widths(spread: Tensor) -> Tensor:
    """Spreads in fp32. A saturated fp8 spread becomes UNBOUNDED, so that the score stays a bound."""
    x = spread.float()
    return torch.where(x >= FP8_MAX, UNBOUNDED, x) if spread.dtype == FP8 else x


def bound(q: Tensor, centre: Tensor, spread: Tensor, origin: Tensor) -> Tensor:
    """The largest q.k that each digest allows, over the query heads of its kv head: [batch, heads, digests]."""
    x = q[:, :, 0].unflatten(1, (centre.shape[1], -1)).float()
    size = x.abs() if spread.shape[-1] > 1 else x.norm(dim=-1, keepdim=True)
    scores = x @ centre.float().transpose(-1, -2) + size @ _widths(spread).transpose(-1, -2)
    return (scores * unit_of(centre.dtype) + x @ origin[..., None]).amax(2)


def reference(
    q: AnyQuery, digests: Digests, lengths: Lengths, pinned: PerHead | None = None, table: BlockTable = OWN_POOLS
) -> tuple[Tensor, Tensor]:
    centre, spread, block_size, _, origin = digests
    blocks = centre.shape[2] if table.ids is None else table.ids.shape[1]
    block, first = torch.arange(blocks, device=q.device), lengths.sink // block_size
    live = (block >= first) & (block < lengths.ring_begin[:, None] // block_size)
    if table.ids is not None:
        ids = torch.where(live, table.ids, 0).long()
        centre, spread = (t[0][:, ids].transpose(0, 1) for t in (centre, spread))
    scores = bound(q, centre, spread, origin)
    if pinned is not None:
        scores = scores.masked_fill(block < first + pinned[..., None] // block_size, torch.inf)
    scores = scores.masked_fill(~live[:, None], -torch.inf)
    return scores, peaks_of(scores)


@triton.jit
def bounds_of(
    q, q_b, q_h, b, h, centre, spread, origin, head, blocks, block, place, first, end, BOX: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DOT: tl.constexpr, LIMIT: tl.constexpr,
    UNBOUNDED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Scores [n, GP] of the digests `block` [n] of a `head` with `blocks` digests, by the G query heads of kv head `h`.

    -inf where `place` [n], the number of a block within row `b`, is not from `first` up to `end`.
    """
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    m = (g < G)[None, :] & (d < D)[:, None]
    x = tl.load(q + b * q_b + (h * G + g[None, :]) * q_h + d[:, None], mask=m, other=0.0)
    at = (head * blocks + block[:, None]) * D + d[None, :]
    m = (place < end)[:, None] & (d < D)[None, :]
    c = tl.load(centre + at, mask=m, other=0.0).to(DOT)
    s = tl.dot(c, x.to(DOT), input_precision="ieee")
    if BOX:
        w = tl.load(spread + at, mask=m, other=0.0).to(DOT)
        if LIMIT > 0:
            w = tl.where(w >= LIMIT, UNBOUNDED, w)
        s += tl.dot(w, tl.abs(x).to(DOT), input_precision="ieee")
    x = x.to(tl.float32)
    if not BOX:
        norm = tl.sqrt(tl.sum(x * x, 0))
        s += tl.load(spread + head * blocks + block, mask=place < end, other=0.0)[:, None] * norm[None, :]
    o = tl.load(origin + head * D + d, mask=d < D, other=0.0)
    s = s * UNIT + tl.sum(x * o[:, None], 0)[None, :]
    return tl.where((g < G)[None, :] & ((place < end) & (place >= first))[:, None], s, float("-inf"))


@triton.jit
def _scores(
    q, centre, spread, origin, out, peaks, ring_begin, pinned, table, q_b, q_h, heads, blocks, places, groups, first,
    TABLE: tl.constexpr, PINNED: tl.constexpr, BOX: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, P: tl.constexpr, BLOCKS: tl.constexpr, DOT: tl.constexpr, LIMIT: tl.constexpr,
    UNBOUNDED: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    place = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    end = tl.load(ring_begin + b) // P
    best = tl.full((BLOCKS,), float("-inf"), tl.float32)
    if (tl.program_id(1) * BLOCKS < end) & (tl.program_id(1) * BLOCKS + BLOCKS > first):
        head, block = bh, place
        if TABLE:
            end = tl.minimum(end, places)
            head, block = h, tl.load(table + b * places + place, mask=place < end, other=0)
        s = bounds_of(
            q, q_b, q_h, b, h, centre, spread, origin, head, blocks, block, place, first, end, BOX, G, GP, D, DP, DOT,
            LIMIT, UNBOUNDED, UNIT,
        )  # fmt: skip
        best = tl.max(s, 1)
        if PINNED:
            pinned_end = tl.minimum(first + tl.load(pinned + bh) // P, end)
            best = tl.where((place >= first) & (place < pinned_end), float("inf"), best)
    tl.store(out + bh * places + place, best, mask=place < places)
    store_peaks(peaks + bh * groups, best, tl.program_id(1) * BLOCKS, places, BLOCKS, GROUP)


def dot_type(q: Tensor, centre: Tensor):
    """The type of the products. fp8 is exact in fp16, and so is a bf16 query of ordinary magnitude."""
    if q.dtype == torch.float32 or centre.dtype not in (q.dtype, FP8):
        return tl.float32
    return tl.bfloat16 if centre.dtype == torch.bfloat16 else tl.float16


def _fits(q, digests, lengths, pinned=None, table=OWN_POOLS) -> _cuda.Module | str:
    centre, spread = digests[:2]
    if table.ids is not None:
        return "rows share one pool"
    d, group, box = centre.shape[-1], q.shape[1] // centre.shape[1], spread.shape[-1] > 1
    if q.dtype not in (torch.float16, torch.bfloat16) or centre.dtype != FP8:
        return f"queries in {q.dtype} against centres in {centre.dtype}, not halves against fp8"
    if d not in NATIVE_DIMS or group > min(NATIVE_GROUP, NATIVE_QUERIES // d):
        return f"head_dim {d} with {group} query heads a kv head"
    if not _cuda.aligned(q, centre, spread, digests.origin) or any(x % 8 for x in q.stride()[:2]):
        return "tensors are not aligned to 16 bytes"
    bf16 = int(q.dtype == torch.bfloat16)
    shape = dict(D=d, G=group, BOX=int(box), BF16=bf16, WARPS=NATIVE_WARPS, GROUP=GROUP, UNIT=int(unit_of(FP8)))
    return _cuda.load("bound_scores", q.device, **shape)


def _launch_cuda(kernels, q, digests, lengths, pinned=None, table=OWN_POOLS) -> tuple[Tensor, Tensor]:
    """csrc/bound_scores.cu"""
    (centre, spread, block_size, _, origin), (batch, heads, blocks, _) = digests, digests.centre.shape
    out, peaks = fake(q, digests, lengths)
    parts = max(1, min(cdiv(peaks.shape[2], NATIVE_WARPS), RESIDENT * sm_count(q.device) // (batch * heads)))
    kernels.launch(
        "bounds", (batch * heads, parts, 1), 32 * NATIVE_WARPS, q, centre, spread, origin, out, peaks,
        lengths.ring_begin, pinned, q.stride(0), q.stride(1), heads, blocks, lengths.sink // block_size, block_size,
    )  # fmt: skip
    return out, peaks


def _launch_triton(q, digests, lengths, pinned=None, table=OWN_POOLS) -> tuple[Tensor, Tensor]:
    (centre, spread, block_size, _, origin), begin = digests, lengths.ring_begin
    heads, blocks, d = centre.shape[1:]
    out, peaks = fake(q, digests, lengths, pinned, table)
    (batch, _, places), group = out.shape, q.shape[1] // heads
    _scores[(batch * heads, cdiv(places, BLOCKS))](
        q, centre, spread, origin, out, peaks, begin, begin if pinned is None else pinned,
        begin if table.ids is None else table.ids, q.stride(0), q.stride(1), heads, blocks, places, peaks.shape[2],
        lengths.sink // block_size, TABLE=table.ids is not None, PINNED=pinned is not None,
        BOX=spread.shape[-1] > 1, G=group, GP=max(16, next_power_of_2(group)), D=d, DP=next_power_of_2(d), P=block_size,
        BLOCKS=BLOCKS, DOT=dot_type(q, centre), LIMIT=FP8_MAX if spread.dtype == FP8 else 0.0, UNBOUNDED=UNBOUNDED,
        UNIT=unit_of(centre.dtype), GROUP=GROUP, num_warps=2,
        **launch_early(q.device, batch * heads * cdiv(places, BLOCKS)),
    )  # fmt: skip
    return out, peaks


def fake(q, digests, lengths, pinned=None, table=OWN_POOLS) -> tuple[Tensor, Tensor]:
    heads, blocks = digests.centre.shape[1:3]
    places = blocks if table.ids is None else table.ids.shape[1]
    lead, new = (q.shape[0], heads), digests.centre.new_empty
    return new((*lead, places), dtype=torch.float32), new((*lead, cdiv(places, GROUP)), dtype=torch.float32)


bound_scores = register(
    "bound_scores", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake, check=check
)
