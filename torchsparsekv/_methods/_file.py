"""A hyper-parameter that may be the path of a file of a command."""
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchsparsekv.method import Method


def read_file(method: Method, field: str, command: str, take: Callable[[Any], object]) -> None:
    """Replace the path of a file of `torchsparsekv COMMAND` by the value that `take` reads from the file."""
    path = getattr(method, field)
    if not isinstance(path, (str, Path)):
        return
    try:
        found = take(json.loads(Path(path).read_text()))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{method.name}: {path} is no file of `torchsparsekv {command}`: {e!r}") from e
    object.__setattr__(method, field, found)
