"""Summarise the keys of every block that leaves the ring by a bounding volume: a centre and a spread.

`box`: the midpoint of the per-channel range and half that range (Quest's minimum and maximum, in another form).
`ball`: the mean key and the largest distance to it (ArkVale). The centre is rounded to its storage type first and the
spread is taken around the rounded centre, then rounded up: the volume contains every key whatever the storage type.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._fp8 import FP8, FP8_MAX, to_e4m3
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import cdiv, chain, chained, next_power_of_2, tl, triton
from torchsparsekv.ops.index._leaving import leaving_keys

SCHEMA = (
    "(Tensor k, Tensor pool, Tensor(a!) centre, Tensor(b!) spread, Tensor start, Tensor length, Tensor leaving, "
    "Tensor retired, int interval, int block_size) -> ()"
)
UNBOUNDED = 65504.0  # what a spread of FP8_MAX counts as: fp8 has no infinity, and this is the largest that fp16 has


def check(k, pool, centre, spread, start, length, leaving, retired, interval, block_size) -> None:
    _check.rows(pool)
    _check.dense_last(k=k)
    _check.same_dtype(k=k, pool=pool)
    _check.contiguous(centre=centre, spread=spread)
    _check.dtype((*_check.FLOATS, FP8), centre=centre)
    _check.same_dtype(centre=centre, spread=spread) if spread.shape[-1] > 1 else _check.dtype(
        (torch.float32,), spread=spread
    )
    _check.counters(k.shape[0], start=start, length=length, leaving=leaving, retired=retired)
    _check.shape((*pool.shape[:2], pool.shape[2] // block_size, pool.shape[-1]), centre=centre)
    _check.shape((*pool.shape[:2], k.shape[2], pool.shape[-1]), k=k)
    if spread.shape[-1] not in (1, centre.shape[-1]) or spread.shape[:3] != centre.shape[:3]:
        raise ValueError(f"spread has one value per channel (box) or per block (ball), got {tuple(spread.shape)}")


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Non-negative `x` rounded towards +inf in `dtype` (saturating for fp8: bound_scores reads 448 as "or more")."""
    if dtype == torch.float32:
        return x
    if dtype == FP8:
        x = x.clamp(max=FP8_MAX)
    y = x.to(dtype)
    bits = y.view(torch.uint8 if dtype == FP8 else torch.int16)
    return torch.where(y.float() < x, bits + 1, bits).view(dtype)


def bounds(keys: Tensor, box: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Centre and spread of keys [..., tokens, head_dim]."""
    x = keys.float()
    middle = (x.amin(-2) + x.amax(-2)) / 2 if box else x.mean(-2)
    centre = (middle.clamp(-FP8_MAX, FP8_MAX) if dtype == FP8 else middle).to(dtype)
    away = x - centre.float().unsqueeze(-2)
    if box:
        return centre, round_up(away.abs().amax(-2), dtype)
    return centre, away.square().sum(-1).amax(-1, keepdim=True).sqrt()


def reference(k, pool, centre, spread, start, length, leaving, retired, interval, block_size) -> None:
    for b, old, new, keys in leaving_keys(k, pool, start, length, leaving, retired):
        blocks = slice(old // block_size, new // block_size)
        box = spread.shape[-1] > 1
        c, s = bounds(keys.unflatten(1, (-1, block_size)), box, centre.dtype)
        centre[b, :, blocks], spread[b, :, blocks] = c, s


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
def _bounds(
    k, pool, centre, spread, start, length, leaving, retired, k_b, k_h, k_s, heads, tokens, pool_rows, blocks,
    BOX: tl.constexpr, LIMIT: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n = tl.load(start + b), tl.load(length + b)
    block = tl.load(leaving + b) // P + tl.program_id(0)  # in the dimension that may exceed 65,535
    if (n > 0) & (block * P < tl.load(retired + b)):
        pos = block * P + tl.arange(0, P)
        d = tl.arange(0, DP)
        live = (d < D)[None, :]
        fresh = (pos >= n0)[:, None]
        col = (tokens - n + pos).to(tl.int64)
        x = tl.load(k + b * k_b + h * k_h + col[:, None] * k_s + d[None, :], mask=fresh & live, other=0.0)
        old = pool + (bh * pool_rows + pos[:, None]) * 2 * D + d[None, :]
        x = (x + tl.load(old, mask=~fresh & live, other=0.0)).to(tl.float32)
        if BOX:
            middle = (tl.min(x, 0) + tl.max(x, 0)) / 2
        else:
            middle = tl.sum(x, 0) / P
        if LIMIT > 0:
            middle = tl.minimum(tl.maximum(middle, -LIMIT), LIMIT)
        at = bh * blocks + block
        c = _store(centre + at * D, middle, d, D, False, LIMIT > 0)
        away = tl.abs(x - c[None, :])
        if BOX:
            s = tl.max(away, 0)
            if LIMIT > 0:
                s = tl.minimum(s, LIMIT)
            _store(spread + at * D, s, d, D, True, LIMIT > 0)
        else:
            away = tl.where(live, away, 0.0)
            tl.store(spread + at, tl.sqrt(tl.max(tl.sum(away * away, 1), 0)))


def cuda(k, pool, centre, spread, start, length, leaving, retired, interval, block_size) -> None:
    batch, heads, rows, _, d = pool.shape
    most = cdiv(k.shape[2] + interval, block_size)  # blocks that can leave in one call
    _bounds[(min(most, centre.shape[2]), batch * heads)](
        k, pool, centre, spread, start, length, leaving, retired, *k.stride()[:3], heads, k.shape[2], rows,
        centre.shape[2], BOX=spread.shape[-1] > 1, LIMIT=FP8_MAX if centre.dtype == FP8 else 0.0, P=block_size,
        D=d, DP=next_power_of_2(d), num_warps=2, **chained(centre.device, batch * heads * most),
    )  # fmt: skip


def fake(k: Tensor, *_) -> None: ...


block_bounds = register("block_bounds", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
