"""The round-robin union of pages, with more entries than the worlds of test_ops.py have."""
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from literal import round_robin
from world import DEVICE

from torchsparsekv.ops._machinery.registry import load_all

UNION = importlib.import_module("torchsparsekv.ops.icecache.union_pages")
ENTRY = load_all()["union_pages"]


@pytest.mark.parametrize("kind", ["reference", "triton", pytest.param("cuda", marks=pytest.mark.gpu)])
@given(
    group=st.integers(1, 8), n=st.sampled_from([1, 7, 16, 64, 100, 256]), more=st.sampled_from([0, 5, 3000]),
    values=st.sampled_from([2, 1 << 20]), missing=st.sampled_from([0.0, 0.3, 1.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_kernel_equals_reference_with_many_entries(kind, group, n, more, values, missing, seed):
    """Two kv heads, at most as many entries as the CUDA kernel takes. Heads have fewer than n pages where some are
    missing. Scores of two values are mostly ties."""
    n = min(n, UNION.NATIVE_ENTRIES // group)
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, values, (1, 2 * group, n + more), generator=g).float()
    ids = torch.rand(scores.shape, generator=g).argsort(-1)[..., :n].int()
    ids = torch.where(torch.rand(ids.shape, generator=g) < missing, n + more, ids).sort(-1).values
    ids = ids.masked_fill(ids == n + more, -1).contiguous()
    union = torch.full((1, 2, n), -7, dtype=torch.int32, device=DEVICE)
    ENTRY.run(kind, scores.to(DEVICE), ids.to(DEVICE), union)
    found = union[0].tolist()
    for h in range(2):
        heads = slice(h * group, (h + 1) * group)
        assert found[h] == round_robin(scores[0, heads], ids[0, heads], n)


def test_cuda_kernel_runs_at_the_usual_shapes():
    assert UNION.native(4, 256) == dict(G=4, THREADS=1024)
    assert UNION.native(1, 3) == dict(G=1, THREADS=32)
    assert UNION.native(8, 129) == "8 query heads of 129 pages each"
