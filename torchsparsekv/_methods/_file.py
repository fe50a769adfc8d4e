"""Hyper-parameters that may be the path of a file which a command wrote."""
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchsparsekv.method import Method


def read_file(method: Method, field: str, command: str, take: Callable[[Any], object]) -> None:
    """Replace the path of a file that `torchsparsekv COMMAND` wrote by the value that `take` reads from the file."""
    path = getattr(method, field)
    if not isinstance(path, (str, Path)):
        return
    try:
        found = take(json.loads(Path(path).read_text()))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{method.name}: {path} is not a file of `torchsparsekv {command}`: {e!r}") from e
    object.__setattr__(method, field, found)


def read_layers(method: Method, field: str) -> None:
    """Check a hyper-parameter that names layers: None, or layers in ascending order.

    The path of a file that `torchsparsekv selecting-layers` wrote becomes the layers that select.
    """
    given, selecting = getattr(method, field), lambda rows: [r["layer"] for r in rows if r["follows"] is None]
    read_file(method, field, "selecting-layers", lambda file: selecting(file["rows"]))
    if (layers := getattr(method, field)) is None:
        return
    layers = tuple(layers) if isinstance(layers, (tuple, list)) else ()
    if not layers or any(type(i) is not int or i < 0 for i in layers) or list(layers) != sorted(set(layers)):
        raise ValueError(
            f"{method.name}: {field} must be layers in ascending order, or a file of `torchsparsekv selecting-layers`, "
            f"got {given!r}"
        )
    object.__setattr__(method, field, layers)
