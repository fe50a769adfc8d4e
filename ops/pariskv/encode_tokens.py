"""Encode new tokens of any requests as encode_keys does, at their pool rows, but count no ids.

count_ids counts the ids, because counts depend on all blocks of a request. For count_ids, this op also counts in `uses`
how often each block is begun.
"""
import math

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import (
    cdiv,
    launch_early,
    load_early,
    next_power_of_2,
    tl,
    triton,
    wait_for_previous,
)
from torchsparsekv.ops.engine.tables import check_one
from torchsparsekv.ops.engine.views import FlatTokens, RowOfToken
from torchsparsekv.ops.pariskv._code import words
from torchsparsekv.ops.pariskv.encode_keys import COLUMNS, LARGEST, NOISE, check_codes, constants, encode, encode_tile
from torchsparsekv.ops.pariskv.views import Codes, Uses

TILE = 16  # tokens of a program
# Of up to FEW tokens, a program encodes FEW_COLUMNS rotated coordinates of one token, without tensor cores. So a layer
# of one request takes 31.3 us, not 34.2.
FEW, FEW_COLUMNS = 8, 32


def check(k, to, codes, uses, m, seed) -> None:
    check_one(codes.ids)
    check_codes(codes, k.shape[2], m, seed)
    if codes.ids.shape[2] % uses.shape[1]:
        raise ValueError(f"{codes.ids.shape[2]} rows of the pool are not {uses.shape[1]} blocks of one size")


def reference(k: FlatTokens, to: RowOfToken, codes: Changed[Codes], uses: Changed[Uses], m: int, seed: int) -> None:
    """Encode new tokens of any requests as encode_keys does. The codes lie at the pool rows of the tokens.

    Args:
        k: keys of the new tokens [tokens, heads, dim], any strides.
        to: the row of the pool for each token [tokens], -1 for none, as in write_tokens.
        codes: ids, codes and weights [1, heads, rows, ...] are written; `counts` stays as it is.
        uses: how often each block was begun [1, blocks]; a token in the first row of a block adds 1.
        m: dimensions of a subspace, 2, 4 or 8.
        seed: of the rotation.

    Launches:
        One kernel of tokens / TILE x heads programs; of up to FEW tokens, tokens x heads x size / FEW_COLUMNS.
    """
    stored, page = to >= 0, codes.ids.shape[2] // uses.shape[1]
    begun = to[stored & (to % page == 0)] // page
    uses[0, begun] += 1
    found = encode(k[stored].transpose(0, 1), m, seed)
    for t, new in zip((codes.ids, codes.codes, codes.weights), found):
        t[0, :, to[stored]] = new


@triton.jit(do_not_specialize=["tokens", "seed"])
def _encode(
    k, to, ids, codes, weights, uses, k_t, k_h, tokens, rows, seed, scale, t1, t2, t3, t4, t5, t6, t7, c0, c1, c2, c3,
    c4, c5, c6, c7, LARGEST: tl.constexpr, NOISE: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, OF_PART: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    h, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    t, d = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE), tl.arange(0, DP)
    row = load_early(to + t, t < tokens, -1)
    wait_for_previous(PDL)
    live = (row >= 0)[:, None]
    if (h == 0) & (part == 0):
        block = uses + tl.maximum(row, 0) // PAGE
        begins = (row >= 0) & (row % PAGE == 0)
        tl.store(block, tl.load(block, mask=begins, other=0) + 1, mask=begins)
    if tl.max(row, 0) >= 0:
        x = tl.load(k + t[:, None] * k_t + h * k_h + d[None, :], mask=live & (d < D)[None, :], other=0.0)  # [TILE, DP]
        encode_tile(
            x, live, part * OF_PART, part * OF_PART + OF_PART, (h * rows + tl.maximum(row, 0)[:, None]) * (DP // M),
            ids, codes, weights, ids, seed, scale, t1, t2, t3, t4, t5, t6, t7, c0, c1, c2, c3, c4, c5, c6, c7, False,
            LARGEST, NOISE, M, DP, TILE, COLUMNS,
        )  # fmt: skip


def launch(k, to, codes, uses, m, seed) -> None:
    (tokens, heads, d), size = k.shape, next_power_of_2(k.shape[2])
    few = tokens <= FEW
    tile, columns = (1, min(FEW_COLUMNS, size)) if few else (TILE, min(COLUMNS, size))
    part = columns if few else size
    grid = cdiv(tokens, tile), heads, size // part
    _encode[grid](
        k, to, codes.ids, words(codes.codes, m), codes.weights, uses, *k.stride()[:2], tokens, codes.ids.shape[2], seed,
        *constants(m, size), LARGEST=LARGEST, NOISE=NOISE, M=m, D=d, DP=size, TILE=tile, OF_PART=part, COLUMNS=columns,
        PAGE=codes.ids.shape[2] // uses.shape[1], **launch_early(k.device, math.prod(grid)),
    )  # fmt: skip


encode_tokens = register("encode_tokens", reference, impls=(by_triton(launch),), check=check)
