"""The file of finished samples: a run goes on where it stopped, and takes up only what would be measured alike."""
import json
from dataclasses import dataclass

import pytest
import torch
from evaluating import evaluate, stand_in_for
from standin import source

from torchsparsekv._methods.quest import Quest
from torchsparsekv_benchmarks.quality import run as quality
from torchsparsekv_benchmarks.quality.store import read


@pytest.fixture(scope="module")
def model():
    return source()


def test_a_run_goes_on_where_it_stopped(model, tmp_path, monkeypatch):
    path = tmp_path / "eval.jsonl"
    whole = evaluate(model, tmp_path, ("quest",), samples=3)
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 3
    path.write_text("".join(lines[:5]) + lines[5][:40])  # killed while it wrote
    calls = []
    generate = quality.Runner._generate
    monkeypatch.setattr(quality.Runner, "_generate", lambda *a, **k: calls.append(1) or generate(*a, **k))
    again = evaluate(model, tmp_path, ("quest",), samples=3)
    assert len(calls) == 2
    for name, row in whole.items():
        assert {**again[name], "seconds": 0} == {**row, "seconds": 0}
    assert evaluate(model, tmp_path, ("quest",), samples=3).keys() == whole.keys()
    assert len(calls) == 2
    assert sum("benchmark" in r for r in read(path)[0]) == 1, "the same options are not written again"


def test_other_options_add_to_the_file_and_a_wider_probe_measures_again(model, tmp_path, monkeypatch):
    evaluate(model, tmp_path, ("quest",), samples=2, probe=0)
    calls = []
    generate = quality.Runner._generate
    monkeypatch.setattr(quality.Runner, "_generate", lambda *a, **k: calls.append(1) or generate(*a, **k))
    table = evaluate(model, tmp_path, ("quest",), samples=2, probe=1)
    assert len(calls) == 1
    assert table["chain quest"]["mass"] > 0.9
    evaluate(model, tmp_path, ("quest",), samples=2, probe=1, window=32)
    assert len(calls) == 3, "another window is another setting"
    heads = [r for r in read(tmp_path / "eval.jsonl")[0] if "benchmark" in r]
    assert [h["options"]["window"] for h in heads] == [16, 16, 32]


@dataclass(frozen=True, kw_only=True)
class Finer(Quest):
    """Quest after its default has changed."""

    digest: str = "float32"


def test_a_changed_default_measures_again(model, tmp_path, monkeypatch):
    """What `patch` is told is the same; the later rows count. So in a file from before rows said what a default is."""
    path = tmp_path / "eval.jsonl"
    evaluate(model, tmp_path, ("quest",), samples=2)
    calls = []
    generate = quality.Runner._generate
    monkeypatch.setattr(quality.Runner, "_generate", lambda *a, **k: calls.append(1) or generate(*a, **k))
    stand_in_for(monkeypatch, "quest", Finer)
    for _ in range(2):
        evaluate(model, tmp_path, ("quest",), samples=2)
        assert len(calls) == 2, "not the dense ones, and not a second time"
    told = {r["index"]: r["hyper"]["digest"] for r in read(path)[0] if r.get("method") == "quest"}
    assert told == {0: "float32", 1: "float32"}
    lines = [{k: v for k, v in r.items() if k != "hyper"} for r in read(path)[0]]
    path.write_text("".join(json.dumps(r) + "\n" for r in lines))
    evaluate(model, tmp_path, ("quest",), samples=2)
    assert len(calls) == 4


def test_results_of_another_model_are_not_mixed_in(model, tmp_path):
    evaluate(model, tmp_path, ("quest",), samples=1)
    other = source()
    with torch.no_grad():
        other.model.lm_head.weight[0, 0] += 1
    with pytest.raises(ValueError, match=r"eval\.jsonl was made with \{'weights': .* choose another file"):
        evaluate(other, tmp_path, ("quest",), samples=1)


@pytest.mark.parametrize("text", ["{}\n", '{"benchmark": "decode"}\n', "[1]\n", "x\n"])
def test_a_file_of_something_else_is_left_alone(model, tmp_path, text):
    path = tmp_path / "eval.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"eval\.jsonl"):
        evaluate(model, tmp_path, ("quest",), samples=1)
    assert path.read_text() == text
