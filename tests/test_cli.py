"""The command line, as a user starts it."""
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

ROOT = Path(__file__).resolve().parents[1]
MAIN = "import sys; from torchsparsekv.cli import main; sys.argv[0] = 'torchsparsekv'; main()"


def cli(*args: str, before: str = "") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", before + MAIN, *args], cwd=ROOT, capture_output=True, text=True)


def refused(*args: str) -> str:
    """What the command says as it exits with 2; in this process, which is faster."""
    from typer.testing import CliRunner

    from torchsparsekv.commands import load

    done = CliRunner().invoke(load(), args)
    assert done.exit_code == 2, (done.output, done.exception)
    return done.output


def test_methods_are_listed():
    done = cli("methods")
    assert done.returncode == 0, done.stderr
    for word in ("quest", "streaming", "block_size=32", "budget=1024"):
        assert word in done.stdout


WRONG = [
    ["methods", "--nope"], ["nope"], ["demo", "--budget", "33"], ["demo", "--questions", "x"], ["bench", "nope"],
    ["bench", "decode", "--nope", "3"], ["bench", "decode", "--methods", "nope"], ["bench", "kernels", "--tokens", "x"],
]  # fmt: skip


@pytest.mark.parametrize("args", WRONG)
def test_wrong_use_exits_with_2(args):
    done = cli(*args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_without_typer_it_says_so():
    done = cli("methods", before="import sys; sys.modules['typer'] = None; ")
    assert done.returncode == 2
    assert done.stderr == "the command line needs typer: pip install 'torchsparsekv[cli]'\n"
