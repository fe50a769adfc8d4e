"""Summarise the keys of every block that leaves the ring by a volume: a centre and a spread.

    y         = (key - origin) / unit                the origin of the head (ops/index/_origin.py)
    box       centre = (max + min) / 2 per channel;  spread = max |y - centre| per channel
    ball      centre = mean y;                       spread = max |y - centre|_2, one number
    mean-box  centre = (max + min) / 2 per channel;  spread = mean |y - centre| per channel
    mean      centre = mean y;                       spread = 0, one number

The unit is UNIT for volumes in fp8 and 1 for others. A spread in fp8 is 448 at most, and 448 counts as unbounded. So a
box in fp8 is a bound at any size of the keys. The spread of a ball is always in fp32.

Box (arXiv 2406.10774) and ball contain every key: the centre is rounded to its storage type first, and the
spread is taken around the rounded centre and rounded up. Mean-box (the cuboid-mean of ArkVale, NeurIPS 2024)
describes where most keys are. It is no bound, and its spread is rounded to the nearest. Mean is a point.

Args:
    leaving: the keys of the tokens that leave the ring.
    digests: centre [batch, heads, blocks, dim] and spread [batch, heads, blocks, dim or 1], changed for the blocks that
        leave. The origin of a row is changed when its first tokens leave.
    coarse [batch, heads, rows, dim]: if given, the same launch writes the fp8 copy of these keys (copy_keys.py), from
        the same origin.

Launches: one program per (row, head, block that can leave in one call); it returns at once if its block does not leave.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.fp8 import FP8, FP8_MAX, to_e4m3
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.index._leaving import leaving_keys, load_keys
from torchsparsekv.ops.index._origin import UNIT, middle_of, origin_of
from torchsparsekv.ops.index.copy_keys import COPY_UNIT, Coarse, as_copied, keep_copy
from torchsparsekv.ops.store.views import Digests, Leaving, Lengths

UNBOUNDED = 65504.0  # how a spread of FP8_MAX is read, as fp8 has no infinity: the largest number of fp16
VOLUMES = ("box", "ball", "mean-box", "mean")
ONE_SPREAD = ("ball", "mean")  # one number a block


def check_spread(digests: Digests) -> None:
    centre, spread = digests[:2]
    if spread.shape[-1] not in (1, centre.shape[-1]):
        raise ValueError(f"spread has a value per channel (boxes) or per block (ball, mean), got {tuple(spread.shape)}")
    want = centre.dtype if spread.shape[-1] > 1 else torch.float32
    if spread.dtype != want:
        raise TypeError(f"spread must be {want}, got {spread.dtype}")


def check(leaving, digests, lengths, coarse=None) -> None:
    check_digests(leaving.pool, digests)


def check_digests(pool: Tensor, digests: Digests) -> None:
    """Refuse digests of an unknown volume, or of other blocks than those of this pool."""
    check_spread(digests)
    rows, (centre, spread, block_size, volume, _) = pool.shape[2], digests
    if centre.shape[0] != pool.shape[0]:
        raise ValueError(f"digests must be of {pool.shape[0]} pools, got {centre.shape[0]}")
    if volume not in range(len(VOLUMES)) or (VOLUMES[volume] in ONE_SPREAD) != (spread.shape[-1] == 1):
        known = ", ".join(f"{i} ({name})" for i, name in enumerate(VOLUMES))
        raise ValueError(f"volume must be one of {known}, got {volume} with spreads {tuple(spread.shape)}")
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


def unit_of(dtype: torch.dtype) -> float:
    """The unit of volumes that are stored in this type."""
    return UNIT if dtype == FP8 else 1.0


def bounds(keys: Tensor, origin: Tensor | float, volume: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Centre and spread of keys [..., tokens, head_dim]. `origin` broadcasts to the keys."""
    x, name = (keys.float() - origin) / unit_of(dtype), VOLUMES[volume]
    middle = x.mean(-2) if name in ONE_SPREAD else (x.amin(-2) + x.amax(-2)) / 2
    centre = (middle.clamp(-FP8_MAX, FP8_MAX) if dtype == FP8 else middle).to(dtype)
    if name == "mean":
        return centre, torch.zeros_like(x[..., 0, :1])
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
        if old == lengths.sink:
            digests.origin[b] = middle_of(keys[:, :block_size])
        origin, pages = digests.origin[b, :, None, None], keys.unflatten(1, (-1, block_size))
        centre, spread = bounds(pages, origin, digests.volume, digests.centre.dtype)
        digests.centre[b, :, blocks], digests.spread[b, :, blocks] = centre, spread
        if coarse is not None:
            coarse[b, :, old:new] = as_copied(keys, digests.origin[b, :, None])


