"""`torchsparsekv again`: the committed results made again, by the commands they hold."""
import signal
from pathlib import Path

import typer

from torchsparsekv.commands import app
from torchsparsekv.commands._options import TOLD
from torchsparsekv_benchmarks.report.again import run

NAMES = typer.Argument(None, help="Files to make again, as patterns of their paths in the folder; all unless given.")
RESULTS = typer.Option(Path("benchmarks/results"), help="The folder of results.")
DRY_RUN = typer.Option(False, "--dry-run", help="Only tell, a line per file, what would become of it.")
FRESH = typer.Option(False, "--fresh", help="Begin anew, not where an earlier call was stopped or failed.")


@app.command()
def again(names: list[str] = NAMES, results: Path = RESULTS, dry_run: bool = DRY_RUN, fresh: bool = FRESH) -> None:
    """Run the commands in the heads of files of results again, each into the place of its file.

    A file measured on a GPU needs one of that name and is left alone elsewhere; the others run on any CPU. Exits with 1
    if a run failed or none was possible, with 2 if something is refused before any is begun, with 130 if stopped. After
    1 and 130 the same command goes on with what is left.
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
