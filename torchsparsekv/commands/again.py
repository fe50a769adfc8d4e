"""`torchsparsekv again`: repeat the commands that made result files."""
import signal
from pathlib import Path

import typer

from torchsparsekv.commands import app
from torchsparsekv.commands._options import TOLD
from torchsparsekv_benchmarks.report.again import run

NAMES = typer.Argument(None, help="Patterns of file names in the folder, such as 'h200_decode*'. Default: all files.")
RESULTS = typer.Option(Path("benchmarks/results"), help="The folder of result files.")
DRY_RUN = typer.Option(
    False, "--dry-run",
    help="Only print what would happen to each file: run, go on (after a stop), place (copy the new file) or leave.",
)  # fmt: skip
FRESH = typer.Option(False, "--fresh", help="Start afresh, even if an earlier call was stopped or failed.")


@app.command()
def again(names: list[str] = NAMES, results: Path = RESULTS, dry_run: bool = DRY_RUN, fresh: bool = FRESH) -> None:
    """Repeat the commands that made result files. Each run replaces its file.

    A file that was measured on a GPU needs a GPU of the same name. A file that was measured on a CPU runs on any CPU.
    Three kinds of files are left alone, with the reason: files that need another GPU, files with means over other
    files, and files that a script made.

    Exit status: 1 if a run failed or no file can be made here, 2 if something is refused before the first run, 130 if
    stopped. After 1 or 130, call the same command to go on with the rest.
    """
    had = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so SIGTERM stops the running command too
    try:
        good = run(results, names or (), dry_run=dry_run, fresh=fresh)
    except TOLD as e:
        typer.echo(f"again: {e}", err=True)
        raise typer.Exit(2) from e
    except KeyboardInterrupt as e:
        typer.echo("again: stopped; call the same command to go on", err=True)
        raise typer.Exit(130) from e
    finally:
        signal.signal(signal.SIGTERM, had)
    if not good:
        raise typer.Exit(1)
