"""What users call."""
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchsparsekv.method import (
    HyperParameter,
    Offload,
    PoolType,
    Step,
    all_methods,
    as_int,
    hyper_parameters,
    make_method,
    renamed,
)  # fmt: skip
from torchsparsekv.ops._machinery.chain import use_kernels

__all__ = ["methods", "patch", "use_kernels"]

if TYPE_CHECKING:
    from torchsparsekv.patches._handle import Handle


def patch(
    model,
    method: str = "pariskv",
    *,
    max_length: int | None = None,
    budget: int | None = None,
    sink: int | None = None,
    window: int | None = None,
    offload: Offload = "auto",
    pool_dtype: PoolType | None = None,
    skip_layers: int | None = None,
    layers: Mapping[int, str | Mapping] | None = None,
    step: Step = "auto",
    **hyper,
) -> "Handle":
    """Make this model instance decode with `method`, a name in `torchsparsekv.methods()`.

    max_length: capacity of a cache row, prompt and generation together. None: each cache is sized for the call that
        needs it (powers of two, up to the model's own limit).
    budget: tokens retrieved per kv head and decode step, beside the `sink` first and the `window` latest tokens.
        None, for each of the three: the method's default; a default budget above what a cache holds is lowered to it.
    offload: where the pool of all keys and values lives. "auto" keeps it in GPU memory if the cache takes at most half
        of what is free there.
    pool_dtype: "int8": keys and values stand in the pool in 8 bits, with an fp32 scale for every 64 channels; sinks,
        window and what was fetched stay in the model's type. A bit over half the memory of the pool and of what has to
        be read from it. None: the model's type.
    skip_layers: the first layers, which attend densely (their pool stays on the device). None: 2, but at least one
        layer is left to the method.
    layers: what single layers run instead, by index: the name of a method, or a dict of hyper-parameters of `method`
        (with "method", of that one), as in `layers={0: "full", 5: dict(budget=512)}`. What is given here wins over
        `skip_layers`. Where an entry does not name budget, sink or window, what was given to patch() holds; of its
        other hyper-parameters an entry has the given ones if its method is `method`, else the defaults.
    step: what generate() makes of a decode step on a GPU. "captured": a CUDA graph of the step as it is; the first call
        of a process takes about 10 seconds, or 3 where a process before left its caches. "compiled": a graph by
        torch.compile, which takes 53 or 14; such a step by itself takes three quarters of the time, through generate()
        about as long (quest, 32K, batch 1; docs/guide/own-loop.md). "auto": captured, but compiled where the model is not on one
        CUDA device, where something waits for the host or hooks of yours have to run, which a line says, and with a
        compile_config.
    hyper: other hyper-parameters of the method, by name. `torchsparsekv.methods()["quest"]` has those of quest, each
        with its type, default and meaning; the command `torchsparsekv methods` prints them all.
    """
    given = {name: n for name, n in (("budget", budget), ("sink", sink), ("window", window)) if n is not None}
    given = {name: as_int(value) for name, value in (given | renamed(hyper)).items()}
    chosen = make_method(method, **given)
    from torchsparsekv.patches._install import install  # transformers is imported here and nowhere above

    return install(
        model, chosen, given, max_length=max_length, offload=offload, skip_layers=skip_layers, layers=layers,
        pool_dtype=pool_dtype, step=step,
    )  # fmt: skip


def methods() -> dict[str, dict[str, HyperParameter]]:
    """Every method by name, with the type, default and meaning of each hyper-parameter."""
    return {name: hyper_parameters(cls) for name, cls in all_methods().items()}


def model_table() -> str:
    """The types of models that patch() takes and what their layers run, and those that it refuses, as Markdown."""
    from torchsparsekv.patches._table import markdown

    return markdown()
