"""Keep the mean key of every chunk that leaves the ring, and the least cosine of a key of the chunk to this mean.

    landmark = mean of the keys of the chunk, in the type of the keys
    cosine   = min over the keys of  <key, landmark> / (|key| |landmark|)

Launches: `_landmarks`, (chunks that can leave in one call, row * kv head). A program without a chunk returns at once.

ShadowKV (arXiv 2410.21465), and its authors' code.
"""
import torch

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.index._leaving import leaving_keys, load_keys
from torchsparsekv.ops.shadowkv.views import Landmarks, check_chunks
from torchsparsekv.ops.store.views import Leaving, Lengths

LEAST = 1e-16  # of a product of two norms


def check(leaving, landmarks, lengths, block_size) -> None:
    check_chunks(block_size, leaving.pool.shape[2], landmarks.keys.shape[2])


def reference(leaving: Leaving, landmarks: Changed[Landmarks], lengths: Lengths, block_size: int) -> None:
    """Keep the mean key of every chunk that leaves the ring, and the least cosine of a key of the chunk to this mean.

    Args:
        leaving: the keys that leave the ring, in new tokens and in the pool; whole chunks.
        landmarks: the index. `keys` and `cosines` of these chunks change.
        lengths: positions per row.
        block_size: tokens of a chunk.
    """
    for b, old, new, keys in leaving_keys(leaving, lengths):
        x = keys.float().unflatten(1, (-1, block_size))
        mean = x.mean(2).to(keys.dtype)
        size = (x.norm(dim=-1) * mean.float().norm(dim=-1)[..., None]).clamp(min=LEAST)
        chunks = slice(old // block_size, new // block_size)
        landmarks.keys[b, :, chunks] = mean
        landmarks.cosines[b, :, chunks] = (torch.einsum("hcpd,hcd->hcp", x, mean.float()) / size).amin(-1)


@triton.jit(do_not_specialize=["tokens"])
def _landmarks(
    k, pool, landmarks, cosines, start, length, previous_ring_begin, ring_begin, k_b, k_h, k_s, heads, tokens, rows,
    blocks, LEAST: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n = tl.load(start + b), tl.load(length + b)
    block = tl.load(previous_ring_begin + b) // P + tl.program_id(0)  # the one grid dimension that may exceed 65,535
    if (n > 0) & (block * P < tl.load(ring_begin + b)):
        pos, d = block * P + tl.arange(0, P), tl.arange(0, DP)
        every = tl.full((P,), True, tl.int1)
        x = load_keys(k, pool, pos, n0, n, b, h, bh, k_b, k_h, k_s, tokens, rows, every, D, DP).to(tl.float32)
        mean = (tl.sum(x, 0) / P).to(landmarks.dtype.element_ty)
        tl.store(landmarks + (bh * blocks + block) * D + d, mean, mask=d < D)
        wide = mean.to(tl.float32)
        size = tl.sqrt(tl.sum(x * x, 1)) * tl.sqrt(tl.sum(wide * wide, 0))
        cosine = tl.sum(x * wide[None, :], 1) / tl.maximum(size, LEAST)
        tl.store(cosines + bh * blocks + block, tl.min(cosine, 0))


def launch(leaving, landmarks, lengths, block_size) -> None:
    (k, pool), (keys, cosines, _) = leaving, landmarks
    batch, heads, blocks, d = keys.shape
    most = min(cdiv(k.shape[2] + lengths.interval, block_size), blocks)  # chunks that can leave in one call
    _landmarks[(most, batch * heads)](
        k, pool, keys, cosines, *lengths[:4], *k.stride()[:3], heads, k.shape[2], pool.shape[2], blocks, LEAST=LEAST,
        P=block_size, D=d, DP=next_power_of_2(d), num_warps=2, **launch_early(k.device, batch * heads * most),
    )  # fmt: skip


keep_landmarks = register("keep_landmarks", reference, impls=(by_triton(launch),), check=check)
