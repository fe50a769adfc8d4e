"""Summarise the keys of every block that leaves the ring by a volume: a centre and a spread.

`box`: the middle of the per-channel range and half that range (Quest's minimum and maximum, in another form).
`ball`: the mean key and the largest distance to it. Both contain every key: the centre is rounded to its storage type
first, the spread is taken around the rounded centre and rounded up.
`mean-box`: the middle of the per-channel range and the mean distance to it per channel (ArkVale's cuboid-mean). It says
where most keys are, and is no bound: spreads are rounded to the nearest.

Where there is a `coarse` copy of the keys, that of these keys is made on the way, as copy_keys would.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.fp8 import FP8, FP8_MAX, to_e4m3
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.index._leaving import leaving_keys, load_keys
from torchsparsekv.ops.index.copy_keys import Coarse, as_copied, keep_copy
from torchsparsekv.ops.store.views import Digests, Leaving, Lengths

UNBOUNDED = 65504.0  # what a spread of FP8_MAX counts as: fp8 has no infinity, and this is the largest that fp16 has
VOLUMES = ("box", "ball", "mean-box")


def check_spread(digests: Digests) -> None:
    centre, spread = digests[:2]
    if spread.shape[-1] not in (1, centre.shape[-1]):
        raise ValueError(f"spread has one value per channel (boxes) or per block (ball), got {tuple(spread.shape)}")
    want = centre.dtype if spread.shape[-1] > 1 else torch.float32
    if spread.dtype != want:
        raise TypeError(f"spread must be {want}, got {spread.dtype}")


def check(leaving, digests, lengths, coarse=None) -> None:
    check_digests(leaving.pool, digests)


def check_digests(pool: Tensor, digests: Digests) -> None:
    """The digests are those of a known volume, and of the blocks of this pool."""
    check_spread(digests)
    rows, (centre, spread, block_size, volume) = pool.shape[2], digests
    if volume not in range(len(VOLUMES)) or (VOLUMES[volume] == "ball") != (spread.shape[-1] == 1):
        known = ", ".join(f"{i} ({name})" for i, name in enumerate(VOLUMES))
        raise ValueError(f"volume is one of {known}, got {volume} with spreads {tuple(spread.shape)}")
    if rows // block_size != centre.shape[2]:
        raise ValueError(f"{rows} rows are not {centre.shape[2]} blocks of {block_size}")


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Non-negative `x` rounded towards +inf in `dtype` (saturating for fp8: bound_scores reads 448 as "or more")."""
    if dtype == torch.float32:
        return x
    if dtype == FP8:
        x = x.clamp(max=FP8_MAX)
    y = x.to(dtype)
    bits = y.view(torch.uint8 if dtype == FP8 else torch.int16)
    return torch.where(y.float() < x, bits + 1, bits).view(dtype)


