"""Benchmarks on a CPU: a timer that counts calls instead of time."""
import pytest
import torch

from torchsparsekv_benchmarks.speed import _common, decode, patterns

PROMPT_MS, WARM, SPAN = 50.0, 1, 4
SMALL = dict(budget=32, sink=32, window=32, skip_layers=1, shape="tiny")
COMPILE, BANK_OF = torch.compile, decode.bank_of


class Watch:
    """Stands in for the timer: calls are made, and a step takes as many microseconds as there are tokens."""

    def __init__(self):
        self.steps: list[tuple[int, int]] = []  # (rows, tokens in the store) where timing of steps began
        self.prompts = self.compiled = 0
        self.stop_after: int | None = None

    def time_loop(self, step, steps, repeats=3) -> float:
        if not isinstance(step, decode.Step):
            step(0)
            self.prompts += 1
            return PROMPT_MS
        if len(self.steps) == self.stop_after:
            raise KeyboardInterrupt
        at = int(step.cache.get_seq_length())
        self.steps.append((len(step.ids), at))
        for i in range(steps * repeats):
            step(i)
        return at / 1e3

    def time_each(self, step, steps) -> list[float]:
        for i in range(_common.AHEAD + steps):
            step(i)
        return [float(i) for i in range(1, steps + 1)]

    def compile(self, f, **_):
        self.compiled += 1
        return f


def prepare(methods, options=None) -> torch.device:
    _common.check(methods, options)
    return torch.device("cpu")


def watch_on(monkeypatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(_common, "time_loop", watch.time_loop)
    monkeypatch.setattr(_common, "time_each", watch.time_each)
    monkeypatch.setattr(torch, "compile", watch.compile)
    monkeypatch.setattr(_common, "prepare", prepare)
    for name in ("synchronize", "reset_peak_memory_stats", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(patterns, "gpu_gib", lambda model: 64.0)
    monkeypatch.setattr(decode, "collect", lambda: None)  # of so little memory it would be most of the time
    monkeypatch.setattr(decode, "WARM", WARM)
    return watch


@pytest.fixture
def watch(monkeypatch) -> Watch:
    return watch_on(monkeypatch)
