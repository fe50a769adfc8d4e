"""The functions that users call."""
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchsparsekv.method import (
    HyperParameter,
    Offload,
    PoolType,
    Step,
    all_methods,
    hyper_parameters,
    named_method,
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
    hot_gib: float | None = None,
    skip_layers: int | None = None,
    layers: Mapping[int, str | Mapping] | None = None,
    step: Step = "auto",
    **hyper,
) -> "Handle":
    """Make this model object decode with `method`.

    What cannot work is refused in one line, and the model stays as it was.

    Args:
        model: a transformers model in evaluation mode, on one device.
        method: a name in `torchsparsekv.methods()`.
        max_length: tokens of a cache row, prompt and generation together. None: each cache gets the size that its call
            needs, in powers of two up to the model's own limit.
        budget: tokens retrieved per kv head and decode step, beside `sink` and `window`. None: the method's default.
            A default above the size of a cache is lowered to that size.
        sink: first tokens, always attended to. None: the method's default.
        window: latest tokens, always attended to. None: the method's default.
        offload: where the pool of keys and values lives. "host": in pinned host memory. "device": on the GPU. "auto":
            on the GPU if the cache takes at most half of the memory that is free there, else in host memory.
        pool_dtype: "int8" stores the pool in 8 bits, with an fp32 scale for every 64 channels. The pool and its traffic
            shrink to a bit over half. Sinks, window and fetched blocks keep the model's type. None: the model's type.
        hot_gib: GiB of GPU memory for the hot buffers of a cache, all layers together. It replaces `hot_budgets`, the
            size in budgets. None: `hot_budgets`, "auto" by default (docs/guide/memory.md).
        skip_layers: number of first layers that are dense. Their pool stays on the GPU. None: 2, but at least one layer
            runs the method.
        layers: exceptions for single layers, such as `{0: "full", 5: dict(budget=512)}`. A value is the name of a
            method, or a dict of hyper-parameters, where "method" names another method. An entry wins over
            `skip_layers`. It inherits budget, sink and window, and the other hyper-parameters if the method is the
            same.
        step: how `generate()` runs a decode step on a GPU. "captured": as a CUDA graph of the eager step. "compiled":
            by torch.compile, whose first call takes longer (docs/guide/own-loop.md). "auto": captured where that is
            possible, else compiled, with a warning that says why.
        hyper: other hyper-parameters of the method. `torchsparsekv.methods()["quest"]` lists those of quest.

    Returns:
        The handle of the patch. Leaving its `with`, or `unpatch()`, restores the model.
    """
    chosen, given = named_method(method, dict(budget=budget, sink=sink, window=window, **hyper))
    install = _seam().install  # transformers is imported here and nowhere above

    return install(
        model, chosen, given, max_length=max_length, offload=offload, skip_layers=skip_layers, layers=layers,
        pool_dtype=pool_dtype, step=step, hot_gib=hot_gib,
    )  # fmt: skip


def _seam():
    """The module that installs patches, or an error that says which transformers is needed."""
    needs = "pip install 'torchsparsekv[hf]'"
    try:
        from torchsparsekv.patches import _install
    except ModuleNotFoundError as e:
        if (e.name or "").split(".")[0] != "transformers":
            raise
        if e.name == "transformers":
            raise ImportError(f"patch needs transformers, which is not installed: {needs}", name=e.name) from None
        raise _misfit(e, needs) from e
    except ImportError as e:
        raise _misfit(e, needs) from e
    return _install


def _misfit(e: ImportError, needs: str) -> ImportError:
    """The error for a transformers that lacks a name which patch() imports."""
    from importlib.metadata import version

    fits = f"{needs} installs one that fits"
    return ImportError(f"patch does not fit transformers {version('transformers')}: {e}; {fits}")


def methods() -> dict[str, dict[str, HyperParameter]]:
    """Every method by name, with the type, default and meaning of each hyper-parameter."""
    return {name: hyper_parameters(cls) for name, cls in all_methods().items()}


def model_table() -> str:
    """The types of models that patch() takes and what their layers run, and those that it refuses, as Markdown."""
    from torchsparsekv.patches._table import markdown

    return markdown()
