"""`torchsparsekv models`: list the model types that are supported, and those that are refused."""
import typer

from torchsparsekv.api import model_table
from torchsparsekv.commands import app


@app.command()
def models() -> None:
    """List the model types that are supported, and those that are refused, as Markdown."""
    typer.echo(model_table(), nl=False)
