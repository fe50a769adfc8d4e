"""Work on a side stream waits for the right streams; stand-ins record the calls."""
import contextlib

import pytest
import torch

from torchsparsekv.ops._machinery import side_stream as _side

CUDA = torch.device("cuda", 0)


class Stream:
    def __init__(self, log: list, name: str, number: int = 0):
        self.log, self.name, self.device, self.cuda_stream = log, name, CUDA, number

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class Used:
    device = CUDA

    def __init__(self, log: list):
        self.log = log

    def record_stream(self, stream):
        self.log.append(f"kept for {stream.name}")


class Streams:
    """The current one is `main`; sides are numbered as they are made."""

    def __init__(self, monkeypatch):
        self.log: list[str] = []
        self.main, self.sides, self.capturing = Stream(self.log, "main"), 0, False
        _side._stream.cache_clear()
        for name, fake in (
            ("current_stream", lambda device: self.main), ("Stream", self.make), ("stream", self.on),
            ("is_current_stream_capturing", lambda: self.capturing),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, fake)

    def make(self, device):
        self.sides += 1
        return Stream(self.log, f"side{self.sides}")

    @contextlib.contextmanager
    def on(self, stream):
        self.log.append(f"on {stream.name}")
        yield
        self.log.append("back")

    def launched(self, join: bool, **told) -> list[str]:
        self.log.clear()
        with _side.on_side_stream(join, Used(self.log), **told):
            self.log.append("launch")
        return list(self.log)


@pytest.fixture
def streams(monkeypatch):
    yield Streams(monkeypatch)
    _side._stream.cache_clear()


@pytest.mark.parametrize("of_step", [False, True])
def test_last_layer_waits_for_the_side_stream_and_launches_itself(streams, of_step):
    fork = ["side1 waits for main"]
    beside = [*fork, "on side1", "launch", "kept for side1", "back"]
    assert streams.launched(False, of_step=of_step) == beside
    assert streams.launched(True, of_step=of_step) == [*fork, "main waits for side1", "launch"]


def test_captured_work_is_not_kept_for_the_side_stream(streams):
    streams.capturing = True
    assert streams.launched(False, of_step=True) == ["side1 waits for main", "on side1", "launch", "back"]


def test_every_stream_has_its_own_side_stream(streams):
    """Or what one thread launches would be in the graph that another captures."""
    streams.launched(False, of_step=True)
    streams.main = Stream(streams.log, "other", 1)
    assert "on side2" in streams.launched(False, of_step=True)
    assert "on side3" in streams.launched(False), "and prompts"
    streams.log.clear()
    _side.wait_for_side_stream(torch.device("cuda"))  # is the same
    assert streams.log == ["other waits for side3", "other waits for side2"]
