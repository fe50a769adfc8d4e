"""`torchsparsekv report`: make one page of figures from result files."""
from pathlib import Path

import typer

from torchsparsekv.commands import app
from torchsparsekv.commands._options import TOLD
from torchsparsekv_benchmarks.report.make import make

RESULTS = typer.Argument(..., help="Result files of `board`, `eval`, `eval-text` and `bench`.")
OUT = typer.Option(Path("report.html"), "--out", "-o", help="The HTML page. Its figures stand beside it as PNG.")


@app.command()
def report(results: list[Path] = RESULTS, out: Path = OUT) -> None:
    """Make one page of figures: answers, needles, KL, time per token, throughput, memory and the stages of a step."""
    try:
        written = make(results, out)
    except TOLD as e:
        typer.echo(f"report: {e}", err=True)
        raise typer.Exit(2) from e
    for path in written:
        typer.echo(path)
