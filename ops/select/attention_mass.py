"""Compute the true attention weight of every block. It reads all keys, so it serves evaluation and ablations.

    w       = softmax(scale * q.k, with the soft cap) over all tokens of the row, in pool and ring
    mass[b] = mean over the query heads of the group of sum_{p in block b} w[p]

Blocks without a retrievable token (the sinks, and blocks that have not left the ring) score -inf.

Args:
    q [batch, q_heads, 1, dim]
    store: ring and pool.
    block_size: tokens per block.

Returns: mass [batch, heads, rows / block_size], fp32.
Launches: one kernel for q.k over the pool (ops/select/_products.py); torch ops do the rest.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops.attend._split import soft_capped
from torchsparsekv.ops.select._products import grouped, products, products_by_triton
from torchsparsekv.ops.store.rows import keys_of, ring_positions
from torchsparsekv.ops.store.views import Attention, KVStore, Lengths, Query


def check(q, store, lengths, block_size, attention) -> None:
    _check.heads(q, store.pool)
    if store.pool.shape[2] % block_size or lengths.sink % block_size:
        raise ValueError(f"{store.pool.shape[2]} rows and {lengths.sink} sinks are not whole blocks of {block_size}")


def reference(q: Query, store: KVStore, lengths: Lengths, block_size: int, attention: Attention) -> Tensor:
    return _mass(products(q, store.pool), q, store.ring, lengths, block_size, attention)


def _mass(raw, q, ring, lengths, block_size, attention) -> Tensor:
    """Block weights from the products `raw` = q.k over the pool, in torch, without a wait for the device."""
    sink, end = lengths.sink, lengths.ring_begin[:, None]

    def logits(products: Tensor, live: Tensor) -> Tensor:
        z = soft_capped(products * attention.scale, attention.softcap)
        return z.masked_fill(~live[:, None, None], -torch.inf)

    pos = torch.arange(raw.shape[-1], device=q.device)
    in_pool = logits(raw, (pos >= sink) & (pos < end))
    in_row = ring_positions(ring.shape[2], lengths.length, lengths.ring_begin, sink)
    x = grouped(q, ring.shape[1])
    in_ring = logits(x @ keys_of(ring).float().transpose(-1, -2), in_row >= 0)
    lse = torch.logaddexp(in_pool.logsumexp(-1), in_ring.logsumexp(-1))
    mass = (in_pool - lse[..., None]).exp().mean(2).unflatten(-1, (-1, block_size)).sum(-1)
    block = torch.arange(mass.shape[-1], device=q.device)
    live = (block >= sink // block_size) & (block < end // block_size)
    return mass.masked_fill(~live[:, None], -torch.inf)


def launch(q, store, lengths, block_size, attention) -> Tensor:
    raw = products_by_triton(q, store.pool, lengths.ring_begin)
    return _mass(raw, q, store.ring, lengths, block_size, attention)


def fake(q, store, lengths, block_size: int, attention) -> Tensor:
    return q.new_empty((*store.pool.shape[:2], store.pool.shape[2] // block_size), dtype=torch.float32)


attention_mass = register("attention_mass", reference, impls=(by_triton(launch),), fake=fake, check=check)
