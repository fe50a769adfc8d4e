"""What the worlds of test_ops.py are too short for: several programs a head, several turns of each."""
import importlib

import pytest
import torch
from cases import OPS
from hypothesis import given
from hypothesis import strategies as st
from test_ops import on
from world import DEVICE, TOLERANCE, World

from torchsparsekv.ops._registry import load_all

PEAKS = importlib.import_module("torchsparsekv.ops.select.page_peaks")
ENTRY = load_all()["page_peaks"]


@given(
    seed=st.integers(0, 999), group=st.sampled_from([1, 3, 4]), looked=st.sampled_from([16, 32]),
    lengths=st.lists(st.integers(1, 240), min_size=1, max_size=2), codes=st.booleans(),
)  # fmt: skip
def test_pages_are_shared_by_programs(seed, group, looked, lengths, codes):
    w = World(
        lengths=lengths, group=group, dim=16, block=4, rows=256, seed=seed, pick=lambda *options: options[codes]
    )
    things = OPS["page_peaks"](w)
    rows = things[2].node.shape[2]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(PEAKS, "TILE", 16)
        m.setattr(PEAKS, "LOOKED", looked)
        got = ENTRY.run("triton", *on(DEVICE, things)).cpu()
    assert rows > 4 * looked
    torch.testing.assert_close(got, ENTRY.reference(*things), rtol=0, atol=TOLERANCE[w.dtype])
