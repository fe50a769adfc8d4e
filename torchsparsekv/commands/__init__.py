"""One file per command: import `app`, decorate a function with `@app.command()`. Files that start with `_` are helpers.

These are applications on top of the library. They may import anything, transformers too; only cli.py imports them.
"""
import importlib
import pkgutil

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Sparse KV-cache retrieval for Hugging Face models.",
)


def load() -> typer.Typer:
    """The application with every command in this folder."""
    for m in pkgutil.iter_modules(__path__):
        if not m.name.startswith("_"):
            importlib.import_module(f"{__name__}.{m.name}")
    return app
