"""Multiply every query head with every landmark.

    logit[h, chunk] = scale * <q_h, landmark>,  soft-capped where the model does that;  +inf for outliers

Chunks that cannot be retrieved (the sinks, and chunks that have not left the ring) have -inf.

Launches: `_logits`, (tiles of chunks, row * kv head).

ShadowKV (arXiv 2410.21465), and its authors' code.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.attend._split import capped, load_query, soft_capped
from torchsparsekv.ops.shadowkv.views import Landmarks
from torchsparsekv.ops.store.views import Attention, Lengths, Query

TILE = 64  # chunks of a program


def check(q, landmarks, lengths, block_size, attention) -> None:
    _check.heads(q, landmarks.keys)
    if block_size < 1 or lengths.sink % block_size:
        raise ValueError(f"{lengths.sink} sinks are not whole chunks of {block_size}")


def reference(q: Query, landmarks: Landmarks, lengths: Lengths, block_size: int, attention: Attention) -> Tensor:
    """Multiply every query head with every landmark.

    Args:
        q: [batch, q_heads, 1, dim].
        landmarks: the index.
        lengths: positions per row.
        block_size: tokens of a chunk.
        attention: scale and soft cap of the model.

    Returns:
        [batch, q_heads, chunks], fp32.
    """
    keys, _, outlier = landmarks
    x = q[:, :, 0].unflatten(1, (keys.shape[1], -1)).float()
    z = soft_capped(x @ keys.float().transpose(-1, -2) * attention.scale, attention.softcap)
    z = z.masked_fill((outlier != 0)[:, :, None], torch.inf)
    chunk = torch.arange(keys.shape[2], device=q.device)
    live = (chunk >= lengths.sink // block_size) & (chunk < lengths.ring_begin[:, None] // block_size)
    return z.masked_fill(~live[:, None, None], -torch.inf).flatten(1, 2)


@triton.jit
def _logits(
    q, landmarks, outlier, out, ring_begin, q_b, q_h, heads, blocks, first, scale, softcap, G: tl.constexpr,
    GP: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    g, d, block = tl.arange(0, GP), tl.arange(0, DP), tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = (block >= first) & (block < tl.load(ring_begin + b) // P)
    x = load_query(q, q_b, q_h, b, h, G, GP, D, DP)  # [GP, DP]
    at = landmarks + (bh * blocks + block[:, None]) * D + d[None, :]
    key = tl.load(at, mask=live[:, None] & (d < D)[None, :], other=0.0)  # [TILE, DP]
    z = capped(tl.dot(x, tl.trans(key.to(x.dtype)), input_precision="ieee") * scale, softcap)
    marked = tl.load(outlier + bh * blocks + block, mask=live, other=0)
    z = tl.where((marked != 0)[None, :], float("inf"), z)
    z = tl.where(live[None, :], z, float("-inf"))
    there = (g < G)[:, None] & (block < blocks)[None, :]
    tl.store(out + (bh * G + g)[:, None] * blocks + block[None, :], z, mask=there)


def launch(q, landmarks, lengths, block_size, attention) -> Tensor:
    keys, _, outlier = landmarks
    batch, heads, blocks, d = keys.shape
    out, group = fake(q, landmarks), q.shape[1] // heads
    tiles = cdiv(blocks, TILE)
    _logits[(tiles, batch * heads)](
        q, keys, outlier, out, lengths.ring_begin, q.stride(0), q.stride(1), heads, blocks, lengths.sink // block_size,
        attention.scale, attention.softcap, G=group, GP=max(16, next_power_of_2(group)), P=block_size, D=d,
        DP=max(16, next_power_of_2(d)), TILE=TILE, **launch_early(q.device, tiles * batch * heads),
    )  # fmt: skip
    return out


def fake(q, landmarks, *_) -> Tensor:
    return q.new_empty((*q.shape[:2], landmarks.keys.shape[2]), dtype=torch.float32)


landmark_logits = register("landmark_logits", reference, impls=(by_triton(launch),), fake=fake, check=check)
