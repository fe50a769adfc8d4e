"""Run the commands in the heads of the committed result files again, one after the other, and replace the files.

A command runs in a folder of its own under `.again`, beside the files. Its `--out` is relative, so the new file lies in
that folder, and its head has the same command. It replaces the old file when all commands of the file have succeeded.
Finished and begun files wait in `.again` until the whole selection is done. After a stop or a failed run, the same call
goes on with the rest. `eval`, `bench patterns` and `bench shapes` also go on within a file.

A file that was measured on a GPU needs a GPU of the same name. The other files contain no times, so any CPU will do.
Their commands get the number of threads in the head, and do not see a GPU. A file of means (condense.py) is left alone:
its sources name the commands of the raw files.
"""
import contextlib
import fnmatch
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torchsparsekv
from torchsparsekv_benchmarks.report.load import load, means_of

PACKAGE = Path(torchsparsekv.__file__).resolve().parent
COMMANDS = ("eval", "eval-text", "bench", "selecting-layers")
WORK = ".again"  # the folder of what is in the making


@dataclass(frozen=True)
class File:
    """A file of results and what makes it; the name is its path in the folder of results."""

    name: str
    path: Path
    commands: tuple[str, ...]
    environment: dict[str, Any]
    means: int = 0  # number of raw files that the means are of; 0: the file is what its command wrote

    @property
    def by_hand(self) -> str | None:
        """Why its command is left to a person, if it is."""
        if self.commands[0].startswith("python benchmarks/research/"):
            return "made by a script"
        return "needs a running server" if self.commands[0].startswith("torchsparsekv eval-server ") else None

    @property
    def out(self) -> Path:
        """What the commands call it."""
        return out_of(self.commands[0])

    def obstacle(self, gpu: str | None) -> str | None:
        """Why it cannot be made where that is the GPU."""
        if self.means:
            return f"means of {self.means} raw files, whose commands it holds"
        if self.by_hand:
            return f"{self.by_hand}: {self.commands[0]}"
        wanted = self.environment.get("gpu")
        return f"needs {wanted}, this machine has {gpu or 'no GPU'}" if wanted not in (None, gpu) else None

    def surroundings(self) -> dict[str, str]:
        """The environment variables of its commands."""
        paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        out = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, [str(PACKAGE.parent), *paths]))}
        if "gpu" not in self.environment:
            out |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(self.environment["threads"])}
        return out


TORCHRUN = ("torchrun", "--nproc-per-node", "-m", "torchsparsekv.cli")  # with how many ranks in the middle


