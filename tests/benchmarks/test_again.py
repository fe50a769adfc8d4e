"""Results are made again by the commands in their heads; whatever goes wrong, the old file stands."""
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from cli import refused
from paths import ROOT

from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks.quality.store import heads, read
from torchsparsekv_benchmarks.report import again

RESULTS = ROOT / "benchmarks/results"
GPU = {"gpu": "NVIDIA Z1"}
OLD = {"benchmark": "decode", "options": {}, "rows": [{"is": "old"}]}
# Stands in for a benchmark: argv is its code, then the command.
WRITE = f"""
import json, shlex, sys
words = shlex.split(sys.argv[1])
json.dump({OLD!r} | dict(command=sys.argv[1], environment=dict(threads=1), rows=[dict(new=1)]), open(words[-1], "w"))
"""
BREAK = WRITE + "sys.exit(3 if 'bad' in words[-1] else 0)"
BOAST = WRITE.replace("command=sys.argv[1]", "command='torchsparsekv bench decode --steps 9'")
SLEEP = "import os, time; open('pid.txt', 'w').write(str(os.getpid())); time.sleep(60)"


def put(folder, name: str, command: str = "torchsparsekv bench decode", environment=None) -> str:
    """An old file of results; what it says."""
    path, out = folder / name, "" if "--out" in command else f" --out {name.split('/')[-1]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = OLD | {"command": command + out, "environment": environment or {"cpu": "Z80", "threads": 1}}
    path.write_text(json.dumps(head))
    return path.read_text()


class Runs:
    """The commands that were run, by the name of their file, with another program in their place."""

    def __init__(self, monkeypatch, code: str):
        self.code, self.names, self.stop_at, self.run = code, [], None, subprocess.run
        argv = again.argv
        monkeypatch.setattr(again, "argv", lambda c: argv(c) and [sys.executable, "-S", "-c", self.code, c])
        monkeypatch.setattr(again.subprocess, "run", self)
        monkeypatch.setattr(again, "gpu", lambda: None)

    def __call__(self, words, **how):
        self.names.append(shlex.split(words[-1])[-1])
        self.env = how["env"]
        done = self.run(words, **how)
        if self.names[-1] == self.stop_at:
            raise KeyboardInterrupt
        return done


@pytest.fixture
def runs(monkeypatch) -> Runs:
    return Runs(monkeypatch, WRITE)


# ---------------------------------------------------------------- it makes them again


def test_files_are_made_again_by_what_their_heads_say(tmp_path):
    """By the real commands: `eval`, which adds to its file in a second run, and `bench`, on the threads they had."""
    one = "torchsparsekv eval --tasks single --lengths 256 --samples 1 --probe 0 --budgets 32 --out s.jsonl --methods "
    loop = "torchsparsekv bench host-loop --tokens 8 --out benchmarks/results/loop.json"
    commands, samples = [one + "streaming", one + "random"], tmp_path / "quality/s.jsonl"
    put(tmp_path, "loop.json", loop)
    old = {**OLD, "benchmark": "eval", "environment": {"threads": 1}, "model": {}}
    samples.parent.mkdir()
    samples.write_text("".join(json.dumps(x) + "\n" for x in [*({**old, "command": c} for c in commands), {"old": 1}]))
    assert again.run(tmp_path)
    rows, _ = read(samples)
    told = [r.get("method", r.get("command")) for r in rows]
    assert told == [commands[0], "dense", "streaming", commands[1], "random"]
    assert [(h["model"]["device"], h["environment"]["threads"]) for h in heads(rows)] == [("cpu", 1)] * 2
    made = json.loads((tmp_path / "loop.json").read_text())
    assert (made["command"], made["environment"]["threads"]) == (loop, 1)
    assert made["rows"][0].get("is") != "old"
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == [tmp_path / "loop.json", samples]
    assert not (tmp_path / again.WORK).exists()


