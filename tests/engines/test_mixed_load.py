"""The soak test of the plugin in vLLM's asynchronous engine, for a few seconds."""
import argparse
import importlib
import json

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")
pytest.importorskip("torchsparsekv.engines.vllm", exc_type=ImportError)
mixed_load = importlib.import_module("mixed_load")
blocks = importlib.import_module("torchsparsekv.engines._blocks")


class Broken(mixed_load.Watch):
    """From the first sample of memory, steps of several requests store all new tokens but the last."""

    def memory_used(self):
        if not hasattr(blocks.BlockStore.write, "theirs"):
            theirs = blocks.BlockStore.write

            def write(store, k, v, to):
                last = torch.arange(len(to), device=to.device) == len(to) - 1
                theirs(store, k, v, torch.where(last, -1, to) if 1 < len(to) <= 8 else to)

            write.theirs, blocks.BlockStore.write = theirs, write
        return super().memory_used()


def short_run(tmp_path, method: str, kv: str = "device", **engine) -> tuple[int, dict]:
    """A run of prompts of 32 to 300 tokens, in a cache so small that requests are preempted."""
    vllm = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.05, **engine}
    ours = {"sink": 16, "window": 16} | ({"device_gib": 0.125} if kv == "auto" else {})
    told = dict(options=json.dumps(ours), vllm=json.dumps(vllm), out=tmp_path / "out.json", method=method, kv=kv)
    told |= dict(minutes=0.02, budget=64, blocks=48, shortest=32, longest=300, rate=12, again=6)
    status = mixed_load.main([x for name, value in told.items() for x in (f"--{name}", str(value))])
    return status, json.loads((tmp_path / "out.json").read_text())


@pytest.mark.parametrize(("method", "kv"), [("quest", "auto"), ("pariskv", "device")])
def test_short_run_has_no_fault(tmp_path, method, kv, monkeypatch):
    monkeypatch.setattr(mixed_load, "MOST_NEW", 96)
    status, found = short_run(tmp_path, method, kv)
    assert (status, found["faults"]) == (0, [])
    total = found["total"]
    assert total["finished"] + total["cancelled"] == total["requests"] > 6
    assert total["preemptions"] > 0
    assert total["again"] == 6
    assert found["memory"]


def test_token_that_is_not_stored_is_noticed(tmp_path):
    status, found = short_run(tmp_path, "quest", worker_extension_cls="test_mixed_load.Broken", enforce_eager=True)
    assert status == 1
    assert any("other tokens when it runs again" in x for x in found["faults"])


@pytest.mark.parametrize(
    ("what", "last"), [("allocated", 1011), ("reserved", 1011), ("engine", 1115), ("client", 1115)]
)
def test_growth_of_memory_is_a_fault(what, last):
    memory = [{what: 1000} for _ in range(6)]
    for end, faults in ((1009, {}), (last, {f"memory grew: {what}": 1})):
        run = mixed_load.Run(argparse.Namespace(), None, None, memory=[*memory, {what: end}])
        (row,) = run.growth()
        assert (row["first third"], row["then"], run.faults) == (1000, end, faults)
