"""`torchsparsekv plan`: print the memory of a cache by buffer, before it exists.

Nothing is allocated. The model is made of its config alone, without weights.
"""
import json
from typing import Any

import torch
import typer

from torchsparsekv.commands import app
from torchsparsekv.commands._models import check_name
from torchsparsekv.commands._options import TOLD
from torchsparsekv.method import as_int, make_method, renamed

LONG = 32768
MODEL = typer.Argument(..., help="Name or folder of a Hugging Face model; its config is enough.")
METHOD = typer.Option("pariskv", help="One of `torchsparsekv methods`.")
TOKENS = typer.Option(
    None, "--max-length",
    help=f"Tokens of a row, prompt and generation together. Default: {LONG}, or the model's positions if fewer.",
)  # fmt: skip
BATCH = typer.Option(1, min=1, help="Rows of the batch.")
OFFLOAD = typer.Option("auto", help="Where the pool lives: auto, host or device.")
HYPER = typer.Option([], "--set", help="A hyper-parameter, as NAME=VALUE. May be repeated.")
POOL = typer.Option(None, "--pool-dtype", help="int8 stores keys and values in 8 bits. Default: the model's type.")
HOT = typer.Option(None, "--hot-gib", help="GiB for the hot buffers of all layers. Default: hot_budgets decides.")
SKIP = typer.Option(None, "--skip-layers", help="First layers, which are dense. Default: 2.")


@app.command()
def plan(
    model: str = MODEL, method: str = METHOD, max_length: int | None = TOKENS, batch: int = BATCH,
    offload: str = OFFLOAD, hyper: list[str] = HYPER, skip_layers: int = SKIP, pool_dtype: str = POOL,
    hot_gib: float = HOT,
) -> None:  # fmt: skip
    """Print the memory of a cache by buffer, in host memory and on the device. Loads no weights."""
    try:
        found, said = planned(
            model, method, max_length, batch, offload, _parsed(hyper), skip_layers, pool_dtype, hot_gib
        )
    except TOLD as e:
        typer.echo(f"plan: {e}", err=True)
        raise typer.Exit(2) from e
    typer.echo(f"{said}\n{found}")


def planned(
    name: str, method: str, max_length: int | None, batch: int, offload: str, hyper: dict, skip_layers: int | None,
    pool_dtype: str | None, hot_gib: float | None,
):  # fmt: skip
    """The table, and a line on the method."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from torchsparsekv.patches._install import planned
    from torchsparsekv.patches._memory import check_hot_gib, hot_note, placed

    check_name(name)
    hyper = renamed(hyper)
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as e:
        why = str(e).strip().split("\n", 1)[0]
        raise ValueError(
            f"{name} is not a folder with a model, and the Hugging Face hub gave no model of this name: {why}"
        ) from e
    if max_length is None:
        max_length = min(LONG, getattr(config.get_text_config(decoder=True), "max_position_embeddings", LONG))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(config, "dtype", None) or torch.bfloat16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = make_method(method, **hyper)
    hot_gib = check_hot_gib(hot_gib, chosen, device)
    plan, length, _ = planned(
        model.eval(), chosen, hyper, device, max_length=max_length, offload=offload,
        skip_layers=skip_layers, layers=None, pool_dtype=pool_dtype,
    )  # fmt: skip
    said = f"{plan.method}, skip_layers={plan.skip_layers}, {str(model.dtype).removeprefix('torch.')}"
    place = placed(plan, offload, batch, as_int(length), hot_gib)
    where = f"offload {offload}: the pool on the {'host' if place.pool_on_host else 'device'}"
    lines = "; ".join([said, where, *plan.pool_said(), *plan.notes])
    if device.type == "cpu":
        lines += "\nNo GPU is here: on a GPU, offload and hot_budgets of 'auto' use up to half of its free memory."
    notes = hot_note(plan, place, batch, as_int(length), hot_gib)
    return plan.memory(batch, as_int(length), **place._asdict(), notes=notes), lines


PYTHON = {"True": True, "False": False, "None": None}  # as in calls of patch(); JSON writes true, false and null


def _parsed(texts: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ValueError(f"--set takes NAME=VALUE, got {text!r}")
        if name in out:
            raise ValueError(f"--set names {name} twice")
        try:
            out[name] = json.loads(value)
        except json.JSONDecodeError:
            out[name] = PYTHON.get(value, value)
    return out
