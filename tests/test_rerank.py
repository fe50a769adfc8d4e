"""What the worlds of test_ops.py are too short for."""
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from world import DEVICE

from torchsparsekv.ops.index.encode_keys import encode
from torchsparsekv.ops.select import rerank


def test_tiles_full_in_part_and_empty():
    g = torch.Generator().manual_seed(7)
    _, codes, weights = (t.view(1, 2, 900, -1) for t in encode(torch.randn(1800, 64, generator=g), 8, 0))
    rotated = torch.randn(1, 2, 3, 64, generator=g)
    candidates = torch.full((1, 2, 1300), -1, dtype=torch.int32)
    candidates[0, 0, :900], candidates[0, 1, :75] = torch.arange(900), torch.arange(5, 80)
    args = rotated, codes, weights, candidates
    want, got = rerank.reference(*args), rerank.cuda(*(a.to(DEVICE) for a in args))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("spaces", rerank.NATIVE_SPACES)
@given(
    total=st.sampled_from([1, 15, 16, 31, 33, 128, 500]), fields=st.integers(1, rerank.NATIVE_FIELDS + 1),
    share=st.floats(0, 1), seed=st.integers(0, 99),
)  # fmt: skip
def test_native(spaces, total, fields, share, seed):
    """csrc/rerank.cu, and Triton's kernel at the same shapes. Candidates in any order; some places hold none."""
    g = torch.Generator().manual_seed(seed)
    rows, size = 300, spaces * 8
    keys = torch.randn(6 * rows, size, generator=g) * 10 ** torch.randn(6 * rows, 1, generator=g)
    _, codes, weights = (t.view(2, 3, rows, -1) for t in encode(keys, 8, 0))
    rotated = torch.randn(2, 3, fields, size, generator=g)
    candidates = torch.randint(0, rows, (2, 3, total), generator=g, dtype=torch.int32)
    candidates[torch.rand(2, 3, total, generator=g) > share] = -1
    args = rotated, codes, weights, candidates
    there = [a.to(DEVICE) for a in args]
    by_triton = [torch.empty_like(x) for x in rerank.fake(*there)]
    rerank._by_triton(*there, *by_triton)
    want = rerank.reference(*args)
    with pytest.MonkeyPatch.context() as m:
        if fields <= rerank.NATIVE_FIELDS:
            m.setattr(rerank, "_by_triton", None)  # not taken
        native = rerank.cuda(*there)
    for got in native, by_triton:
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x.cpu(), y, rtol=1e-3, atol=1e-2)
