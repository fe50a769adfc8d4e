"""Shapes of 2M tokens: offsets above 2^31, of which no other test has any, and grids beyond what CUDA takes."""
import os

import pytest
import torch
from world import DEVICE

from torchsparsekv.ops._registry import load_all
from torchsparsekv.ops.store.views import Lengths, Observed

ENTRIES = load_all()
WRAP = 1 << 32  # an offset of 32 bits that overflows is less by this: there is room for it, so that a test can fail


@pytest.fixture
def huge(tmp_path):
    """Zeros of any shape, on the CPU, that take memory only where something is written."""
    if DEVICE.type != "cpu":
        pytest.skip("a file is mapped for the interpreter")

    def zeros(*shape: int) -> torch.Tensor:
        count, file = WRAP + torch.Size(shape).numel(), tmp_path / "zeros"
        try:
            file.touch()
            os.truncate(file, 2 * count)
            if file.stat().st_blocks:
                pytest.skip("this file system has no sparse files")
            return torch.from_file(str(file), shared=True, size=count, dtype=torch.float16)[WRAP:].view(shape)
        except (OSError, RuntimeError) as e:
            pytest.skip(f"no room for a sparse file: {e}")

    return zeros


@pytest.mark.parametrize("heads_last", [True, False])
def test_observe(huge, heads_last):
    tokens, heads, dim, window = (1 << 19) + (1 << 15), 32, 128, 2
    q = huge(1, tokens, heads, dim).transpose(1, 2) if heads_last else huge(1, heads, tokens, dim)
    q[:, :, -window:] = torch.randn(1, heads, window, dim)
    times = (torch.tensor([n], dtype=torch.int32) for n in (0, tokens, 0, tokens - window))
    observed, at = Observed(torch.zeros(1, window, heads, dim).half()), torch.zeros(1, heads, dtype=torch.int32)
    ENTRIES["observe"].run("triton", q, observed, at, Lengths(*times, 0, 1))
    kept = observed.queries.roll(-(tokens % window), 1)
    torch.testing.assert_close(kept.transpose(1, 2), q[:, :, -window:], rtol=0, atol=0)
