"""The command line, run in a process or in this one."""
import subprocess
import sys

from paths import ROOT

MAIN = "import sys; from torchsparsekv.cli import main; sys.argv[0] = 'torchsparsekv'; main()"


def cli(*args: str, before: str = "") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", before + MAIN, *args], cwd=ROOT, capture_output=True, text=True)


def answered(*args: str, status: int = 0) -> str:
    """What the command says; in this process, which is faster."""
    from typer.testing import CliRunner

    from torchsparsekv.commands import load

    done = CliRunner().invoke(load(), args)
    assert done.exit_code == status, (done.output, done.exception)
    return done.output


def refused(*args: str) -> str:
    """What it says as it exits with 2."""
    return answered(*args, status=2)


def commands_of(app) -> dict:
    from typer.main import get_group

    return get_group(app).commands
