"""The command line, as a user starts it."""
import re
import sys

import pytest
from cli import answered, cli, commands_of, refused
from paths import ROOT

from torchsparsekv import methods
from torchsparsekv.cli import main

pytest.importorskip("typer")


def test_methods_are_listed():
    done = cli("methods")
    assert done.returncode == 0, done.stderr
    for name, hyper in methods().items():
        assert f"\n{name}: " in f"\n{done.stdout}"
        for field, h in hyper.items():
            words = (field, h.type_name, repr(h.default), h.meaning)
            assert re.search("^    " + " +".join(map(re.escape, words)) + "$", done.stdout, re.MULTILINE)


def test_named_methods_are_listed_alone():
    said = answered("methods", "quest")
    assert [line for line in said.splitlines() if line and not line.startswith(" ")] == [said.splitlines()[0]]
    assert said.startswith("quest: ")
    assert "unknown method qest; available: arkvale, " in refused("methods", "qest")


WHAT_CAME = """
heavy = ('transformers', 'matplotlib', 'torchsparsekv.patches')
parts = [(m.split('.'), m) for m in sys.modules]
ours = [m for p, m in parts if p[:2] == ['torchsparsekv', 'commands'] and p[2:]]
ours += [m for p, m in parts if p[0] == 'torchsparsekv_benchmarks' and p[1:]]
print(*sorted(m[14:] for m in ours if '._' not in m), *(m for m in heavy if m in sys.modules))
"""
# What a command line imports of commands and benchmarks, helpers apart.
CALLS = {
    "methods": ["commands.methods"], "--help": [], "bench --help": ["benchmarks.speed", "commands.bench"],
    "again --help": [
        "benchmarks.quality", "benchmarks.quality.store", "benchmarks.report", "benchmarks.report.again",
        "benchmarks.report.load", "commands.again",
    ],
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_only_the_called_command_is_imported(call):
    """Of what takes long, nothing that is not needed: neither transformers nor the other commands' benchmarks."""
    leave = f"import atexit, sys; atexit.register(exec, {WHAT_CAME!r}, {{'sys': sys}}); "
    done = cli(*call.split(), before=leave)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == CALLS[call]


def test_every_file_defines_the_command_of_its_name():
    from torchsparsekv.commands import bench, load

    names = (
        "again", "bench", "board", "calibrate", "demo", "eval", "eval-server", "eval-text", "info", "methods", "models",
        "plan", "record", "report", "selecting-layers",
    )  # fmt: skip
    speed = (
        "clusters", "decode", "first-call", "generate", "host-loop", "kernels", "parallel", "patterns", "prefill",
        "serve", "shapes", "throughput",
    )  # fmt: skip
    for app, load_one, wanted in ((load(), load, names), (bench.bench, bench.load, speed)):
        assert tuple(name for name, command in commands_of(app).items() if not command.hidden) == wanted
        for name in wanted:
            command = commands_of(load_one(name))[name]
            assert command.name == name
            assert command.help
            assert type(command).__name__ != "Later"


def test_help_of_a_command_is_the_first_paragraph_of_its_file():
    from torchsparsekv.commands._later import about

    assert about(ROOT / "torchsparsekv/commands/methods.py") == "List the methods with their hyper-parameters."
    assert about(ROOT / "benchmarks/speed/prefill.py").startswith("Time to the first token: ")


WRONG = [
    ["methods", "--nope"], ["nope"], ["demo", "--budget", "33"], ["demo", "--questions", "x"], ["bench", "nope"],
    ["bench", "decode", "--nope", "3"], ["bench", "decode", "--methods", "nope"], ["bench", "kernels", "--tokens", "x"],
]  # fmt: skip


@pytest.mark.parametrize("args", WRONG)
def test_wrong_arguments_exit_with_2(args, monkeypatch, capsys):
    """What the entry point does, without the seconds of a process each."""
    monkeypatch.setattr(sys, "argv", ["torchsparsekv", *args])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_wrong_arguments_exit_with_2_in_a_process():
    done = cli("bench", "decode", "--methods", "nope")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


NOT_INSTALLED = """
import sys
class Absent:
    def find_spec(name, *_):
        if name == "torchsparsekv_benchmarks":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Absent)
"""


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_a_command_without_the_benchmarks_says_what_to_install(command):
    done = cli(command, before=NOT_INSTALLED)
    assert done.returncode == 2
    needed = "needs torchsparsekv_benchmarks: `pip install ./benchmarks` in a checkout"
    assert (done.stdout, done.stderr) == ("", f"torchsparsekv {command} {needed}\n")


def test_missing_typer_is_reported():
    done = cli("methods", before="import sys; sys.modules['typer'] = None; ")
    assert done.returncode == 2
    assert done.stderr == "the command line needs typer: pip install 'torchsparsekv[cli]'\n"
