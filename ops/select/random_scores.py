"""Give a random score to every block that can be retrieved: the baseline that selects without knowledge.

    score = upper 24 bits of hash(seed, length, kv head, block) / 2^24

Scores change at every step, repeat where the same step runs again, and do not depend on the other rows of the batch.
Blocks without a retrievable token score -inf.

Args:
    lengths: length and ring_begin of each row.
    heads, blocks: kv heads, and blocks per head.
    seed: 0 to 2^32 - 1.

Returns: scores [batch, heads, blocks], fp32.
Launches: one program per (row, head, TILE blocks).
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.hash import LOW, mix, mixed
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv, tl, triton
from torchsparsekv.ops.store.views import Lengths

TILE = 1024
# Odd multipliers: no two values of one input coincide before the hash mixes them.
STEP, HEAD, SEED = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D


def check(lengths, heads, blocks, block_size, seed) -> None:
    if min(heads, blocks, block_size) < 1 or lengths.sink < 0 or lengths.sink % block_size:
        raise ValueError(
            "need heads, blocks, block_size >= 1 and sink in whole blocks, got "
            f"{heads}, {blocks}, {block_size} and sink {lengths.sink}"
        )
    if not 0 <= seed <= LOW:
        raise ValueError(f"seed must be in 0..{LOW}, got {seed}")


def reference(lengths: Lengths, heads: int, blocks: int, block_size: int, seed: int) -> Tensor:
    block = torch.arange(blocks, device=lengths.length.device)
    head = torch.arange(heads, device=lengths.length.device)[:, None]
    x = mixed(lengths.length.long()[:, None, None] * STEP + head * HEAD + (seed * SEED & LOW))
    x = mixed(x + block)
    start = block * block_size
    live = (start >= lengths.sink) & (start < lengths.ring_begin[:, None])
    return ((x >> 8).float() * 2.0**-24).masked_fill(~live[:, None], -torch.inf)


@triton.jit
def _scores(out, length, ring_begin, heads, blocks, sink, block_size, seed, TILE: tl.constexpr):
    bh = tl.program_id(0)
    b, h = bh // heads, bh % heads
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(length + b).to(tl.uint32) * 0x9E3779B1 + h.to(tl.uint32) * 0x85EBCA77
    x += tl.full((), seed, tl.uint32)  # Triton passes a seed from 2^31 on as a 64-bit number
    x = mix(mix(x) + block)
    start = block * block_size
    live = (start >= sink) & (start < tl.load(ring_begin + b))
    score = tl.where(live, (x >> 8).to(tl.float32) * 5.9604644775390625e-08, float("-inf"))
    tl.store(out + bh.to(tl.int64) * blocks + block, score, mask=block < blocks)


def launch(lengths, heads, blocks, block_size, seed) -> Tensor:
    out = fake(lengths, heads, blocks)
    batch = out.shape[0]
    _scores[(batch * heads, cdiv(blocks, TILE))](
        out, lengths.length, lengths.ring_begin, heads, blocks, lengths.sink, block_size, seed * SEED & LOW, TILE=TILE
    )
    return out


def fake(lengths, heads: int, blocks: int, *_) -> Tensor:
    return lengths.length.new_empty((lengths.length.numel(), heads, blocks), dtype=torch.float32)


random_scores = register("random_scores", reference, impls=(by_triton(launch),), fake=fake, check=check)
