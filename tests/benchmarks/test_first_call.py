"""`bench first-call`: what its rows are, at a tiny shape and without a GPU."""
import dataclasses
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from timer import watch as on_a_cpu

from torchsparsekv_benchmarks.speed import first_call

watch = on_a_cpu  # the fixture
SMALL = first_call.Options(shape="tiny", context=60, tokens=4, methods=("quest",), step=("captured", "compiled"))


def test_a_process_says_how_long_it_took(monkeypatch):
    """The clock of the last call, of three times as many tokens, less that of one: the time of a token."""
    took, new = iter([9.0, 2.0, 5.0, 1.0]), []

    def timed(call):
        new.append(call().shape[1] - SMALL.context)
        return next(took)

    monkeypatch.setattr(first_call, "timed", timed)
    row = first_call.measure(SMALL, "quest", "compiled", "cpu")
    assert new == [4, 4, 12, 4]
    assert row == {"first_s": 9.0, "second_s": 1.0, "tpot_ms": 4.0 / 8 * 1e3}


def test_each_row_is_a_process_with_caches_of_its_own(watch, monkeypatch, tmp_path):
    """Those of one step and method are kept from the first to the second, and then gone."""
    seen = []

    def run(command, *, env, **_):
        options, method, step = json.loads(command[-1])
        assert first_call.Options(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}) == SMALL
        folder = Path(env["TRITON_CACHE_DIR"]).parent
        assert env["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "torchinductor")
        assert set(os.environ) <= set(env)
        seen.append((method, step, folder, (folder / "left").exists()))
        (folder / "left").touch()
        return SimpleNamespace(stdout=f'said on the way\n{{"first_s": {len(seen)}}}\n')

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "first.json"
    first_call.run(SMALL, out)
    rows = json.loads(out.read_text())["rows"]
    assert [(r["step"], r["caches"], r["first_s"]) for r in rows] == [
        ("captured", "empty", 1), ("captured", "kept", 2), ("compiled", "empty", 3), ("compiled", "kept", 4),
    ]  # fmt: skip
    assert [left for *_, left in seen] == [False, True, False, True]
    assert seen[0][2] == seen[1][2] != seen[2][2]
    assert not any(folder.exists() for _, _, folder, _ in seen)


@pytest.mark.gpu
def test_a_process_of_its_own(tmp_path):
    o = dataclasses.replace(SMALL, step=("captured",), caches=("empty",))
    (row,) = first_call.run(o, tmp_path / "first.json")["rows"]
    assert row["first_s"] > row["second_s"] > 0
    assert torch.cuda.is_available()
