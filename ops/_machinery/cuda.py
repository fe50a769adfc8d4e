"""CUDA C++ kernels of csrc/, for what Triton cannot express. They are compiled at first use, as Triton's kernels are.

NVRTC, which CUDA builds of torch include, compiles a kernel; the CUDA driver launches it. Both have C interfaces. So an
install needs no compiler, and the kernels do not depend on the binary interface of one torch version. Without NVRTC
`load` returns the reason, and the op runs its Triton kernels, which give the same results.
"""
import ctypes
import functools
import threading
import warnings
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torchsparsekv.ops._machinery.triton import launch_early

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT and
# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_SHARED, _CARVEOUT, _EARLY = 8, 9, 6
# The percentage of a multiprocessor's L1 memory that is shared memory. By default the driver chooses a share for each
# kernel. Kernels with different shares cannot overlap, and a change takes time: four kernels took 27.0 us with one
# share, and 30.5 us with several. Only kernels that take far longer than a change ask for another share.
_SHARED_PERCENT = 40
_NO_CONTEXT = 201
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
# The least compute capability of each file: 8.0 for matrix products and warp reductions, 8.9 for conversion of fp8, 9.0
# for clusters of programs. Triton's kernels run on older devices.
OLDEST = {
    "best_pages": (9, 0), "bound_scores": (8, 9), "centroid_votes": (8, 0), "dense_attention": (8, 0), "fetch": (8, 0),
    "page_peaks": (8, 0), "rank_by_votes": (8, 0), "rerank": (8, 0), "sparse_attention": (9, 0), "top_blocks": (8, 0),
    "union_pages": (8, 0), "visit_nodes": (9, 0),
}  # fmt: skip
SOURCES = Path(__file__).resolve().parents[2] / "csrc"  # beside ops/, in a checkout and in a wheel
_loaded: dict[tuple, "Module | str"] = {}
_one_at_a_time = threading.Lock()  # two threads do not compile the same module
# Tensors go as pointers (None: a null pointer), numbers as int and float, sequences as structs of int.
Argument: TypeAlias = Tensor | int | float | Sequence[int] | None


class _Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int * 16)]


class _Config(ctypes.Structure):
    _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
                ("attributes", c_void_p), ("count", c_uint)]  # fmt: skip


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """The libraries NVRTC and CUDA driver. Torch is linked against NVRTC, so the loader finds it."""
    if not torch.version.cuda:
        return None
    major = torch.version.cuda.split(".")[0]
    for name in (Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so", f"libnvrtc.so.{major}"):
        try:
            nvrtc = ctypes.CDLL(str(name))
            nvrtc.nvrtcCreateProgram  # noqa: B018
            return nvrtc, ctypes.CDLL("libcuda.so.1")
        except (OSError, AttributeError):
            pass
    warnings.warn("torchsparsekv: NVRTC is missing, so Triton kernels decode: same results, slower", stacklevel=2)
    return None


@functools.cache
def _headers() -> dict[bytes, bytes]:
    return {h.name.encode(): h.read_bytes() for h in SOURCES.iterdir() if h.name.endswith(".cuh")}


def compiled(nvrtc: ctypes.CDLL, name: str, arch: str, **defines: int) -> bytes:
    """The machine code of csrc/`name`.cu."""
    program, size = c_void_p(), c_size_t()
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{k}={v}" for k, v in defines.items())]
    strings = lambda x: (c_char_p * len(x))(*x)  # noqa: E731
    file, headers = f"{name}.cu", _headers()
    nvrtc.nvrtcCreateProgram(
        byref(program), (SOURCES / file).read_bytes(), file.encode(), len(headers), strings(headers.values()),
        strings(headers.keys()),
    )  # fmt: skip
    failed = nvrtc.nvrtcCompileProgram(program, len(options), strings([o.encode() for o in options]))
    what = "ProgramLog" if failed else "CUBIN"
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, byref(size))
    answer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, answer)
    nvrtc.nvrtcDestroyProgram(byref(program))
    if failed:
        raise RuntimeError(f"csrc/{name}.cu does not compile for {arch} with {defines}:\n{answer.value.decode()}")
    return answer.raw


