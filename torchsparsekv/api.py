"""What users call."""
from typing import TYPE_CHECKING

from torchsparsekv.method import Offload, all_methods, hyper_parameters, make_method

if TYPE_CHECKING:
    from torchsparsekv.patches._seam import Handle


def patch(
    model,
    method: str = "quest",
    *,
    max_length: int | None = None,
    budget: int | None = None,
    sink: int | None = None,
    window: int | None = None,
    offload: Offload = "auto",
    skip_layers: int = 2,
    **hyper,
) -> "Handle":
    """Make this model instance decode with `method`; `torchsparsekv.methods()` lists them and their hyper-parameters.

    max_length: capacity of a cache row, prompt and generation together. None: each cache is sized for the call that
        needs it (powers of two, up to the model's own limit).
    budget: tokens retrieved per kv head and decode step, beside the `sink` first and the `window` latest tokens.
        None, for each of the three: the method's default.
    offload: where the pool of all keys and values lives. "auto" keeps it in GPU memory if the cache takes at most half
        of what is free there.
    skip_layers: the first layers, which attend densely (their pool stays on the device).
    """
    given = {name: n for name, n in (("budget", budget), ("sink", sink), ("window", window)) if n is not None}
    chosen = make_method(method, **given, **hyper)
    from torchsparsekv.patches._seam import install  # transformers is imported here and nowhere above

    return install(model, chosen, max_length, offload, skip_layers)


def methods() -> dict[str, dict[str, object]]:
    """Every method by name, with its hyper-parameters and their defaults."""
    return {name: hyper_parameters(cls) for name, cls in all_methods().items()}