@triton.jit
def _store(to, x, d, D: tl.constexpr, UP: tl.constexpr, FP8: tl.constexpr):
    """Store `x` [DP], rounded to the type of `to`: to the nearest, or up with UP (x >= 0). Returns what is stored."""
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
    x, origin, live, centre, spread, at, BALL: tl.constexpr, MEAN: tl.constexpr, LIMIT: tl.constexpr,
    UNIT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store the volume around the `live` keys of `x` [P, DP], less `origin` [DP], as block number `at`.

    Divisions round correctly: a mean may lie half-way between two fp8 numbers, and an error of half a bit would round
    it to the other number."""
    d = tl.arange(0, DP)
    x = (x.to(tl.float32) - origin[None, :]) * (1.0 / UNIT)
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
        if BALL == 2:
            away = tl.zeros_like(away)
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
    k, pool, centre, spread, origin, coarse, block, old, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows, blocks,
    sink, BALL: tl.constexpr, MEAN: tl.constexpr, LIMIT: tl.constexpr, UNIT: tl.constexpr, COPY: tl.constexpr,
    MAX: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store the volume of one block that leaves and, with COPY, the fp8 copy of its keys."""
    o = origin_of(
        k, pool, origin, block * P == sink, old, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows, sink, P, P, D,
        DP,
    )  # fmt: skip
    pos = block * P + tl.arange(0, P)
    every = tl.full((P,), True, tl.int1)
    x = load_keys(k, pool, pos, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows, every, D, DP).to(tl.float32)
    store_digest(x, o, every, centre, spread, bh * blocks + block, BALL, MEAN, LIMIT, UNIT, D, DP)
    if COPY:
        keep_copy(x, o, coarse, bh * pool_rows + pos, every, MAX, COPY_UNIT, D, DP)


@triton.jit(do_not_specialize=["tokens"])
def _bounds(
    k, pool, centre, spread, origin, coarse, start, length, previous_ring_begin, ring_begin, k_b, k_h, k_s, heads,
    tokens, pool_rows, blocks, sink, BALL: tl.constexpr, MEAN: tl.constexpr, LIMIT: tl.constexpr, UNIT: tl.constexpr,
    COPY: tl.constexpr, MAX: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n = tl.load(start + b), tl.load(length + b)
    old = tl.load(previous_ring_begin + b)
    block = old // P + tl.program_id(0)  # the only grid dimension that may exceed 65,535
    if (n > 0) & (block * P < tl.load(ring_begin + b)):
        digest_block(
            k, pool, centre, spread, origin, coarse, block, old, n0, n, b, h, bh, k_b, k_h, k_s, tokens, pool_rows,
            blocks, sink, BALL, MEAN, LIMIT, UNIT, COPY, MAX, P, D, DP,
        )  # fmt: skip


def volume_of(digests: Digests) -> dict[str, object]:
    """The constants with which `store_digest` makes the volume of these digests."""
    name, dtype = VOLUMES[digests.volume], digests.centre.dtype
    limit = FP8_MAX if dtype == FP8 else 0.0
    ball = {"ball": 1, "mean": 2}.get(name, 0)
    return dict(BALL=ball, MEAN=name == "mean-box", LIMIT=limit, UNIT=unit_of(dtype))


def launch(leaving, digests, lengths, coarse) -> None:
    (k, pool), (centre, spread, block_size, _, origin) = leaving, digests
    (batch, heads, rows), d = pool.shape[:3], k.shape[3]
    most = cdiv(k.shape[2] + lengths.interval, block_size)  # blocks that can leave in one call
    _bounds[(min(most, centre.shape[2]), batch * heads)](
        k, pool, centre, spread, origin, pool if coarse is None else coarse, *lengths[:4], *k.stride()[:3], heads,
        k.shape[2], rows, centre.shape[2], lengths.sink, **volume_of(digests), COPY=coarse is not None, MAX=FP8_MAX,
        P=block_size, D=d,
        DP=next_power_of_2(d), num_warps=2, **launch_early(centre.device, batch * heads * most),
    )  # fmt: skip


block_bounds = register("block_bounds", reference, impls=(by_triton(launch),), check=check)
