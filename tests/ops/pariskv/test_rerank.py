"""rerank on full, partial and empty tiles equals the reference."""
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import NATIVE, in_blocks, on
from world import DEVICE

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.pariskv.encode_keys import encode
from torchsparsekv.ops.pariskv.views import Codes

RERANK = importlib.import_module("torchsparsekv.ops.pariskv.rerank")
ENTRY = load_all()["rerank"]


def encoded(keys: torch.Tensor, *lead: int) -> Codes:
    """Codes of keys, and no counts: they are not looked at."""
    return Codes(*(t.view(*lead, -1) for t in encode(keys, 8, 0)), torch.empty(*lead[:2], 0, 0, dtype=torch.int32))


def test_kernel_equals_reference_on_full_partial_and_empty_tiles():
    g = torch.Generator().manual_seed(7)
    codes = encoded(torch.randn(1800, 64, generator=g), 1, 2, 900)
    rotated = torch.randn(1, 2, 3, 64, generator=g)
    candidates = torch.full((1, 2, 1300), -1, dtype=torch.int32)
    candidates[0, 0, :900], candidates[0, 1, :75] = torch.arange(900), torch.arange(5, 80)
    things = rotated, codes, candidates
    want, got = ENTRY.reference(*things), ENTRY.run("triton", *on(DEVICE, things))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("spaces", RERANK.NATIVE_SPACES)
@given(
    total=st.sampled_from([1, 15, 16, 31, 33, 128, 500]), fields=st.integers(1, RERANK.NATIVE_FIELDS + 1),
    share=st.floats(0, 1), seed=st.integers(0, 99), block_size=st.sampled_from([0, 16, 48]),
)  # fmt: skip
def test_cuda_kernel_equals_reference(spaces, total, fields, share, seed, block_size):
    """csrc/rerank.cu, and Triton's kernel at the same shapes. Candidates in any order; some places hold none."""
    g = torch.Generator().manual_seed(seed)
    rows, size = 300, spaces * 8
    keys = torch.randn(6 * rows, size, generator=g) * 10 ** torch.randn(6 * rows, 1, generator=g)
    codes, table = in_blocks(encoded(keys, 2, 3, rows), block_size, g)
    rotated = torch.randn(2, 3, fields, size, generator=g)
    candidates = torch.randint(0, rows, (2, 3, total), generator=g, dtype=torch.int32)
    candidates[torch.rand(2, 3, total, generator=g) > share] = -1
    things = rotated, codes, candidates, table
    there = on(DEVICE, things)
    want = ENTRY.reference(*things)
    kind, reasons = ENTRY.chain.chosen(*there)
    assert (kind, list(reasons)) == (("cuda", []) if fields <= RERANK.NATIVE_FIELDS else ("triton", ["cuda"]))
    for one in {kind, "triton"}:
        for x, y in zip(ENTRY.run(one, *there), want, strict=True):
            torch.testing.assert_close(x.cpu(), y, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("dim", "fields"), [(128, RERANK.NATIVE_FIELDS), (128, RERANK.NATIVE_FIELDS + 1), (32, 1)])
def test_triton_runs_what_the_cuda_kernel_does_not_support(dim, fields):
    codes = encoded(torch.zeros(60, dim), 1, 2, 30)
    things = torch.zeros(1, 2, fields, dim), codes, torch.zeros(1, 2, 7, dtype=torch.int32)
    reason = f"{dim // 8} subspaces of {dim} dimensions and {fields} queries a kv head"
    native = (dim, fields) == (128, RERANK.NATIVE_FIELDS)
    assert ENTRY.chain.chosen(*on(DEVICE, things)) == (NATIVE if native else ("triton", {"cuda": reason}))
