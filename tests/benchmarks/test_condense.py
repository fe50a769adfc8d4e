"""Means of samples: every number against a computation by hand."""
import json

import pytest

from torchsparsekv_benchmarks.report.condense import condensed

HEAD = {"benchmark": "board", "command": "x", "environment": {}, "options": {}, "model": {}}


def row(method: str, index: int, score: float, **more) -> dict:
    named = {"task": "vt", "length": 64, "method": method, "budget": None if method == "full" else 8}
    return {**named, "index": index, "patch": {}, "hyper": {}, "score": score, **more}


def of(tmp_path, rows: list[dict], against=()) -> dict:
    path = tmp_path / "raw.jsonl"
    path.write_text("\n".join(json.dumps(x) for x in [HEAD, *rows]) + "\n")
    found = condensed([path], "abc", tmp_path, against)
    return {r["method"]: r for r in found["rows"]}


def test_loss_is_paired_with_the_dense_model_on_the_same_samples(tmp_path):
    rows = [row("quest", 1, 0.5), row("quest", 0, 0.0), row("full", 0, 1.0), row("full", 1, 0.5), row("full", 2, 0.0)]
    found = of(tmp_path, rows)
    assert found["quest"]["score"] == 0.25
    assert found["quest"]["loss"] == 0.5, "1 on the first sample, 0 on the second"
    assert found["quest"]["loss_se"] == pytest.approx(0.5)
    assert found["full"]["loss"] == 0


def test_gain_is_paired_with_the_same_cell_in_another_file(tmp_path):
    other = tmp_path / "other.jsonl"
    before = [row("quest", 0, 0.5), row("quest", 1, 1.0), row("oracle", 2, 0.0), {**row("quest", 2, 0.0), "budget": 9}]
    other.write_text("\n".join(json.dumps(x) for x in [HEAD, *before]) + "\n")
    found = of(tmp_path, [row("quest", i, 1.0) for i in range(3)], [other])["quest"]
    assert (found["score"], found["gain"], found["gain_se"]) == (1.0, 0.25, pytest.approx(0.25)), "of two samples"
    assert "gain" not in of(tmp_path, [row("quest", 0, 1.0)])["quest"]


def test_without_a_dense_model_there_is_no_loss(tmp_path):
    assert "loss" not in of(tmp_path, [row("quest", 0, 0.5)])["quest"]


def test_costs_and_kl_are_means_over_samples(tmp_path):
    kl = [row("quest", i, 1.0, kl=[x, 3 * x], nats=x, agrees=1.0, attended=10 * x) for i, x in enumerate((1.0, 3.0))]
    found = of(tmp_path, kl)["quest"]
    assert (found["kl"], found["tokens"], found["attended"], found["samples"]) == (4.0, 4, 20.0, 2)
    assert found["kl_se"] == pytest.approx(2.0)
