"""The CUDA C++ kernels of csrc/ on a CPU, compiled by the C++ compiler of the machine. emulator.h says how.

    def test_...(emulated):
        ENTRY.run("cuda", ...)  # of tensors on the CPU

Asynchronous copies are done at once. So a wait that is missing behind such a copy is not noticed, nor one between
kernels.
"""
import ctypes
import functools
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from torchsparsekv.ops._machinery import cuda

COMPILER = shutil.which("c++")
HEADER = Path(__file__).with_suffix(".h")
KNOWN = set(re.findall(r"void (ptx_\w+)\(", HEADER.read_text()))
STRING = r'"(?:[^"\\]|\\.)*"'
KERNEL = re.compile(r'extern "C" __global__ void ((?:__\w+__\([^)]*\)\s*)*)(\w+)\(')
CLUSTER = re.compile(r"__cluster_dims__\(([^)]*)\)")
DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


def balanced(text: str, at: int) -> int:
    """The place after the parenthesis that closes the one at `at`."""
    depth, quoted = 0, False
    for i in range(at, len(text)):
        quoted ^= text[i] == '"' and text[i - 1] != "\\"
        depth += 0 if quoted else (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError("a parenthesis is not closed")


def as_call(inline: str) -> str:
    """The call that stands for one statement of inline PTX: the text between its parentheses."""
    head = re.match(rf"(?:{STRING}|[\s\\]|\w)*", inline).group()  # strings, and arguments of a macro between them
    at, operands = len(head), []
    for found in re.finditer(r'"[=+]?\w"\s*\(', inline):
        if found.start() >= at:
            at = balanced(inline, found.end() - 1)
            operands.append(inline[found.end() : at - 1])
    pasted = re.findall(r"\w+", re.sub(STRING, "", head))
    code = "".join(x[1:-1] if x[0] == '"' else "T" for x in re.findall(rf"{STRING}|\w+", head))
    if not code:
        return "(void)0"
    if code.startswith("{") and "e4m3x2" in code:
        return f"ptx_e4m3x2({operands[0]}, {operands[1]}, {str('%0, high' in code).lower()})"
    if code.startswith("{") and "mbarrier.try_wait" in code:
        return f"ptx_mbarrier_try_wait({operands[0]})"
    mnemonic, _, rest = code.rstrip("; ").partition(" ")
    name = "ptx_" + re.sub(r"\W+", "_", mnemonic)
    if name not in KNOWN:
        return f'ptx_unknown("{mnemonic}")'
    arguments = [operands[int(x[1:])] if x[0] == "%" else x for x in re.findall(r"%\d+|0x\w+|\d+", rest)]
    return f"{name}({', '.join([*pasted[:1], *arguments])})"


def translated(source: str) -> str:
    """CUDA C++ as C++ for emulator.h."""
    out, at = [], 0
    for found in re.finditer(r"\basm\s*(?:volatile\s*)?\(", source):
        if found.start() >= at:
            end = balanced(source, found.end() - 1)
            out += [source[at : found.start()], as_call(source[found.end() : end - 1])]
            at = end
    whole = "".join([*out, source[at:]])
    return DYNAMIC.sub(r"static \1* const \2 = reinterpret_cast<\1*>(emulator::dynamic_shared);", whole)


class Emulated:
    """As cuda.Module. backward: threads run in reverse order."""

    def __init__(self, library: ctypes.CDLL):
        self.library, self.backward = library, False
        library.launch.restype, library.failure.restype = ctypes.c_bool, ctypes.c_char_p

    def launch(self, name, grid, threads, *args, shared=0, percent=0) -> None:
        values = [cuda._argument(a) for a in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        size = (ctypes.c_int * 3)(*grid)
        assert self.library.launch(name.encode(), size, threads, shared, int(self.backward), pointers)
        if failure := self.library.failure():
            raise RuntimeError(failure.decode())


@functools.cache
def compiled(sources: Path, name: str, **defines: int) -> Emulated:
    with tempfile.TemporaryDirectory() as folder:
        for path in sources.glob("*.cuh"):
            (Path(folder) / path.name).write_text(translated(path.read_text()))
        source = translated((sources / f"{name}.cu").read_text())
        launches = "\n".join(
            f'  if (!strcmp(name, "{kernel}"))\n'
            f"    return emulator::launch({kernel}, grid, threads, shared, backward, args, {{{cluster}}}), true;"
            for about, kernel in KERNEL.findall(source)
            for cluster in CLUSTER.findall(about) or [""]
        )
        constants = "\n".join(f"#define {k} {v}" for k, v in defines.items())
        given = "const char* name, const int* grid, int threads, int shared, bool backward, void** args"
        start = f'extern "C" bool launch({given}) {{'
        end = '  return false;\n}\nextern "C" const char* failure() { return emulator::failure.c_str(); }\n'
        parts = ('#include "emulator.h"', constants, source, start, launches, end)
        (Path(folder) / "all.cpp").write_text("\n".join(parts))
        command = [
            COMPILER, "-std=c++17", "-O1", "-w", "-fpermissive", "-fno-strict-aliasing", "-shared", "-fPIC",
            f"-I{Path(__file__).parent}", "all.cpp", "-o", "all.so",
        ]  # fmt: skip
        subprocess.run(command, cwd=folder, check=True)
        return Emulated(ctypes.CDLL(str(Path(folder) / "all.so")))


def emulate(monkeypatch: pytest.MonkeyPatch, backward: bool) -> None:
    """Let kernels in CUDA C++ run on the CPU, and take the tensors that are there."""
    if COMPILER is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C++ compiler")

    def load(name, device, **defines):
        module = compiled(cuda.SOURCES, name, **defines)
        module.backward = backward
        return module

    monkeypatch.setattr(cuda, "load", load)
