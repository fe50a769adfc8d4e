"""Find the mean key of a prompt, subtract it from every key that has left the ring, and hash the differences.

    centre    mean of the keys from `sink` up to `ring_begin`; of all keys of the row where none has left the ring
    codes     those of `hash_keys`, for all positions from `sink` up to `ring_begin`

So codes depend on the tokens of a row, and not on how they were cut into prompts and chunks. Rows without new tokens
stay as they are.

MagicPIG (arXiv 2410.16179), and its authors' code. Without the mean subtracted, keys that all lie far from 0 on the
same side would share nearly all codes.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.index._leaving import load_keys, row_keys
from torchsparsekv.ops.magicpig._planes import hashes
from torchsparsekv.ops.magicpig.hash_keys import check as check_hash
from torchsparsekv.ops.magicpig.hash_keys import launch_hash
from torchsparsekv.ops.magicpig.views import Signatures
from torchsparsekv.ops.store.views import Leaving, Lengths

PART, TILE = 1024, 32  # keys of a program, and at a time


def check(leaving, signatures, lengths, bits, seed, join) -> None:
    check_hash(leaving, signatures, lengths, bits, seed)


def reference(
    leaving: Leaving, signatures: Changed[Signatures], lengths: Lengths, bits: int, seed: int, join: bool
) -> None:
    """Find the mean key of a prompt, subtract it from every key that has left the ring, and hash the differences.

    Args:
        leaving: the keys of the new tokens; the pool holds all earlier tokens.
        signatures: the index, changed.
        lengths: positions per row.
        bits: of a code.
        seed: of the planes.
        join: whether the calling stream waits for the result.

    Launches:
        `_sums`, (parts of PART keys, row * kv head); kernels of torch for the means; then the kernel of `hash_keys`.
        They run on the side stream, beside the next layer, unless `join`.
    """
    (codes, centre), sink = signatures, lengths.sink
    for b, (n0, n, _, end) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= n0:
            continue
        keys = row_keys(leaving, b, n0, n, sink, end) if end > sink else row_keys(leaving, b, n0, n, 0, n)
        centre[b] = keys.float().mean(1)
        if end > sink:
            found = hashes(keys, centre[b, :, None], codes.shape[2], bits, seed)
            codes[b, :, :, sink:end] = found.transpose(1, 2)


@triton.jit(do_not_specialize=["tokens"])
def _sums(
    k, pool, sums, start, length, ring_begin, k_b, k_h, k_s, heads, tokens, rows, sink, PART: tl.constexpr,
    TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n, end = tl.load(start + b), tl.load(length + b), tl.load(ring_begin + b)
    first, end = tl.where(end > sink, sink, 0), tl.where(end > sink, end, n)
    end = tl.where(n > n0, end, first)
    first += tl.program_id(0) * PART
    d = tl.arange(0, DP)
    total = tl.zeros((DP,), tl.float32)
    for at in range(first, tl.minimum(first + PART, end), TILE):
        pos = at + tl.arange(0, TILE)
        x = load_keys(k, pool, pos, n0, n, b, h, bh, k_b, k_h, k_s, tokens, rows, pos < end, D, DP)  # [TILE, DP]
        total += tl.sum(x.to(tl.float32), 0)
    tl.store(sums + (tl.program_id(0) * tl.num_programs(1) + bh) * D + d, total, mask=d < D)


def mean_keys(leaving: Leaving, lengths: Lengths) -> Tensor:
    """The mean key [batch, heads, dim] of every head; undefined for rows without new tokens."""
    (k, pool), (start, length, _, ring_begin, sink, _) = leaving, lengths
    (batch, heads, rows), d = pool.shape[:3], k.shape[3]
    sums = torch.empty((cdiv(rows, PART), batch, heads, d), dtype=torch.float32, device=k.device)
    _sums[(sums.shape[0], batch * heads)](
        k, pool, sums, start, length, ring_begin, *k.stride()[:3], heads, k.shape[2], rows, sink, PART=PART, TILE=TILE,
        D=d, DP=next_power_of_2(d),
    )  # fmt: skip
    count = torch.where(ring_begin > sink, ring_begin - sink, length).clamp(min=1)
    return sums.sum(0) / count[:, None, None]


def launch(leaving, signatures, lengths, bits, seed, join) -> None:
    centre = signatures.centre
    with on_side_stream(join, *leaving, *signatures, *lengths[:4]):
        fresh = (lengths.length > lengths.start)[:, None, None]
        centre.copy_(torch.where(fresh, mean_keys(leaving, lengths), centre))
        launch_hash(leaving, signatures, lengths, bits, seed, True)


hash_prompt = register("hash_prompt", reference, impls=(by_triton(launch),), check=check)
