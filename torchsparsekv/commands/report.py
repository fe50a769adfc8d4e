"""`torchsparsekv report`: one page of figures from files of results."""
from pathlib import Path

import typer

from torchsparsekv.commands import app
from torchsparsekv.commands._options import TOLD
from torchsparsekv_benchmarks.report.make import make

RESULTS = typer.Argument(..., help="Files of `eval`, `eval-text` and `bench`.")
OUT = typer.Option(Path("report.html"), "--out", "-o", help="The page; its figures go beside it as PNG.")


@app.command()
def report(results: list[Path] = RESULTS, out: Path = OUT) -> None:
    """Accuracy, needles, KL, time per token, throughput, memory and stages of a step on one page."""
    try:
        written = make(results, out)
    except TOLD as e:
        typer.echo(f"report: {e}", err=True)
        raise typer.Exit(2) from e
    for path in written:
        typer.echo(path)
