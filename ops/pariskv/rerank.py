"""Estimate <k, q> of the candidates from their 4-bit codes.

    estimate[key] = max over queries of  sum over subspaces s of  weight_s * <direction_s, q_s>
    peaks = the largest estimate of every group of candidates        (ops/select/_top.py)

Directions, weights and queries are rounded to fp16, so that tensor cores multiply them; sums are in fp32. This rounding
is far below the error of 4-bit codes.

Launches: one, (row * kv head, tiles of candidates), in CUDA C++ for subspaces of 8 dimensions and up to 8 queries, in
Triton for other shapes. It reads 96 bytes a candidate at dim 128, unpacks them in registers, and stores nothing in
between. Tiles without candidates store -inf.

ParisKV, stage II of retrieval, appendix B.
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
from torchsparsekv.ops.pariskv._code import directions, level_bytes, unpack, unpack_ptx, unpack_weighted, words
from torchsparsekv.ops.pariskv._lloyd_max import polynomial
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.select._top import GROUP, peaks_of, store_peaks
from torchsparsekv.ops.store.tables import check_table, places_of, pool_row_of, pool_rows
from torchsparsekv.ops.store.views import OWN_POOLS, BlockTable, Candidates

RotatedQueries = Annotated[Tensor, Of("batch heads queries padded_dim", torch.float32)]
TILE = 64  # candidates per program: 820 programs at 128K keys, 8 kv heads and beta 0.05
# What csrc/rerank.cu supports; other shapes run on Triton. NATIVE_SPACES: the number of subspaces, and for how many
# programs a multiprocessor then has registers. All programs run at once. NATIVE_FIELDS: the most queries. NATIVE_TILE:
# the threads of a program, and the candidates that it takes at a time.
NATIVE_SPACES, NATIVE_FIELDS, NATIVE_TILE = {8: 4, 16: 4, 32: 2}, 8, 128


def check(rotated, codes, candidates, table=OWN_POOLS) -> None:
    check_table(codes.codes, candidates.shape[0], table)
    if rotated.shape[3] != 2 * codes.codes.shape[3]:
        raise ValueError(
            f"queries {tuple(rotated.shape)} do not fit codes of {codes.codes.shape[3]} bytes, two dimensions each"
        )


def reference(
    rotated: RotatedQueries, codes: Codes, candidates: Candidates, table: BlockTable = OWN_POOLS
) -> tuple[Tensor, Tensor]:
    """Estimate the candidates.

    Args:
        rotated: [batch, heads, queries, padded dim], of centroid_votes; the largest estimate of the queries counts.
        codes: the index; `codes` and `weights` are read.
        candidates: [batch, heads, candidates], positions, -1 for none.
        table: the blocks of each row, if rows share one pool.

    Returns:
        estimates: [batch, heads, candidates] in fp32, -inf for empty candidates.
        peaks: [batch, heads, groups] in fp32.
    """
    spaces, dim = codes.weights.shape[3], rotated.shape[3]
    row = candidates.clamp(min=0).long()
    pool = torch.arange(row.shape[0], device=row.device)[:, None, None]
    if table.ids is not None:
        row, pool = pool_rows(torch.where(candidates < 0, 0, row), table), torch.zeros_like(pool)
    at = pool, torch.arange(row.shape[1], device=row.device)[:, None], row
    direction = directions(codes.codes[at], dim // spaces).half() * codes.weights[at][..., None]
    estimate = direction.flatten(-2).float() @ rotated.half().float().transpose(-1, -2)
    estimate = estimate.amax(-1).masked_fill(candidates < 0, -torch.inf)
    return estimate, peaks_of(estimate)


@triton.jit
def _rerank(
    rotated, codes, weights, candidates, out, peaks, table, heads, places, rows, total, groups, c0, c1, c2, c3, c4, c5,
    c6, c7, F: tl.constexpr, FP: tl.constexpr, B: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    UNPACK: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.load(candidates + bh * total + i, mask=i < total, other=-1)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    if tl.max(row, 0) >= 0:
        live = (row >= 0)[:, None]
        at = pool_row_of(table, bh // heads, places, tl.maximum(row, 0), row >= 0, PAGE)
        space_at = at[:, None] * B + tl.arange(0, B)[None, :]
        first = bh * rows * B
        if PAGE > 0:
            first = bh % heads * rows * B
        word = tl.load(codes + first + space_at, mask=live, other=0)  # [TILE, B]
        w = tl.load(weights + first + space_at, mask=live, other=0.0)  # [TILE, B]
        if UNPACK == "":
            direction = unpack(word, c0, c1, c2, c3, c4, c5, c6, c7, M) * w[:, :, None]
        else:
            direction = unpack_weighted(UNPACK, word, w)
        d, f = tl.arange(0, B * M), tl.arange(0, FP)
        query_at = rotated + (bh * F + f[None, :]) * (B * M) + d[:, None]
        x = tl.load(query_at, mask=(f < F)[None, :], other=0.0)  # [B * M, FP]
        estimate = tl.dot(tl.reshape(direction, (TILE, B * M)), x.to(tl.float16))
        best = tl.max(tl.where((f < F)[None, :], estimate, float("-inf")), 1)
        best = tl.where(row >= 0, best, float("-inf"))
    tl.store(out + bh * total + i, best, mask=i < total)
    store_peaks(peaks + bh * groups, best, tl.program_id(1) * TILE, total, TILE, GROUP)


def _fits(rotated, codes, candidates, table=OWN_POOLS) -> _cuda.Module | str:
    spaces, queries = codes.weights.shape[3], rotated.shape[2]
    if rotated.shape[3] != 8 * spaces or spaces not in NATIVE_SPACES or queries > NATIVE_FIELDS:
        return f"{spaces} subspaces of {rotated.shape[3]} dimensions and {queries} queries a kv head"
    if not _cuda.aligned(rotated, codes.codes, codes.weights):
        return "tensors are not aligned to 16 bytes"
    levels = dict(zip(("LOW0", "LOW1", "HIGH0", "HIGH1"), level_bytes(8)))
    sizes = dict(B=spaces, F=queries, WARPS=NATIVE_TILE // 32, RESIDENT=NATIVE_SPACES[spaces], GROUP=GROUP)
    return _cuda.load("rerank", candidates.device, **sizes, **levels, PAGE=table.block_size)


def _launch_cuda(kernels, rotated, codes, candidates, table=OWN_POOLS) -> tuple[Tensor, Tensor]:
    """csrc/rerank.cu"""
    out, peaks = fake(rotated, codes, candidates)
    batch, heads, total = candidates.shape
    rows, spaces = codes.weights.shape[2:]
    tiles = cdiv(total, NATIVE_TILE)
    rounds = cdiv(tiles * batch * heads, NATIVE_SPACES[spaces] * sm_count(candidates.device))
    kernels.launch(
        "rerank", (batch * heads, cdiv(tiles, rounds), 1), NATIVE_TILE, rotated, codes.codes, codes.weights, candidates,
        out, peaks, *places_of(table), heads, rows, total, peaks.shape[2],
    )  # fmt: skip
    return out, peaks


def _launch_triton(rotated, codes, candidates, table=OWN_POOLS) -> tuple[Tensor, Tensor]:
    out, peaks = fake(rotated, codes, candidates)
    (batch, heads, total), (rows, spaces), queries = candidates.shape, codes.weights.shape[2:], rotated.shape[2]
    ids, places = (candidates, 0) if table.ids is None else (table.ids, table.ids.shape[1])
    m = rotated.shape[3] // spaces
    device = candidates.device
    _rerank[(batch * heads, cdiv(total, TILE))](
        rotated, words(codes.codes, m), codes.weights, candidates, out, peaks, ids, heads, places, rows, total,
        peaks.shape[2], *polynomial(m), F=queries, FP=max(16, next_power_of_2(queries)), B=spaces, M=m, TILE=TILE,
        UNPACK=unpack_ptx(m, device), GROUP=GROUP, PAGE=table.block_size, num_warps=4,
        **launch_early(device, batch * heads * cdiv(total, TILE)),
    )  # fmt: skip
    return out, peaks


def fake(rotated, codes, candidates, *_) -> tuple[Tensor, Tensor]:
    *lead, total = candidates.shape
    return torch.empty_like(candidates, dtype=torch.float32), rotated.new_empty((*lead, cdiv(total, GROUP)))


rerank = register(
    "rerank", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake, check=check
)
