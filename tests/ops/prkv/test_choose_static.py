"""choose_static with windows and sinks over several tiles equals the reference."""
import importlib

import pytest
import torch
from cases import OPS
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import clones, on
from world import DEVICE, World

from torchsparsekv.ops._machinery.chain import tensors
from torchsparsekv.ops._machinery.registry import load_all

CHOOSE = importlib.import_module("torchsparsekv.ops.prkv.choose_static")
ENTRY = load_all()["choose_static"]
NAN_E4M3 = 0x7F


def world(seed, group, coarse, dtype=torch.float32, **other):
    return World(
        **{"lengths": [150, 90], "rows": 256, **other}, group=group, dim=16, seed=seed, dtype=dtype,
        pick=lambda *options: options[coarse] if options == (False, True) else options[len(options) // 2],
    )  # fmt: skip


def in_parts(m: pytest.MonkeyPatch, w: World) -> None:
    """Sixteen queries at a time."""
    for name in ("SMALL", "LARGE", "PAIR"):
        m.setattr(CHOOSE, name, getattr(CHOOSE, name)._replace(query_bytes=16 * 16 * w.dtype.itemsize))


@settings(max_examples=4)  # each takes seconds in the interpreter
@given(
    seed=st.integers(0, 999), group=st.sampled_from([4, 8]), coarse=st.integers(0, 1),
    share=st.sampled_from(["SMALL", "LARGE", "PAIR"]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_window_in_several_parts_equals_reference(seed, group, coarse, share, dtype):
    """The interpreter cannot multiply bf16; with a coarse copy it need not."""
    coarse |= dtype is torch.bfloat16 and DEVICE.type == "cpu"
    w = world(seed, group, coarse, dtype)
    things = OPS["choose_static"](w)
    things[0].queries.mul_(8)  # so that the largest logit grows from tile to tile
    assert things[0].queries.shape[1] * group > 16
    want, got = clones(things), on(DEVICE, clones(things))
    ENTRY.reference(*want)
    with pytest.MonkeyPatch.context() as m:
        in_parts(m, w)
        m.setattr(CHOOSE, "ROOMY", (1 << 30) * (share == "SMALL"))
        m.setattr(CHOOSE, "PAIRED", 16 * w.dtype.itemsize * (share == "PAIR"))
        m.setattr(CHOOSE, "TILE", 16)  # several for each program
        ENTRY.run("triton", *got)
    assert int(want[1].updates.sum()), "nothing was due"
    for a, b in zip(tensors(got[1]), tensors(want[1]), strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("coarse", [0, 1])
@pytest.mark.parametrize("parts", ["whole", "parts"])
@pytest.mark.parametrize("wrong", ["key", "query", "beyond fp16"])
def test_nan_score_leaves_no_hole_in_the_set(wrong, parts, coarse, monkeypatch):
    """`relocate` moves as many rows as a set says: a -1 among them would be a place outside of the pool."""
    if coarse and wrong == "key" and DEVICE.type == "cpu":
        pytest.skip("the interpreter reads fp8's NaN as 480")
    w = world(0, 8, coarse, torch.bfloat16 if coarse else torch.float32)
    *things, attention = OPS["choose_static"](w)
    things.append(attention._replace(softcap=0.0))  # which would make a number of what is none
    if parts == "parts":
        in_parts(monkeypatch, w)
    if wrong == "key":
        things[2].pool[:, :, 70, 0] = float("nan")
        if coarse:
            things[3][:, :, 70, 0] = NAN_E4M3
    else:
        things[0].queries[:, 0, :, 0] = float("nan") if wrong == "query" else 1e6
    things[1].chosen_at.fill_(CHOOSE.NOT_YET), things[1].target.fill_(8)
    want, got = clones(tuple(things)), on(DEVICE, clones(tuple(things)))
    ENTRY.reference(*want)
    ENTRY.run("triton", *got)
    count = want[1].count.flatten().tolist()
    assert min(count) > 0
    for n, ids in zip(count, got[1].ids.cpu().flatten(0, 1)):
        assert len(set(ids[:n].tolist()) - {-1}) == n
    assert torch.equal(got[1].ids.cpu(), want[1].ids)


@pytest.mark.parametrize("seed", range(3))
def test_sinks_over_several_tiles_equal_reference(seed, monkeypatch):
    """What half of the queries look at is a sink, and not in the first tile: little weight is left for others."""
    w = world(seed, 2, 0, lengths=[128, 100], sink=40, window=20, interval=4, rows=128, block=4)
    *things, attention = OPS["choose_static"](w)
    things.append(attention._replace(softcap=0.0))
    key = things[2].ring[0, 0, 30, 0].clone()
    things[2].ring[:, :, 30, 0] = key
    things[0].queries[:, ::2] = 6 * key
    things[1].chosen_at.fill_(CHOOSE.NOT_YET), things[1].target.fill_(10)
    monkeypatch.setattr(CHOOSE, "TILE", 16)
    want, got = clones(tuple(things)), on(DEVICE, clones(tuple(things)))
    ENTRY.reference(*want)
    ENTRY.run("triton", *got)
    assert torch.equal(got[1].ids.cpu(), want[1].ids)


def test_update_due_before_the_first_token_still_happens():
    """Such a head chose when `at` was: not anew until `every` tokens after that."""
    w = world(0, 2, 0, lengths=[30, 30], rows=64)
    queries, static, *rest = OPS["choose_static"](w)
    things = (queries, static._replace(every=36), *rest)
    static.count.copy_(static.target.fill_(1)), static.updated.fill_(1)
    static.chosen_at.copy_(torch.tensor([[-5, -6], [-7, CHOOSE.NOT_YET]]))
    want, got = clones(things), on(DEVICE, clones(things))
    ENTRY.reference(*want)
    ENTRY.run("triton", *got)
    assert want[1].updated.tolist() == got[1].updated.tolist() == [[0, 1], [1, 1]]
    assert torch.equal(got[1].ids.cpu(), want[1].ids)


@pytest.mark.parametrize(("length", "window"), [(1, 1), (1, 6), (3, 6), (60, 2)])
def test_target_uses_the_first_and_the_last_query(window, length):
    """Of all windows, also those that are longer than the row, and at every place where the newest query can lie."""
    entry = load_all()["static_target"]
    for seed in range(3):
        w = World(lengths=[length + seed], window=6, seed=seed, pick=lambda *options: options[-1])
        queries, static, far, _, lengths, _, per_head = OPS["static_target"](w)
        queries = type(queries)(torch.randn(1, window, 4, 16, generator=w.g).mul(3).round())
        static.chosen_at.fill_(CHOOSE.NOT_YET), static.target.fill_(-1)
        things = (queries, static, far, None, lengths, 12, per_head)
        want, got = clones(things), on(DEVICE, clones(things))
        entry.reference(*want)
        entry.run("triton", *got)
        assert torch.equal(got[1].target.cpu(), want[1].target)
