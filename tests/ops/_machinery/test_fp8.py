"""Rounding to fp8 is right for every value, every midpoint and their neighbours."""
import pytest
import torch
from world import DEVICE

from torchsparsekv.ops._machinery.fp8 import FP8, FP8_MAX, to_e4m3
from torchsparsekv.ops._machinery.triton import cdiv, tl, triton
from torchsparsekv.ops.index.block_bounds import round_up


@triton.jit
def _round(x, byte, value, n, UP: tl.constexpr, WIDTH: tl.constexpr):
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    b, v = to_e4m3(tl.load(x + i, mask=i < n, other=0.0), UP)
    tl.store(byte + i, b, mask=i < n)
    tl.store(value + i, v, mask=i < n)


def values() -> torch.Tensor:
    grid = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    exact = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.rand(2000) * 460, torch.rand(2000) * 2**-6])
    near = torch.cat([exact, exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(-torch.inf))])
    return near.clamp(0, FP8_MAX)


@pytest.mark.parametrize("up", [False, True], ids=["nearest", "up"])
def test_rounding_to_e4m3_is_exact(up):
    x = values()
    x, want = (x, round_up(x, FP8)) if up else (torch.cat([x, -x]), torch.cat([x, -x]).to(FP8))
    byte = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
    value = torch.full(x.shape, torch.nan, device=DEVICE)
    _round[(cdiv(len(x), 1024),)](x.to(DEVICE), byte, value, len(x), UP=up, WIDTH=1024)
    assert torch.equal(byte.cpu(), want.view(torch.uint8))
    assert torch.equal(value.cpu(), want.float())
    assert (want.float() >= x).all() or not up
