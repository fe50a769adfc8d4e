"""Host memory that the GPU reads and writes in place.

`torch.empty(pin_memory=True)` rounds up to a power of two and pins at 2 GiB/s. This module maps the exact size with
huge pages, touches the pages on all cores, registers them with the driver, and shows them to torch as a CUDA tensor.
"""
import contextlib
import functools
import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch


class _Pinned:
    """The owner of one registered mapping. The CUDA tensor made from the mapping holds a reference to its owner."""

    def __init__(self, nbytes: int, device: torch.device):
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise MemoryError(f"cannot map {size / 2**30:.2f} GiB of host memory: {e}") from e
        with contextlib.suppress(AttributeError, OSError):  # a hint: a Linux kernel without it uses small pages
            region.madvise(mmap.MADV_HUGEPAGE)
        touched = torch.frombuffer(region, dtype=torch.uint8)
        touched.zero_()  # touches the pages on all threads: to register untouched pages is several times slower
        pointer = touched.data_ptr()
        error = _register(pointer, size, device)
        if error:
            raise MemoryError(
                f"the driver refused to pin {size / 2**30:.2f} GiB of host memory (cudaHostRegister error {error}); "
                f"{memlock_said(memlock())}"
            )
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None,
        }  # fmt: skip
        weakref.finalize(self, _release, touched, pointer, device)


def _register(pointer: int, size: int, device: torch.device) -> int:
    with torch.cuda.device(device):  # the registration belongs to the current device
        error = int(torch.cuda.cudart().cudaHostRegister(pointer, size, 2))  # 2: mapped into its address space
        if error:  # CUDA reports an error again at the next check of a launch; this check takes it
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device=device).fill_(1)
    return error


def _release(touched: torch.Tensor, pointer: int, device: torch.device) -> None:
    """Unpin first; dropping `touched` then drops the mapping. Kernels may still be reading, so wait for them."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(pointer)


UNLIMITED = 1 << 62
PROBE_LIMIT = 64 << 20  # a limit above this is lowered for the probe, so that the probe stays small


def memlock() -> int:
    import resource

    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def memlock_said(limit: int) -> str:
    return f"the memlock limit is {'unlimited' if limit == UNLIMITED else f'{limit >> 10} KiB'} (`ulimit -l`)"


def pinnable(wanted: int, device: torch.device) -> int:
    """The bytes, of the `wanted` bytes, that the memlock limit allows to pin. All of them if the limit is higher, or if
    the driver ignores the limit."""
    limit = memlock()
    return wanted if wanted <= limit or not _memlock_counts(device) else limit


@functools.cache
def _memlock_counts(device: torch.device) -> bool:
    """True if the driver obeys a finite memlock limit. Most drivers do not. Privileges matter too, so a probe pins more
    than the limit."""
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
    nbytes = int(torch.Size(shape).numel()) * dtype.itemsize
    if nbytes > (free := available()):  # the system grants more memory than it has, and kills the process that uses it
        raise MemoryError(f"cannot pin {nbytes / 2**30:.2f} GiB of host memory: {free / 2**30:.2f} GiB are free")
    owner = _Pinned(max(nbytes, 1), device)
    flat = torch.as_tensor(owner, device=device)
    if flat.data_ptr() != owner.pointer:
        raise RuntimeError(f"pinned host memory cannot be seen from {device}: torch made a copy of it")
    return flat[:nbytes].view(dtype).view(shape)


# Control groups, versions 2 and 1. A row has the root folder, the controller's name in /proc/self/cgroup, and three
# names: the file with the limit, the file with the use, and the field of memory.stat with the file cache. The system
# can free the file cache.
_ROOT = Path("/sys/fs/cgroup")
CGROUPS = (
    (_ROOT, "", ("memory.max", "memory.current", "inactive_file")),
    (_ROOT / "memory", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
)
OWN_CGROUPS = Path("/proc/self/cgroup")


def _control_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The control groups of this process, up to the roots. A container sees its own group as the root."""
    own: dict[str, PurePosixPath] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own |= dict.fromkeys(controllers.split(","), PurePosixPath(path))
    for root, controller, names in CGROUPS:
        mine = own.get(controller, PurePosixPath("/"))
        for group in (mine, *mine.parents):
            yield root / group.relative_to("/"), names


def available() -> int:
    """Bytes of host memory that are free without swapping, within the limits of control groups."""
    free = 1 << 62  # without /proc/meminfo, the allocation itself fails if memory is short
    with contextlib.suppress(OSError, KeyError, ValueError):
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    for folder, (limit, used, cache) in _control_groups():
        with contextlib.suppress(OSError, KeyError, ValueError):  # "max" is no integer: no limit
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, int((folder / limit).read_text()) - int((folder / used).read_text()) + int(stat[cache]))
    return free
