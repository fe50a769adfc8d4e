"""`torchsparsekv bench NAME`: the benchmarks, each with the fields of its Options as command-line options."""
import importlib
import inspect
import pkgutil

import typer

from torchsparsekv import benchmarks
from torchsparsekv.commands import app
from torchsparsekv.commands._options import add

bench = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Measure; needs a CUDA device.")
app.add_typer(bench, name="bench")
OUT = "Write rows, options, versions and the command here, as JSON."

for found in pkgutil.iter_modules(benchmarks.__path__):
    module = importlib.import_module(f"{benchmarks.__name__}.{found.name}")
    if hasattr(module, "Options"):
        add(bench, found.name, module.Options, module.run, inspect.getdoc(module), None, OUT)
