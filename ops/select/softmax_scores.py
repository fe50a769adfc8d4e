"""Score blocks by the softmaxes of the query heads of a kv head: by their sum, or by the largest of them.

    w_h     = softmax over the blocks of logits_h
    score   = log of the sum over h of w_h,  or log of the largest w_h

The logarithm keeps the order and cannot underflow. A logit of -inf or NaN has weight 0. A logit of +inf is outside the
softmax, and its block scores +inf, so that every selection takes the block.

Launches: `_sums`, one program per (row, query head, TILE logits); `_scores`, one per (row, kv head, BLOCKS blocks).
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.select._top import GROUP, peaks_of, store_peaks

Logits = Annotated[Tensor, Of("batch q_heads n", torch.float32)]
TILE, BLOCKS = 2048, 256  # logits of a program of the first launch, blocks of a program of the second


def check(logits, heads, largest) -> None:
    if heads < 1 or logits.shape[1] % heads:
        raise ValueError(f"heads must divide the {logits.shape[1]} query heads, got {heads}")


def reference(logits: Logits, heads: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Score blocks by the softmaxes of the query heads of a kv head: by their sum, or by the largest of them.

    Args:
        logits: [batch, q_heads, blocks].
        heads: the number of kv heads.
        largest: take the largest softmax, not the sum.

    Returns:
        scores [batch, heads, blocks] and their peaks [batch, heads, cdiv(blocks, GROUP)] (ops/select/_top.py), fp32.
    """
    z = logits.unflatten(1, (heads, -1))
    z = torch.where(z.isnan(), -torch.inf, z)
    inside = z.masked_fill(z == torch.inf, -torch.inf)
    total = inside.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weight = inside - total
    scores = weight.amax(2) if largest else weight.logsumexp(2)
    scores = scores.masked_fill((z == torch.inf).any(2), torch.inf)
    return scores, peaks_of(scores)


@triton.jit
def _inside(z):
    """The logits that take part in the softmax; -inf for the others."""
    return tl.where((z == z) & (z < float("inf")), z, float("-inf"))


@triton.jit
def _sums(logits, tops, totals, n, parts, TILE: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    i = part * TILE + tl.arange(0, TILE)
    z = _inside(tl.load(logits + row * n + i, mask=i < n, other=float("-inf")))
    top = tl.max(z, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + row * parts + part, top)
    tl.store(totals + row * parts + part, tl.sum(tl.exp(z - safe), 0))


@triton.jit
def _scores(
    logits, tops, totals, out, peaks, n, parts, groups, LARGEST: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCKS
    i, p = first + tl.arange(0, BLOCKS), tl.arange(0, PARTS)
    best = tl.full((BLOCKS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCKS,), tl.float32)
    pinned = tl.zeros((BLOCKS,), tl.int32)
    for g in range(G):
        head = bh * G + g
        top = tl.load(tops + head * parts + p, mask=p < parts, other=float("-inf"))
        peak = tl.max(top, 0)
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        every = tl.sum(tl.exp(top - safe) * tl.load(totals + head * parts + p, mask=p < parts, other=0.0), 0)
        z = tl.load(logits + head * n + i, mask=i < n, other=float("-inf"))
        pinned = pinned | (z == float("inf")).to(tl.int32)
        weight = _inside(z) - safe - tl.log(tl.where(every > 0, every, 1.0))
        higher = tl.maximum(best, weight)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(best - base) + tl.exp(weight - base)
        best = higher
    if not LARGEST:
        best = best + tl.log(tl.where(total > 0, total, 1.0))
    best = tl.where(pinned != 0, float("inf"), best)
    tl.store(out + bh * n + i, best, mask=i < n)
    store_peaks(peaks + bh * groups, best, first, n, BLOCKS, GROUP)


def launch(logits, heads, largest) -> tuple[Tensor, Tensor]:
    (batch, q_heads, n), parts = logits.shape, cdiv(logits.shape[2], TILE)
    out, peaks = fake(logits, heads)
    tops, totals = torch.empty((2, batch, q_heads, parts), dtype=torch.float32, device=logits.device)
    _sums[(parts, batch * q_heads)](
        logits, tops, totals, n, parts, TILE=TILE, **launch_early(logits.device, parts * batch * q_heads)
    )
    tiles = cdiv(n, BLOCKS)
    _scores[(tiles, batch * heads)](
        logits, tops, totals, out, peaks, n, parts, peaks.shape[2], LARGEST=largest, G=q_heads // heads,
        PARTS=next_power_of_2(parts), BLOCKS=BLOCKS, GROUP=GROUP, **launch_early(logits.device, tiles * batch * heads),
    )  # fmt: skip
    return out, peaks


def fake(logits, heads: int, *_) -> tuple[Tensor, Tensor]:
    batch, _, n = logits.shape
    new = logits.new_empty
    return new((batch, heads, n)), new((batch, heads, cdiv(n, GROUP)))


softmax_scores = register("softmax_scores", reference, impls=(by_triton(launch),), fake=fake, check=check)
