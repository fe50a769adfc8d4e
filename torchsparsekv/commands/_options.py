"""A command from a dataclass of options. Each field has its default and its line of help."""
import dataclasses
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

# Errors of the user, shown in one line. Any other error is a bug and shows its traceback.
TOLD = (ValueError, TypeError, RuntimeError, MemoryError, NotImplementedError, OSError)
# The help of options that many commands have. A field may have its own.
USUAL = {
    "budget": "Tokens retrieved per kv head and step, beside sink and window.",
    "sink": "First tokens, always attended to.",
    "window": "Latest tokens, always attended to.",
    "skip_layers": "First layers, which are dense.",
    "offload": "Where the pool lives: auto, host or device.",
    "pool_dtype": "Type of the pool: int8, or auto for the type of the model.",
    "hyper": "Hyper-parameters, comma-separated METHOD.NAME=VALUE.",
    "shape": "Shape of the model, which has random weights.",
    "context": "Tokens in the cache.",
    "contexts": "Tokens in the cache, comma-separated.",
    "prompts": "Tokens of a prompt, comma-separated.",
    "batches": "Rows of the batch, comma-separated.",
    "method": "The method.",
    "methods": "Methods, comma-separated.",
    "q_heads": "Query heads of a layer.",
    "kv_heads": "Key-value heads of a layer.",
    "head_dim": "Channels of a key.",
    "layers": "Layers of the model.",
    "locality": "Share of steps at which a synthetic query stays on its topic.",
    "steps": "Timed steps of a run.",
    "hf_static": "Also time transformers' static cache, up to 131072 tokens.",
    "repeats": "Timed runs; the result is their median.",
    "tokens": "Tokens by which the long answer is longer than the short answer.",
}


def parsed(name: str, hint: object, given):
    """Tuples come as comma-separated text. typer parses all other types."""
    if typing.get_origin(hint) is typing.Literal and given not in typing.get_args(hint):
        raise ValueError(f"{name} must be one of {', '.join(typing.get_args(hint))}, got {given!r}")
    if typing.get_origin(hint) is not tuple:
        return given
    kind = typing.get_args(hint)[0]
    try:
        return tuple(kind(x) for x in given.split(",") if x)
    except ValueError as e:
        raise ValueError(f"{name} takes {kind.__name__} values with commas between them, got {given!r}") from e


def made(options: type, given: dict[str, Any]) -> Any:
    """The options object of a command line."""
    hints = typing.get_type_hints(options)
    return options(**{k: parsed(k, hints[k], v) for k, v in given.items()})


def _option(field: dataclasses.Field, hint: object) -> inspect.Parameter:
    many = typing.get_origin(hint) is tuple
    default = ",".join(map(str, field.default)) if many else field.default  # type: ignore[arg-type]
    kind = str if many or typing.get_origin(hint) is typing.Literal else hint
    option = typer.Option(default, help=field.metadata.get("help", USUAL.get(field.name, "")))
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def add(app: typer.Typer, name: str, options: type, run: Callable, about: str | None, out: Path | None, out_help: str):
    """Register `run(options(...), out)` as a command. An error of the user prints one line and exits with 2."""
    hints = typing.get_type_hints(options)

    def command(**given) -> None:
        path = given.pop("out")
        try:
            run(made(options, given), path)
        except TOLD as e:
            typer.echo(f"{name}: {e}", err=True)
            raise typer.Exit(2) from e

    signature = [_option(f, hints[f.name]) for f in dataclasses.fields(options)]
    last = typer.Option(out, help=out_help)
    signature.append(inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=last, annotation=Path))
    command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    app.command(name, help=about)(command)
