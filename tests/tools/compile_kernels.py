"""Compile every kernel for sm_90 on a machine without a GPU: run the launchers with a driver that only compiles.

`python tests/tools/compile_kernels.py [--all] [NAME ...]` prints the kernels of each op, a line an op, or why one of
them does not compile; then it exits non-zero. `--all` compiles more types and options of each.
The interpreter accepts programs that the compiler refuses: types that change in a loop, values that do not broadcast.
"""
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops._machinery.triton import SMALLEST

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from cases import MANY_TOKENS, OPS
from cases_packed import TAKING, packed
from world import World

LARGE = 232_448  # bytes of shared memory a program may have on an H100
MULTIPROCESSOR, RESERVED = 233_472, 1024  # those of all programs on one, and what the driver takes of each program's
REGISTERS, MOST_REGISTERS = 65_536, 256  # of a multiprocessor, and of a thread
WARPS = 4  # of a program, where a launcher does not say
SIZES = (80, 128, 256)  # head_dim: one that needs padding, the usual one, the largest
# Beside attention, what keeps tiles of rows in shared memory.
TILED = {"cluster_keys", "cluster_ring", "pick_units", "choose_static", "update_static_set"}
ROOMY = {"choose_static", "update_static_set"}  # what takes more where there is more
OF_OTHERS = {"update_static_set"}  # kernels made of those of other ops, which are compiled in all their ways
WHOLE = (CUDABackend.make_ptx, CUDABackend.make_cubin)
ALL = "--all" in sys.argv
COMPILED: set[JITFunction] = set()
LAUNCHED: set[str] = set()  # names of the kernels of one op
choose_static = importlib.import_module("torchsparsekv.ops.prkv.choose_static")
relocate = importlib.import_module("torchsparsekv.ops.prkv.relocate")
update_static_set = importlib.import_module("torchsparsekv.ops.prkv.update_static_set")


def no_assembly(self, src, metadata, *_) -> str:
    metadata["name"] = ""
    return ""


def compile_whole(yes: bool) -> None:
    """Or only as far as Triton goes, which is what refuses, and what says how much memory is needed: then LLVM does not
    optimise, and there is no machine code."""
    os.environ["DISABLE_LLVM_OPT"] = str(int(not yes))
    CUDABackend.make_ptx, CUDABackend.make_cubin = WHOLE if yes else (no_assembly, lambda *_: b"")


def together(kernel, options) -> int:
    """How many programs of it share a multiprocessor and wait for one another: all have to fit."""
    if kernel is relocate._relocate:
        return relocate.PER_SM
    choosing = kernel in (choose_static._choose, update_static_set._update_static_set)
    paired = choosing and options["num_warps"] == choose_static.PAIR.warps
    return choose_static.PAIR.per_sm if paired else 1


def launcher(kernel, grid):
    """What `kernel[grid]` is here: compile, and check what the compiled kernel asks of the GPU."""

    def launch(*args, **kwargs):
        compile_whole(kernel not in COMPILED)  # in one of its variants: a third of the time
        COMPILED.add(kernel)
        LAUNCHED.add(f"{kernel.fn.__module__}.{kernel.__name__}")
        compiled = kernel.warmup(*args, grid=grid, **kwargs)
        used, room = compiled.metadata.shared, choose_static.shared_bytes(None)
        if (beside := together(kernel, kwargs)) > 1:
            room = (MULTIPROCESSOR if room == LARGE else room) // beside - RESERVED
            assert 32 * kwargs.get("num_warps", WARPS) * beside * MOST_REGISTERS <= REGISTERS
        if used > room:
            raise RuntimeError(f"{kernel.__name__} needs {used} bytes of shared memory, of {room}")

    return launch


def compile_only() -> None:
    target = GPUTarget("cuda", 90, 32)
    fake = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda d: 0, get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cpu"),
    )  # fmt: skip
    triton.runtime.driver.set_active(fake)
    triton.knobs.compilation.disable_line_info = True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    JITFunction.__getitem__ = launcher


def variants(name: str) -> Iterator[tuple[torch.dtype, int, int, int]]:
    """(type, shared memory there is, head_dim, way to pick options). Sizes vary where tiles of keys and values must
    fit, of fp32 it is the largest; of halves options vary, in one way at the usual size: its tiles are those of the
    size that is padded to it. With many query heads a tile is as large as it gets."""
    pad, usual, most = SIZES
    tiled = "attention" in name or name in TILED
    if name in OF_OTHERS:
        yield torch.bfloat16, SMALLEST, usual, 1
        yield torch.bfloat16, LARGE, usual, 0
        yield torch.float32, LARGE, most, 0
        return
    ways = ((pad, 0), (usual, 1), (most, 0), (pad, 2)) if tiled else ((pad, 0), (pad, 1), (pad, 2))
    for dim, way in ways if ALL else ways[: 3 if tiled else 1]:
        yield torch.bfloat16, SMALLEST, dim, way
    if ALL:
        yield torch.float32, SMALLEST, most if tiled else pad, 0
    if name in ROOMY:
        yield torch.bfloat16, LARGE, usual, 0
        yield torch.bfloat16, LARGE, most, 0
        yield torch.float32, LARGE, most, 0
        yield torch.float32, LARGE, usual // 2, 0


def compile_op(name: str, entry) -> str:
    """What went wrong, or nothing. Pools that may be packed are that too, of the first variant."""
    LAUNCHED.clear()
    for nth, (dtype, room, dim, way) in enumerate(variants(name)):
        choose_static.shared_bytes = lambda _, room=room: room
        w = World(
            tokens=5 if name in MANY_TOKENS else 1, dim=dim, group=32 if room == LARGE else 3, dtype=dtype, seed=way,
            lengths=[60, 33], pick=lambda *options, way=way: options[way % len(options)],
        )  # fmt: skip
        things = OPS[name](w)
        for given in (things, packed(name, things)) if name in TAKING and nth == 0 else (things,):
            try:
                entry.run("triton", *given)
            except Exception as e:
                said = f"{dtype}, head_dim {dim}, way {way}, packed {given is not things}: {type(e).__name__}"
                return f"{said}\n{e}\n{e.__cause__ or ''}"
    return ""


def main() -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 is set: kernels would be interpreted, and nothing compiled")
    compile_only()
    entries = load_all()
    names = [x for x in sys.argv[1:] if x != "--all"]
    if unknown := sorted(set(names) - set(entries)):
        sys.exit(f"no such op: {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as folder:  # nobody is to find what is not whole
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        wrong = False
        for name in names or entries:
            what = compile_op(name, entries[name])
            print(name, what or " ".join(sorted(LAUNCHED)), flush=True)
            wrong |= bool(what)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
