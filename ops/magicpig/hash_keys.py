"""Hash every key that leaves the ring, in all tables (ops/magicpig/_planes.py).

Launches: `_hash`, (tiles of keys and tables, row * kv head). A program whose tile has no keys returns at once.

MagicPIG (arXiv 2410.16179), and its authors' code.
"""

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.index._leaving import leaving_keys, load_keys
from torchsparsekv.ops.magicpig._planes import CHANNELS, NOISE, codes_of, hashes, plane_of
from torchsparsekv.ops.magicpig.views import Signatures, check_bits
from torchsparsekv.ops.store.views import Leaving, Lengths

TILE, TABLES = 32, 8  # keys and tables of a program


def check(leaving, signatures, lengths, bits, seed) -> None:
    check_bits(bits, seed)
    if leaving.new.shape[3] > CHANNELS:
        raise ValueError(f"head_dim must be at most {CHANNELS}, got {leaving.new.shape[3]}")


def reference(leaving: Leaving, signatures: Changed[Signatures], lengths: Lengths, bits: int, seed: int) -> None:
    """Hash every key that leaves the ring, in all tables.

    Args:
        leaving: the keys that leave the ring, in new tokens and in the pool.
        signatures: the index. The codes of these keys change. Its centre is subtracted from a key before the key is
            hashed.
        lengths: positions per row.
        bits: of a code.
        seed: of the planes.
    """
    codes, centre = signatures
    for b, old, new, keys in leaving_keys(leaving, lengths):
        codes[b, :, :, old:new] = hashes(keys, centre[b, :, None], codes.shape[2], bits, seed).transpose(1, 2)


@triton.jit(do_not_specialize=["tokens", "seed"])
def _hash(
    k, pool, codes, centre, start, length, first_of, ring_begin, k_b, k_h, k_s, heads, tokens, rows, tables, sink, seed,
    ALL: tl.constexpr, BITS: tl.constexpr, NOISE: tl.constexpr, TABLES: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Codes of the positions from `first_of` up to `ring_begin`; ALL: from `sink` on, in rows with new tokens."""
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    chunks = tl.cdiv(tables, TABLES)
    tile, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks  # the one grid dimension that may exceed 65,535
    n0, n, first, end = tl.load(start + b), tl.load(length + b), tl.load(first_of + b), tl.load(ring_begin + b)
    if ALL:
        first = tl.where(n > n0, sink, end)
    if (n > 0) & (first + tile * TILE < end):
        pos, d = first + tile * TILE + tl.arange(0, TILE), tl.arange(0, DP)
        x = load_keys(k, pool, pos, n0, n, b, h, bh, k_b, k_h, k_s, tokens, rows, pos < end, D, DP)  # [TILE, DP]
        c = tl.load(centre + bh * D + d, mask=d < D, other=0.0)
        for table in range(chunk * TABLES, tl.minimum(chunk * TABLES + TABLES, tables)):
            code = codes_of(x, c, plane_of(table, seed, D, DP, BITS), NOISE)
            tl.store(codes + (bh * tables + table) * rows + pos, code.to(tl.int16), mask=pos < end)


def launch_hash(leaving: Leaving, signatures: Signatures, lengths: Lengths, bits: int, seed: int, everything: bool):
    """`_hash` of the keys that leave the ring, or of all keys that have left it."""
    (k, pool), (codes, centre) = leaving, signatures
    (batch, heads, tables, rows), d = codes.shape, k.shape[3]
    most = rows if everything else min(k.shape[2] + lengths.interval, rows)  # keys that can leave in one call
    programs = cdiv(most, TILE) * cdiv(tables, TABLES)
    _hash[(programs, batch * heads)](
        k, pool, codes, centre, *lengths[:4], *k.stride()[:3], heads, k.shape[2], rows, tables, lengths.sink, seed,
        ALL=everything, BITS=bits, NOISE=NOISE, TABLES=TABLES, TILE=TILE, D=d, DP=max(16, next_power_of_2(d)),
        **launch_early(k.device, batch * heads * programs),
    )  # fmt: skip


def launch(leaving, signatures, lengths, bits, seed) -> None:
    launch_hash(leaving, signatures, lengths, bits, seed, False)


hash_keys = register("hash_keys", reference, impls=(by_triton(launch),), check=check)
