"""What the worlds of test_ops.py are too short for."""
import pytest
import torch
from world import DEVICE

from torchsparsekv.ops.index.encode_keys import encode
from torchsparsekv.ops.select import rerank


@pytest.mark.parametrize("stages", [1, 3])
def test_programs_of_many_tiles(monkeypatch, stages):
    """Some tiles full, one in part, some empty; more of them than there are programs."""
    g = torch.Generator().manual_seed(7)
    _, codes, weights = (t.view(1, 2, 900, -1) for t in encode(torch.randn(1800, 64, generator=g), 8, 0))
    rotated = torch.randn(1, 2, 3, 64, generator=g)
    candidates = torch.full((1, 2, 1300), -1, dtype=torch.int32)
    candidates[0, 0, :900], candidates[0, 1, :75] = torch.arange(900), torch.arange(5, 80)
    monkeypatch.setattr(rerank, "RESIDENT", 1)
    monkeypatch.setattr(rerank, "STAGES", stages)
    monkeypatch.setattr(rerank, "sm_count", lambda _: 4)
    args = rotated, codes, weights, candidates
    want, got = rerank.reference(*args), rerank.cuda(*(a.to(DEVICE) for a in args))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-4, atol=1e-3)
