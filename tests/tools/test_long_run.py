"""The script for long runs generates all tokens and reports growth."""
import long_run
import pytest
import torch
from world import DEVICE


def test_short_run_generates_all_tokens():
    row = long_run.run("streaming", 60, DEVICE)
    assert (row["tokens"], row["steps"]) == (60, 59), "the prompt itself says the first"
    assert long_run.good(row), row


def test_growth_is_measured_over_the_last_call(monkeypatch):
    seen = iter([{"graphs": 0}, {"graphs": 5}, {"graphs": 7}])
    monkeypatch.setattr(long_run, "seen", lambda *_: next(seen))
    assert long_run.run("streaming", 60, DEVICE)["graphs"] == 2


@pytest.mark.parametrize(("what", "much"), [("graphs", 1), ("skips", 1), ("device_bytes", 1024), ("MiB", 65.0)])
def test_growth_is_reported(what, much):
    row = {"graphs": 0, "skips": 0, "device_bytes": 0, "MiB": 3.0}
    assert long_run.good(row)
    assert not long_run.good(row | {what: much})


def test_kept_memory_is_counted():
    ids = torch.zeros(1, 8, dtype=torch.long)
    before, kept = long_run.seen(ids), torch.ones(64 << 20)
    assert long_run.seen(ids)["MiB"] - before["MiB"] > 200
    del kept
