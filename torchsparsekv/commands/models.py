"""`torchsparsekv models`: which models can be patched, what their layers run, and which are refused."""
import typer

from torchsparsekv.api import model_table
from torchsparsekv.commands import app


@app.command()
def models() -> None:
    """List the types of models that are supported, and those that are refused, as Markdown."""
    typer.echo(model_table(), nl=False)
