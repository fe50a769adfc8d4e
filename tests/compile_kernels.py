"""Compile every kernel for sm_90 on a machine without a GPU: run the launchers with a driver that only compiles.

`python tests/compile_kernels.py`: prints one line per op and exits non-zero if one does not compile. The interpreter
accepts programs that the compiler refuses (types that change in a loop, values that do not broadcast); this finds them.
"""
import sys
from types import SimpleNamespace

import torch
import triton
from cases import MANY_TOKENS, OPS
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from world import World

from torchsparsekv.ops._registry import load_all


def compile_only() -> None:
    target = GPUTarget("cuda", 90, 32)
    fake = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda d: 0, get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cpu"),
    )  # fmt: skip
    triton.runtime.driver.set_active(fake)
    JITFunction.__getitem__ = lambda self, grid: lambda *a, **k: self.warmup(*a, grid=grid, **k)


def main() -> int:
    compile_only()
    failed = 0
    for name, entry in load_all().items():
        for dtype in (torch.bfloat16, torch.float32):
            for seed in (0, 3):
                tokens = 5 if name in MANY_TOKENS else 1
                w = World(tokens=tokens, dim=80, group=3, dtype=dtype, seed=seed, lengths=[60, 33])
                try:
                    entry.cuda(*OPS[name](w))
                except Exception as e:
                    failed += 1
                    print(f"{name} {dtype} seed {seed}: {type(e).__name__}\n{e}\n{e.__cause__ or ''}")
                    break
        print(name, "compiled")
    return failed


if __name__ == "__main__":
    sys.exit(main())
