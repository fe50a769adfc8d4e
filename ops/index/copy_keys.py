"""Keep a copy of every key that leaves the ring, in fp8 and on the device: what static sets are chosen by anew.

The keys of the pool would have to come over the link, all of them; the copy is a quarter of a row. Keys beyond the
range of fp8 are stored as its largest number.
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
from torchsparsekv.ops.store.rows import keys_of, load_key, row_at
from torchsparsekv.ops.store.views import Leaving, Lengths

Coarse: TypeAlias = Annotated[Tensor, Of("batch heads rows dim", torch.uint8)]  # fp8, as its bytes
TILE = 32


def copied(pool: Tensor, coarse: Tensor | None) -> Tensor:
    """Where keys are read: the copy, if there is one, or the pool."""
    return pool if coarse is None else coarse.view(FP8)


def keys_in(pool: Tensor, coarse: Tensor | None, *at: int | slice | list[int]) -> Tensor:
    """The keys that are there, [..., dim], or those at these indices: of packed rows no others are unpacked."""
    return keys_of(pool[at]) if coarse is None else copied(pool, coarse)[at]


@triton.jit
def key_of(source, head, row, d, live, rows, D: tl.constexpr, COARSE: tl.constexpr):
    """Channels `d` of the keys in these rows where `live`; `source` is what `copied` says."""
    if COARSE:
        return tl.load(source + (head * rows + row) * D + d, mask=live & (d < D), other=0.0)
    else:
        return load_key(row_at(source, head, row, rows, D), d, live, d < D, D)


@triton.jit
def keep_copy(x, coarse, row, live, MAX: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The keys `x` [n, DP] as rows of the copy where `live`, both [n]."""
    d = tl.arange(0, DP)[None, :]
    byte, _ = to_e4m3(tl.minimum(tl.maximum(x, -MAX), MAX), False)
    tl.store(coarse + row[:, None] * D + d, byte, mask=live[:, None] & (d < D))


def as_copied(keys: Tensor) -> Tensor:
    return keys.float().clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def reference(leaving: Leaving, coarse: Changed[Coarse], lengths: Lengths) -> None:
    for b, old, new, keys in leaving_keys(leaving, lengths):
        coarse[b, :, old:new] = as_copied(keys)


@triton.jit(do_not_specialize=["tokens"])
def _copy(
    k, pool, coarse, start, length, previous_ring_begin, ring_begin, k_b, k_h, k_s, heads, tokens, rows,
    MAX: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n, new = tl.load(start + b), tl.load(length + b), tl.load(ring_begin + b)
    first = tl.load(previous_ring_begin + b) + tl.program_id(0) * TILE  # in the dimension that may exceed 65,535
    if (n > 0) & (first < new):
        pos = first + tl.arange(0, TILE)
        live = pos < new
        x = load_keys(k, pool, pos, n0, n, b, h, bh, k_b, k_h, k_s, tokens, rows, live, D, DP).to(tl.float32)
        keep_copy(x, coarse, bh * rows + pos, live, MAX, D, DP)


def launch(leaving, coarse, lengths) -> None:
    k, pool = leaving
    (batch, heads, rows), d = pool.shape[:3], k.shape[3]
    parts = cdiv(min(k.shape[2] + lengths.interval, rows), TILE)
    _copy[(parts, batch * heads)](
        k, pool, coarse, *lengths[:4], *k.stride()[:3], heads, k.shape[2], rows, MAX=FP8_MAX, D=d,
        DP=next_power_of_2(d), TILE=TILE, **launch_early(k.device, batch * heads * parts),
    )  # fmt: skip


copy_keys = register("copy_keys", reference, impls=(by_triton(launch),))
