"""Pinned host memory respects the memlock limit; a stand-in replaces the driver (core/test_gpu.py has the real one)."""
import gc
import resource

import pytest
import torch
from models import tiny

import torchsparsekv
from torchsparsekv import host
from torchsparsekv.patches import _handle, _memory

CUDA, KIB, MIB, GIB = torch.device("cuda"), 1 << 10, 1 << 20, 1 << 30
WANTED = 3 * GIB
LIMITS = [64 * KIB, 8 * MIB, 64 * MIB, 2 * GIB]


class Driver:
    """A driver that pins, counting against the memlock limit or not, and the limit that this process seems to have."""

    def __init__(self):
        self.soft, self.hard, self.heeds, self.room = resource.RLIM_INFINITY, resource.RLIM_INFINITY, True, 1 << 40
        self.asked: list[int] = []
        self.lowest = self.soft
        self.live: dict[int, int] = {}
        self.breaks: Exception | None = None

    def register(self, pointer: int, size: int, device) -> int:
        self.asked.append(size)
        if self.breaks:
            raise self.breaks
        if sum(self.live.values()) + size > (self.soft if self.heeds and self.soft >= 0 else self.room):
            return 2
        self.live[pointer] = size
        return 0

    def release(self, touched, pointer: int, device) -> None:
        del self.live[pointer]

    def getrlimit(self, which: int) -> tuple[int, int]:
        return self.soft, self.hard

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_MEMLOCK
        assert limits[1] == self.hard, "a hard limit that is lowered cannot be raised again"
        self.soft = limits[0]
        self.lowest = min(self.lowest, self.soft) if self.lowest >= 0 else self.soft


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(host, "_register", made.register)
    monkeypatch.setattr(host, "_release", made.release)
    monkeypatch.setattr(resource, "getrlimit", made.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", made.setrlimit)
    monkeypatch.setattr(host, "available", lambda: 1 << 40)
    monkeypatch.setattr(_memory, "free_device_bytes", lambda _: 1 << 40)
    host._memlock_counts.cache_clear()
    yield made
    host._memlock_counts.cache_clear()
    assert not made.live, "still pinned"


class Cache:
    """What a report reads when the patch is taken off, where no cache of an earlier test is the latest."""

    def __init__(self):
        self.stored, self.batch, self.max_length, self.place = {}, 1, 64, _memory.Placement(False)

    def nbytes(self) -> tuple[int, int]:
        return 0, 0


@pytest.fixture
def make_cache(monkeypatch):
    """Asks a patched model for a cache that wants so much pinned memory; how many were made until then."""
    made: list[Cache] = []

    def make(wanted: int = WANTED) -> int:
        with torchsparsekv.patch(tiny(), "quest", max_length=64, budget=16, sink=4, block_size=4) as handle:
            handle.offload, handle.planned.device = "host", CUDA
            handle.planned.bytes = lambda *_, **__: (wanted, 0)
            handle.make_cache(2)
        return len(made)

    monkeypatch.setattr(_handle.SparseCache, "of_plan", lambda *_, **__: made.append(Cache()) or made[-1])
    return make


@pytest.mark.parametrize("limit", LIMITS)
def test_enforced_memlock_limit_is_refused_before_allocating(driver, make_cache, monkeypatch, limit):
    driver.soft = limit
    monkeypatch.setattr(_handle.SparseCache, "of_plan", lambda *_, **__: pytest.fail("allocated"))
    says = rf"64 tokens x batch 2 needs 3.00 GiB of pinned host memory.*limit is {limit // KIB} KiB \(`ulimit -l`\)"
    with pytest.raises(MemoryError, match=says):
        make_cache()
    assert max(driver.asked) <= 65 * MIB, "the probe stays small"
    assert driver.soft == limit


@pytest.mark.parametrize("limit", LIMITS)
def test_unenforced_memlock_limit_is_probed_once(driver, make_cache, limit):
    driver.soft, driver.heeds = limit, False
    assert [make_cache(), make_cache()] == [1, 2]
    (size,) = driver.asked
    assert min(limit, driver.lowest if driver.lowest >= 0 else limit) < size <= 65 * MIB, "beyond the limit, if lowered"
    assert driver.soft == limit


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 4 * GIB, WANTED])
def test_sizes_within_the_limit_are_not_probed(driver, make_cache, limit):
    driver.soft = limit
    assert make_cache() == 1
    assert driver.asked == []


def test_limit_is_restored_after_any_error(driver, make_cache):
    driver.soft, driver.breaks = 2 * GIB, RuntimeError("no device")
    with pytest.raises(RuntimeError, match="no device"):
        make_cache()
    assert (driver.lowest, driver.soft) == (64 * MIB, 2 * GIB)
    driver.breaks = None
    with pytest.raises(MemoryError, match="memlock"):  # what failed was not taken for an answer
        make_cache()


def test_memory_pinned_before_a_refusal_is_released(driver):
    driver.room = 200 * KIB
    with pytest.raises(MemoryError, match=r"refused to pin .* \(cudaHostRegister error 2\); the memlock limit is "):
        [host._Pinned(64 * KIB, CUDA) for _ in range(5)]
    gc.collect()
    assert driver.asked == [64 * KIB] * 4
    assert driver.live == {}


def test_more_memory_than_is_free_is_refused(driver, monkeypatch):
    monkeypatch.setattr(host, "available", lambda: GIB)
    monkeypatch.setattr(host.mmap, "mmap", lambda *_, **__: pytest.fail("mapped"))
    with pytest.raises(MemoryError, match=r"cannot pin 3.00 GiB of host memory: 1.00 GiB are free"):
        host.pinned((3 * GIB,), torch.uint8, CUDA)


def group(folder, names, limit, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


@pytest.mark.parametrize(("version", "line"), [(0, "0::/slice/job"), (1, "4:cpu,memory:/slice/job")])
def test_limits_of_all_control_groups_count(monkeypatch, tmp_path, version, line):
    """The process's own, and those around it; where they are not to be seen, the root's."""
    _, controller, names = host.CGROUPS[version]
    monkeypatch.setattr(host, "CGROUPS", [(tmp_path, controller, names)])
    monkeypatch.setattr(host, "OWN_CGROUPS", tmp_path / "own")
    free = host.available()
    assert free > 100 * MIB
    (tmp_path / "own").write_text(f"9:pids:/elsewhere\n{line}\n")
    group(tmp_path, names, 90 * MIB, 10 * MIB, MIB)
    assert host.available() == 81 * MIB
    group(tmp_path / "slice", names, 50 * MIB, 10 * MIB, 0)
    assert host.available() == 40 * MIB
    group(tmp_path / "slice" / "job", names, 30 * MIB, 5 * MIB, 2 * MIB)
    assert host.available() == 27 * MIB
    group(tmp_path / "elsewhere", names, MIB, 0, 0)
    (tmp_path / "slice" / "job" / names[0]).write_text("max\n")
    assert host.available() == 40 * MIB
    (tmp_path / "own").unlink()
    assert host.available() == 81 * MIB
