"""The ids of the k best scores of each row, in ascending order of id; ties go to the lower id.

No sort: `take_top` bisects an order-preserving integer key, then one compaction. Rows too long for one program are cut
into chunks whose winners meet in a second launch. Scores of -inf are never chosen; unused places are -1 and stand at
the end. With `ids` (ascending where scores are above -inf), what is returned is the id at the place of each winner.
"""
import math

import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._top import take_top
from torchsparsekv.ops._triton import cdiv, chain, chained, next_power_of_2, tl, triton

SCHEMA = "(Tensor scores, int k, Tensor? ids=None) -> Tensor"
WIDEST = 16384  # scores per program at most: 16 registers a thread


def check(scores, k, ids=None) -> None:
    _check.dtype((torch.float32,), scores=scores)
    _check.contiguous(scores=scores)
    if k < 1 or scores.shape[-1] < 1:
        raise ValueError(f"need k >= 1 and at least one score, got k={k}, scores {tuple(scores.shape)}")
    if ids is not None:
        _check.dtype((torch.int32,), ids=ids)
        _check.contiguous(ids=ids)
        _check.shape(scores.shape, ids=ids)


def reference(scores, k, ids=None) -> Tensor:
    n = scores.shape[-1]
    scores = torch.where(scores.isnan(), -torch.inf, scores)  # NaN is nobody's best
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., : min(k, n)]
    chosen = torch.where(scores.gather(-1, order) == -torch.inf, n, order).sort(-1).values
    named = chosen if ids is None else ids.gather(-1, chosen.clamp(max=n - 1))
    out = torch.full((*scores.shape[:-1], k), -1, dtype=torch.int32, device=scores.device)
    out[..., : chosen.shape[-1]] = torch.where(chosen == n, -1, named)
    return out


@triton.jit
def _top(
    scores, ids, out, best, n, chunk, k, KEEP: tl.constexpr, MAPPED: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    i = tl.arange(0, N)
    at = part * chunk + i
    x = tl.load(scores + row * n + at, mask=(i < chunk) & (at < n), other=float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)  # -0 ties with +0
    bits = x.to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)
    key = tl.where((x == float("-inf")) | (x != x), 0, key)
    take = take_top(key, k, N, 16)
    place = tl.cumsum(take.to(tl.int32), 0) - 1
    chosen = at
    if MAPPED:
        chosen = tl.load(ids + row * n + at, mask=take, other=-1)
    base = (row * parts + part) * k
    j = tl.arange(0, K)
    filled = tl.sum(take.to(tl.int32), 0)
    empty = (j >= filled) & (j < k)
    tl.store(out + base + j, tl.full((K,), -1, tl.int32), mask=empty)
    tl.store(out + base + place, chosen, mask=take)
    if KEEP:
        tl.store(best + base + j, tl.full((K,), float("-inf"), tl.float32), mask=empty)
        tl.store(best + base + place, x, mask=take)


def _launch(scores: Tensor, ids: Tensor | None, k: int, parts: int) -> tuple[Tensor, Tensor]:
    rows, n = scores.shape
    chunk = cdiv(n, parts)
    out = torch.empty((rows, parts * k), dtype=torch.int32, device=scores.device)
    best = torch.empty((rows, parts * k) if parts > 1 else (1,), dtype=torch.float32, device=scores.device)
    width = next_power_of_2(chunk)
    _top[(rows, parts)](
        scores, ids if ids is not None else out, out, best, n, chunk, k, KEEP=parts > 1, MAPPED=ids is not None,
        N=width, K=next_power_of_2(k), num_warps=min(32, max(4, width // 512)),
        **chained(scores.device, rows * parts),
    )  # fmt: skip
    return out, best


def _parts(n: int, k: int) -> int:
    """Both launches take as long as their widest program, so the chunks are about as wide as their winners together."""
    chunk = next_power_of_2(math.isqrt(n * k))
    return cdiv(n, min(max(chunk, 2 * k, 1024), WIDEST))


def cuda(scores, k, ids=None) -> Tensor:
    flat = scores.flatten(0, -2)
    ids, best = _launch(flat, ids.flatten(0, -2) if ids is not None else None, k, _parts(flat.shape[1], k))
    while ids.shape[1] > k:
        ids, best = _launch(best, ids, k, cdiv(ids.shape[1], max(WIDEST, 2 * k)))
    return ids.view(*scores.shape[:-1], k)


def fake(scores: Tensor, k: int, ids: Tensor | None = None) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], k), dtype=torch.int32)


top_blocks = register("top_blocks", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
