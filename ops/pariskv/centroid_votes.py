"""The votes that each centroid of the ParisKV index gets from a query (eq. 15), and the query as the index has it.

The query is rotated like the keys, per kv head the sum of its group or every head of it: the first result, fp32
[batch, kv_heads, 1 or group, padded head_dim], is that with the length of the query kept (of the mean, for a sum), so
that <k, q> is the inner product of rotated vectors. Sums of +-q before any scaling decide about votes, so that they
are exact where the query is of small integers.

In every subspace the keys are ranked by the score of their centroid against the query. A key gets 6, 5, 4, 3, 2 or 1
votes if the keys of strictly better centroids are fewer than 5, 15, 30, 50, 75 or 100 % of the first `rho` of all n
retrievable keys (rounded up); buckets are never split, so equal centroid scores get the same. `counts` says how many
keys each centroid of a subspace has, `ratios` which rho a row of n keys has: the last of every (below, beta, rho), for
n < below, and of (beta, rho) for the rest, in millionths. The second result, uint8 [batch, kv_heads, packs, centroids,
subspaces, 4], has four query heads side by side, so that one lookup serves them; heads that there are not give
none.
"""
import functools
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import FLOATS, Of
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.pariskv._srht import SEEDS, flipped, flips, hadamard_odd, turned
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.store.views import Lengths

AnyQuery = Annotated[Tensor, Of("batch q_heads 1 dim", FLOATS, strided=True)]
PERCENT = (5, 15, 30, 50, 75, 100)
ONE = 1_000_000
PACKED = 4  # query heads whose votes share a table entry, a byte each
NATIVE_SPACES = (8, 16, 32)  # what csrc/centroid_votes.cu is for, with 256 centroids; other shapes are left to Triton


def check_ratios(ratios) -> None:
    if len(ratios) != 11 or min(ratios) < 0 or max(*ratios[1:9:3], *ratios[2:9:3], *ratios[9:]) > ONE:
        raise ValueError(f"ratios must be three of (below, beta, rho) and (beta, rho), in millionths, got {ratios}")


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


def pair(n: int, ratios: list[int]) -> tuple[int, int]:
    """(beta, rho) of a row of n keys."""
    for below, beta, rho in zip(ratios[:9:3], ratios[1:9:3], ratios[2:9:3]):
        if n < below:
            return beta, rho
    return ratios[9], ratios[10]


