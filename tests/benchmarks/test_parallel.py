"""`bench parallel` by two ranks on the CPU: the shares make up the whole, and there is a row for all ranks."""
import sys

import pytest
from ranks import torchrun

from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks.report import again
from torchsparsekv_benchmarks.speed import _common, decode, parallel


def test_two_ranks(tmp_path):
    found = torchrun("parallel_ranks.py")
    assert found["share"]["heads"] == _common.SHAPES["tiny"]["num_key_value_heads"] // 2
    assert max(found["share"]["plain"], found["share"]["compiled"]) <= 1e-5
    assert set(found["logits"]) == {"quest", "louiskv"}
    assert max(found["logits"].values()) <= 1e-5
    rows = found["rows"]
    assert [(r["method"], r["context"], r["ranks"]) for r in rows] == [
        ("hf-static", decode.FLOOR_CONTEXT, 2), ("full", 512, 2), ("quest", 512, 2),
    ]  # fmt: skip
    assert all(r["tpot_ms"] == 2.0 for r in rows), "the slowest rank's"
    assert all(len(r["device_GiB"]) == 2 for r in rows[1:])


def test_shares_of_the_large_shapes():
    fields = parallel.share_of("llama-3.1-70b", 4)
    assert [fields[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim")] == [16, 2, 128]
    assert fields["hidden_size"] == 8192
    with pytest.raises(ValueError, match=r"cannot be shared by 3 ranks: \{'num_attention_heads': 64"):
        parallel.share_of("llama-3.1-70b", 3)


def test_without_torchrun_it_says_how_to_start(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match="this needs torchrun: torchrun --nproc-per-node 2"):
        parallel.run(parallel.Options())


def test_a_file_of_results_says_how_to_start_it_again(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(sys, "argv", ["cli.py", "bench", "parallel", "--out", "x.json"])
    command = _results.header("parallel", {})["command"]
    assert command == "torchrun --nproc-per-node 4 -m torchsparsekv.cli bench parallel --out x.json"
    assert again.argv(command) == [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]]
    with pytest.raises(ValueError, match="can run again"):
        again.argv(command.replace("torchsparsekv.cli", "os"))


def test_rows_are_told_against_the_floor_and_the_best_dense():
    dense, methods = [{"tpot_ms": 8.0}, {"tpot_ms": 6.0}], iter([{"tpot_ms": 3.0}])
    rows = list(decode.told_against({"tpot_ms": 2.0}, dense, methods))
    assert [(r["over_floor"], r["speedup"]) for r in rows] == [(4.0, 0.75), (3.0, 1.0), (1.5, 2.0)]
