"""The true attention weight of every block: what the oracle selects by. Reads all keys, so it is for evaluation only.

Weights are softmax(q.k) over everything the row holds (pool and ring), summed over the block, averaged over the query
heads of the group. Blocks that hold no retrievable token score -inf.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.attend._split import load_query, soft_capped
from torchsparsekv.ops.store.rows import keys_of, load_key, ring_positions, row_at
from torchsparsekv.ops.store.views import Attention, KVStore, Lengths, Query

TILE = 64


def check(q, store, lengths, block_size, attention) -> None:
    _check.heads(q, store.pool)
    if store.pool.shape[2] % block_size or lengths.sink % block_size:
        raise ValueError(f"{store.pool.shape[2]} rows and {lengths.sink} sinks are not whole blocks of {block_size}")


def grouped(q: Tensor, heads: int) -> Tensor:
    """The one query token in fp32, [batch, kv_heads, group, head_dim]."""
    return q[:, :, 0].unflatten(1, (heads, -1)).float()


def reference(q: Query, store: KVStore, lengths: Lengths, block_size: int, attention: Attention) -> Tensor:
    raw = grouped(q, store.pool.shape[1]) @ keys_of(store.pool).to(q.dtype).float().transpose(-1, -2)
    return _mass(raw, q, store.ring, lengths, block_size, attention)


def _mass(raw, q, ring, lengths, block_size, attention) -> Tensor:
    """From raw products q.k over the pool to block weights; plain torch, free of host syncs."""
    sink, end = lengths.sink, lengths.ring_begin[:, None]

    def logits(products: Tensor, live: Tensor) -> Tensor:
        z = soft_capped(products * attention.scale, attention.softcap)
        return z.masked_fill(~live[:, None, None], -torch.inf)

    pos = torch.arange(raw.shape[-1], device=q.device)
    in_pool = logits(raw, (pos >= sink) & (pos < end))
    held = ring_positions(ring.shape[2], lengths.length, lengths.ring_begin, sink)
    x = grouped(q, ring.shape[1])
    in_ring = logits(x @ keys_of(ring).float().transpose(-1, -2), held >= 0)
    lse = torch.logaddexp(in_pool.logsumexp(-1), in_ring.logsumexp(-1))
    mass = (in_pool - lse[..., None]).exp().mean(2).unflatten(-1, (-1, block_size)).sum(-1)
    block = torch.arange(mass.shape[-1], device=q.device)
    live = (block >= sink // block_size) & (block < end // block_size)
    return mass.masked_fill(~live[:, None], -torch.inf)


@triton.jit
def _products(
    q, pool, out, ring_begin, q_b, q_h, heads, rows,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    pos = tl.program_id(1) * TILE + tl.arange(0, TILE)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    x = load_query(q, q_b, q_h, b, h, G, GP, D, DP)
    live = pos < tl.load(ring_begin + b)
    k = load_key(row_at(pool, bh, pos[None, :], rows, D), d[:, None], live[None, :], (d < D)[:, None], D)
    s = tl.dot(x, k.to(x.dtype), input_precision="ieee")
    tl.store(out + (bh * G + g[:, None]) * rows + pos[None, :], s, mask=(g < G)[:, None] & (pos < rows)[None, :])


def launch(q, store, lengths, block_size, attention) -> Tensor:
    ring, pool = store
    (batch, heads, rows), d = pool.shape[:3], q.shape[3]
    group = q.shape[1] // heads
    raw = torch.empty((batch, heads, group, rows), dtype=torch.float32, device=q.device)
    _products[(batch * heads, cdiv(rows, TILE))](
        q, pool, raw, lengths.ring_begin, q.stride(0), q.stride(1), heads, rows, G=group,
        GP=max(16, next_power_of_2(group)), D=d, DP=next_power_of_2(d), TILE=TILE,
        **launch_early(q.device, batch * heads * cdiv(rows, TILE)),
    )  # fmt: skip
    return _mass(raw, q, ring, lengths, block_size, attention)


def fake(q, store, lengths, block_size: int, attention) -> Tensor:
    return q.new_empty((*store.pool.shape[:2], store.pool.shape[2] // block_size), dtype=torch.float32)


attention_mass = register("attention_mass", reference, impls=(by_triton(launch),), fake=fake, check=check)
