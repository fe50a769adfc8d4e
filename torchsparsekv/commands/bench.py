"""`torchsparsekv bench NAME`: measure time and throughput. All but host-loop need a CUDA device."""
import functools
import importlib
import inspect
from pathlib import Path

import typer

from torchsparsekv.commands import app
from torchsparsekv.commands._later import about, later
from torchsparsekv.commands._options import add
from torchsparsekv_benchmarks import speed

OUT = "File for the result: rows of the table, options, versions and the command, as JSON."


@functools.cache
def load(name: str) -> typer.Typer:
    """The application of benchmarks, with the command of one benchmark registered."""
    module = importlib.import_module(f"{speed.__name__}.{name.replace('-', '_')}")
    add(bench, name, module.Options, module.run, inspect.getdoc(module), None, OUT)
    return bench


bench = typer.Typer(
    cls=later(speed.__path__[0], load), no_args_is_help=True, pretty_exceptions_enable=False,
    help=about(Path(__file__)),
)  # fmt: skip
app.add_typer(bench, name="bench")
