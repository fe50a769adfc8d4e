"""Weigh the sampled tokens of a step: minus the logarithm of the chance that a query head samples a token.

    p     = 1 - angle(q_h, key_i - centre) / pi                   the chance that one sign is equal
    P     = p^bits                                                the chance that a whole code is equal
    w     = 1 - (1 - P)^u - u P (1 - P)^(u - 1)                   the chance that 2 or more of u = used codes are equal
    bias  = -log(w + FLOOR)   if head h has sampled token i,  -inf if only another head of its kv head has sampled it

The softmax with these biases estimates the softmax over all tokens: in its numerator and denominator, the term of each
sampled token is divided by the chance of the token. FLOOR is the constant of the authors' code. It bounds the weight of
a token that was sampled although its chance was nearly 0. With used = 0 all tokens were taken, and all biases are 0.

Launches: `_bias`, (tiles of tokens, row * kv head). It reads the keys in the hot buffer, and their codes.

MagicPIG (arXiv 2410.16179), and its authors' code.
"""
import math

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.attend._split import load_query
from torchsparsekv.ops.magicpig.views import MOST_BITS, Sample, Signatures
from torchsparsekv.ops.store.rows import keys_of, load_key, row_at
from torchsparsekv.ops.store.views import HotBuffer, Query

TILE = 32  # tokens of a program
FLOOR = 1e-4


def check(q, hot, signatures, sample, bits) -> None:
    _check.heads(q, signatures.centre)
    if hot.rows.shape[3] != 1:
        raise ValueError(f"blocks must be single tokens, got blocks of {hot.rows.shape[3]}")
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"bits must be from 1 to {MOST_BITS}, got {bits}")


def chance(cosine: Tensor, bits: int, tables: Tensor) -> Tensor:
    """The chance that codes are equal in two or more of `tables` tables."""
    one = (1 - cosine.clamp(-1, 1).acos() / math.pi) ** bits
    none = torch.log1p(-one.clamp(max=1 - 2**-24))
    return -torch.expm1(tables * none) - tables * one * torch.exp((tables - 1) * none)


def reference(q: Query, hot: HotBuffer, signatures: Signatures, sample: Sample, bits: int) -> Tensor:
    """Weigh the sampled tokens of a step: minus the logarithm of the chance that a query head samples a token.

    Args:
        q: [batch, q_heads, 1, dim].
        hot: the hot buffer, whose `chosen` are the sampled tokens.
        signatures: the index.
        sample: the codes of the queries, and the number of tables that are used.
        bits: of a code.

    Returns:
        [batch, q_heads, n], fp32; 0 in places of `hot.chosen` without a token.
    """
    (codes, centre), (asked, used) = signatures, sample
    heads, tables = codes.shape[1:3]
    slot = hot.chosen.clamp(min=0).long()
    row = hot.block_of.gather(2, slot).clamp(min=0).long()
    k = keys_of(hot.rows.flatten(2, 3).gather(2, slot[..., None, None].expand(-1, -1, -1, *hot.rows.shape[4:])))
    k = k.float() - centre[:, :, None]  # [batch, heads, n, dim]
    x = q[:, :, 0].unflatten(1, (heads, -1)).float()
    size = (x.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[:, :, None]).clamp(min=torch.finfo(torch.float32).tiny)
    u = used[:, :, None, None].float()
    bias = -(chance(x @ k.transpose(-1, -2) / size, bits, u) + FLOOR).log()  # [batch, heads, group, n]
    hit = codes.gather(3, row[:, :, None].expand(-1, -1, tables, -1))[:, :, None]
    hit = hit == asked.unflatten(1, (heads, -1))[..., None]  # [batch, heads, group, tables, n]
    hits = (hit & (torch.arange(tables, device=q.device) < used[..., None])[:, :, None, :, None]).sum(3)
    bias = torch.where(hits >= 2, bias, -torch.inf)
    return bias.masked_fill((u == 0) | (hot.chosen < 0)[:, :, None], 0.0).flatten(1, 2)


