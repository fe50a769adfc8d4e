"""The progress of long runs, on stderr: a bar on a terminal, or a line every few seconds in a log."""
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
SECONDS = 5.0  # between two lines of a log; what ends sooner says nothing


class Progress:
    """Counted by `step`; for `with`."""

    def __init__(self, total: int, unit: str):
        self.total, self.unit, self.done = total, unit, 0
        self.begin = self.said = time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, unit=unit)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.close()

    def step(self) -> None:
        self.done += 1
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update()
        elif now - self.said >= SECONDS:
            self.said = now
            line = f"{self.done} of {self.total} {self.unit}s in {now - self.begin:.0f} s"
            print(line, file=sys.stderr, flush=True)


def watched(items: Iterable[T], total: int, unit: str) -> Iterator[T]:
    """The items, each counted when the next is asked for: so what is done with it may be what takes long."""
    with Progress(total, unit) as progress:
        for item in items:
            yield item
            progress.step()


def now(what: str) -> None:
    """What is measured next, which may take minutes. Of several ranks the first says it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"... {what}", file=sys.stderr, flush=True)
