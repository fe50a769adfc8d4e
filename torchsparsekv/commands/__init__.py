"""One file per command: import `app`, decorate a function with `@app.command()`. Files that start with `_` are helpers.

A command has the name of its file, which is imported when the command is called or asked for its own --help. The help
of the application has the first lines of the files instead, "`torchsparsekv NAME`: what it does".
Commands are applications on top of the library. They may import transformers. The library imports them in cli.py alone.
"""
import importlib

import typer

import torchsparsekv
from torchsparsekv.commands._later import later


def load(name: str = "") -> typer.Typer:
    """The application; with a name, after the file of that command has registered it there."""
    if name:
        importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    return app


RENAMED = {"choosers": "selecting_layers.py"}  # old names of commands, and their files
app = typer.Typer(
    cls=later(__path__[0], load, RENAMED), no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchsparsekv {torchsparsekv.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_say_version, help="Print the version."),
) -> None:
    """Sparse KV-cache retrieval for Hugging Face models."""
