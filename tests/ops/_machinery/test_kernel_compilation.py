"""Triton kernels compile for sm_90 without a GPU; the interpreter accepts more than the compiler."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import OPS

TESTS = Path(__file__).resolve().parents[2]
WITHOUT_KERNELS = {  # made of kernels of torch and of other ops
    "best_pages", "keep_heaviest", "keep_prompt_pages", "mark_outliers", "prompt_attention", "share_prompt",
    "snap_tokens", "table_prompt",
}  # fmt: skip


def has_compiler() -> bool:
    """Asked in a process of its own: here Triton may be in interpreter mode for good."""
    ask = "from triton.backends import backends; import sys; sys.exit('nvidia' not in backends)"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, env=environment()).returncode == 0


def environment() -> dict:
    """Ours without the interpreter; the checkout first on the path, whatever is installed."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(TESTS / "support"), str(TESTS / "tools")])}


@pytest.mark.skipif(not has_compiler(), reason="this Triton comes without its CUDA backend")
def test_kernels_compile_for_sm_90(tmp_path):
    """A sixth of the ops, as `make fuzz` has all. The cache is empty, so that every kernel has to compile."""
    some = sorted(OPS)[3::6]
    done = subprocess.run(
        [sys.executable, str(TESTS / "tools/compile_kernels.py"), *some], capture_output=True, text=True, timeout=600,
        env={**environment(), "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {name: names for name, *names in map(str.split, done.stdout.splitlines())}
    assert set(kernels) == set(some)
    assert {name for name, names in kernels.items() if not names} == WITHOUT_KERNELS & {*some}
    whole = sum(f.stat().st_size > 0 for f in tmp_path.rglob("*.cubin"))
    assert whole >= len(set().union(*kernels.values())), "a kernel was not compiled to machine code"


@pytest.mark.skipif(not has_compiler(), reason="this Triton comes without its CUDA backend")
def test_prompt_and_step_share_compiled_kernels():
    """Triton makes a constant of a number that is 1, and compiles anew: half a second before the first token."""
    command = [sys.executable, str(TESTS / "support/shared_kernels.py"), "quest", "pariskv", "prkv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
