"""spread_channels: a rotation, which a packed key needs."""
import pytest
import torch
from kernels import ENTRIES, on
from world import DEVICE

from torchsparsekv.ops.store.rows import PACKED, as_stored, keys_of, rows_of
from torchsparsekv.ops.store.spread_channels import CHANNELS, block_of, spread_channels

SIZES = {8: 8, 20: 4, 33: 1, 48: 16, 80: 16, 96: 32, 128: 128, 256: 128}  # channels, and those of a block


@pytest.mark.parametrize(("dim", "block"), SIZES.items())
def test_rotation_keeps_products(dim, block):
    """With integers no number is rounded, so all implementations agree to the last bit."""
    assert block_of(dim) == block <= CHANNELS
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-4, 5, (2, heads, 3, dim), generator=g).float() for heads in (4, 2))
    for kind in ("reference", *ENTRIES["spread_channels"].chain.kinds):
        device = torch.device("cpu") if kind == "reference" else DEVICE
        x, y = on("cpu", ENTRIES["spread_channels"].run(kind, *on(device, (q, k))))
        products = [a[:, ::2] @ b.transpose(-1, -2) for a, b in ((q, k), (x, y))]
        assert torch.equal(*products), kind
        for one, many in ((q, x), (k, y)):
            channels = one.unflatten(-1, (-1, block)).square().sum(-1).sqrt()
            spread = many.unflatten(-1, (-1, block)).square().sum(-1).sqrt()
            ratio = spread[channels > 0] / channels[channels > 0]
            assert ratio.max() / ratio.min() < 1 + 1e-5, "lengths change by one factor"
            assert ratio.min() > 0.7
            assert ratio.max() < 1.5


@pytest.mark.parametrize("dim", [64, 128])
def test_rotated_keys_with_a_large_channel_lose_less_in_8_bits(dim):
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 2, 200, dim, generator=g) for _ in range(2))
    k[..., 5] *= 60
    exact, off = q @ k.transpose(-1, -2), []
    for x, y in ((q, k), spread_channels(q, k)):
        store = torch.empty(0, dtype=PACKED)
        off.append(float((x @ keys_of(as_stored(rows_of(y, y), store)).transpose(-1, -2) - exact).abs().mean()))
    assert off[1] < off[0] / 3


@pytest.mark.parametrize("kind", ["reference", *ENTRIES["spread_channels"].chain.kinds])
def test_numbers_beyond_fp16_become_the_largest(kind):
    """The first rotated channel is the sum of all; the others are zero. NaN stays NaN."""
    q, k = (torch.full((1, 1, 2, 128), x, dtype=torch.float16) for x in (30_000.0, -5_000.0))
    k[0, 0, 1, 3] = torch.nan
    device = torch.device("cpu") if kind == "reference" else DEVICE
    x, y = on("cpu", ENTRIES["spread_channels"].run(kind, *on(device, (q, k))))
    assert x[0, 0, :, 0].tolist() == [65504.0, 65504.0]
    assert y[0, 0, 0, 0] == -65504.0
    assert not x[..., 1:].any()
    assert not y[0, 0, 0, 1:].any()
    assert y[0, 0, 1].isnan().all()
