"""A random score for every block that can be retrieved: what a choice without any knowledge selects by.

Scores are the upper 24 bits of a hash of (seed, tokens in the row, kv head, block), so they are new at every step, the
same again wherever the same step runs, and do not depend on the other rows of the batch. Blocks that hold no
retrievable token score -inf.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import cdiv, tl, triton

SCHEMA = "(Tensor length, Tensor retired, int heads, int blocks, int sink, int block_size, int seed) -> Tensor"
TILE = 1024
LOW = (1 << 32) - 1
# Odd multipliers, so that no two inputs of one kind meet before the hash mixes them.
STEP, HEAD, SEED = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D


def check(length, retired, heads, blocks, sink, block_size, seed) -> None:
    _check.counters(length.numel(), length=length, retired=retired)
    if min(heads, blocks, block_size) < 1 or sink < 0 or sink % block_size:
        raise ValueError(
            f"need heads, blocks, block_size >= 1 and sink in whole blocks: {heads}, {blocks}, {block_size}, {sink}"
        )
    if not 0 <= seed <= LOW:
        raise ValueError(f"seed must be in 0..{LOW}, got {seed}")


def reference(length, retired, heads, blocks, sink, block_size, seed) -> Tensor:
    block = torch.arange(blocks, device=length.device)
    head = torch.arange(heads, device=length.device)[:, None]
    x = _mixed(length.long()[:, None, None] * STEP + head * HEAD + (seed * SEED & LOW) & LOW)
    x = _mixed(x + block & LOW)
    start = block * block_size
    live = (start >= sink) & (start < retired[:, None])
    return ((x >> 8).float() * 2.0**-24).masked_fill(~live[:, None], -torch.inf)


def _mixed(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3, in 64-bit integers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & LOW
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & LOW
    return x ^ (x >> 16)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _scores(out, length, retired, heads, blocks, sink, block_size, seed, TILE: tl.constexpr):
    bh = tl.program_id(0)
    b, h = bh // heads, bh % heads
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(length + b).to(tl.uint32) * 0x9E3779B1 + h.to(tl.uint32) * 0x85EBCA77
    x += tl.full((), seed, tl.uint32)  # from 2^31 on it comes as 64 bits
    x = _mix(_mix(x) + block.to(tl.uint32))
    start = block * block_size
    live = (start >= sink) & (start < tl.load(retired + b))
    score = tl.where(live, (x >> 8).to(tl.float32) * 5.9604644775390625e-08, float("-inf"))
    tl.store(out + bh.to(tl.int64) * blocks + block, score, mask=block < blocks)


def cuda(length, retired, heads, blocks, sink, block_size, seed) -> Tensor:
    out = torch.empty((length.numel(), heads, blocks), dtype=torch.float32, device=length.device)
    _scores[(length.numel() * heads, cdiv(blocks, TILE))](
        out, length, retired, heads, blocks, sink, block_size, seed * SEED & LOW, TILE=TILE
    )
    return out


def fake(length: Tensor, retired, heads: int, blocks: int, *_) -> Tensor:
    return length.new_empty((length.numel(), heads, blocks), dtype=torch.float32)


random_scores = register("random_scores", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
