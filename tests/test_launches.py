"""Kernels that are launched early (ops/_triton.py) wait before they read or write anything. No other test would see it:
the interpreter runs kernels one by one, and on a GPU a race shows seldom."""
import ast
from pathlib import Path

import pytest

import torchsparsekv.ops

FILES = sorted(Path(torchsparsekv.ops.__path__[0]).rglob("*.py"))


def early(tree: ast.Module) -> set[str]:
    """The kernels of a module that take the option of an early launch."""
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.decorator_list]
    return {f.name for f in functions if f.name != "chain" and any(a.arg == "PDL" for a in f.args.args)}


def waits(tree: ast.Module) -> set[str]:
    """The kernels that begin by waiting, but for what says what they do."""
    out = set()
    for f in ast.walk(tree):
        if isinstance(f, ast.FunctionDef):
            body = f.body[1:] if ast.get_docstring(f) else f.body
            if ast.unparse(body[0]) == "chain(PDL)":
                out.add(f.name)
    return out


def launched_early(tree: ast.Module) -> set[str]:
    """The names that `kernel[grid](..., **chained(...))` is written for."""
    calls = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and isinstance(c.func, ast.Subscript)]
    option = lambda k: k.arg is None and ast.unparse(k.value).startswith("chained(")  # noqa: E731
    return {ast.unparse(c.func.value) for c in calls if any(map(option, c.keywords))}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_what_is_launched_early_waits_first(path):
    tree = ast.parse(path.read_text())
    assert early(tree) == waits(tree)
    passed_on = {"kernel"} if path.stem == "fetch" else set()  # to _fetch, or to _refetch around it
    assert launched_early(tree) - passed_on <= waits(tree)


def test_many_are():
    trees = [ast.parse(p.read_text()) for p in FILES]
    assert len(set().union(*map(early, trees))) > 12
    assert len(set().union(*map(launched_early, trees))) > 10


def test_a_kernel_that_reads_first_is_noticed():
    tree = ast.parse("@triton.jit\ndef k(x, PDL):\n    y = tl.load(x)\n    chain(PDL)\nk[(1,)](x, **chained(d, 1))")
    assert early(tree) == launched_early(tree) == {"k"}
    assert waits(tree) == set()
