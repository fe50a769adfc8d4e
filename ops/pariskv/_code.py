"""Unpack 4-bit direction codes: the m codes of a subspace are one word, and each code is a sign and a magnitude.

    code = 8 * (x >= 0) + magnitude number (0 to 7)        direction = +-levels[magnitude number]
"""
import functools

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import compiles, tl, triton
from torchsparsekv.ops.pariskv._lloyd_max import quantiser

WORDS = {8: torch.int32, 4: torch.int16, 2: torch.uint8}  # the type that holds m codes of 4 bits


def words(codes: Tensor, m: int) -> Tensor:
    """The packed bytes as one word per subspace."""
    return codes.view(WORDS[m])


def directions(codes: Tensor, m: int) -> Tensor:
    """Packed codes [..., subspaces * m / 2], low nibble first -> directions [..., subspaces, m]."""
    nibble = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    levels = torch.tensor(quantiser(m)[1], dtype=torch.float32)
    return torch.where(nibble >= 8, levels[nibble & 7], -levels[nibble & 7]).unflatten(-1, (-1, m))


@triton.jit
def magnitude(t, c0, c1, c2, c3, c4, c5, c6, c7):
    """Magnitude number `t` (0 to 7), by the polynomial of `_lloyd_max.polynomial`."""
    x = t.to(tl.float32) - 3.5
    return ((((((c7 * x + c6) * x + c5) * x + c4) * x + c3) * x + c2) * x + c1) * x + c0


@triton.jit
def unpack(word, c0, c1, c2, c3, c4, c5, c6, c7, M: tl.constexpr):
    """Words [rows, subspaces] -> directions [rows, subspaces, M] in fp16."""
    nibble = (word.to(tl.int32)[:, :, None] >> (4 * tl.arange(0, M))[None, None, :]) & 15
    v = magnitude(nibble & 7, c0, c1, c2, c3, c4, c5, c6, c7)
    return tl.where(nibble >= 8, v, -v).to(tl.float16)


@functools.cache
def level_bytes(m: int) -> tuple[int, ...]:
    """The 8 magnitudes in fp16, for lookups by byte: two words with their low bytes, two with their high bytes."""
    levels = torch.tensor(quantiser(m)[1]).half().view(torch.int16).tolist()
    return tuple(
        sum((x >> shift & 255) << 8 * i for i, x in enumerate(levels[half : half + 4]))
        for shift in (0, 8)
        for half in (0, 4)
    )


@functools.cache
def unpack_ptx(m: int, device: torch.device) -> str:
    """PTX that unpacks a word of 8 codes into 8 fp16 directions; empty for other m, and in Triton's interpreter.

    `prmt` picks 4 bytes out of 8 by 4 nibbles. It looks up the low and then the high bytes of 4 codes at once, and in
    its sign mode it spreads 4 sign bits over 4 bytes. This takes two instructions a code; `unpack` takes 15.
    """
    if m != 8 or not compiles(device):
        return ""

    def four(signs: int, out: int) -> str:
        return f"""
        prmt.b32 a, l0, l1, s;
        prmt.b32 b, h0, h1, s;
        prmt.b32 g, n, $8, {signs:#x};
        lop3.b32 b, b, g, 0x80808080, 0xD2;
        prmt.b32 c, a, b, 0x5140;
        mov.b32 {{${out}, ${out + 1}}}, c;
        prmt.b32 c, a, b, 0x7362;
        mov.b32 {{${out + 2}, ${out + 3}}}, c;"""

    halves = "".join(f"mov.b32 {name}, {word:#x};" for name, word in zip(("l0", "l1", "h0", "h1"), level_bytes(m)))
    return f"""{{
        .reg .b32 s, n, a, b, c, g, l0, l1, h0, h1;
        {halves}
        and.b32 s, $8, 0x77777777;
        shl.b32 n, $8, 4;{four(0xD9C8, 0)}
        shr.u32 s, s, 16;{four(0xFBEA, 4)}
    }}"""


@triton.jit
def unpack_weighted(ASM: tl.constexpr, word, w):
    """`unpack` for M = 8 by the PTX of `unpack_ptx`, times the weights `w` of the subspaces."""
    v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
        ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r", [word], (tl.int16,) * 8, is_pure=True, pack=1
    )
    a = tl.join(_weighted(v0, w), _weighted(v4, w))
    b = tl.join(_weighted(v2, w), _weighted(v6, w))
    c = tl.join(_weighted(v1, w), _weighted(v5, w))
    d = tl.join(_weighted(v3, w), _weighted(v7, w))
    return tl.join(tl.join(a, b), tl.join(c, d))  # the new dimension is the last


@triton.jit
def _weighted(v, w):
    return v.to(tl.float16, bitcast=True) * w
