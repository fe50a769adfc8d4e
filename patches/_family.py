"""What the seam must know about a group of models."""
from collections.abc import Callable
from dataclasses import dataclass

FAMILIES: dict[str, "Family"] = {}


def window_of(config, layer: int) -> int | None:
    """The sliding window of a layer, None where it attends to everything."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] == "full_attention":
        return None
    return getattr(config, "sliding_window", None)


def head_dim_of(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@dataclass(frozen=True)
class Family:
    """Data about model types; every field has the common answer as default."""

    model_types: tuple[str, ...]
    window: Callable[[object, int], int | None] = window_of

    def __post_init__(self) -> None:
        for t in self.model_types:
            if t in FAMILIES:
                raise ValueError(f"model_type {t!r} is claimed by two families")
            FAMILIES[t] = self
