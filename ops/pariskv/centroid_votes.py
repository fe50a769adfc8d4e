"""Rotate the query, and give every centroid of every subspace the votes that its keys get from the query.

    y = rotate(q)                             of every query head, or of the mean of a group's heads
    score[c] = <y_s, pattern_c>               in subspace s, for all 2^m sign patterns c
    before[c] = number of keys of the centroids with strictly larger scores
    votes[c] = the number of p in (5, 15, 30, 50, 75, 100) with  before[c] < ceil(p % of rho * n)

n is the number of retrievable keys of the row. So the keys of the best centroids get 6 votes, and keys beyond the first
rho * n get none. Centroids with equal scores get equal votes. Scores are sums of +-q before any scaling, so ties are
exact where the query has small integers.

`ratios` is three times (below, beta, rho), for rows of n < below keys, then (beta, rho) for longer rows. beta and rho
are in millionths.

Launches: one. For 8, 16 or 32 subspaces of 256 centroids in CUDA C++, (row * kv head, subspaces / PER_PROGRAM, packs of
four query heads): a warp has one subspace of one query head. It reads q and the lengths while the kernel directly
before it still runs, so that kernel must not write them. Else in Triton, (row * kv head, subspaces, query heads).

ParisKV, equation 15.
"""
import functools
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.hadamard import hadamard_odd
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
from torchsparsekv.ops.pariskv._srht import SEEDS, is_flipped, rotate, signs
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.store.views import Lengths

AnyQuery = Annotated[Tensor, Of("batch q_heads 1 dim", FLOATS, strided=True)]
PERCENT = (5, 15, 30, 50, 75, 100)  # a centroid gets a vote for each threshold that it is below
MILLION = 1_000_000
HEADS_PER_ENTRY = 4  # query heads whose votes share an entry of the table, one byte each
NATIVE_SPACES = (8, 16, 32)  # subspaces that csrc/centroid_votes.cu supports, of 256 centroids
PER_PROGRAM = 4  # subspaces of a program of it; 1 if there would be fewer programs than multiprocessors


def check_ratios(ratios) -> None:
    if len(ratios) != 11 or min(ratios) < 0 or max(*ratios[1:9:3], *ratios[2:9:3], *ratios[9:]) > MILLION:
        raise ValueError(
            "ratios must be three times (below, beta, rho), then (beta, rho), with beta and rho in millionths, "
            f"got {ratios}"
        )


def check(q, codes, lengths, ratios, mean, seed) -> None:
    counts = codes.counts
    _check.heads(q, counts)
    spaces, size = counts.shape[2:]
    if q.shape[3] > 256 or not 0 <= seed < SEEDS:
        raise ValueError(f"need head_dim <= 256 and 0 <= seed < {SEEDS}, got {q.shape[3]}, seed {seed}")
    m = size.bit_length() - 1
    if size != 1 << m or spaces * m != next_power_of_2(q.shape[3]):
        raise ValueError(f"counts {tuple(counts.shape)} do not fit q {tuple(q.shape)}")
    check_ratios(ratios)


def beta_and_rho(n: int, ratios: list[int]) -> tuple[int, int]:
    """(beta, rho) of a row of n keys."""
    for below, beta, rho in zip(ratios[:9:3], ratios[1:9:3], ratios[2:9:3]):
        if n < below:
            return beta, rho
    return ratios[9], ratios[10]


