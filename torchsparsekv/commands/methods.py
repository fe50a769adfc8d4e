"""`torchsparsekv methods`: list the methods with their hyper-parameters."""
from inspect import getdoc, getmodule

import typer

from torchsparsekv.commands import app
from torchsparsekv.method import all_methods, hyper_parameters

NAMES = typer.Argument(None, help="Methods to list. Default: all.")


@app.command()
def methods(names: list[str] | None = NAMES) -> None:
    """List the methods, with type, default and meaning of each hyper-parameter."""
    known = all_methods()
    if unknown := [name for name in names or () if name not in known]:
        typer.echo(f"methods: unknown method {', '.join(unknown)}; available: {', '.join(known)}", err=True)
        raise typer.Exit(2)
    for name, cls in known.items():
        if names and name not in names:
            continue
        about = (getdoc(getmodule(cls)) or "").splitlines()[0]
        rows = [(n, h.type_name, repr(h.default), h.meaning) for n, h in hyper_parameters(cls).items()]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ("  ".join([*(x.ljust(w) for x, w in zip(row, widths)), row[3]]) for row in rows)
        typer.echo("\n".join([f"{name}: {about}", *(f"    {line.rstrip()}" for line in lines), ""]))
