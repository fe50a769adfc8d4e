"""`torchsparsekv plan`: print the memory of a cache by buffer, before it exists.

Nothing is allocated. The model is made of its config alone, without weights.
"""
import json
import math
from typing import Any, NamedTuple

import torch
import typer

from torchsparsekv import host
from torchsparsekv.commands import app
from torchsparsekv.commands._models import check_name
from torchsparsekv.commands._options import TOLD
from torchsparsekv.method import as_int, make_method, renamed

LONG = 32768
SPARE_GIB = 2  # of GPU memory, for the activations of a step, its graph and the driver
MODEL = typer.Argument(..., help="Name or folder of a Hugging Face model; its config is enough.")
METHOD = typer.Option("pariskv", help="One of `torchsparsekv methods`.")
TOKENS = typer.Option(
    None, "--max-length",
    help=f"Tokens of a row, prompt and generation together. Default: {LONG}, or the model's positions if fewer.",
)  # fmt: skip
BATCH = typer.Option(None, min=1, help="Rows of the batch. Default: 1.")
OFFLOAD = typer.Option("auto", help="Where the pool lives: auto, host or device.")
HYPER = typer.Option([], "--set", help="A hyper-parameter, as NAME=VALUE. May be repeated.")
POOL = typer.Option(None, "--pool-dtype", help="int8 stores keys and values in 8 bits. Default: the model's type.")
HOT = typer.Option(None, "--hot-gib", help="GiB for the hot buffers of all layers. Default: hot_budgets decides.")
GPU = typer.Option(
    None, "--gpu-gib", help="GiB of GPU memory, for weights and cache. Plans the largest batch that fits, and says "
    "which hot_gib then fits.",
)  # fmt: skip
HOST = typer.Option(None, "--host-gib", help="With --gpu-gib: GiB of host memory for the pool. Default: what is free.")
SKIP = typer.Option(None, "--skip-layers", help="First layers, which are dense. Default: 2.")


@app.command()
def plan(
    model: str = MODEL, method: str = METHOD, max_length: int | None = TOKENS, batch: int | None = BATCH,
    offload: str = OFFLOAD, hyper: list[str] = HYPER, skip_layers: int = SKIP, pool_dtype: str = POOL,
    hot_gib: float = HOT, gpu_gib: float = GPU, host_gib: float = HOST,
) -> None:  # fmt: skip
    """Print the memory of a cache by buffer, in host memory and on the device. Loads no weights."""
    try:
        room = _room(batch, offload, hot_gib, gpu_gib, host_gib)
        found, said = planned(
            model, method, max_length, batch or 1, offload, _parsed(hyper), skip_layers, pool_dtype, hot_gib, room
        )
    except TOLD as e:
        typer.echo(f"plan: {e}", err=True)
        raise typer.Exit(2) from e
    typer.echo(f"{said}\n{found}")


class Room(NamedTuple):
    """GiB of memory of a machine; its largest batch is to be found."""

    gpu: float
    host: float


def _room(
    batch: int | None, offload: str, hot_gib: float | None, gpu_gib: float | None, host_gib: float | None
) -> Room | None:
    if gpu_gib is None:
        if host_gib is not None:
            raise ValueError("--host-gib is for --gpu-gib")
        return None
    for name, gib in (("--gpu-gib", gpu_gib), ("--host-gib", 1 if host_gib is None else host_gib)):
        if not 0 < gib < math.inf:
            raise ValueError(f"{name} must be finite, > 0, got {gib}")
    if batch is not None or hot_gib is not None:
        raise ValueError("--gpu-gib finds --batch and --hot-gib: leave these out")
    if offload not in ("host", "device"):
        raise ValueError(f"with --gpu-gib, --offload must be host or device, got {offload!r}")
    return Room(gpu_gib, host.available() / 2**30 if host_gib is None else host_gib)


def _largest(plan, length: int, on_host: bool, weights: int, room: Room) -> tuple[int, float | None, str]:
    """The largest batch, its hot_gib, and a line that says both."""
    from torchsparsekv.patches._memory import hot_room, largest_batch

    left = (room.gpu - SPARE_GIB) * 2**30 - weights
    batch = largest_batch(plan, length, on_host=on_host, device_bytes=left, host_bytes=room.host * 2**30)
    beside = f"beside {weights / 2**30:.1f} GiB of weights and {SPARE_GIB} GiB for a step"
    if batch < 1:
        memory = f"{room.gpu:g} GiB of GPU memory" + f" and {room.host:.4g} GiB of host memory" * on_host
        raise ValueError(f"not one sequence of {length} tokens fits in {memory}, {beside}")
    hot = hot_room(plan, batch, length, left) / 2**30 if on_host else 0
    digits = 1 if hot >= 0.1 else 4
    rounded = math.floor(hot * 10**digits) / 10**digits
    fill = f", with hot_gib up to {rounded:.{digits}f}" if rounded else ""
    said = f"largest batch: {batch} sequences of {length} tokens{fill}, {beside}; a prompt takes more in its forward"
    return batch, rounded or hot or None, said


def planned(
    name: str, method: str, max_length: int | None, batch: int, offload: str, hyper: dict, skip_layers: int | None,
    pool_dtype: str | None, hot_gib: float | None, room: Room | None = None,
):  # fmt: skip
    """The table, and a line on the method; with `room`, of the largest batch."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from torchsparsekv.patches._install import planned
    from torchsparsekv.patches._memory import check_hot_gib, hot_note, placed, weight_bytes

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
    more = ""
    if room is not None:
        batch, hot_gib, more = _largest(plan, as_int(length), offload == "host", weight_bytes(model), room)
    elif device.type == "cpu":
        more = "No GPU is here: on a GPU, offload and hot_budgets of 'auto' use up to half of its free memory."
    place = placed(plan, offload, batch, as_int(length), hot_gib)
    where = f"offload {offload}: the pool on the {'host' if place.pool_on_host else 'device'}"
    lines = "; ".join([said, where, *plan.pool_said(), *plan.notes]) + (f"\n{more}" if more else "")
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
