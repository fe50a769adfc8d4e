"""`bench generate`: a real model through the stock generate(). On a CPU, with a tiny model."""
import json
from types import SimpleNamespace

import pytest
import torch
from cli import refused
from evaluating_text import folder as of_a_tiny_model
from timer import prepare

from torchsparsekv_benchmarks.quality.pretrained import Files
from torchsparsekv_benchmarks.speed import _common, generate

folder = of_a_tiny_model  # the fixture
WRONG = {
    "--rows=0": "rows must be at least 1, got 0", "--rows=2,2": "rows must be one or more different values",
    "--places=disk": "places must be of auto, host, device, got disk", "--tokens=17": "tokens must be at least 18",
    "--methods=full": "full always runs", "--text=nowhere.txt": "there is no text nowhere.txt",
    "--hyper=arkvale.block_size=16": "hyper sets arkvale",
}  # fmt: skip


@pytest.mark.parametrize("arg", WRONG)
def test_wrong_options_are_refused(arg):
    assert WRONG[arg] in refused("bench", "generate", arg)


def test_time_of_a_step_is_the_median_after_the_first_steps():
    clock = generate.Clock()
    clock.times = [100.0 * i for i in range(generate.WARM)] + [9000.0, 9000.004, 9000.007, 9000.107]
    assert clock.step_ms() == pytest.approx(4.0)


def test_each_row_is_a_method_in_a_place_with_its_answers_compared(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(_common, "prepare", prepare)
    load = Files.load
    monkeypatch.setattr(Files, "load", lambda self, device, dtype: load(self, device, torch.float32))
    o = generate.Options(
        model=str(folder), text=str(folder / "said.txt"), context=120, rows=(2,), tokens=18, methods=("pariskv",),
        budget=16, sink=8, window=8, skip_layers=0, places=("device", "host"), hyper=("pariskv.full_threshold=0",),
    )  # fmt: skip
    out = tmp_path / "generate.json"
    generate.run(o, out)
    result = json.loads(out.read_text())
    assert result["options"]["acts"]["pariskv"]["estimate_rest"] is True
    stock, dense, device, host = result["rows"]
    assert [(r["method"], r["place"], r["rows"]) for r in (stock, dense, device, host)] == [
        ("stock", None, 2), ("full", None, 2), ("pariskv", "device", 2), ("pariskv", "host", 2),
    ]  # fmt: skip
    assert "hit_rate" not in stock
    assert dense["hit_rate"] is None
    assert 0 < device["hit_rate"] <= host["hit_rate"] <= 1
    assert device["same"] == host["same"] == 1, "where keys are does not change an answer"
    assert all(r["tokens_per_s"] == pytest.approx(2e3 / r["step_ms"]) for r in result["rows"])


def test_answers_that_differ_from_the_first_place_are_counted(monkeypatch, folder, tmp_path):
    said = iter([torch.zeros(2, 18)] * 3 + [torch.tensor([[0.0] * 18, [0.0] * 17 + [1.0]])])
    monkeypatch.setattr(_common, "prepare", prepare)
    monkeypatch.setattr(generate, "measure", lambda *a: ({"method": a[2]}, next(said)))
    monkeypatch.setattr(Files, "load", lambda *_: SimpleNamespace(eval=lambda: None))
    o = generate.Options(model=str(folder), text=str(folder / "said.txt"), context=120, rows=(2,), methods=("quest",))
    assert [r["same"] for r in generate.run(o)["rows"]] == [1, 1, 1, 0.5]
