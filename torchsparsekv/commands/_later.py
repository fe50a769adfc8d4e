"""Commands that are imported when they are called. So a list of commands imports none of them."""
import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

BENCHMARKS = "torchsparsekv_benchmarks"  # a distribution of its own, which comes with a checkout


def about(path: Path) -> str:
    """The first paragraph of a file's docstring, without the "`torchsparsekv NAME`: " of commands."""
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    text = re.sub("^`torchsparsekv [^`]*`: ", "", text)
    return text[:1].upper() + text[1:]


class Later(TyperCommand):
    """The command of a file, by its name (with "-" for "_") and a line of help; `load` adds it to an application.

    `old`: a name that the command had, which help does not list.
    """

    def __init__(self, path: Path, load: Callable[[str], typer.Typer], old: str = ""):
        self.today = path.stem.replace("_", "-")
        super().__init__(old or self.today, help=about(path), hidden=bool(old))
        self.load = load

    def real(self) -> Any:
        try:
            loaded = self.load(self.today)
        except ModuleNotFoundError as e:
            if e.name != BENCHMARKS:
                raise
            typer.echo(
                f"torchsparsekv {self.today} needs {BENCHMARKS}: `pip install ./benchmarks` in a checkout", err=True
            )
            raise typer.Exit(2) from None
        return typer.main.get_group(loaded).commands[self.today]

    def make_context(self, *given, **named) -> Any:
        """A group calls this first. The returned context has the real command, which answers all other questions."""
        if self.hidden:
            typer.echo(f"{self.name} is now {self.today}; the next release refuses {self.name}", err=True)
        return self.real().make_context(*given, **named)


def later(folder: str, load: Callable[[str], typer.Typer], renamed: dict[str, str] | None = None) -> type[TyperGroup]:
    """For typer.Typer(cls=...): a command for every file of a folder but those that start with `_`.

    `renamed`: old names of commands and their files.
    """

    class Folder(TyperGroup):
        def __init__(self, **given):
            super().__init__(**given)
            found = [Later(p, load) for p in Path(folder).glob("[!_]*.py")]
            found += [Later(Path(folder, file), load, old) for old, file in (renamed or {}).items()]
            here = {str(c.name): c for c in found}
            self.commands = dict(sorted({**here, **self.commands}.items()))

    return Folder
