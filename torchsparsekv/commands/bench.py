"""`torchsparsekv bench NAME`: the benchmarks, each with the fields of its Options as command-line options."""
import dataclasses
import importlib
import inspect
import pkgutil
import typing
from pathlib import Path

import typer

from torchsparsekv import benchmarks
from torchsparsekv.commands import app

bench = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Measure; needs a CUDA device.")
app.add_typer(bench, name="bench")


def _parse(hint: object, given):
    """Tuples are given as comma-separated text, everything else as typer knows it."""
    if typing.get_origin(hint) is not tuple:
        return given
    kind = typing.get_args(hint)[0]
    return tuple(kind(x) for x in given.split(",") if x)


def _option(field: dataclasses.Field, hint: object) -> inspect.Parameter:
    many = typing.get_origin(hint) is tuple
    default = ",".join(map(str, field.default)) if many else field.default  # type: ignore[arg-type]
    kind = str if many or typing.get_origin(hint) is typing.Literal else hint
    option = typer.Option(default, help="comma-separated" if many else "")
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def _add(name: str) -> None:
    module = importlib.import_module(f"{benchmarks.__name__}.{name}")
    hints = typing.get_type_hints(module.Options)

    def run(**given) -> None:
        out = given.pop("out")
        try:
            module.run(module.Options(**{k: _parse(hints[k], v) for k, v in given.items()}), out)
        except (ValueError, TypeError, RuntimeError, MemoryError, NotImplementedError) as e:
            typer.echo(f"bench {name}: {e}", err=True)
            raise typer.Exit(2) from e

    out = typer.Option(None, help="Write rows, options, versions and the command here, as JSON.")
    signature = [_option(f, hints[f.name]) for f in dataclasses.fields(module.Options)]
    signature.append(inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=out, annotation=Path))
    run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    bench.command(name, help=inspect.getdoc(module))(run)


for found in pkgutil.iter_modules(benchmarks.__path__):
    if hasattr(importlib.import_module(f"{benchmarks.__name__}.{found.name}"), "Options"):
        _add(found.name)