def bounds(keys: Tensor, volume: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Centre and spread of keys [..., tokens, head_dim]."""
    x, name = keys.float(), VOLUMES[volume]
    middle = x.mean(-2) if name == "ball" else (x.amin(-2) + x.amax(-2)) / 2
    centre = (middle.clamp(-FP8_MAX, FP8_MAX) if dtype == FP8 else middle).to(dtype)
    away = x - centre.float().unsqueeze(-2)
    if name == "ball":
        return centre, away.square().sum(-1).amax(-1, keepdim=True).sqrt()
    if name == "box":
        return centre, round_up(away.abs().amax(-2), dtype)
    spread = away.abs().mean(-2)
    return centre, (spread.clamp(max=FP8_MAX) if dtype == FP8 else spread).to(dtype)


def reference(
    leaving: Leaving, digests: Changed[Digests], lengths: Lengths, coarse: Changed[Coarse | None] = None
) -> None:
    block_size = digests.block_size
    for b, old, new, keys in leaving_keys(leaving, lengths):
        blocks = slice(old // block_size, new // block_size)
        centre, spread = bounds(keys.unflatten(1, (-1, block_size)), digests.volume, digests.centre.dtype)
        digests.centre[b, :, blocks], digests.spread[b, :, blocks] = centre, spread
        if coarse is not None:
            coarse[b, :, old:new] = as_copied(keys)


@triton.jit
def _store(to, x, d, D: tl.constexpr, UP: tl.constexpr, FP8: tl.constexpr):
    """Store `x` rounded to what `to` holds, to the nearest or up (then x >= 0); returns the value that is stored."""
    dtype: tl.constexpr = to.dtype.element_ty
    if FP8:
        byte, value = to_e4m3(x, UP)
        tl.store(to + d, byte.to(dtype, bitcast=True), mask=d < D)
    else:
        y = x.to(dtype)
        if UP and dtype != tl.float32:
            raw = y.to(tl.int16, bitcast=True)
            y = tl.where(y.to(tl.float32) < x, raw + 1, raw).to(dtype, bitcast=True)
        tl.store(to + d, y, mask=d < D)
        value = y.to(tl.float32)
    return value


@triton.jit
def store_digest(
    x, live, centre, spread, at, BALL: tl.constexpr, MEAN: tl.constexpr, LIMIT: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """The volume around those of the keys `x` [P, DP] that are `live` as number `at` of all. Division is exact: a mean
    of keys in fp8 may lie half-way between two such numbers, and half a bit less leads to the other one."""
    d = tl.arange(0, DP)
    live, n = live[:, None], tl.sum(live.to(tl.float32), 0)
    if BALL:
        middle = tl.div_rn(tl.sum(tl.where(live, x, 0.0), 0), n)
    else:
        middle = (tl.min(tl.where(live, x, float("inf")), 0) + tl.max(tl.where(live, x, float("-inf")), 0)) / 2
    if LIMIT > 0:
        middle = tl.minimum(tl.maximum(middle, -LIMIT), LIMIT)
    c = _store(centre + at * D, middle, d, D, False, LIMIT > 0)
    away = tl.where(live, tl.abs(x - c[None, :]), 0.0)
    if BALL:
        away = tl.where((d < D)[None, :], away, 0.0)
        tl.store(spread + at, tl.sqrt(tl.max(tl.sum(away * away, 1), 0)))
    else:
        if MEAN:
            s = tl.div_rn(tl.sum(away, 0), n)
        else:
            s = tl.max(away, 0)
        if LIMIT > 0:
            s = tl.minimum(s, LIMIT)
        _store(spread + at * D, s, d, D, not MEAN, LIMIT > 0)


@triton.jit
def digest_block(
    k, pool, centre, spread, coarse, block, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows, blocks,
    BALL: tl.constexpr, MEAN: tl.constexpr, LIMIT: tl.constexpr, COPY: tl.constexpr, MAX: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """One block that leaves: its volume, and the copy of its keys."""
    pos = block * P + tl.arange(0, P)
    every = tl.full((P,), True, tl.int1)
    x = load_keys(k, pool, pos, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows, every, D, DP).to(tl.float32)
    store_digest(x, every, centre, spread, bh * blocks + block, BALL, MEAN, LIMIT, D, DP)
    if COPY:
        keep_copy(x, coarse, bh * pool_rows + pos, every, MAX, D, DP)


@triton.jit(do_not_specialize=["tokens"])
def _bounds(
    k, pool, centre, spread, coarse, start, length, previous_ring_begin, ring_begin, k_b, k_h, k_s, heads, tokens,
    pool_rows, blocks, BALL: tl.constexpr, MEAN: tl.constexpr, LIMIT: tl.constexpr, COPY: tl.constexpr,
    MAX: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n = tl.load(start + b), tl.load(length + b)
    block = tl.load(previous_ring_begin + b) // P + tl.program_id(0)  # in the dimension that may exceed 65,535
    if (n > 0) & (block * P < tl.load(ring_begin + b)):
        digest_block(
            k, pool, centre, spread, coarse, block, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows, blocks, BALL,
            MEAN, LIMIT, COPY, MAX, P, D, DP,
        )  # fmt: skip


def volume_of(digests: Digests) -> dict[str, object]:
    """What a kernel is compiled for, so that `store_digest` makes their volume."""
    name, limit = VOLUMES[digests.volume], FP8_MAX if digests.centre.dtype == FP8 else 0.0
    return dict(BALL=name == "ball", MEAN=name == "mean-box", LIMIT=limit)


def launch(leaving, digests, lengths, coarse) -> None:
    (k, pool), (centre, spread, block_size, _) = leaving, digests
    (batch, heads, rows), d = pool.shape[:3], k.shape[3]
    most = cdiv(k.shape[2] + lengths.interval, block_size)  # blocks that can leave in one call
    _bounds[(min(most, centre.shape[2]), batch * heads)](
        k, pool, centre, spread, pool if coarse is None else coarse, *lengths[:4], *k.stride()[:3], heads, k.shape[2],
        rows, centre.shape[2], **volume_of(digests), COPY=coarse is not None, MAX=FP8_MAX, P=block_size, D=d,
        DP=next_power_of_2(d), num_warps=2, **launch_early(centre.device, batch * heads * most),
    )  # fmt: skip


block_bounds = register("block_bounds", reference, impls=(by_triton(launch),), check=check)