@triton.jit
def _acos(x):
    """The angle of a cosine from -1 to 1, by a polynomial that is off by 2e-8 at most (Abramowitz and Stegun, 4.4.46).
    """
    a = tl.abs(x)
    y = a * -0.0012624911 + 0.0066700901
    y = y * a - 0.0170881256
    y = y * a + 0.0308918810
    y = y * a - 0.0501743046
    y = y * a + 0.0889789874
    y = y * a - 0.2145988016
    y = y * a + 1.5707963050
    y = tl.sqrt(1.0 - a) * y
    return tl.where(x < 0, 3.141592653589793 - y, y)


@triton.jit
def _log1p(x):
    """log(1 + x), also where x is far below 1."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * x / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def _expm1(x):
    """exp(x) - 1 for x <= 0, also where x is near 0."""
    u = tl.exp(x)
    near = (u - 1.0) * x / tl.log(tl.where((u == 1.0) | (u == 0.0), 0.5, u))
    return tl.where(u == 1.0, x, tl.where(u == 0.0, -1.0, near))


@triton.jit
def _bias(
    q, hot, chosen, block_of, codes, centre, asked, used_of, out, q_b, q_h, heads, tables, rows, slots, n, FLOOR,
    BITS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    g, d, j = tl.arange(0, GP), tl.arange(0, DP), tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(chosen + bh * n + j, mask=j < n, other=-1)
    row = tl.load(block_of + bh * slots + slot, mask=slot >= 0, other=-1)
    used = tl.load(used_of + bh)
    bias = tl.zeros((GP, TILE), tl.float32)
    if used > 0:
        at = row_at(hot, bh, tl.maximum(slot, 0), slots, D)
        c = tl.load(centre + bh * D + d, mask=d < D, other=0.0)
        k = load_key(at[:, None], d[None, :], (slot >= 0)[:, None], (d < D)[None, :], D).to(tl.float32) - c[None, :]
        x = load_query(q, q_b, q_h, b, h, G, GP, D, DP).to(tl.float32)
        size = tl.sqrt(tl.sum(x * x, 1))[:, None] * tl.sqrt(tl.sum(k * k, 1))[None, :]
        cosine = tl.dot(x, tl.trans(k), input_precision="ieee") / tl.maximum(size, 1e-37)
        p = 1.0 - _acos(tl.minimum(tl.maximum(cosine, -1.0), 1.0)) * 0.3183098861837907
        one = p
        for _ in tl.static_range(BITS - 1):
            one *= p
        none = _log1p(-tl.minimum(one, 0.99999994))
        u = used.to(tl.float32)
        w = -_expm1(u * none) - u * one * tl.exp((u - 1.0) * none)
        hits = tl.zeros((GP, TILE), tl.int32)
        for table in range(used):
            code = tl.load(codes + (bh * tables + table) * rows + row, mask=row >= 0, other=-1)
            mine = tl.load(asked + (bh * G + g) * tables + table, mask=g < G, other=-2)
            hits += (code[None, :] == mine[:, None]).to(tl.int32)
        bias = tl.where(hits >= 2, -tl.log(w + FLOOR), float("-inf"))
        bias = tl.where((slot >= 0)[None, :], bias, 0.0)
    tl.store(out + (bh * G + g)[:, None] * n + j[None, :], bias, mask=(g < G)[:, None] & (j < n)[None, :])


def launch(q, hot, signatures, sample, bits) -> Tensor:
    (codes, centre), (asked, used) = signatures, sample
    batch, heads, tables, rows = codes.shape
    out, group, d = fake(q, hot), q.shape[1] // heads, q.shape[3]
    tiles = cdiv(out.shape[2], TILE)
    _bias[(tiles, batch * heads)](
        q, hot.rows, hot.chosen, hot.block_of, codes, centre, asked, used, out, q.stride(0), q.stride(1), heads, tables,
        rows, hot.rows.shape[2], out.shape[2], FLOOR, BITS=bits, G=group, GP=max(16, next_power_of_2(group)), D=d,
        DP=max(16, next_power_of_2(d)), TILE=TILE, **launch_early(q.device, tiles * batch * heads),
    )  # fmt: skip
    return out


def fake(q, hot, *_) -> Tensor:
    return q.new_empty((*q.shape[:2], hot.chosen.shape[2]), dtype=torch.float32)


sample_bias = register("sample_bias", reference, impls=(by_triton(launch),), fake=fake, check=check)
