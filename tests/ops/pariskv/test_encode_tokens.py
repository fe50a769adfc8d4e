"""A program encodes a tile of many tokens. With few tokens it encodes a part of one. Both equal the reference."""
import importlib

import pytest
import torch
from kernels import on
from world import DEVICE

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.pariskv.views import Codes

ENTRY, HEADS, PAGE, FEW = load_all()["encode_tokens"], 2, 4, 4


@pytest.mark.parametrize(("dim", "m"), [(16, 2), (80, 8), (128, 4), (256, 8)])
@pytest.mark.parametrize("tokens", [1, FEW, FEW + 1])
def test_few_tokens_and_many_equal_the_reference(tokens, dim, m, monkeypatch):
    monkeypatch.setattr(importlib.import_module("torchsparsekv.ops.pariskv.encode_tokens"), "FEW", FEW)
    g = torch.Generator().manual_seed(dim + tokens)
    size, rows = 1 << (dim - 1).bit_length(), (tokens // PAGE + 2) * PAGE
    keys = torch.randint(-8, 9, (tokens, HEADS, dim), generator=g).to(torch.bfloat16)  # sums are exact in any order
    to = torch.randperm(rows, generator=g)[:tokens]
    to[tokens // 2] = -1 if tokens > 1 else to[0]
    lead = 1, HEADS, rows
    codes = Codes(
        torch.zeros(*lead, size // m, dtype=torch.uint8), torch.zeros(*lead, size // 2, dtype=torch.uint8),
        torch.zeros(*lead, size // m, dtype=torch.float16), torch.zeros(1, HEADS, size // m, 1 << m, dtype=torch.int32),
    )  # fmt: skip
    found = []
    for kind in ("reference", "triton"):
        things = on(DEVICE, (keys, to, codes, torch.zeros(1, rows // PAGE, dtype=torch.int32), m, 3))
        ENTRY.run(kind, *things)
        found.append(on(torch.device("cpu"), things[2:4]))
    (want, uses), (got, counted) = found
    for one, other in ((got.ids, want.ids), (got.codes, want.codes), (counted, uses)):
        assert torch.equal(one, other)
    torch.testing.assert_close(got.weights, want.weights, rtol=1e-3, atol=0)
    assert want.ids.any()