def by_length(ratios: list[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Below which numbers of keys, and beta and rho there and beyond."""
    return tuple(ratios[:9:3]), (*ratios[1:9:3], ratios[9]), (*ratios[2:9:3], ratios[10])


def summed(q: Tensor, heads: int, mean: bool, seed: int) -> Tensor:
    """sqrt(padded head_dim) times the rotated queries: sums of +-q. Of one query token; [batch, heads, fields, dim]."""
    x = q[:, :, 0].float().unflatten(1, (heads, -1))
    return turned(x.sum(2, keepdim=True) if mean else x, seed)


def scale_of(q: Tensor, heads: int, mean: bool) -> float:
    return next_power_of_2(q.shape[3]) ** -0.5 * (heads / q.shape[1] if mean else 1)


def proxies(rotated: Tensor, spaces: int, centroids: int) -> Tensor:
    """The score of every sign pattern in every subspace: rotated [..., spaces * m] -> [..., spaces, 2^m]."""
    x = rotated.unflatten(-1, (spaces, -1))
    bits = torch.arange(centroids, device=x.device)[:, None] >> torch.arange(x.shape[-1], device=x.device) & 1
    return x @ (2.0 * bits - 1).T


def votes_of(proxy: Tensor, counts: Tensor, n: int, rho: int) -> Tensor:
    """What each centroid gets, given its score and the number of its keys (both [..., spaces, centroids])."""
    score, order = proxy.sort(-1, descending=True)
    before = counts.expand_as(order).gather(-1, order).cumsum(-1)
    before = torch.nn.functional.pad(before, (1, 0))[..., :-1]
    first = torch.searchsorted(-score, -score).clamp(max=score.shape[-1] - 1)  # of a run of equal scores; NaN has none
    before = torch.empty_like(before).scatter_(-1, order, before.gather(-1, first))
    limits = torch.tensor([cdiv(n * rho * p, 100 * ONE) for p in PERCENT], device=proxy.device)
    return (before[..., None] < limits).sum(-1)


def reference(
    q: AnyQuery, codes: Codes, lengths: Lengths, ratios: list[int], mean: bool, seed: int
) -> tuple[Tensor, Tensor]:
    counts = codes.counts
    batch, heads, spaces, size = counts.shape
    x = summed(q, heads, mean, seed)
    proxy, votes = proxies(x, spaces, size), []
    for b in range(batch):
        n = max(int(lengths.ring_begin[b]) - lengths.sink, 0)
        votes.append(votes_of(proxy[b], counts[b][:, None], n, pair(n, ratios)[1]))
    every = torch.stack(votes).to(torch.uint8)  # [batch, heads, fields, spaces, centroids]
    every = torch.nn.functional.pad(every, (0, 0, 0, 0, 0, -every.shape[2] % PACKED)).unflatten(2, (-1, PACKED))
    return x * scale_of(q, heads, mean), every.permute(0, 1, 2, 5, 4, 3).contiguous()


@triton.jit
def by_length_of(n, below0, below1, below2, at0, at1, at2, at3):
    return tl.where(n < below0, at0, tl.where(n < below1, at1, tl.where(n < below2, at2, at3))).to(tl.int64)


@triton.jit
def _limit(n, rho, percent):
    return ((n.to(tl.int64) * rho * percent + 99999999) // 100000000).to(tl.int32)


@triton.jit
def _rotated(q, seed, first, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, q_h):
    """Coordinates `first` to `first + M` of the sum of G heads at `q`, before scaling."""
    d = tl.arange(0, DP)
    x = tl.zeros((DP,), tl.float32)
    for g in range(G):
        x += tl.load(q + g * q_h + d, mask=d < D, other=0.0).to(tl.float32)
    minus = hadamard_odd(first + tl.arange(0, M)[:, None], d[None, :]) ^ flipped(d, seed)[None, :]
    return tl.sum(tl.where(minus, -x[None, :], x[None, :]), 1)


@triton.jit
def _votes_of(before, n, rho):
    """Votes of centroids by the number of keys that strictly better ones have."""
    votes = (before < _limit(n, rho, 5)).to(tl.int32) + (before < _limit(n, rho, 15)).to(tl.int32)
    votes += (before < _limit(n, rho, 30)).to(tl.int32) + (before < _limit(n, rho, 50)).to(tl.int32)
    return votes + (before < _limit(n, rho, 75)).to(tl.int32) + (before < _limit(n, rho, 100)).to(tl.int32)


# Triton would make a seed of 1 a constant, and its version 3.6 then writes wrong code (2 or 4 dimensions of 256).
@triton.jit(do_not_specialize=["seed"])
def _votes(
    q, counts, rotated, table, ring_begin, q_b, q_h, heads, sink, seed, scale, below0, below1, below2, rho0, rho1, rho2,
    rho3, G: tl.constexpr, F: tl.constexpr, W: tl.constexpr, B: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One subspace of one query head: what each centroid gets, a byte of its table entry.

    Opposite patterns have opposite scores, so that comparing the absolute scores of the pairs says all: a quarter of
    the comparisons. And where the better ones of all pairs have keys enough, the others get nothing.
    """
    wait_for_previous(PDL)
    bh, space, f = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    size: tl.constexpr = 1 << M
    half: tl.constexpr = 1 << (M - 1)
    c = tl.arange(0, half)
    up, down = tl.zeros((half,), tl.int32), tl.zeros((half,), tl.int32)
    if f < F:  # beyond it is padding of the entry
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
        rho = by_length_of(n, below0, below1, below2, rho0, rho1, rho2, rho3)
        up += _votes_of(tl.sum(tl.where(s[:, None] > s[None, :], better[:, None], 0), 0), n, rho)
        whole = tl.sum(better, 0)
        if whole < _limit(n, rho, 100):
            down += _votes_of(whole + tl.sum(tl.where(s[:, None] < s[None, :], worse[:, None], 0), 0), n, rho)
        down = tl.where(s == 0, up, down)
    table += ((bh * W + f // 4) * size * B + space) * 4 + f % 4
    tl.store(table + c * (B * 4), up.to(tl.uint8))
    tl.store(table + (size - 1 - c) * (B * 4), down.to(tl.uint8))


@functools.cache
def _flip_bits(seed: int, size: int) -> tuple[int, ...]:
    """Which of 256 channels change their sign, in words of 32."""
    minus = torch.nn.functional.pad(flips(seed, size) < 0, (0, 256 - size)).view(8, 32).tolist()
    return tuple(sum(bit << i for i, bit in enumerate(word)) for word in minus)


def _fits(q, codes, lengths, ratios, mean, seed) -> _cuda.Module | str:
    heads, spaces, size = codes.counts.shape[1:]
    if size != 256 or spaces not in NATIVE_SPACES:
        return f"{spaces} subspaces of {size} centroids"
    group = q.shape[1] // heads
    kind = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}[q.dtype]
    fields, sums = (1, group) if mean else (group, 1)
    return _cuda.load("centroid_votes", q.device, B=spaces, F=fields, G=sums, D=q.shape[3], KIND=kind)


def _launch_cuda(kernels, q, codes, lengths, ratios, mean, seed) -> tuple[Tensor, Tensor]:
    """csrc/centroid_votes.cu"""
    batch, heads, spaces, _ = codes.counts.shape
    rotated, votes = fake(q, codes, lengths, ratios, mean)
    below, _, rho = by_length(ratios)
    kernels.launch(
        "votes", (batch * heads, spaces, votes.shape[2]), 128 * min(rotated.shape[2], PACKED), q, codes.counts, rotated,
        votes, lengths.ring_begin, q.stride(0), q.stride(1), heads, lengths.sink, scale_of(q, heads, mean), below + rho,
        _flip_bits(seed, rotated.shape[3]),
    )  # fmt: skip
    return rotated, votes


def _launch_triton(q, codes, lengths, ratios, mean, seed) -> tuple[Tensor, Tensor]:
    batch, heads, spaces, size = codes.counts.shape
    rotated, votes = fake(q, codes, lengths, ratios, mean)
    packs = votes.shape[2]
    below, _, rho = by_length(ratios)
    _votes[(batch * heads, spaces, packs * PACKED)](
        q, codes.counts, rotated, votes, lengths.ring_begin, q.stride(0), q.stride(1), heads, lengths.sink, seed,
        scale_of(q, heads, mean), *below, *rho, G=q.shape[1] // heads, F=rotated.shape[2], W=packs, B=spaces,
        M=size.bit_length() - 1, D=q.shape[3], DP=rotated.shape[3], num_warps=4 if size == 256 else 1,
        **launch_early(q.device, batch * heads * spaces * packs * 4),
    )  # fmt: skip
    return rotated, votes


def fake(q, codes, lengths, ratios, mean: bool, *_) -> tuple[Tensor, Tensor]:
    counts = codes.counts
    batch, heads, spaces, size = counts.shape
    fields = 1 if mean else q.shape[1] // heads
    rotated = q.new_empty((batch, heads, fields, next_power_of_2(q.shape[3])), dtype=torch.float32)
    return rotated, counts.new_empty((batch, heads, cdiv(fields, PACKED), size, spaces, PACKED), dtype=torch.uint8)


centroid_votes = register(
    "centroid_votes", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake,
    check=check,
)  # fmt: skip
