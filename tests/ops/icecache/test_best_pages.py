"""best_pages with more query heads and tokens than in test_ops.py."""
import importlib

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from literal import round_robin
from world import DEVICE

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.select._top import GROUP, peaks_of
from torchsparsekv.ops.store.views import Scored

BEST = importlib.import_module("torchsparsekv.ops.icecache.best_pages")
ENTRY = load_all()["best_pages"]


@pytest.mark.parametrize("kind", ["reference", "triton", pytest.param("cuda", marks=pytest.mark.gpu)])
@given(
    group=st.integers(1, 8), k=st.sampled_from([1, 7, 16, 64, 128]), n=st.sampled_from([1, 63, 2048, 10240, 40960]),
    values=st.sampled_from([2, 1 << 20]), unseen=st.sampled_from([0.0, 0.3, 0.99, 1.0]),
    far=st.sampled_from([None, -1, 0, 1]), seed=st.integers(0, 99),
)  # fmt: skip
@example(group=4, k=64, n=40960, values=1 << 20, unseen=0.0, far=-1, seed=0)
def test_best_pages_are_taken_round_robin_over_query_heads(kind, group, k, n, values, unseen, far, seed):
    """Two kv heads. Scores of two values are mostly ties. With `far`, k + far scores in different groups stand out."""
    if DEVICE.type == "cpu":
        n = min(n, 2048)
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-values, values, (1, 2 * group, n), generator=g).float()
    if far is not None:
        scores[..., : (k + far) * GROUP : GROUP] += 1e9
    scores[torch.rand(scores.shape, generator=g) < unseen] = -torch.inf
    union = torch.full((1, 2, k), -7, dtype=torch.int32, device=DEVICE)
    ENTRY.run(kind, Scored(scores.to(DEVICE), peaks_of(scores).to(DEVICE)), union)
    order = scores[0].argsort(dim=-1, descending=True, stable=True)[:, :k]
    ids = torch.where(scores[0].gather(1, order) > -torch.inf, order, -1)
    for h in range(2):
        heads = slice(h * group, (h + 1) * group)
        assert union[0, h].tolist() == round_robin(scores[0, heads], ids[heads], k)


def test_cuda_kernel_runs_at_the_usual_shapes():
    assert BEST.native(10240, 64, 4)["THREADS"] == 512
    assert BEST.native(10240, 128, 8)["THREADS"] == 1024
    assert BEST.native(10240, 64, 9) == "9 query heads a kv head"
    assert BEST.native(10240, 129, 8) == "the best 129 of 10240 scores with peaks"
