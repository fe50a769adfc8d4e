"""Host memory that the GPU reads and writes in place.

`torch.empty(pin_memory=True)` rounds up to a power of two and pins at 2 GiB/s. Here an exact anonymous mapping gets
huge pages, is touched by all cores, registered with the driver, and shown to torch as an ordinary CUDA tensor.
"""
import contextlib
import functools
import mmap
import weakref
from pathlib import Path

import torch


class _Pinned:
    """Owner of one registered mapping. The CUDA tensor made from it holds a reference, so it lives as long."""

    def __init__(self, nbytes: int, device: torch.device):
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise MemoryError(f"cannot map {size / 2**30:.2f} GiB of host memory: {e}") from e
        with contextlib.suppress(AttributeError, OSError):  # a hint: kernels without it work with small pages
            region.madvise(mmap.MADV_HUGEPAGE)
        touched = torch.frombuffer(region, dtype=torch.uint8)
        touched.zero_()  # first touch, on all threads: registering untouched pages is several times slower
        pointer = touched.data_ptr()
        error = _register(pointer, size, device)
        if error:
            raise MemoryError(
                f"the driver refused to pin {size / 2**30:.2f} GiB of host memory (cudaHostRegister error {error}); "
                f"{memlock_said(_memlock())}"
            )
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None,
        }  # fmt: skip
        weakref.finalize(self, _release, touched, pointer, device)


def _register(pointer: int, size: int, device: torch.device) -> int:
    with torch.cuda.device(device):  # the registration belongs to the current device
        error = int(torch.cuda.cudart().cudaHostRegister(pointer, size, 2))  # 2: mapped into its address space
        if error:  # CUDA keeps it for the next check of a launch, which would raise it again: let that be this one
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device=device).fill_(1)
    return error


def _release(touched: torch.Tensor, pointer: int, device: torch.device) -> None:
    """Unpin first; dropping `touched` then drops the mapping. Kernels may still be reading, so wait for them."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(pointer)


UNLIMITED = 1 << 62
PROBE_LIMIT = 64 << 20  # a limit above this is lowered for the probe, so that the probe stays small


def _memlock() -> int:
    import resource

    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def memlock_said(limit: int) -> str:
    return f"the memlock limit is {'unlimited' if limit == UNLIMITED else f'{limit >> 10} KiB'} (`ulimit -l`)"


def pinnable(wanted: int, device: torch.device) -> int:
    """How many of the `wanted` bytes the memlock limit allows to pin: all where it is higher or does not count."""
    limit = _memlock()
    return wanted if wanted <= limit or not _memlock_counts(device) else limit


@functools.cache
def _memlock_counts(device: torch.device) -> bool:
    """Whether the driver heeds a finite memlock limit. Most do not, and privileges matter: pinning beyond it tells."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    low = min(soft, PROBE_LIMIT)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (low, hard))
        _Pinned(low + (1 << 20), device)  # released at once
    except MemoryError:
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    return False


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed tensor in pinned host memory that presents itself as a tensor of `device`."""
    count = int(torch.Size(shape).numel())
    owner = _Pinned(max(count * dtype.itemsize, 1), device)
    flat = torch.as_tensor(owner, device=device)
    if flat.data_ptr() != owner.pointer:
        raise RuntimeError(f"pinned host memory cannot be seen from {device}: torch made a copy of it")
    return flat[: count * dtype.itemsize].view(dtype).view(shape)


# (limit, in use, what of it is file cache and can be had back) of control groups, version 2 and 1.
_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
CGROUPS = (
    (_V2 / "memory.max", _V2 / "memory.current", "inactive_file"),
    (_V1 / "memory.limit_in_bytes", _V1 / "memory.usage_in_bytes", "total_inactive_file"),
)


def available() -> int:
    """Bytes of host memory that can be had without swapping (the container's limit counts)."""
    free = 1 << 62  # where no one tells, the allocation itself will
    with contextlib.suppress(OSError, KeyError, ValueError):
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used, cache in CGROUPS:
        with contextlib.suppress(OSError, KeyError, ValueError):  # "max" is no integer: no limit
            stat = dict(line.split() for line in (limit.parent / "memory.stat").read_text().splitlines())
            free = min(free, int(limit.read_text()) - int(used.read_text()) + int(stat[cache]))
    return free
