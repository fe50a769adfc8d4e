"""Without a GPU, Triton kernels run in the interpreter; the switch must be set before they are defined."""
import contextlib
import gc
import os
import sys
from pathlib import Path

# Helpers are modules by their bare names.
sys.path.extend(str(Path(__file__).parent / folder) for folder in ("support", "tools"))

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start, too, see below

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings
from slow import are_slow, order

# Asserts of helpers show their values as those of tests do.
pytest.register_assert_rewrite(*(p.stem for p in (Path(__file__).parent / "support").glob("*.py")))

if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError, AttributeError):  # no Triton, or its interpreter has other parts by now
        from interpreter import save_look_ups

        save_look_ups()

torch.set_num_threads(1)  # nothing here is large enough to share, and on a busy machine threads wait for each other

settings.register_profile("default", deadline=None, max_examples=4, suppress_health_check=list(HealthCheck))
settings.register_profile("gpu", deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
# make fuzz: as many of everything as TORCHSPARSEKV_FUZZ says
fuzz = int(os.environ.get("TORCHSPARSEKV_FUZZ", "0"))
settings.register_profile("fuzz", deadline=None, max_examples=fuzz or 1, suppress_health_check=list(HealthCheck))
settings.load_profile("fuzz" if fuzz else "gpu" if torch.cuda.is_available() else "default")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: one for each core that may be used, up to eight. With a GPU none: some tests measure its memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if torch.cuda.is_available() else min(cores, 8)


@pytest.hookimpl(tryfirst=True)  # before -m leaves any out
def pytest_collection_modifyitems(items):
    for item in are_slow(items):
        item.add_marker(pytest.mark.slow)
    items.sort(key=order)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    """What is imported by now stays: no collection need walk it, nor one come at every 700 objects. Tests of what is
    let go call gc.collect themselves."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """The recompile limit is counted per code object for the whole process."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def replays(monkeypatch):
    """CUDA graphs, or where there are none what stands for them (tests/support/graphs.py): the replays of each."""
    from graphs import pretend

    return pretend(monkeypatch)


@pytest.fixture(params=[False, True], ids=["forward", "backward"])
def emulated(request, monkeypatch):
    """Kernels in CUDA C++ run on the CPU (tests/support/emulator.py), threads in order or in reverse order."""
    from emulator import emulate

    emulate(monkeypatch, request.param)