def argv(command: str) -> list[str]:
    """A command as this Python starts it; what is not this package's measuring is refused."""
    words = shlex.split(command)
    if len(words) > 1 and words[0] == "torchsparsekv" and words[1] in COMMANDS:
        return [sys.executable, "-m", "torchsparsekv.cli", *words[1:]]
    if len(words) > 5 and (words[0], words[1], *words[3:5]) == TORCHRUN and words[5] in COMMANDS:
        return [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    raise ValueError(f"only {', '.join(f'torchsparsekv {c}' for c in COMMANDS)} can run again, got {command!r}")


def out_of(command: str) -> Path:
    words = shlex.split(command)
    if "--out" not in words[:-1]:
        raise ValueError(f"a command must have --out FILE, got {command!r}")
    return Path(words[words.index("--out") + 1])


def read(path: Path, results: Path) -> File:
    if sources := means_of(path):
        return File(path.relative_to(results).as_posix(), path, (), {}, len(sources))
    (result,) = load([path])
    file = File(path.relative_to(results).as_posix(), path, result.commands, result.environment)
    if file.by_hand:
        return file
    try:
        for command in file.commands:
            argv(command)
            out = out_of(command)
            if out.name != path.name or out.is_absolute() or ".." in out.parts or out != file.out:
                raise ValueError(f"--out must be one relative path to {path.name}, got {out} in {command!r}")
        if not {"gpu", "threads"} & set(file.environment):
            raise ValueError("its environment names neither a GPU nor the threads of a CPU")
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return file


def find(results: Path, patterns: Sequence[str] = ()) -> list[File]:
    """The files of a folder and those below it whose names match a pattern, `*` also across folders."""
    if not results.is_dir():
        raise ValueError(f"there is no folder {results} of results; --results sets the folder")
    every = {p.relative_to(results): p for kind in ("json", "jsonl") for p in results.rglob(f"*.{kind}")}
    found = {name.as_posix(): p for name, p in every.items() if WORK not in name.parts}
    unknown = [x for x in patterns if not fnmatch.filter(found, x)]
    if not found or unknown:
        what = f" matches {' or '.join(unknown)}; --dry-run lists them" if found else "; --results sets the folder"
        raise ValueError(f"no file of results in {results}{what}")
    wanted = {n for x in patterns for n in fnmatch.filter(found, x)} if patterns else set(found)
    return [read(found[n], results) for n in sorted(wanted)]


class Work:
    """One file in the making: the folder its commands run in, and how many of them have ended there."""

    def __init__(self, file: File, results: Path):
        self.file = file
        self.folder = results / WORK / file.name
        self.note = self.folder / "ended.json"

    @property
    def state(self) -> str:
        """What is to be done, in a word or two."""
        return "run" if self.ended is None else "go on" if self.ended < len(self.file.commands) else "place"

    @property
    def ended(self) -> int | None:
        """None where nothing was begun, or with other commands."""
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(self.note.read_text())
            return told["ended"] if told["commands"] == list(self.file.commands) else None
        return None

    def clear(self) -> None:
        """Away with the folder, and with those around it that held nothing else."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.removedirs(self.folder.parent)

    def run(self) -> None:
        """Go on with it, to the end; raises where a command fails, the old file then being as it was."""
        if self.ended is None:
            self.clear()
            self.folder.mkdir(parents=True)
            self._tell(0)
        for i in range(self.ended or 0, len(self.file.commands)):
            command = self.file.commands[i]
            done = subprocess.run(argv(command), cwd=self.folder, env=self.file.surroundings())
            if done.returncode:
                raise RuntimeError(f"exit status {done.returncode} of `{command}`")
            self._tell(i + 1)
        self._place()

    def _tell(self, ended: int) -> None:
        self.note.write_text(json.dumps({"commands": self.file.commands, "ended": ended}))

    def _place(self) -> None:
        """A copy, so that a call that goes on finds it, whatever has become of the file since."""
        (made,) = load([self.folder / self.file.out])
        if made.commands != self.file.commands:
            raise ValueError(f"the new file names the commands {made.commands}, the old file {self.file.commands}")
        part = self.file.path.with_name(f"{self.file.path.name}.part")
        shutil.copyfile(made.path, part)
        part.replace(self.file.path)


def gpu() -> str | None:
    """The name of this machine's. Another process asks: this one lives on while others measure the GPU's memory."""
    if not torch.cuda.is_available():
        return None
    ask = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()


def make(works: Sequence[Work]) -> dict[str, str]:
    """What failed, and why. Where nothing did, no traces are left."""
    failed = {}
    for i, w in enumerate(works, 1):
        print(f"[{i}/{len(works)}] {w.state} {w.file.name}: {'; '.join(w.file.commands)}", flush=True)
        try:
            w.run()
        except (RuntimeError, ValueError, OSError) as e:
            failed[w.file.name] = f"{e}; the next call goes on there, --fresh starts afresh"
    if not failed:
        for w in works:
            w.clear()
    return failed


def run(results: Path, patterns: Sequence[str] = (), *, dry_run: bool = False, fresh: bool = False) -> bool:
    """Whether there was something to make again that this machine can make, and all of it was made."""
    files, here = find(results, patterns), gpu()
    left = {f.name: why for f in files if (why := f.obstacle(here))}
    works = [Work(f, results) for f in files if f.name not in left]
    if dry_run:
        states = {w.file.name: "run" if fresh else w.state for w in works}
        for f in files:
            print(f"{states.get(f.name, 'leave'):<6}{f.name}: {left.get(f.name) or '; '.join(f.commands)}")
        return bool(works)
    for w in works if fresh else ():
        w.clear()
    failed = make(works)
    lines = [f"left alone: {name}: {why}" for name, why in left.items()]
    lines += [f"FAILED: {name}: {why}" for name, why in failed.items()]
    print(*lines, f"{len(works) - len(failed)} of {len(files)} made again", sep="\n")
    return bool(works) and not failed
