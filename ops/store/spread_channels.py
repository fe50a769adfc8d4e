"""Rotate queries and keys, so that no channel of a key is much larger than the others of its group.

    q' = a q H,  k' = b k H    so that q'.k' = q.k, but for rounding

Layers that attend to a whole packed pool store rotated keys. 64 channels of a packed key share a scale. In the first
layers of a model a few channels are far larger than the others, which then lose most of their 8 bits. Each rotated
channel is a sum of the channels of its block, with signs.

H is block-diagonal, with a Hadamard matrix for each block of `block_of(dim)` channels. `a` and `b` are powers of two
with a product of 1 / block_of(dim), so multiplying by them rounds nothing. Numbers beyond the range of the type become
its largest. In fp16 that can happen where the magnitudes of a block of 128 channels add up to more than 8 x 65504 in k,
or 16 x 65504 in q.

Args:
    q [batch, q_heads, tokens, dim]; k [batch, heads, tokens, dim]

Returns: q' and k', contiguous.
Launches: one program per ROWS blocks of channels, first of q, then of k.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.hadamard import hadamard, hadamard_odd
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.store.views import NewKeys, Queries

CHANNELS = 128  # of a block, at most
ROWS = 32


def check(q, k) -> None:
    _check.heads(q, k)


def block_of(dim: int) -> int:
    """The largest power of two that divides `dim`, up to CHANNELS."""
    return min(dim & -dim, CHANNELS)


def _factors(block: int) -> tuple[float, float]:
    """Those of queries and keys."""
    half = (block.bit_length() - 1) // 2
    return 2.0**half / block, 2.0**-half


def _rotated(x: Tensor, factor: float) -> Tensor:
    block = block_of(x.shape[-1])
    y = x.float().unflatten(-1, (-1, block)) @ hadamard(block) * factor
    most = torch.finfo(x.dtype).max
    return y.clamp(-most, most).flatten(-2).to(x.dtype)


def reference(q: Queries, k: NewKeys) -> tuple[Tensor, Tensor]:
    return tuple(_rotated(x, factor).contiguous() for x, factor in zip((q, k), _factors(block_of(q.shape[3]))))


def fake(q, k) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@triton.jit
def _rotate(
    x, out, factor, first, blocks, heads, tokens, x_b, x_h, x_s, PARTS: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Rotate the `first` block and those after it. W channels are loaded: those of a block, or of a whole row."""
    at, c = first.to(tl.int64) + tl.arange(0, ROWS), tl.arange(0, W)
    row, part = at // PARTS, at % PARTS
    head, token = row // tokens, row % tokens
    live = (at < blocks)[:, None] & (c < D // PARTS)[None, :]
    place = head // heads * x_b + head % heads * x_h + token * x_s + part * (D // PARTS)
    numbers = tl.load(x + place[:, None] + c[None, :], mask=live, other=0.0)
    i, j = c[:, None], c[None, :]
    sign = tl.where(hadamard_odd(i % B, j % B), -1.0, 1.0)
    matrix = tl.where(i // B == j // B, sign, 0.0).to(x.dtype.element_ty)
    rotated = tl.dot(numbers, matrix, input_precision="ieee") * factor
    rotated = tl.clamp(rotated, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at[:, None] * (D // PARTS) + c[None, :], rotated.to(out.dtype.element_ty), mask=live)


@triton.jit
def _rotate_both(
    q, k, q_out, k_out, of_q, of_k, q_programs, q_blocks, k_blocks, q_heads, heads, tokens, q_b, q_h, q_s, k_b, k_h,
    k_s, PARTS: tl.constexpr, B: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    n = tl.program_id(0)
    if n < q_programs:
        _rotate(q, q_out, of_q, n * ROWS, q_blocks, q_heads, tokens, q_b, q_h, q_s, PARTS, B, W, ROWS, D, MOST)
    else:
        first = (n - q_programs) * ROWS
        _rotate(k, k_out, of_k, first, k_blocks, heads, tokens, k_b, k_h, k_s, PARTS, B, W, ROWS, D, MOST)


def launch(q, k) -> tuple[Tensor, Tensor]:
    d, block = q.shape[3], block_of(q.shape[3])
    parts = d // block if block >= 16 else 1  # 16: the least of a product
    out, blocks = fake(q, k), [x.numel() // d * parts for x in (q, k)]
    programs = [cdiv(n, ROWS) for n in blocks]
    _rotate_both[(sum(programs),)](
        q, k, *out, *_factors(block), programs[0], *blocks, q.shape[1], k.shape[1], q.shape[2], *q.stride()[:3],
        *k.stride()[:3], PARTS=parts, B=block, W=max(16, next_power_of_2(d // parts)), ROWS=ROWS, D=d,
        MOST=torch.finfo(q.dtype).max, **launch_early(q.device, sum(programs)),
    )  # fmt: skip
    return out


spread_channels = register("spread_channels", reference, impls=(by_triton(launch),), fake=fake, check=check)
