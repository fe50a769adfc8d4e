"""The query as the index sees it: rotated like the keys, per kv head the mean of its group or every head of it.

Returns [batch, kv_heads, 1 or group, padded head_dim] in fp32, with the length of the query kept: <k, q> is the inner
product of the rotated vectors.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._srht import SEEDS, flipped, hadamard_odd, turned
from torchsparsekv.ops._triton import chain, chained, next_power_of_2, tl, triton

SCHEMA = "(Tensor q, int kv_heads, bool mean, int seed) -> Tensor"
COLUMNS = 16  # outputs of a program: enough programs to finish in one wave, at 2K products each


def check(q, kv_heads, mean, seed) -> None:
    _check.dtype(_check.FLOATS, q=q)
    _check.dense_last(q=q)
    if q.dim() != 4 or q.shape[1] % kv_heads or q.shape[3] > 256 or not 0 <= seed < SEEDS:
        got = f"{tuple(q.shape)}, seed {seed}"
        raise ValueError(f"need q [batch, heads, tokens, <= 256] and 0 <= seed < {SEEDS}, got {got}")


def reference(q, kv_heads, mean, seed) -> Tensor:
    x = q[:, :, 0].float().unflatten(1, (kv_heads, -1))
    y = turned(x.mean(2, keepdim=True) if mean else x, seed)
    return y * y.shape[-1] ** -0.5


@triton.jit
def _rotate(
    q, out, q_b, q_h, heads, seed, scale, G: tl.constexpr, F: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh, f = (tl.program_id(0) // F).to(tl.int64), tl.program_id(0) % F
    b, h = bh // heads, bh % heads
    d = tl.arange(0, DP)
    x = tl.zeros((DP,), tl.float32)
    for g in range(G // F):  # all heads of the group for their mean, else the one
        x += tl.load(q + b * q_b + (h * G + f + g) * q_h + d, mask=d < D, other=0.0).to(tl.float32)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    minus = hadamard_odd(col[:, None], d[None, :]) ^ flipped(d, seed)[None, :]
    y = tl.sum(tl.where(minus, -x[None, :], x[None, :]), 1) * scale
    tl.store(out + (bh * F + f) * DP + col, y)


def cuda(q, kv_heads, mean, seed) -> Tensor:
    batch, q_heads, _, d = q.shape
    group, size = q_heads // kv_heads, next_power_of_2(d)
    fields = 1 if mean else group
    out = torch.empty((batch, kv_heads, fields, size), dtype=torch.float32, device=q.device)
    _rotate[(batch * kv_heads * fields, size // COLUMNS)](
        q, out, q.stride(0), q.stride(1), kv_heads, seed, size**-0.5 * fields / group, G=group, F=fields, D=d, DP=size,
        COLUMNS=COLUMNS, num_warps=2, **chained(q.device, batch * kv_heads * fields * size // COLUMNS),
    )  # fmt: skip
    return out


def fake(q: Tensor, kv_heads: int, mean: bool, seed: int) -> Tensor:
    fields = 1 if mean else q.shape[1] // kv_heads
    return q.new_empty((q.shape[0], kv_heads, fields, next_power_of_2(q.shape[3])), dtype=torch.float32)


rotate_query = register("rotate_query", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
