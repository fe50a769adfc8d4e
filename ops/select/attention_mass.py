"""The true attention weight of every block: what the oracle selects by. Reads all keys, so it is for evaluation only.

Weights are softmax(q.k) over everything the row holds (pool and ring), summed over the block, averaged over the query
heads of the group. Blocks that hold no retrievable token score -inf.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import cdiv, chain, chained, next_power_of_2, tl, triton
from torchsparsekv.ops.attend._rows import ring_positions

SCHEMA = (
    "(Tensor q, Tensor pool, Tensor ring, Tensor length, Tensor retired, int sink, int block_size, float scale, "
    "float softcap) -> Tensor"
)
TILE = 64


def check(q, pool, ring, length, retired, sink, block_size, scale, softcap) -> None:
    _check.rows(pool, ring=ring)
    _check.one_query(q, pool)
    _check.same_dtype(q=q, pool=pool)
    _check.counters(q.shape[0], length=length, retired=retired)
    if pool.shape[2] % block_size or sink % block_size:
        raise ValueError(f"{pool.shape[2]} rows and {sink} sinks are not whole blocks of {block_size}")


def reference(q, pool, ring, length, retired, sink, block_size, scale, softcap) -> Tensor:
    x = q[:, :, 0].unflatten(1, (pool.shape[1], -1)).float()
    s = x @ pool[..., 0, :].float().transpose(-1, -2)
    return _mass(s, x, pool, ring, length, retired, sink, block_size, scale, softcap)


def _mass(raw, x, pool, ring, length, retired, sink, block_size, scale, softcap) -> Tensor:
    """From raw products q.k over the pool to block weights; plain torch, free of host syncs."""

    def logits(products: Tensor, live: Tensor) -> Tensor:
        z = products * scale
        z = torch.tanh(z / softcap) * softcap if softcap else z
        return z.masked_fill(~live[:, None, None], -torch.inf)

    pos = torch.arange(pool.shape[2], device=pool.device)
    in_pool = logits(raw, (pos >= sink) & (pos < retired[:, None]))
    near = ring_positions(ring.shape[2], length, retired, sink)
    in_ring = logits(x @ ring[..., 0, :].float().transpose(-1, -2), near >= 0)
    lse = torch.logaddexp(in_pool.logsumexp(-1), in_ring.logsumexp(-1))
    mass = (in_pool - lse[..., None]).exp().mean(2).unflatten(-1, (-1, block_size)).sum(-1)
    block = torch.arange(mass.shape[-1], device=pool.device)
    live = (block >= sink // block_size) & (block < retired[:, None] // block_size)
    return mass.masked_fill(~live[:, None], -torch.inf)


@triton.jit
def _products(
    q, pool, out, retired, q_b, q_h, heads, rows,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    pos = tl.program_id(1) * TILE + tl.arange(0, TILE)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    m = (g < G)[:, None] & (d < D)[None, :]
    x = tl.load(q + b * q_b + (h * G + g[:, None]) * q_h + d[None, :], mask=m, other=0.0)
    live = pos < tl.load(retired + b)
    m = live[None, :] & (d < D)[:, None]
    k = tl.load(pool + (bh * rows + pos[None, :]) * 2 * D + d[:, None], mask=m, other=0.0)
    s = tl.dot(x, k, input_precision="ieee")
    tl.store(out + (bh * G + g[:, None]) * rows + pos[None, :], s, mask=(g < G)[:, None] & (pos < rows)[None, :])


def cuda(q, pool, ring, length, retired, sink, block_size, scale, softcap) -> Tensor:
    batch, heads, rows, _, d = pool.shape
    group = q.shape[1] // heads
    raw = torch.empty((batch, heads, group, rows), dtype=torch.float32, device=q.device)
    _products[(batch * heads, cdiv(rows, TILE))](
        q, pool, raw, retired, q.stride(0), q.stride(1), heads, rows, G=group, GP=max(16, next_power_of_2(group)),
        D=d, DP=next_power_of_2(d), TILE=TILE, **chained(q.device, batch * heads * cdiv(rows, TILE)),
    )  # fmt: skip
    x = q[:, :, 0].unflatten(1, (heads, -1)).float()
    return _mass(raw, x, pool, ring, length, retired, sink, block_size, scale, softcap)


def fake(q: Tensor, pool: Tensor, ring, length, retired, sink: int, block_size: int, *_) -> Tensor:
    return q.new_empty((*pool.shape[:2], pool.shape[2] // block_size), dtype=torch.float32)


attention_mass = register("attention_mass", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
