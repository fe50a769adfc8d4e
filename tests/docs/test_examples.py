"""Every example runs at a tiny size, as a user starts it."""
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CALLS = {
    "chat.py": (
        ["--words", "300", "--new-tokens", "4"], ["tokens read in", "> w001 w002", "> w003 w004", "cache memory"],
    ),
    "conversation.py": (
        ["--words", "300"],
        ["0 tokens of 0 stay, 302 are new", "309 tokens of 309 stay", "the same answer again: True"],
    ),
    "batch_scoring.py": ([], ["'w001 w002 w003 w004 w005' -> 'w006 w007'", "'w008 w009' -> 'w010'", "nats a token"]),
    "own_loop.py": (
        ["--words", "257", "--chunk", "128", "--new-tokens", "6", "--compiled", "0"], ["pariskv", "cache memory"],
    ),
    "compare_methods.py": (
        ["--words", "200", "--new-tokens", "3", "--methods", "streaming,quest,oracle"],
        ["200 tokens, budget 64", "streaming", "quest", "oracle"],
    ),
}  # fmt: skip


def test_every_example_is_run():
    assert sorted(CALLS) == sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "common.py")


def run(name: str, *args: str):
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture
def here(monkeypatch):
    """The same in this process, which has imported all of it."""

    def run(name: str, *args: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    monkeypatch.syspath_prepend(str(EXAMPLES))
    return run


def test_named_method_is_compared(here, capsys):
    here("compare_methods.py", "--words", "200", "--new-tokens", "3", "--method", "quest")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["quest"]


@pytest.mark.parametrize("given", ["--chunk must be at least 2, got 1: one", "--words must be at least 1, got 0:"])
def test_one_token_chunks_and_empty_texts_are_refused(given, here):
    with pytest.raises(SystemExit, match=given):
        here("own_loop.py", given.split()[0], given.split("got ")[1].split(":")[0])


@pytest.mark.parametrize("name", CALLS)
def test_example_runs(name):
    args, says = CALLS[name]
    done = run(name, *args)
    assert done.returncode == 0, done.stderr[-2000:]
    for part in says:
        assert part in done.stdout
    assert "!!" not in done.stdout, "a report warns"
