"""`bench throughput`: the largest batch that fits, and what it is held against."""
from types import SimpleNamespace

import pytest
import torch
from cli import refused
from timer import watch  # noqa: F401

import torchsparsekv
from torchsparsekv import host
from torchsparsekv_benchmarks.speed import _common, throughput

WRONG = {
    "--context=3000000": "contexts must be at most 2096932", "--context=0": "context must be at least 1, got 0",
    "--caps-gib=48,-1": "caps_gib must be positive, got 48.0,-1.0", "--caps-gib=": "got none",
    "--skip-layers=-1": "skip_layers must be from 0 to 31, got -1", "--locality=-1": "locality must be between 0",
    "--host-gib=-1": "host_gib must not be negative, got -1", "--most=0": "most must be at least 1, got 0",
    "--dense=nope": "dense must be different ones of", "--hyper=arkvale.block_size=16": "hyper sets arkvale",
    "--pool-dtype=int4": "pool_dtype must be", "--also=arkvale.block_size=16": "also changes arkvale",
    "--trace=nothing.npz": "No such file",
}  # fmt: skip


@pytest.mark.parametrize("arg", WRONG)
def test_wrong_options_are_refused(arg):
    assert WRONG[arg] in refused("bench", "throughput", arg)


@pytest.fixture
def small(watch, monkeypatch):  # noqa: F811
    """A device of any size, and dense attention of others that takes twice as long as ours."""
    monkeypatch.setattr(throughput, "SPARE_GIB", 0)
    device = SimpleNamespace(name="any", multi_processor_count=1, total_memory=2**40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda _: None)
    monkeypatch.setattr(throughput._dense, "try_out", lambda *_: None)
    static = lambda model, batch, context, d, name: {"method": name, "batch": batch, "tpot_ms": context / 500}  # noqa: E731
    monkeypatch.setattr(throughput, "run_static", static)
    return throughput.Options(
        shape="tiny", context=200, budget=32, sink=32, window=32, skip_layers=1, steps=2, methods=("quest",),
        dense=("sdpa-cudnn",), offload="device",
    )  # fmt: skip


def model_gib() -> float:
    return sum(p.nbytes for p in _common.build("tiny", torch.device("cpu")).parameters()) / 2**30


def bytes_of(o, name: str, rows: int, on_host: bool) -> tuple[int, int]:
    model, length = _common.build("tiny", torch.device("cpu")), o.context + o.grows
    with torchsparsekv.patch(model, name, max_length=length, **o.patch(name) | {"offload": "device"}) as handle:
        return handle.planned.bytes(rows, length, pool_on_host=on_host)


def test_the_largest_batch_that_fits_against_the_best_dense(small):
    o = type(small)(**vars(small) | {"caps_gib": (model_gib() + 8 / 1024, 1e-3), "most": 4, "dense_int8": True})
    result = throughput.run(o)
    assert result["options"]["acts"]["quest"] == o.method("quest").effective()
    ours, other, quest, _, *nothing = result["rows"]
    fits = {r["method"]: r["batch"] for r in (ours, quest)}
    for name, batch in fits.items():
        assert 0 < batch <= 4
        assert bytes_of(o, name, batch, False)[1] <= 8 * 2**20
        assert batch == 4 or bytes_of(o, name, batch + 1, False)[1] > 8 * 2**20, "one more does not fit"
    assert (other["method"], other["batch"]) == ("sdpa-cudnn", ours["batch"])
    best = max(ours["tokens_per_s"], other["tokens_per_s"])
    assert quest["over_dense"] == pytest.approx(quest["tokens_per_s"] / best)
    assert [(r["method"], r["batch"]) for r in nothing] == [("full", 0), ("quest", 0), ("full", 0)]


def test_another_value_and_dense_attention_in_8_bits_are_rows_of_their_own(small, monkeypatch):
    step = throughput.run_method

    def fast(model, name, o, *a):
        return step(model, name, o, *a) | ({"tpot_ms": 1e-3} if isinstance(o, throughput._Packed) else {})

    monkeypatch.setattr(throughput, "run_method", fast)
    more = {"caps_gib": (48.0,), "most": 2, "also": ("quest.block_size=8",), "dense_int8": True}
    o = type(small)(**vars(small) | more)
    result = throughput.run(o)
    assert result["options"]["host_share"] == 0.9
    row, other, quest, also, packed = result["rows"]
    assert "hyper" not in quest
    assert (also["method"], also["hyper"]) == ("quest", "block_size=8")
    assert (packed["method"], packed["pool"]) == ("full", "int8")
    assert packed["device_GiB"] < row["device_GiB"]
    best = max(row["tokens_per_s"], other["tokens_per_s"])
    assert packed["over_dense"] == pytest.approx(packed["tokens_per_s"] / best), "the best dense attention in 16 bits"


def test_host_memory_bounds_the_batch_too(monkeypatch):
    model, o = _common.build("tiny", torch.device("cpu")), throughput.Options(shape="tiny", context=4096)
    monkeypatch.setattr(host, "available", lambda: 2**40)
    on_host = bytes_of(o, "quest", 1, True)[0]
    monkeypatch.setattr(torchsparsekv.patches._plan.Plan, "bytes", lambda *_, **__: (on_host, 1), raising=False)
    setup = type(o)(**vars(o) | {"offload": "device"})
    gib = 3.5 * on_host / throughput.HOST_SHARE / 2**30
    assert throughput.largest_batch(model, "quest", 5000, 1e3, setup, gib) == 3
    monkeypatch.setattr(host, "available", lambda: int(2.5 * on_host / throughput.HOST_SHARE))
    assert throughput.largest_batch(model, "quest", 5000, 1e3, setup, gib) == 2, "not more than what is free"


def test_steps_are_timed_one_by_one_and_the_first_ones_not(monkeypatch):
    """A clock that every step puts forward: what came before the first event is not in any step's time."""
    now, took = [0.0], [100.0, 90.0, 80.0, 70.0, 1.0, 5.0, 2.0]

    class Event:
        def __init__(self, enable_timing):
            self.at = -1.0

        def record(self):
            self.at = now[0]

        def elapsed_time(self, end) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    step = lambda i: now.__setitem__(0, now[0] + took[i])  # noqa: E731
    assert _common.time_each(step, 3) == [1.0, 5.0, 2.0]
    assert now[0] == sum(took), "all were taken"
