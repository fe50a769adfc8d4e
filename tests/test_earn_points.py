"""The CUDA kernel for the points of ParisKV: it and Triton's against the reference, at the shapes that it is for."""
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from world import DEVICE

POINTS = importlib.import_module("torchsparsekv.ops.select.earn_points")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(
    spaces=st.sampled_from(POINTS.NATIVE_SPACES), short=st.sampled_from([0, 1, 8, 9]), group=st.integers(1, 9),
    mean=st.booleans(), alike=st.booleans(), sliced=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_native(dtype, spaces, short, group, mean, alike, sliced, seed):
    """Integers, so that no sum rounds and ties are ties; `short` of padding, `sliced` out of a larger tensor."""
    g = torch.Generator().manual_seed(seed)
    heads, dim, sink = 2, spaces * 8 - short, 5
    q = torch.randint(-1 if alike else -4, 2 if alike else 5, (3, heads * group, 2, dim + 3), generator=g).to(dtype)
    q = q[:, :, 1:, 3:] if sliced else q[:, :, :1, :dim].contiguous()
    counts = torch.randint(0, 50, (3, heads, spaces, 256), generator=g, dtype=torch.int32)
    counts[1] *= torch.rand(counts[1].shape, generator=g) < 0.1
    retired = torch.tensor([5 + int(counts[0, 0, 0].sum()), 40, 3], dtype=torch.int32)
    args = counts, retired, sink, [50, 500_000, 600_000, 200, 250_000, 300_000, 300, 0, 250_000, 0, 700_000], mean, seed
    want = POINTS.reference(q, *args)
    there = [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in (q, *args)]
    if sliced:
        there[0] = torch.nn.functional.pad(there[0], (3, 0))[..., 3:]  # not aligned
    by_triton = POINTS._empty(there[0], there[1], mean)
    for t in by_triton:
        t.view(torch.uint8).fill_(255)
    POINTS._by_triton(*there[:2], *by_triton, *there[2:])
    with pytest.MonkeyPatch.context() as m:
        m.setattr(POINTS, "_by_triton", None)  # not taken
        native = POINTS.cuda(*there)
    for got in native, by_triton:
        torch.testing.assert_close(got[0].cpu(), want[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("m", [2, 4])
def test_a_wide_head_and_a_seed_of_one(m):
    """Triton makes an argument of 1 a constant. Of `_rotated` as it was, version 3.6 then made wrong machine code."""
    g = torch.Generator().manual_seed(m)
    q = torch.randint(-4, 5, (1, 1, 1, 256), generator=g).float()
    counts = torch.randint(0, 50, (1, 1, 256 // m, 1 << m), generator=g, dtype=torch.int32)
    args = counts, torch.tensor([300], dtype=torch.int32), 5, [0, 0, 0] * 3 + [0, 700_000], False, 1
    want = POINTS.reference(q, *args)
    got = POINTS.cuda(*(a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in (q, *args)))
    torch.testing.assert_close(got[0].cpu(), want[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(got[1].cpu(), want[1])


def test_a_query_of_nan_breaks_nothing():
    """A row whose mask is wrong is NaN all over; the others of its batch are to be right."""
    q, counts = torch.ones(2, 2, 1, 16), torch.ones(2, 2, 2, 256, dtype=torch.int32)
    args = counts, torch.tensor([256, 256], dtype=torch.int32), 0, [0, 0, 0] * 3 + [0, 700_000], False, 0
    want = POINTS.reference(q, *args)
    q[0] = torch.nan
    there = [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in (q, *args)]
    for got in POINTS.reference(q, *args), POINTS.cuda(*there):
        assert got[0][0].isnan().all()
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x[1].cpu(), y[1])
