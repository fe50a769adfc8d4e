"""The CUDA and Triton kernels of centroid_votes equal the reference at the usual shapes."""
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import NATIVE, on, until
from world import DEVICE

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.pariskv.views import Codes

VOTES = importlib.import_module("torchsparsekv.ops.pariskv.centroid_votes")
ENTRY = load_all()["centroid_votes"]


def counted(counts: torch.Tensor) -> Codes:
    """Of keys of which nothing else is known."""
    none = torch.empty(*counts.shape[:2], 0, counts.shape[2])
    return Codes(none.to(torch.uint8), none.to(torch.uint8), none.half(), counts)


@pytest.fixture(autouse=True)
def _used_memory(monkeypatch):
    """Results are made of memory that held something before."""
    fake = VOTES.fake

    def made(*args):
        results = fake(*args)
        for t in results:
            t.view(torch.uint8).fill_(255)
        return results

    monkeypatch.setattr(VOTES, "fake", made)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(
    spaces=st.sampled_from(VOTES.NATIVE_SPACES), short=st.sampled_from([0, 1, 8, 9]), group=st.integers(1, 9),
    mean=st.booleans(), alike=st.booleans(), sliced=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_cuda_kernel_equals_reference(dtype, spaces, short, group, mean, alike, sliced, seed):
    """`short` of padding, `sliced` out of a larger tensor. Programs with one subspace and with several."""
    things = arguments(dtype, spaces, short, group, mean, alike, sliced, seed)
    want = ENTRY.reference(*things)
    there = on(DEVICE, things)
    if sliced:
        there = (torch.nn.functional.pad(there[0], (3, 0))[..., 3:], *there[1:])  # not aligned
    for kind, sms in (("cuda", 1), ("cuda", 1 << 20), ("triton", 1)):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(VOTES, "sm_count", lambda _, x=sms: x)
            got = ENTRY.run(kind, *there)
        torch.testing.assert_close(got[0].cpu(), want[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(got[1].cpu(), want[1])


def arguments(dtype, spaces: int, short: int, group: int, mean: bool, alike: bool, sliced: bool, seed: int) -> tuple:
    """Integers, so that no sum rounds and ties are ties."""
    g = torch.Generator().manual_seed(seed)
    heads, dim, sink = 2, spaces * 8 - short, 5
    q = torch.randint(-1 if alike else -4, 2 if alike else 5, (3, heads * group, 2, dim + 3), generator=g).to(dtype)
    q = q[:, :, 1:, 3:] if sliced else q[:, :, :1, :dim].contiguous()
    counts = torch.randint(0, 50, (3, heads, spaces, 256), generator=g, dtype=torch.int32)
    counts[1] *= torch.rand(counts[1].shape, generator=g) < 0.1
    lengths = until([5 + int(counts[0, 0, 0].sum()), 40, 3], sink)
    ratios = [50, 500_000, 600_000, 200, 250_000, 300_000, 300, 0, 250_000, 0, 700_000]
    return q, counted(counts), lengths, ratios, mean, seed


@pytest.mark.parametrize(
    ("dtype", "spaces", "group", "alike", "sms"),
    [(torch.float32, 16, 4, True, 1), (torch.float16, 8, 5, False, 1 << 20), (torch.bfloat16, 8, 1, False, 1)],
)
def test_cuda_kernel_on_a_cpu_equals_reference(dtype, spaces, group, alike, sms, emulated, monkeypatch):
    monkeypatch.setattr(VOTES, "sm_count", lambda _: sms)
    things = arguments(dtype, spaces, 1, group, False, alike, False, 0)
    got, want = ENTRY.run("cuda", *things), ENTRY.reference(*things)
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize(("dim", "m"), [(128, 4), (128, 8), (32, 8)])
def test_triton_runs_what_the_cuda_kernel_does_not_support(dim, m):
    q, counts = torch.zeros(1, 2, 1, dim), torch.zeros(1, 1, dim // m, 1 << m, dtype=torch.int32)
    things = on(DEVICE, (q, counted(counts), until([9], 0), [0, 0, 0] * 3 + [0, 700_000], False, 0))
    reason = {"cuda": f"{dim // m} subspaces of {1 << m} centroids"}
    assert ENTRY.chain.chosen(*things) == (NATIVE if (dim, m) == (128, 8) else ("triton", reason))


@pytest.mark.parametrize("m", [2, 4])
def test_wide_head_with_seed_1(m):
    """Triton makes an argument of 1 a constant. Of `_rotated` as it was, version 3.6 then made wrong machine code."""
    g = torch.Generator().manual_seed(m)
    q = torch.randint(-4, 5, (1, 1, 1, 256), generator=g).float()
    counts = torch.randint(0, 50, (1, 1, 256 // m, 1 << m), generator=g, dtype=torch.int32)
    things = (q, counted(counts), until([300], 5), [0, 0, 0] * 3 + [0, 700_000], False, 1)
    want = ENTRY.reference(*things)
    got = ENTRY.run("triton", *on(DEVICE, things))
    torch.testing.assert_close(got[0].cpu(), want[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("kind", ["reference", "triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nan_query_gives_valid_votes(kind):
    """A row whose mask is wrong is NaN all over; the others of its batch are to be right."""
    dim = 64 if kind == "cuda" else 16  # the least that the CUDA kernel is for
    q, counts = torch.ones(2, 2, 1, dim), torch.ones(2, 2, dim // 8, 256, dtype=torch.int32)
    rest = counted(counts), until([256, 256], 0), [0, 0, 0] * 3 + [0, 700_000], False, 0
    want = ENTRY.reference(q, *rest)
    q[0] = torch.nan
    got = ENTRY.run(kind, *((q, *rest) if kind == "reference" else on(DEVICE, (q, *rest))))
    assert got[0][0].isnan().all()
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x[1].cpu(), y[1])
