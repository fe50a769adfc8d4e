"""What the worlds of test_ops.py are too short for."""
import torch
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