def test_patterns_choose(tmp_path, runs):
    for name in ("a_1.json", "a_2.json", "b.json", "quality/tau/a.json"):
        put(tmp_path, name)
    assert again.run(tmp_path, ["a_*"])
    assert runs.names == ["a_1.json", "a_2.json"]
    assert [f.name for f in again.find(tmp_path, ["b*", "quality/*"])] == ["b.json", "quality/tau/a.json"]
    assert len(again.find(tmp_path)) == 4
    with pytest.raises(ValueError, match=r"matches c\* or other/\*; --dry-run lists them"):
        again.find(tmp_path, ["c*", "b*", "other/*"])


def test_means_are_left_alone(tmp_path, runs, capsys):
    (tmp_path / "means.json").write_text(json.dumps({"benchmark": "means", "sources": [{}, {}]}))
    assert not again.run(tmp_path)
    assert "left alone: means.json: means of 2 raw files, whose commands it holds" in capsys.readouterr().out
    assert not runs.names


def test_the_committed_files_are_each_told_once(capsys):
    before = sorted(RESULTS.rglob("*"))
    again.run(RESULTS, dry_run=True)
    told = [line.split(":")[0].split()[-1] for line in capsys.readouterr().out.splitlines()]
    files = [*RESULTS.rglob("*.json")]
    assert len(files) > 30
    assert sorted(told) == sorted(p.relative_to(RESULTS).as_posix() for p in files)
    assert sorted(RESULTS.rglob("*")) == before


# ---------------------------------------------------------------- or leaves them as they are


def test_what_needs_other_hardware_is_left_alone_and_named(tmp_path, runs, capsys, monkeypatch):
    old = put(tmp_path, "gpu.json", environment=GPU)
    assert not again.run(tmp_path), "nothing could be run"
    put(tmp_path, "cpu.json", environment={"cpu": "Z80", "threads": 3})
    assert again.run(tmp_path)
    assert runs.names == ["cpu.json"]
    assert (runs.env["CUDA_VISIBLE_DEVICES"], runs.env["OMP_NUM_THREADS"]) == ("", "3")
    assert "left alone: gpu.json: needs NVIDIA Z1, this machine has no GPU\n1 of 2 made" in capsys.readouterr().out
    assert (tmp_path / "gpu.json").read_text() == old
    for name, good in (("NVIDIA Z2", False), (GPU["gpu"], True)):
        monkeypatch.setattr(again, "gpu", lambda name=name: name)
        assert again.run(tmp_path, ["gpu*"]) == good
    assert runs.names == ["cpu.json", "gpu.json"]
    assert runs.env.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")


def test_a_run_that_fails_leaves_the_old_file_and_the_next_call_makes_only_that(tmp_path, runs, capsys):
    old = {name: put(tmp_path, name) for name in ("bad.json", "good.json")}
    runs.code = BREAK
    assert not again.run(tmp_path)
    assert (tmp_path / "bad.json").read_text() == old["bad.json"]
    assert "new" in (tmp_path / "good.json").read_text()
    assert "FAILED: bad.json: exit status 3 of `torchsparsekv bench decode --out bad.json`" in capsys.readouterr().out
    (tmp_path / "good.json").write_text(old["good.json"])  # as another copy of the checkout has it
    runs.code = WRITE
    assert again.run(tmp_path)
    assert runs.names == ["bad.json", "good.json", "bad.json"]
    assert all("new" in (tmp_path / name).read_text() for name in old)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(old)


@pytest.mark.parametrize("how", [{}, {"fresh": True}])
def test_a_call_that_was_stopped_goes_on_unless_told_not_to(tmp_path, runs, how, capsys):
    old = [put(tmp_path, f"{name}.json") for name in "abc"]
    runs.stop_at = "b.json"
    with pytest.raises(KeyboardInterrupt):
        again.run(tmp_path)
    assert [(tmp_path / f"{name}.json").read_text() == x for name, x in zip("abc", old)] == [False, True, True]
    assert again.run(tmp_path, dry_run=True, **how)
    told = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert told == (["run", "run", "run"] if how else ["place", "go", "run"])
    runs.stop_at = None
    assert again.run(tmp_path, **how)
    assert runs.names[2:] == (["a.json", "b.json", "c.json"] if how else ["b.json", "c.json"])