def split_ratios(ratios: list[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """`ratios` as three tuples: the three bounds `below`, the four beta, the four rho."""
    return tuple(ratios[:9:3]), (*ratios[1:9:3], ratios[9]), (*ratios[2:9:3], ratios[10])


def rotated_query(q: Tensor, heads: int, mean: bool, seed: int) -> Tensor:
    """Rotated queries before scaling, sums of +-q: [batch, q_heads, 1, dim] -> [batch, heads, queries, padded dim]."""
    x = q[:, :, 0].float().unflatten(1, (heads, -1))
    return rotate(x.sum(2, keepdim=True) if mean else x, seed)


def scale_of(q: Tensor, heads: int, mean: bool) -> float:
    """The factor that makes `rotated_query` an orthogonal rotation of the query, or of the mean of a group."""
    return next_power_of_2(q.shape[3]) ** -0.5 * (heads / q.shape[1] if mean else 1)


def centroid_scores(rotated: Tensor, spaces: int, centroids: int) -> Tensor:
    """The score of every centroid in every subspace: rotated [..., spaces * m] -> [..., spaces, 2^m]."""
    x = rotated.unflatten(-1, (spaces, -1))
    bits = torch.arange(centroids, device=x.device)[:, None] >> torch.arange(x.shape[-1], device=x.device) & 1
    return x @ (2.0 * bits - 1).T


def votes_of(scores: Tensor, counts: Tensor, n: int, rho: int) -> Tensor:
    """Votes of the centroids, by their scores and the number of their keys, all [..., spaces, centroids]."""
    score, order = scores.sort(-1, descending=True)
    before = counts.expand_as(order).gather(-1, order).cumsum(-1)
    before = torch.nn.functional.pad(before, (1, 0))[..., :-1]
    first = torch.searchsorted(-score, -score).clamp(max=score.shape[-1] - 1)  # the first equal score; none for NaN
    before = torch.empty_like(before).scatter_(-1, order, before.gather(-1, first))
    limits = torch.tensor([cdiv(n * rho * p, 100 * MILLION) for p in PERCENT], device=scores.device)
    return (before[..., None] < limits).sum(-1)


def reference(
    q: AnyQuery, codes: Codes, lengths: Lengths, ratios: list[int], mean: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """Rotate the query and count votes.

    Args:
        q: [batch, q_heads, 1, dim].
        codes: the index; only `counts` [batch, heads, spaces, centroids] is read.
        lengths: positions per row.
        ratios: rho by the number of keys, in millionths (above).
        mean: vote by the mean query of a group, instead of by every query head.
        seed: of the rotation.

    Returns:
        rotated: [batch, heads, queries, padded dim] in fp32, with 1 query or one per query head; <k, q> is the inner
            product of rotated vectors.
        votes: [batch, heads, packs, centroids, spaces, 4] in uint8: an entry has the votes of four query heads, so that
            one lookup serves them. Missing query heads give 0 votes.
    """
    counts = codes.counts
    batch, heads, spaces, size = counts.shape
    y = rotated_query(q, heads, mean, seed)
    scores, votes = centroid_scores(y, spaces, size), []
    for b in range(batch):
        n = max(int(lengths.ring_begin[b]) - lengths.sink, 0)
        votes.append(votes_of(scores[b], counts[b][:, None], n, beta_and_rho(n, ratios)[1]))
    table = torch.stack(votes).to(torch.uint8)  # [batch, heads, queries, spaces, centroids]
    missing = -table.shape[2] % HEADS_PER_ENTRY
    table = torch.nn.functional.pad(table, (0, 0, 0, 0, 0, missing)).unflatten(2, (-1, HEADS_PER_ENTRY))
    return y * scale_of(q, heads, mean), table.permute(0, 1, 2, 5, 4, 3).contiguous()


@triton.jit
def share_by_length(n, below0, below1, below2, at0, at1, at2, at3):
    """beta, or rho, of a row of n keys, in millionths."""
    return tl.where(n < below0, at0, tl.where(n < below1, at1, tl.where(n < below2, at2, at3))).to(tl.int64)


@triton.jit
def _limit(n, rho, percent):
    """ceil(percent % of rho * n), with rho in millionths."""
    return ((n.to(tl.int64) * rho * percent + 99999999) // 100000000).to(tl.int32)


@triton.jit
def _rotated(q, seed, first, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, q_h):
    """Coordinates `first` to `first + M` of the rotated sum of G query heads at `q`, before scaling."""
    d = tl.arange(0, DP)
    x = tl.zeros((DP,), tl.float32)
    for g in range(G):
        x += tl.load(q + g * q_h + d, mask=d < D, other=0.0).to(tl.float32)
    minus = hadamard_odd(first + tl.arange(0, M)[:, None], d[None, :]) ^ is_flipped(d, seed)[None, :]
    return tl.sum(tl.where(minus, -x[None, :], x[None, :]), 1)


@triton.jit
def _votes_of(before, n, rho):
    """Votes of centroids, by the number of keys of strictly better centroids."""
    votes = (before < _limit(n, rho, 5)).to(tl.int32) + (before < _limit(n, rho, 15)).to(tl.int32)
    votes += (before < _limit(n, rho, 30)).to(tl.int32) + (before < _limit(n, rho, 50)).to(tl.int32)
    return votes + (before < _limit(n, rho, 75)).to(tl.int32) + (before < _limit(n, rho, 100)).to(tl.int32)


# Triton makes an argument of 1 a constant, and version 3.6 then generates wrong code (seed 1, m of 2 or 4, dim 256).
@triton.jit(do_not_specialize=["seed"])
def _votes(
    q, counts, rotated, table, ring_begin, q_b, q_h, heads, sink, seed, scale, below0, below1, below2, rho0, rho1, rho2,
    rho3, G: tl.constexpr, F: tl.constexpr, W: tl.constexpr, B: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One subspace of one query head: the votes of every centroid, one byte of its table entry.

    Opposite patterns have opposite scores, so the absolute scores of the pairs are compared: a quarter of the
    comparisons. If the better patterns of all pairs hold enough keys, the worse patterns get no votes.
    """
    wait_for_previous(PDL)
    bh, space, f = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    size: tl.constexpr = 1 << M
    half: tl.constexpr = 1 << (M - 1)
    c = tl.arange(0, half)
    up, down = tl.zeros((half,), tl.int32), tl.zeros((half,), tl.int32)
    if f < F:  # the other bytes of the entry stay 0
        counts += (bh * B + space) * size
        b, h = bh // heads, bh % heads
        y = _rotated(q + b * q_b + (h * G + f) * q_h, seed, space * M, G // F, D, DP, M, q_h)
        j = tl.arange(0, M)
        tl.store(rotated + (bh * F + f) * DP + space * M + j, y * scale)
        s = tl.sum(tl.where(((c[:, None] >> j[None, :]) & 1) != 0, y[None, :], -y[None, :]), 1)
        c = tl.where(s < 0, size - 1 - c, c)
        s = tl.abs(s)
        better, worse = tl.load(counts + c), tl.load(counts + size - 1 - c)
        n = tl.maximum(tl.load(ring_begin + b) - sink, 0)
        rho = share_by_length(n, below0, below1, below2, rho0, rho1, rho2, rho3)
        up += _votes_of(tl.sum(tl.where(s[:, None] > s[None, :], better[:, None], 0), 0), n, rho)
        better_keys = tl.sum(better, 0)
        if better_keys < _limit(n, rho, 100):
            down += _votes_of(better_keys + tl.sum(tl.where(s[:, None] < s[None, :], worse[:, None], 0), 0), n, rho)
        down = tl.where(s == 0, up, down)
    table += ((bh * W + f // 4) * size * B + space) * 4 + f % 4
    tl.store(table + c * (B * 4), up.to(tl.uint8))
    tl.store(table + (size - 1 - c) * (B * 4), down.to(tl.uint8))


@functools.cache
def _flip_bits(seed: int, size: int) -> tuple[int, ...]:
    """The channels with flipped signs, of 256, in words of 32 bits."""
    minus = torch.nn.functional.pad(signs(seed, size) < 0, (0, 256 - size)).view(8, 32).tolist()
    return tuple(sum(bit << i for i, bit in enumerate(word)) for word in minus)


def _fits(q, codes, lengths, ratios, mean, seed) -> tuple[_cuda.Module, int] | str:
    heads, spaces, size = codes.counts.shape[1:]
    if size != 256 or spaces not in NATIVE_SPACES:
        return f"{spaces} subspaces of {size} centroids"
    if not _cuda.aligned(codes.counts):
        return "counts are not aligned to 16 bytes"
    group = q.shape[1] // heads
    kind = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}[q.dtype]
    queries, sums = (1, group) if mean else (group, 1)
    programs = q.shape[0] * heads * cdiv(queries, HEADS_PER_ENTRY) * spaces // PER_PROGRAM
    each = PER_PROGRAM if programs >= sm_count(q.device) else 1
    sizes = dict(B=spaces, PER_PROGRAM=each, F=queries, G=sums, D=q.shape[3], KIND=kind)
    kernels = _cuda.load("centroid_votes", q.device, **sizes)
    return kernels if isinstance(kernels, str) else (kernels, each)


def _launch_cuda(fitting, q, codes, lengths, ratios, mean, seed) -> tuple[Tensor, Tensor]:
    """csrc/centroid_votes.cu"""
    kernels, each = fitting
    batch, heads, spaces, _ = codes.counts.shape
    rotated, votes = fake(q, codes, lengths, ratios, mean)
    below, _, rho = split_ratios(ratios)
    kernels.launch(
        "votes", (batch * heads, spaces // each, votes.shape[2]),
        32 * each * min(rotated.shape[2], HEADS_PER_ENTRY), q, codes.counts, rotated, votes, lengths.ring_begin,
        q.stride(0), q.stride(1), heads, lengths.sink, scale_of(q, heads, mean), below + rho,
        _flip_bits(seed, rotated.shape[3]),
    )  # fmt: skip
    return rotated, votes


def _launch_triton(q, codes, lengths, ratios, mean, seed) -> tuple[Tensor, Tensor]:
    batch, heads, spaces, size = codes.counts.shape
    rotated, votes = fake(q, codes, lengths, ratios, mean)
    packs = votes.shape[2]
    below, _, rho = split_ratios(ratios)
    _votes[(batch * heads, spaces, packs * HEADS_PER_ENTRY)](
        q, codes.counts, rotated, votes, lengths.ring_begin, q.stride(0), q.stride(1), heads, lengths.sink, seed,
        scale_of(q, heads, mean), *below, *rho, G=q.shape[1] // heads, F=rotated.shape[2], W=packs, B=spaces,
        M=size.bit_length() - 1, D=q.shape[3], DP=rotated.shape[3], num_warps=4 if size == 256 else 1,
        **launch_early(q.device, batch * heads * spaces * packs * 4),
    )  # fmt: skip
    return rotated, votes


def fake(q, codes, lengths, ratios, mean: bool, *_) -> tuple[Tensor, Tensor]:
    counts = codes.counts
    batch, heads, spaces, size = counts.shape
    queries = 1 if mean else q.shape[1] // heads
    rotated = q.new_empty((batch, heads, queries, next_power_of_2(q.shape[3])), dtype=torch.float32)
    entries = (batch, heads, cdiv(queries, HEADS_PER_ENTRY), size, spaces, HEADS_PER_ENTRY)
    return rotated, counts.new_empty(entries, dtype=torch.uint8)


centroid_votes = register(
    "centroid_votes", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake,
    check=check,
)  # fmt: skip
