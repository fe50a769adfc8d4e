"""Rounding errors decide no sign: the signs of an int8 pool are those of its integers."""
import pytest
import torch
from cases_packed import pack
from kernels import on
from world import DEVICE

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.pariskv._srht import rotate
from torchsparsekv.ops.pariskv.encode_keys import encode
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.store.rows import as_numbers, rows_of
from torchsparsekv.ops.store.views import Leaving, Lengths

ENTRY, TOKENS, M = load_all()["encode_keys"], 64, 8


def encoded(kind: str, pool: torch.Tensor, dim: int) -> Codes:
    """The codes of all tokens of a pool [1, 1, TOKENS, ...], read as a decode step reads them."""
    lead, size = (1, 1, TOKENS), 1 << (dim - 1).bit_length()
    new = lambda *shape, dtype=torch.uint8: torch.zeros(*shape, dtype=dtype)  # noqa: E731
    codes = Codes(
        new(*lead, size // M), new(*lead, size // 2), new(*lead, size // M, dtype=torch.float16),
        new(1, 1, size // M, 1 << M, dtype=torch.int32),
    )  # fmt: skip
    at = lambda n: torch.tensor([n], dtype=torch.int32)  # noqa: E731
    lengths = Lengths(at(TOKENS), at(TOKENS + 1), at(0), at(TOKENS), 0, TOKENS)
    things = on(DEVICE, (Leaving(torch.zeros(1, 1, 1, dim), pool), codes, lengths, M, 0))
    ENTRY.run(kind, *things)
    return on(torch.device("cpu"), things[1])


SIGNS = 0x88  # of the two codes of a byte; a magnitude half-way between two levels may take either


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("dim", [32, 48, 64])
def test_signs_of_an_int8_pool_are_those_of_its_integers(dim, kind):
    """One scale a key at these sizes, so a rotated coordinate is 0 where that of the integers is."""
    keys = torch.randn(1, 1, TOKENS, dim, generator=torch.Generator().manual_seed(dim))
    keys[..., :2] = 60.0  # two large channels cancel in half of the coordinates, where the sum of the others may be 0
    pool = pack(rows_of(keys, torch.zeros_like(keys)))
    numbers = (keys / keys.abs().amax(-1, keepdim=True) * 127).round()
    assert (rotate(numbers, 0) == 0).sum() > 20, "rotated zeros are what rounding errors would decide"
    stored = as_numbers(pool, torch.float32)[..., 0, :]
    torch.testing.assert_close(stored, numbers * keys.abs().amax(-1, keepdim=True) / 127)
    ids, codes, _ = encode(numbers, M, 0)
    found = encoded(kind, pool, dim)
    assert torch.equal(found.ids, ids)
    assert torch.equal(found.codes & SIGNS, codes & SIGNS)


def test_signs_do_not_depend_on_the_keys_encoded_with_them():
    """The sum of a matrix product may run in another order for one key than for many."""
    scale = torch.rand(500, 1, generator=torch.Generator().manual_seed(1)) + 0.01
    numbers = torch.randint(-127, 128, (500, 64), generator=torch.Generator().manual_seed(2)).float()
    ids, codes, _ = encode(numbers, M, 0)
    for part in (1, 7, 500):
        parts = [encode(keys, M, 0) for keys in (numbers * scale).split(part)]
        assert torch.equal(torch.cat([x[0] for x in parts]), ids)
        assert torch.equal(torch.cat([x[1] for x in parts]) & SIGNS, codes & SIGNS)