def test_what_other_commands_began_is_dropped(tmp_path, runs):
    put(tmp_path, "a.json")
    runs.stop_at = "a.json"
    for steps in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            again.run(tmp_path)
        (begun,) = (tmp_path / again.WORK).iterdir()
        (begun / "trace").touch(exist_ok=False)
        put(tmp_path, "a.json", f"torchsparsekv bench decode --steps {steps}")


def test_a_file_that_says_it_was_made_otherwise_is_not_taken(tmp_path, runs, capsys):
    old, runs.code = put(tmp_path, "a.json"), BOAST
    assert not again.run(tmp_path)
    assert (tmp_path / "a.json").read_text() == old
    assert "the new file names the commands ('torchsparsekv bench decode --steps 9',)" in capsys.readouterr().out


def test_the_run_ends_with_the_call(tmp_path, runs, capsys):
    """Terminated, as by a time limit: nothing goes on measuring behind the back of the next call."""
    from typer.testing import CliRunner

    from torchsparsekv.commands import load

    old, runs.code, pid = put(tmp_path, "a.json"), SLEEP, tmp_path / again.WORK / "a.json/pid.txt"

    def terminate():
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    had = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=terminate, daemon=True).start()
    done = CliRunner().invoke(load(), ["again", "--results", str(tmp_path)])
    assert done.exit_code == 130
    assert "stopped; call the same command to go on" in done.output
    with contextlib.suppress(ChildProcessError):  # its end was taken note of already
        assert os.waitpid(int(pid.read_text()), 0)[1] == signal.SIGKILL
    assert signal.getsignal(signal.SIGTERM) == had
    assert (tmp_path / "a.json").read_text() == old


ONLY = "eval, torchsparsekv eval-text, torchsparsekv bench, torchsparsekv selecting-layers can run again"
FOREIGN = {
    "rm -rf --out a.json": ONLY, "torchsparsekv again --out a.json": ONLY, "python other.py --out a.json": ONLY,
    "--out a.json": ONLY, "torchsparsekv --out a.json": ONLY, "torchsparsekv eval --out": "must have --out FILE",
    "torchsparsekv eval --out ../a.json": "--out must be one relative path to a.json, got ../a.json",
    "torchsparsekv eval --out /a.json": "must be one", "torchsparsekv bench decode --out b.json": "must be one",
}  # fmt: skip


@pytest.mark.parametrize("command", FOREIGN)
def test_foreign_commands_are_refused_before_anything_runs(tmp_path, runs, command):
    put(tmp_path, "0.json")
    old = put(tmp_path, "a.json", command)
    said = refused("again", "--results", str(tmp_path))
    assert f"again: {tmp_path / 'a.json'}: " in said
    assert FOREIGN[command] in said
    assert not runs.names
    assert (tmp_path / "a.json").read_text() == old


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    assert "not a file of results" in refused("again", "--results", str(tmp_path))
    put(tmp_path, "a.json", environment={"python": "3"})
    assert "neither a GPU nor the threads of a CPU" in refused("again", "--results", str(tmp_path))
    (tmp_path / "a.json").unlink()
    assert f"no file of results in {tmp_path}; --results sets" in refused("again", "--results", str(tmp_path))
    shutil.rmtree(tmp_path)
    assert f"there is no folder {tmp_path}" in refused("again", "--results", str(tmp_path))


@pytest.mark.gpu
def test_the_gpu_is_named_as_in_the_files():
    assert again.gpu() == _results.environment()["gpu"]
