"""Kernels that are launched early (ops/_machinery/triton.py) wait before they read or write anything. Only `load_early`
comes before.

Other tests do not notice a missing wait: the interpreter runs kernels one by one, and on a GPU the race is rare.
"""
import ast
import re
from pathlib import Path

import pytest

import torchsparsekv.ops
from torchsparsekv.ops._machinery.cuda import SOURCES

FILES = sorted(Path(torchsparsekv.ops.__path__[0]).rglob("*.py"))


def early(tree: ast.Module) -> set[str]:
    """The kernels of a module that take the option of an early launch."""
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.decorator_list]
    return {f.name for f in functions if f.name != "wait_for_previous" and any(a.arg == "PDL" for a in f.args.args)}


# What a kernel may call before it waits.
HARMLESS = re.compile(r"load_early|tl\.(program_id|num_programs|arange)|.*\)\.to")


def waits(tree: ast.Module) -> set[str]:
    """The kernels that wait before they call anything but what is harmless."""
    out = set()
    for f in ast.walk(tree):
        body = [ast.unparse(x) for x in f.body] if isinstance(f, ast.FunctionDef) else []
        if "wait_for_previous(PDL)" in body:
            first = ast.parse("\n".join(body[: body.index("wait_for_previous(PDL)")]))
            called = [ast.unparse(c.func) for c in ast.walk(first) if isinstance(c, ast.Call)]
            if all(map(HARMLESS.fullmatch, called)):
                out.add(f.name)
    return out


def launched_early(tree: ast.Module) -> set[str]:
    """The names that `kernel[grid](..., **launch_early(...))` is written for."""
    calls = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and isinstance(c.func, ast.Subscript)]
    option = lambda k: k.arg is None and ast.unparse(k.value).startswith("launch_early(")  # noqa: E731
    return {ast.unparse(c.func.value) for c in calls if any(map(option, c.keywords))}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_early_launched_kernels_wait_first(path):
    tree = ast.parse(path.read_text())
    assert early(tree) == waits(tree)
    assert launched_early(tree) <= waits(tree)


@pytest.mark.parametrize("read", ["tl.load(x + b)", "load_keys(x)", "load_early(x + tl.load(b))"])
def test_kernel_that_reads_before_it_waits_fails_the_check(read):
    good = "def k(x, PDL):\n    b = tl.program_id(0).to(tl.int64)\n    load_early(x + b)\n    wait_for_previous(PDL)\n"
    assert waits(ast.parse(good)) == {"k"}
    assert waits(ast.parse(good.replace("load_early(x + b)", read))) == set()


def test_more_than_ten_kernels_are_launched_early():
    trees = [ast.parse(p.read_text()) for p in FILES]
    assert len(set().union(*map(early, trees))) > 12
    assert len(set().union(*map(launched_early, trees))) > 10


def native(tree: ast.Module) -> set[str]:
    """The kernels of csrc/ that `kernels.launch("name", ...)` is written for; small grids of all of them come early."""
    calls = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and ast.unparse(c.func) == "kernels.launch"]
    return {ast.literal_eval(c.args[0]) for c in calls}


def native_waits(source: str) -> dict[str, int]:
    """How often each kernel of a source waits; where, it may choose: see `chain` of csrc/common.cuh."""
    kernels = re.findall(r"__global__(.*?)\) \{\n(.*?)\n}\n", source, re.DOTALL)
    return {re.findall(r"(\w+)\(", head)[-1]: body.count("  wait_for_previous();\n") for head, body in kernels}


def test_cuda_kernels_wait_first():
    launched = set().union(*(native(ast.parse(p.read_text())) for p in FILES))
    found = {}
    for path in SOURCES.iterdir():
        if path.name.endswith(".cu"):
            found |= native_waits(path.read_text())
    assert found == dict.fromkeys(launched, 1)
    assert len(launched) > 7


def test_cuda_kernel_without_wait_fails_the_check():
    body = "  wait_for_previous();\n  if (x) {\n    x[0] = 1;\n  }\n}\n"
    source = f"__global__ void __launch_bounds__(32) k(\n    int* x) {{\n{body}"
    assert native_waits(source) == {"k": 1}
    assert native_waits(source.replace("  wait_for_previous();\n", "  // chain\n")) == {"k": 0}


def test_kernel_that_reads_before_its_wait_fails_the_check():
    kernel = "@triton.jit\ndef k(x, PDL):\n    y = tl.load(x)\n    wait_for_previous(PDL)\n"
    tree = ast.parse(kernel + "k[(1,)](x, **launch_early(d, 1))")
    assert early(tree) == launched_early(tree) == {"k"}
    assert waits(tree) == set()
