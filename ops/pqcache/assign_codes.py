"""Give every key that leaves the ring the codes of its nearest centroids.

    code_s = argmax over c of  <key_s, c> - |c|^2 / 2       the nearest centroid of space s, ties to the lower

A row whose codebook is not learned adopts keys: the key of position sink + i becomes centroid i of all spaces and gets
the codes i, for i below the number of centroids. Later keys get the codes of the nearest adopted keys.

Launches: `_assign`, (tiles of keys, row * kv head). A program whose tile has no keys returns at once. With a long
interval, no tile has keys in most decode steps. In a row without a learned codebook one program does all tiles,
because later keys need the centroids of earlier keys.

PQCache (arXiv 2407.12820), and its authors' code.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.clusters._kmeans import nearest
from torchsparsekv.ops.index._leaving import leaving_keys, load_channels
from torchsparsekv.ops.pqcache.views import Codebook, check_codebook
from torchsparsekv.ops.store.views import Leaving, Lengths

TILE = 32  # keys per program: little waste where few keys leave the ring


def check(leaving, codebook, lengths) -> None:
    check_codebook(codebook, leaving.new.shape[3])


def parts(keys: Tensor, spaces: int) -> Tensor:
    """Keys [heads, tokens, dim] by space: [heads * spaces, tokens, width]."""
    return keys.unflatten(-1, (spaces, -1)).transpose(1, 2).flatten(0, 1)


def encode(codebook: Codebook, b: int, first: int, keys: Tensor, sink: int) -> None:
    """Store the codes of the keys [heads, tokens, dim] of row `b` from position `first` on."""
    if keys.shape[1] == 0:
        return
    centroids, codes, learned = codebook.centroids[b], codebook.codes[b], bool(codebook.learned[b])
    heads, spaces, most, _ = centroids.shape
    end, x = first + keys.shape[1], parts(keys, spaces)
    adopted = 0 if learned else max(0, min(sink + most, end) - first)
    at = first - sink + torch.arange(adopted)
    if adopted:
        centroids[:, :, at] = x[:, :adopted].unflatten(0, (heads, spaces))
    known = most if learned else min(end - sink, most)
    found = nearest(x, centroids[:, :, :known].flatten(0, 1))[0].unflatten(0, (heads, spaces))
    found[..., :adopted] = at
    codes[:, first:end] = found.transpose(1, 2).to(torch.uint8)


def reference(leaving: Leaving, codebook: Changed[Codebook], lengths: Lengths) -> None:
    """Give every key that leaves the ring the codes of its nearest centroids.

    Args:
        leaving: the keys that leave the ring, in new tokens and in the pool.
        codebook: the index. Its codes change, and its centroids in rows that adopt keys.
        lengths: positions per row.
    """
    for b, old, _, keys in leaving_keys(leaving, lengths):
        encode(codebook, b, old, keys, lengths.sink)


@triton.jit(do_not_specialize=["tokens"])
def _assign(
    k, pool, centroids, codes, learned, start, length, first_of, ring_begin, k_b, k_h, k_s, heads, tokens, rows, sink,
    ALL: tl.constexpr, SPACES: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Codes of the positions from `first_of` up to `ring_begin`; ALL: from `sink` on, in rows with new tokens."""
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n, end = tl.load(start + b), tl.load(length + b), tl.load(ring_begin + b)
    first, adopts = tl.load(first_of + b), tl.load(learned + b) == 0
    if ALL:
        first = tl.where(n > n0, sink, end)
    tiles = tl.where(n > 0, tl.cdiv(end - first, TILE), 0)
    tile = tl.program_id(0)  # the one grid dimension that may exceed 65,535
    stop = tl.where(adopts, tl.where(tile == 0, tiles, 0), tl.minimum(tile + 1, tiles))
    t, c, w = tl.arange(0, TILE), tl.arange(0, CP), tl.arange(0, WP)
    for i in range(tile, stop):
        pos = first + i * TILE + t
        live = pos < end
        adopted = live & (pos < tl.where(adopts, sink + C, 0))
        known = tl.where(adopts, tl.minimum(first + (i + 1) * TILE, end) - sink, C)
        for s in range(SPACES):
            d = (s * W + w)[None, :]
            x = load_channels(
                k, pool, pos, d, (w < W)[None, :], n0, n, b, h, bh, k_b, k_h, k_s, tokens, rows, live, D
            )  # [TILE, WP]
            at = centroids + (bh * SPACES + s) * C * W
            x = x.to(centroids.dtype.element_ty)
            tl.store(at + (pos - sink)[:, None] * W + w[None, :], x, mask=adopted[:, None] & (w < W)[None, :])
            tl.debug_barrier()
            there = (c < C) & (c < known)
            centroid = tl.load(at + c[:, None] * W + w[None, :], mask=there[:, None] & (w < W)[None, :], other=0.0)
            wide = centroid.to(tl.float32)  # [CP, WP]
            half = tl.where(there, tl.sum(wide * wide, 1) * 0.5, float("inf"))
            score = tl.dot(x, tl.trans(centroid), input_precision="ieee") - half[None, :]
            code = tl.max(score, 1, return_indices=True, return_indices_tie_break_left=True)[1]
            code = tl.where(adopted, pos - sink, code)
            tl.store(codes + (bh * rows + pos) * SPACES + s, code.to(tl.uint8), mask=live)


def launch_assign(leaving: Leaving, codebook: Codebook, lengths: Lengths, everything: bool) -> None:
    """`_assign` of the keys that leave the ring, or of all keys that have left it."""
    (k, pool), (centroids, codes, learned) = leaving, codebook
    (batch, heads, rows), d = pool.shape[:3], k.shape[3]
    spaces, c, w = centroids.shape[2:]
    most = rows if everything else min(k.shape[2] + lengths.interval, rows)  # keys that can leave in one call
    _assign[(cdiv(most, TILE), batch * heads)](
        k, pool, centroids, codes, learned, *lengths[:4], *k.stride()[:3], heads, k.shape[2], rows, lengths.sink,
        ALL=everything, SPACES=spaces, C=c, CP=max(16, next_power_of_2(c)), W=w, WP=max(16, next_power_of_2(w)), D=d,
        TILE=TILE, **launch_early(k.device, batch * heads * cdiv(most, TILE)),
    )  # fmt: skip


def launch(leaving, codebook, lengths) -> None:
    launch_assign(leaving, codebook, lengths, False)


assign_codes = register("assign_codes", reference, impls=(by_triton(launch),), check=check)
