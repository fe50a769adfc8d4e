"""`torchsparsekv methods`: what can be passed to patch()."""
from inspect import getdoc, getmodule

import typer

from torchsparsekv.commands import app
from torchsparsekv.method import all_methods, hyper_parameters


@app.command()
def methods() -> None:
    """List the methods with their hyper-parameters and defaults."""
    for name, cls in all_methods().items():
        about = (getdoc(getmodule(cls)) or "").splitlines()[0]
        hyper = ", ".join(f"{k}={v!r}" for k, v in hyper_parameters(cls).items())
        typer.echo(f"{name:<10} {about}\n{'':<10} {hyper}")
