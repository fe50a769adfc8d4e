"""Estimate <k, q> of the candidates from their 4-bit codes: the sum of weight * <direction, q part> over the subspaces.

`rotated` holds one query per kv head, or several of which the largest estimate counts. Empty candidates (-1) get -inf.
The second result are the peaks of the estimates (ops/select/_top.py).
Fused: a word of codes per subspace is loaded, unpacked in registers and multiplied with the query; 96 bytes a
candidate at head_dim 128, nothing in between is stored. Unpacked directions, weights and queries are fp16, so that the
products are the tensor cores'; sums are fp32. The rounding is far below the error of 4-bit codes.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops._machinery.triton import (
    cdiv,
    launch_early,
    next_power_of_2,
    sm_count,
    tl,
    triton,
    wait_for_previous,
)
from torchsparsekv.ops.pariskv._code import directions, level_bytes, unpacked, unpacked_by, unpacking, words
from torchsparsekv.ops.pariskv._lloyd_max import polynomial
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.select._top import GROUP, peaks_of, store_peaks
from torchsparsekv.ops.store.views import Candidates

Rotated = Annotated[Tensor, Of("batch heads fields padded_dim", torch.float32)]
TILE = 64  # candidates of a program: at 128K keys, 8 heads and beta 0.05 that is 820 programs
# What csrc/rerank.cu is for; other shapes are left to Triton. By the number of subspaces, how many programs a
# multiprocessor has registers for: all are there at once, and at a time take as many candidates as they have threads.
NATIVE_SPACES, NATIVE_FIELDS, NATIVE_TILE = {8: 4, 16: 4, 32: 2}, 8, 128


def check(rotated, codes, candidates) -> None:
    if rotated.shape[3] != 2 * codes.codes.shape[3]:
        raise ValueError(
            f"queries {tuple(rotated.shape)} do not fit codes of {codes.codes.shape[3]} bytes, two dimensions each"
        )


def reference(rotated: Rotated, codes: Codes, candidates: Candidates) -> tuple[Tensor, Tensor]:
    spaces, dim = codes.weights.shape[3], rotated.shape[3]
    at = candidates.clamp(min=0).long()[..., None]
    v = directions(codes.codes.gather(2, at.expand(-1, -1, -1, codes.codes.shape[3])), dim // spaces).half()
    v = v * codes.weights.gather(2, at.expand(-1, -1, -1, spaces))[..., None]
    estimate = v.flatten(-2).float() @ rotated.half().float().transpose(-1, -2)
    estimate = estimate.amax(-1).masked_fill(candidates < 0, -torch.inf)
    return estimate, peaks_of(estimate)


@triton.jit
def _rerank(
    rotated, codes, weights, candidates, out, peaks, rows, total, groups, c0, c1, c2, c3, c4, c5, c6, c7,
    F: tl.constexpr, FP: tl.constexpr, B: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, UNPACK: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.load(candidates + bh * total + i, mask=i < total, other=-1)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    if tl.max(row, 0) >= 0:
        live = (row >= 0)[:, None]
        at = tl.maximum(row, 0)[:, None] * B + tl.arange(0, B)[None, :]
        word = tl.load(codes + bh * rows * B + at, mask=live, other=0)
        w = tl.load(weights + bh * rows * B + at, mask=live, other=0.0)
        if UNPACK == "":
            v = unpacked(word, c0, c1, c2, c3, c4, c5, c6, c7, M) * w[:, :, None]
        else:
            v = unpacked_by(UNPACK, word, w)
        d, f = tl.arange(0, B * M), tl.arange(0, FP)
        x = tl.load(rotated + (bh * F + f[None, :]) * (B * M) + d[:, None], mask=(f < F)[None, :], other=0.0)
        estimate = tl.dot(tl.reshape(v, (TILE, B * M)), x.to(tl.float16))
        best = tl.max(tl.where((f < F)[None, :], estimate, float("-inf")), 1)
        best = tl.where(row >= 0, best, float("-inf"))
    tl.store(out + bh * total + i, best, mask=i < total)
    store_peaks(peaks + bh * groups, best, tl.program_id(1) * TILE, total, TILE, GROUP)


def _fits(rotated, codes, candidates) -> _cuda.Module | str:
    spaces, fields = codes.weights.shape[3], rotated.shape[2]
    if rotated.shape[3] != 8 * spaces or spaces not in NATIVE_SPACES or fields > NATIVE_FIELDS:
        return f"{spaces} subspaces of {rotated.shape[3]} dimensions and {fields} queries a kv head"
    if not _cuda.aligned(rotated, codes.codes, codes.weights):
        return "tensors are not aligned to 16 bytes"
    levels = dict(zip(("LOW0", "LOW1", "HIGH0", "HIGH1"), level_bytes(8)))
    sizes = dict(B=spaces, F=fields, WARPS=NATIVE_TILE // 32, RESIDENT=NATIVE_SPACES[spaces], GROUP=GROUP)
    return _cuda.load("rerank", candidates.device, **sizes, **levels)


def _launch_cuda(kernels, rotated, codes, candidates) -> tuple[Tensor, Tensor]:
    """csrc/rerank.cu"""
    out, peaks = fake(rotated, codes, candidates)
    batch, heads, total = candidates.shape
    rows, spaces = codes.weights.shape[2:]
    tiles = cdiv(total, NATIVE_TILE)
    rounds = cdiv(tiles * batch * heads, NATIVE_SPACES[spaces] * sm_count(candidates.device))
    kernels.launch(
        "rerank", (batch * heads, cdiv(tiles, rounds), 1), NATIVE_TILE, rotated, codes.codes, codes.weights, candidates,
        out, peaks, rows, total, peaks.shape[2],
    )  # fmt: skip
    return out, peaks


def _launch_triton(rotated, codes, candidates) -> tuple[Tensor, Tensor]:
    out, peaks = fake(rotated, codes, candidates)
    batch, heads, rows, spaces = codes.weights.shape
    total, fields = candidates.shape[2], rotated.shape[2]
    m = rotated.shape[3] // spaces
    device = candidates.device
    _rerank[(batch * heads, cdiv(total, TILE))](
        rotated, words(codes.codes, m), codes.weights, candidates, out, peaks, rows, total, peaks.shape[2],
        *polynomial(m), F=fields, FP=max(16, next_power_of_2(fields)), B=spaces, M=m, TILE=TILE,
        UNPACK=unpacking(m, device), GROUP=GROUP, num_warps=4, **launch_early(device, batch * heads * cdiv(total, TILE)),
    )  # fmt: skip
    return out, peaks


def fake(rotated, codes, candidates) -> tuple[Tensor, Tensor]:
    *lead, total = candidates.shape
    return torch.empty_like(candidates, dtype=torch.float32), rotated.new_empty((*lead, cdiv(total, GROUP)))


rerank = register(
    "rerank", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake, check=check
)