class Module:
    """The kernels of one file, loaded on one device."""

    def __init__(self, driver: ctypes.CDLL, image: bytes, device: torch.device):
        self.driver, self.device, self.module = driver, device, c_void_p()
        self.kernels: dict[str, tuple[c_void_p, int]] = {}
        mode = c_int(_RELAXED)  # else loading would break a graph capture in progress, also of another thread
        self._do("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            self._do("cuModuleLoadData", byref(self.module), image)
        finally:
            self._do("cuThreadExchangeStreamCaptureMode", byref(mode))

    def launch(
        self, name: str, grid: Sequence[int], threads: int, *args: Argument, shared: int = 0,
        percent: int = _SHARED_PERCENT,
    ) -> None:  # fmt: skip
        """Launch on the current stream, with `shared` bytes of dynamic shared memory. Small grids launch early, as in
        Triton (`launch_early`). percent: the part of a multiprocessor's L1 memory that is shared memory, set at the
        first launch of a kernel."""
        values = [_argument(a) for a in args]
        pointers = (c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        attribute = _Attribute(_EARLY, 0, (c_int * 16)(1))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        chain = int(launch_early(self.device, grid[0] * grid[1] * grid[2])["PDL"])
        block = (c_uint * 3)(threads, 1, 1)
        config = _Config((c_uint * 3)(*grid), block, shared, stream, ctypes.addressof(attribute), chain)
        self._do("cuLaunchKernelEx", byref(config), self._kernel(name, shared, percent), pointers, None)

    def _kernel(self, name: str, shared: int, percent: int) -> c_void_p:
        """A kernel, allowed to use the largest dynamic shared memory that any launch has asked for."""
        kernel, allowed = self.kernels.get(name, (c_void_p(), -1))
        if allowed < 0:
            self._do("cuModuleGetFunction", byref(kernel), self.module, name.encode())
            self._do("cuFuncSetAttribute", kernel, _CARVEOUT, percent)
        if shared > allowed:
            self._do("cuFuncSetAttribute", kernel, _MAX_SHARED, shared)
            self.kernels[name] = kernel, shared
        return kernel

    def _do(self, call: str, *args) -> None:
        error = getattr(self.driver, call)(*args)
        if error == _NO_CONTEXT:  # a thread that has not used CUDA yet
            context = c_void_p()
            self.driver.cuDevicePrimaryCtxRetain(byref(context), self.device.index)
            self.driver.cuCtxSetCurrent(context)
            error = getattr(self.driver, call)(*args)
        if error:
            text = c_char_p()
            self.driver.cuGetErrorString(error, byref(text))
            raise RuntimeError(f"{call}: {(text.value or b'unknown error').decode()} ({error})")


def _argument(x: Argument):
    if x is None or isinstance(x, Tensor):
        return c_void_p(None if x is None else x.data_ptr())
    if isinstance(x, Sequence):
        return (c_int * len(x))(*x)
    if isinstance(x, float):
        return c_float(x)
    if not -(2**31) <= x < 2**31:
        raise ValueError(f"kernels take 32-bit integers, got {x}")
    return c_int(x)


def aligned(*tensors: Tensor) -> bool:
    """True if all tensors begin at multiples of 16 bytes, because kernels load 16 bytes at a time. A contiguous view
    may begin anywhere. Fake tensors count as aligned."""
    return not any(t.data_ptr() % 16 for t in tensors if not isinstance(t, FakeTensor))


def load(name: str, device: torch.device, **defines: int) -> Module | str:
    """The kernels of csrc/`name`.cu for a device, or the reason why they are not available."""
    if device.type != "cuda":
        return f"these tensors are on {device}"
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (name, index, *defines.items())
    if key not in _loaded:
        with _one_at_a_time:
            if key not in _loaded:
                _loaded[key] = _load(name, torch.device("cuda", index), **defines)
    return _loaded[key]


def _load(name: str, device: torch.device, **defines: int) -> Module | str:
    libraries, capability = _libraries(), torch.cuda.get_device_capability(device)
    if libraries is None:
        return "no NVRTC or no driver was found"
    if capability < OLDEST[name]:
        return "compute capability {}.{} is below {}.{}".format(*capability, *OLDEST[name])
    return Module(libraries[1], compiled(libraries[0], name, "sm_{}{}".format(*capability), **defines), device)
