"""Copy every key that leaves the ring to the device, in fp8 (e4m3).

    coarse[p] = e4m3(clamp((key of p - origin) / UNIT, -448, 448))     for previous_ring_begin <= p < ring_begin

with the origin and the unit of ops/index/_origin.py. The origin is that of the first `interval` tokens after the sinks.

Ops that read all keys of a row read this copy: the pool may be in host memory, and the copy is a quarter of a row of
the pool in bf16.

Args:
    leaving: the keys of the tokens that leave the ring.
    coarse [batch, heads, rows, dim]: the copy, fp8 as bytes, changed.
    origin [batch, heads, dim]: changed when the first tokens of a row leave.

Launches: one program per (row, head, TILE of positions); it returns at once if no position of its tile leaves.
"""
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.fp8 import FP8, FP8_MAX, to_e4m3
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.index._leaving import leaving_keys, load_keys
from torchsparsekv.ops.index._origin import UNIT, middle_of, origin_of
from torchsparsekv.ops.store.rows import keys_of, load_key, row_at
from torchsparsekv.ops.store.views import Leaving, Lengths

Coarse: TypeAlias = Annotated[Tensor, Of("batch heads rows dim", torch.uint8)]  # the bytes of fp8 numbers
Origin: TypeAlias = Annotated[Tensor, Of("batch heads dim", torch.float32)]
TILE = 32
COPY_UNIT = tl.constexpr(UNIT)


def copied(pool: Tensor, coarse: Tensor | None) -> Tensor:
    """The tensor to read keys from: the copy if there is one, else the pool."""
    return pool if coarse is None else coarse.view(FP8)


def keys_in(pool: Tensor, coarse: Tensor | None, *at: int | slice | list[int]) -> Tensor:
    """The keys [..., dim] at the indices `at`: of the copy, less the origin, or of the pool. If the pool is packed,
    only these rows are unpacked."""
    return keys_of(pool[at]) if coarse is None else copied(pool, coarse)[at].float() * UNIT


@triton.jit
def key_of(source, head, row, d, live, rows, D: tl.constexpr, COARSE: tl.constexpr):
    """Channels `d` of the keys of these rows where `live`, else 0. `source` is the tensor that `copied` returns. The
    copy holds keys less the origin, in units of UNIT."""
    if COARSE:
        return tl.load(source + (head * rows + row) * D + d, mask=live & (d < D), other=0.0)
    else:
        return load_key(row_at(source, head, row, rows, D), d, live, d < D, D)


@triton.jit
def keep_copy(
    x, origin, coarse, row, live, MAX: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """Store the keys `x` [n, DP], less `origin` [DP], as the rows `row` [n] of the copy where `live` [n]."""
    d = tl.arange(0, DP)[None, :]
    x = (x - origin[None, :]) * (1.0 / UNIT)
    byte, _ = to_e4m3(tl.minimum(tl.maximum(x, -MAX), MAX), False)
    tl.store(coarse + row[:, None] * D + d, byte, mask=live[:, None] & (d < D))


def as_copied(keys: Tensor, origin: Tensor) -> Tensor:
    """Keys as the bytes of the copy. `origin` broadcasts to the keys."""
    return ((keys.float() - origin) / UNIT).clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def reference(leaving: Leaving, coarse: Changed[Coarse], origin: Changed[Origin], lengths: Lengths) -> None:
    for b, old, new, keys in leaving_keys(leaving, lengths):
        if old == lengths.sink:
            origin[b] = middle_of(keys[:, : lengths.interval])
        coarse[b, :, old:new] = as_copied(keys, origin[b, :, None])


@triton.jit(do_not_specialize=["tokens"])
def _copy(
    k, pool, coarse, origin, start, length, previous_ring_begin, ring_begin, k_b, k_h, k_s, heads, tokens, rows, sink,
    MAX: tl.constexpr, UNIT: tl.constexpr, INTERVAL: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n, new = tl.load(start + b), tl.load(length + b), tl.load(ring_begin + b)
    old = tl.load(previous_ring_begin + b)
    first = old + tl.program_id(0) * TILE  # the only grid dimension that may exceed 65,535
    if (n > 0) & (first < new):
        pos = first + tl.arange(0, TILE)
        live = pos < new
        x = load_keys(k, pool, pos, n0, n, b, h, bh, k_b, k_h, k_s, tokens, rows, live, D, DP).to(tl.float32)
        o = origin_of(
            k, pool, origin, first == sink, old, n0, n, b, h, bh, k_b, k_h, k_s, tokens, rows, sink, INTERVAL, PADDED,
            D, DP,
        )  # fmt: skip
        keep_copy(x, o, coarse, bh * rows + pos, live, MAX, UNIT, D, DP)


def launch(leaving, coarse, origin, lengths) -> None:
    k, pool = leaving
    (batch, heads, rows), d = pool.shape[:3], k.shape[3]
    parts = cdiv(min(k.shape[2] + lengths.interval, rows), TILE)
    _copy[(parts, batch * heads)](
        k, pool, coarse, origin, *lengths[:4], *k.stride()[:3], heads, k.shape[2], rows, lengths.sink, MAX=FP8_MAX,
        UNIT=UNIT, INTERVAL=lengths.interval, PADDED=next_power_of_2(lengths.interval), D=d, DP=next_power_of_2(d),
        TILE=TILE, **launch_early(k.device, batch * heads * parts),
    )  # fmt: skip


copy_keys = register("copy_keys", reference, impls=(by_triton(launch),))
