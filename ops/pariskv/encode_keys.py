"""Encode every key that leaves the ring: a centroid id and a weight per subspace, a 4-bit code per coordinate.

    y = rotate(key) / sqrt(size)                      size is dim rounded up to a power of two; y is cut into parts y_s
    y_j = 0  where |y_j| sqrt(size) <= size 2^-24 |key|_1        fp32 cannot tell such a sum from 0
    id_s = sum over j of 2^j * (y_sj >= 0)            the nearest of 2^m sign patterns
    code_sj = 8 * (y_sj >= 0) + magnitude number of |y_sj| / |y_s|        (ops/pariskv/_lloyd_max.py)
    weight_s = |y_s|^2 / <v_s, y_s>                   v_s: the direction that the codes stand for
    counts[s, id_s] += 1

weight_s * <v_s, q_s>, summed over s, estimates <key, q>. Keys need not be normalized: ids and codes do not depend on
the length of a key, and the weights are proportional to it.

Keys of an int8 pool are integers times a scale, so some of their rotated coordinates are 0. The second line gives
these a fixed sign: the sign of a rounding error would differ with the scale and with the order of the sum.

Launches: `_encode`, (tiles of keys, row * kv head). A key is read once, and 112 bytes are written at dim 128, m = 8.
Tiles without keys return at once; in most decode steps no tile has keys.

ParisKV, section 4.1 and appendix B.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.hadamard import hadamard_odd
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.index._leaving import leaving_keys, load_keys
from torchsparsekv.ops.pariskv._code import WORDS, magnitude, words
from torchsparsekv.ops.pariskv._lloyd_max import polynomial, quantiser
from torchsparsekv.ops.pariskv._srht import SEEDS, is_flipped, rotate
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.store.tables import check_table
from torchsparsekv.ops.store.views import OWN_POOLS, Leaving, Lengths

TILE = 32  # keys per program: one tensor-core tile, and little waste where few keys leave the ring
COLUMNS = 64  # rotated coordinates that a program computes at a time
LARGEST = 65504.0  # of fp16
NOISE = 2.0**-24  # of a sum in fp32: its largest relative error per term


def check(leaving, codes, lengths, m, seed) -> None:
    check_codes(codes, leaving.new.shape[-1], m, seed)
    check_table(codes.ids, leaving.new.shape[0], OWN_POOLS)


def check_codes(codes: Codes, dim: int, m: int, seed: int) -> None:
    """Refuse codes that do not fit keys of `dim` channels."""
    if m not in WORDS or not 0 <= seed < SEEDS:
        known = ", ".join(map(str, sorted(WORDS)))
        raise ValueError(f"m must be one of {known} and 0 <= seed < {SEEDS}, got {m}, {seed}")
    size = next_power_of_2(dim)
    got = codes.ids.shape[3], codes.codes.shape[3], codes.counts.shape[3]
    if got != (size // m, size // 2, 1 << m):
        want = f"{size // m}, {size // 2} and {1 << m}"
        raise ValueError(f"{size} dimensions in parts of {m} need ids, codes and counts {want} wide, got {got}")


def encode(keys: Tensor, m: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [..., spaces], codes [..., size / 2], weights [..., spaces]) of keys [..., dim]."""
    x = rotate(keys, seed)
    size = x.shape[-1]
    x = torch.where(x.abs() <= size * NOISE * keys.float().abs().sum(-1, keepdim=True), 0.0, x)
    x = x.unflatten(-1, (-1, m))
    thresholds, levels = (torch.tensor(t, dtype=torch.float64) for t in quantiser(m))
    square = x.square().sum(-1)
    # |x_j| / |x| > threshold, squared. Without root and quotient, kernel and reference decide alike to the last bit.
    cell = (x.square()[..., None] > thresholds.square().float() * square[..., None, None]).sum(-1)
    positive = x >= 0
    ids = (positive << torch.arange(m)).sum(-1).to(torch.uint8)
    nibble = (positive * 8 + cell).flatten(-2)
    codes = (nibble[..., ::2] | nibble[..., 1::2] << 4).to(torch.uint8)
    aligned = (levels.float()[cell] * x.abs()).sum(-1)
    weights = torch.where(aligned > 0, square / aligned * size**-0.5, 0).clamp(max=LARGEST)
    return ids, codes, weights.half()


def reference(leaving: Leaving, codes: Changed[Codes], lengths: Lengths, m: int, seed: int) -> None:
    """Encode the keys that leave the ring.

    Args:
        leaving: the keys that leave the ring, in new tokens and in the pool.
        codes: the index; the rows of these keys and `counts` are written.
        lengths: positions per row.
        m: dimensions of a subspace, 2, 4 or 8.
        seed: of the rotation.
    """
    for b, old, new, keys in leaving_keys(leaving, lengths):
        ids, packed, weights, counts = (t[b] for t in codes)
        ids[:, old:new], packed[:, old:new], weights[:, old:new] = encode(keys, m, seed)
        ids_by_space = ids[:, old:new].transpose(1, 2).long()
        counts.scatter_add_(2, ids_by_space, torch.ones_like(ids_by_space, dtype=torch.int32))


