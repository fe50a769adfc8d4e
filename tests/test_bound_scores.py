"""Bounds of blocks in fp8 by csrc/bound_scores.cu, of which the few small blocks of a world are no test."""
import importlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from world import DEVICE

from torchsparsekv.ops._registry import load_all
from torchsparsekv.ops._top import peaks_of

BOUNDS = importlib.import_module("torchsparsekv.ops.select.bound_scores")
ENTRY = load_all()["bound_scores"]
FP8, NAN = torch.float8_e4m3fn, 0x7F


def arguments(shape, ends: list[int], sink: int, block: int, box: bool, dtype, largest: float, seed: int):
    """Digests that are NaN where nothing lives; of the spreads a share is so large that it counts as unbounded."""
    g = torch.Generator().manual_seed(seed)
    heads, group, blocks, d = shape
    lead, random = (len(ends), heads, blocks), lambda *n: torch.randn(*n, generator=g)
    q = random(len(ends), heads * group, 1, d).to(dtype)
    centre, spread = (random(*lead, d) * 3).to(FP8), random(*lead, d if box else 1).abs()
    if box:
        spread = spread.masked_fill(torch.rand(spread.shape, generator=g) < largest, BOUNDS.FP8_MAX).to(FP8)
    live = torch.zeros(len(ends), 1, blocks, 1, dtype=torch.bool)
    for b, end in enumerate(ends):
        live[b, :, sink:end] = True
    centre = torch.where(live, centre.view(torch.uint8), NAN).view(FP8)
    spread = torch.where(live, spread.view(torch.uint8), NAN).view(FP8) if box else torch.where(live, spread, math.nan)
    retired = torch.tensor([end * block + seed % block for end in ends], dtype=torch.int32)
    return q, centre, spread, retired, sink * block, block


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [0, 64])
@pytest.mark.parametrize(("d", "group"), [(64, 16), (64, 5), (128, 16), (128, 4), (128, 1), (256, 8), (256, 7)])
@given(
    blocks=st.sampled_from([1, 15, 16, 17, 129, 1000, 4097]), share=st.tuples(*[st.floats(0, 1)] * 2),
    sink=st.sampled_from([0, 1, 15, 16, 40]), block=st.sampled_from([1, 16, 32]), box=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]), largest=st.sampled_from([0.0, 1e-4, 0.5]),
    strided=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_native(resident, d, group, blocks, share, sink, block, box, dtype, largest, strided, seed):
    """By one program a head, and by as many as there are tiles for; and Triton's kernel at the same shapes."""
    ends = [round(x * blocks) for x in share]
    args = arguments((2, group, blocks, d), ends, sink, block, box, dtype, largest, seed)
    there = [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args]
    if strided:  # as if it were cut from the output of one product for q, k and v
        there[0] = there[0].transpose(1, 2).repeat(1, 1, 1, 3)[..., d : 2 * d].transpose(1, 2)
    assert BOUNDS._native(*there[:3]) is not None
    scores, peaks = ENTRY.reference(*args)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(BOUNDS, "RESIDENT", resident)
        results = ENTRY.cuda(*there), BOUNDS._by_triton(*there)
    for got, its_peaks in results:
        torch.testing.assert_close(got.cpu(), scores, rtol=2e-5, atol=1e-3)  # of sums of hundreds
        assert torch.equal(its_peaks, peaks_of(got))
    assert torch.equal(peaks.isinf(), results[0][1].isinf().cpu())


@pytest.mark.gpu
def test_other_arguments_are_left_to_triton():
    there = [a.to(DEVICE) for a in arguments((2, 4, 40, 128), [40, 9], 0, 4, True, torch.bfloat16, 0.0, 0)[:3]]
    q, centre, spread = there
    assert BOUNDS._native(q, centre, spread) is not None
    odd = torch.empty(2, 8, 1, 129, dtype=q.dtype, device=DEVICE)[..., 1:]
    for other in (
        (q.float(), centre, spread), (q, centre.bfloat16(), spread), (q, centre, spread.bfloat16()),
        (q, centre, spread[..., :1].bfloat16()), (odd, centre, spread), (q.repeat(1, 5, 1, 1), centre, spread),
        (q[..., :80].contiguous(), centre[..., :80].contiguous(), spread[..., :80].contiguous()),
    ):  # fmt: skip
        assert BOUNDS._native(*other) is None
