"""`torchsparsekv again`: run the commands in the heads of result files again."""
import signal
from pathlib import Path

import typer

from torchsparsekv.commands import app
from torchsparsekv.commands._options import TOLD
from torchsparsekv_benchmarks.report.again import run

NAMES = typer.Argument(None, help="Patterns of file names in the folder, such as 'h200_decode*'. Default: all files.")
RESULTS = typer.Option(Path("benchmarks/results"), help="The folder of result files.")
DRY_RUN = typer.Option(False, "--dry-run", help="Print what would happen to each file, and run nothing.")
FRESH = typer.Option(False, "--fresh", help="Start afresh, even if an earlier call was stopped or failed.")


@app.command()
def again(names: list[str] = NAMES, results: Path = RESULTS, dry_run: bool = DRY_RUN, fresh: bool = FRESH) -> None:
    """Run the commands in the heads of result files again. Each run replaces its file.

    A file that was measured on a GPU needs a GPU of the same name; without one the file is left alone. All other files
    run on any CPU.

    Exit status: 1 if a run failed or none was possible, 2 if something is refused before the first run, 130 if stopped.
    After 1 and 130 the same command continues.
    """
    had = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the run it waits for is stopped too
    try:
        good = run(results, names or (), dry_run=dry_run, fresh=fresh)
    except TOLD as e:
        typer.echo(f"again: {e}", err=True)
        raise typer.Exit(2) from e
    except KeyboardInterrupt as e:
        typer.echo("again: stopped; the same command goes on here", err=True)
        raise typer.Exit(130) from e
    finally:
        signal.signal(signal.SIGTERM, had)
    if not good:
        raise typer.Exit(1)
