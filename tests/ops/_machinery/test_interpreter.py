"""tests/support/interpreter.py: kernels give the same numbers as in Triton's interpreter as it comes."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from world import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels do not run in the interpreter here")


def attended() -> str:
    """The bits of two calls of a kernel that calls functions of two other modules."""
    from kernels import ENTRIES

    from torchsparsekv.ops.store.views import Attention, Lengths

    g = torch.Generator().manual_seed(0)
    q, pool = torch.randn(2, 4, 1, 32, generator=g), torch.randn(2, 2, 70, 2, 32, generator=g)
    length = torch.tensor([70, 41], dtype=torch.int32)
    lengths = Lengths(length - 1, length, length, length, 4, 1)
    call = lambda x: ENTRIES["dense_attention"].run("triton", x, pool, lengths, Attention(0.2))  # noqa: E731
    return " ".join(call(x).numpy().tobytes().hex() for x in (q, 2 * q))


def test_numbers_are_those_of_the_interpreter_as_it_comes():
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(here.parents[2] / "support"), str(here.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    code = "import test_interpreter; print(test_interpreter.attended())"
    plain = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert attended() == plain.stdout.strip()


def test_the_interpreter_saves_look_ups():
    """If Triton has other parts one day, conftest.py goes on without; then this test says so."""
    from triton.runtime import interpreter

    for name in ("_get_np_dtype", "_patch_builtin", "_patch_lang"):
        assert getattr(interpreter, name).__module__ == "interpreter", name