@triton.jit
def encode_tile(
    x, live, begin, end, first, ids, codes, weights, counts, seed, scale, t1, t2, t3, t4, t5, t6, t7, c0, c1, c2, c3,
    c4, c5, c6, c7, COUNT: tl.constexpr, LARGEST: tl.constexpr, NOISE: tl.constexpr, M: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the codes of the keys `x` [TILE, DP] where `live` [TILE, 1]: of the rotated coordinates from `begin` up to
    `end`. Subspace 0 is at `first` [TILE, 1]. With COUNT their ids are counted in `counts`, the counts of a head."""
    d = tl.arange(0, DP)
    x = tl.where(is_flipped(d, seed)[None, :], -x, x)
    noise = tl.sum(tl.abs(x.to(tl.float32)), 1)[:, None] * (DP * NOISE)
    j = tl.arange(0, M)[None, None, :]
    spaces: tl.constexpr = COLUMNS // M
    for part in range(begin, end, COLUMNS):
        minus = hadamard_odd(d[:, None], (part + tl.arange(0, COLUMNS))[None, :])
        # [TILE, COLUMNS]; the products are exact
        if TILE < 16:  # tensor cores take 16 keys
            y = tl.sum(tl.where(minus[None], -x[:, :, None], x[:, :, None]).to(tl.float32), 1)
        else:
            y = tl.dot(x, tl.where(minus, -1.0, 1.0).to(x.dtype), input_precision="ieee")
        y = tl.where(tl.abs(y) <= noise, 0.0, y)
        y = tl.reshape(y, (TILE, spaces, M))
        square = tl.sum(y * y, 2)
        s, y2 = tl.reshape(square, (TILE, spaces, 1)), y * y
        cell = (y2 > t1 * s).to(tl.int32) + (y2 > t2 * s).to(tl.int32) + (y2 > t3 * s).to(tl.int32)
        cell += (y2 > t4 * s).to(tl.int32) + (y2 > t5 * s).to(tl.int32)
        cell += (y2 > t6 * s).to(tl.int32) + (y2 > t7 * s).to(tl.int32)
        positive = (y >= 0).to(tl.int32)
        id_of = tl.sum(positive << j, 2)
        word = tl.sum((positive * 8 + cell).to(tl.uint32) << (4 * j).to(tl.uint32), 2)
        aligned = tl.sum(magnitude(cell, c0, c1, c2, c3, c4, c5, c6, c7) * tl.abs(y), 2)
        w = tl.where(aligned > 0, square / tl.where(aligned > 0, aligned, 1.0) * scale, 0.0)
        space = part // M + tl.arange(0, spaces)[None, :]
        tl.store(ids + first + space, id_of.to(tl.uint8), mask=live)
        tl.store(codes + first + space, word.to(codes.dtype.element_ty), mask=live)
        tl.store(weights + first + space, tl.minimum(w, LARGEST).to(tl.float16), mask=live)
        if COUNT:
            tl.atomic_add(counts + space * (1 << M) + id_of, tl.full((TILE, spaces), 1, tl.int32), mask=live)


@triton.jit(do_not_specialize=["tokens"])
def _encode(
    k, pool, ids, codes, weights, counts, start, length, previous_ring_begin, ring_begin, k_b, k_h, k_s, heads, tokens,
    rows, seed, scale, t1, t2, t3, t4, t5, t6, t7, c0, c1, c2, c3, c4, c5, c6, c7, LARGEST: tl.constexpr,
    NOISE: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n, new = tl.load(start + b), tl.load(length + b), tl.load(ring_begin + b)
    first = tl.load(previous_ring_begin + b) + tl.program_id(0) * TILE  # the one grid dimension that may exceed 65,535
    if (n > 0) & (first < new):
        pos = first + tl.arange(0, TILE)
        live = (pos < new)[:, None]
        x = load_keys(k, pool, pos, n0, n, b, h, bh, k_b, k_h, k_s, tokens, rows, pos < new, D, DP)  # [TILE, DP]
        encode_tile(
            x, live, 0, DP, (bh * rows + pos[:, None]) * (DP // M), ids, codes, weights,
            counts + bh * (DP // M) * (1 << M), seed, scale, t1, t2, t3, t4, t5, t6, t7, c0, c1, c2, c3, c4, c5, c6, c7,
            True, LARGEST, NOISE, M, DP, TILE, COLUMNS,
        )  # fmt: skip


def constants(m: int, size: int) -> tuple[float, ...]:
    """The numbers `scale` to `c7` of the kernels."""
    return (size**-0.5, *(t * t for t in quantiser(m)[0]), *polynomial(m))


def launch(leaving, codes, lengths, m, seed) -> None:
    k, pool = leaving
    (batch, heads, rows), d = pool.shape[:3], k.shape[3]
    size = next_power_of_2(d)
    most = min(k.shape[2] + lengths.interval, rows)  # keys that can leave in one call
    _encode[(cdiv(most, TILE), batch * heads)](
        k, pool, codes.ids, words(codes.codes, m), codes.weights, codes.counts, *lengths[:4], *k.stride()[:3], heads,
        k.shape[2], rows, seed, *constants(m, size), LARGEST=LARGEST, NOISE=NOISE, M=m, D=d, DP=size,
        TILE=TILE, COLUMNS=min(COLUMNS, size), **launch_early(k.device, batch * heads * cdiv(most, TILE)),
    )  # fmt: skip


encode_keys = register("encode_keys", reference, impls=(by_triton(launch),), check=check)
