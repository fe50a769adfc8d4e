"""Rounding to fp8 (e4m3) in integer arithmetic.

Triton's own conversion has three faults. ptxas of Triton 3.6 miscompiles it if later code computes with the
bytes: a register is read before it is written. The interpreter's conversion rounds wrongly. Neither conversion can
round up.
"""
import torch

from torchsparsekv.ops._machinery.triton import tl, triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@triton.jit
def to_e4m3(x, UP: tl.constexpr):
    """(byte, value) of fp32 `x`, |x| <= 448: rounded to nearest, ties to even; with `UP` rounded away from zero."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    if UP:
        cut = (size + 0xFFFFF) >> 20  # three bits of mantissa are left
    else:
        cut = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    steps = size.to(tl.float32, bitcast=True) * 512.0  # below 2^-6 values are multiples of 2^-9
    if UP:
        steps = tl.maximum(tl.ceil(steps), (size != 0).to(tl.float32))  # `ceil` may make a subnormal number 0
    else:
        steps = (steps + 8388608.0) - 8388608.0  # adding 2^23 rounds to an integer
    tiny = size < 0x3C800000  # 2^-6
    byte = tl.where(tiny, steps.to(tl.uint32), cut - 960) | ((bits >> 24) & 0x80)  # 960 = 120 << 3: exponents 120 apart
    value = tl.where(tiny, steps / 512.0, (cut << 20).to(tl.float32, bitcast=True))
    return byte.to(tl.uint8), tl.where(bits >> 31 != 0, -value, value)
