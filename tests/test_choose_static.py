"""What the worlds of test_ops.py are too narrow for: a window whose queries come in several parts, as on the GPU."""
import importlib

import pytest
import torch
from cases import OPS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops import clones, on
from world import DEVICE, World

from torchsparsekv.ops._registry import load_all

CHOOSE = importlib.import_module("torchsparsekv.ops.select.choose_static")
ENTRY = load_all()["choose_static"]


@settings(max_examples=6)  # each takes seconds in the interpreter
@given(seed=st.integers(0, 999), group=st.sampled_from([4, 8]), coarse=st.integers(0, 1), room=st.sampled_from([0, 1]))
def test_the_window_in_parts(seed, group, coarse, room):
    w = World(
        lengths=[150, 90], group=group, dim=16, rows=256, seed=seed,
        pick=lambda *options: options[coarse] if options == (False, True) else options[len(options) // 2],
    )  # fmt: skip
    things = OPS["choose_static"](w)
    things[1].queries.mul_(8)  # so that the largest logit grows from tile to tile
    assert things[1].queries.shape[1] * group > 16
    want, got = clones(things), on(DEVICE, clones(things))
    ENTRY.reference(*want)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(CHOOSE, "SMALL", (16 * 16 * w.dtype.itemsize, 32768))
        m.setattr(CHOOSE, "LARGE", (16 * 16 * w.dtype.itemsize, 98304))
        m.setattr(CHOOSE, "ROOMY", 200_000 * room)
        m.setattr(CHOOSE, "TILE", 16)  # several for each program
        ENTRY.run("triton", *got)
    assert int(want[2].updates.sum()), "nothing was due"
    for a, b in zip(got[2], want[2]):
        assert torch.equal(a.cpu(), b)
    assert torch.equal(got[1].queries.cpu(), want[1].queries)
