"""Facts about groups of models that patches need."""
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from torchsparsekv.patches._names import NAMES, blamed

FAMILIES: dict[str, "Family"] = {}
# Models with images whose text model is of a family. The whole model is patched, because it has generate(). Tokens of
# images are part of the prompt, with causal attention.
MULTIMODAL = (
    "gemma3", "internvl", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl",
)  # fmt: skip

Shard = Literal["heads", "replicated", "unknown"]
# The kinds of the key projection in transformers' tensor parallel plans. The kinds with "replicated" gather all keys on
# every rank, because a norm or a slice needs all of them.
SHARDS: dict[str, Shard] = {
    "colwise": "heads", "colwise_gather_output": "replicated", "colwise_rep": "replicated",
}  # fmt: skip
KINDS = ("full_attention", "sliding_attention")
Kept: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype | None]]
OWN_KINDS = ("linear_attention", "conv")  # layers without keys and values; transformers keeps their state


@dataclass(frozen=True)
class Layer:
    """The shape of one attention layer of a model."""

    heads: int  # query heads
    kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that the layer attends to; None: all
    softcap: float = 0.0  # cap of the logits; 0: none
    sink_logits: bool = False  # one more learned logit per query head
    shard: Shard = "unknown"  # the part of the kv heads that a tensor parallel rank holds

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads

    def on_rank(self, ranks: int) -> "Layer":
        """The part of this layer on one of `ranks` tensor parallel ranks."""
        if ranks == 1 or self.shard == "replicated":
            return self
        if self.shard == "unknown":
            raise NotImplementedError(
                f"the tensor parallel plan of this model does not say how kv heads are shared by {ranks} ranks"
            )
        if self.kv_heads % ranks or self.heads % ranks:
            raise ValueError(f"{self.heads} query heads and {self.kv_heads} kv heads cannot be shared by {ranks} ranks")
        return dataclasses.replace(self, heads=self.heads // ranks, kv_heads=self.kv_heads // ranks)


def decoder_type(config) -> str:
    """The model_type by which a family is looked up."""
    return config.get_text_config(decoder=True).model_type if config.model_type in MULTIMODAL else config.model_type


def window_of(config, layer: int) -> int | None:
    """The sliding window of a layer. None: the layer attends to all tokens."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] == "full_attention":
        return None
    return getattr(config, "sliding_window", None)


def head_dim_of(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def shard_of(config) -> Shard:
    plan = getattr(config, "base_model_tp_plan", None) or {}
    for name, style in plan.items():
        if name.endswith((".k_proj", ".qkv_proj")):
            return SHARDS.get(style, "unknown")
    return "unknown"


def layer_of(config, layer: int) -> Layer | None:
    """The shape of a layer by the usual names of a config."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] in OWN_KINDS:
        return None
    if types is not None and types[layer] not in KINDS:
        known = ", ".join((*KINDS, *OWN_KINDS))
        raise NotImplementedError(f"layer {layer} is of type {types[layer]!r}; supported: {known}")
    return Layer(
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim_of(config),
        window=window_of(config, layer),
        softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        shard=shard_of(config),
    )


def is_self_attention(module: nn.Module) -> bool:
    """Whether a module is self-attention with a cache that calls transformers' attention dispatch.

    A `layer_idx` is not enough, because decoder layers, linear attention and indexers have one too. The names of
    projections differ from model to model.
    """
    if not isinstance(getattr(module, "layer_idx", None), int):
        return False
    forward = inspect.unwrap(type(module).forward)
    takes = inspect.signature(forward).parameters
    crosses = any(p.startswith(("encoder_", "cross_attention_", "key_value_states")) for p in takes)
    cached = any(name in takes for name in NAMES)
    return cached and not crosses and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


@dataclass(frozen=True)
class Family:
    """Data about model types. The defaults fit most models.

    about: the kinds of layers, for the table of models.
    since: the first transformers version in which the models work; "" for any supported version.
    layer: the shape of a layer, from the text config and the index of the layer; None for a layer without keys and
        values.
    is_attention: whether a module is the attention of a layer with keys and values. The module has the index of the
        layer as `layer_idx`.
    kept: the tensors that transformers keeps for a row in each layer without keys and values, by name: shape and type.
        Type None is the model's type.
    """

    model_types: tuple[str, ...]
    about: str = "full attention; sliding windows in all layers where the config has them"
    since: str = ""
    layer: Callable[[object, int], Layer | None] = layer_of
    is_attention: Callable[[nn.Module], bool] = is_self_attention
    kept: Callable[[Any], Kept] = lambda config: {}

    def __post_init__(self) -> None:
        for t in self.model_types:
            if t in FAMILIES:
                raise ValueError(f"model_type {t!r} is claimed by two families")
            FAMILIES[t] = self

    def layers(self, config) -> tuple[Layer | None, ...]:
        return tuple(self.layer(config, i) for i in range(config.num_hidden_layers))

    def modules(self, model: nn.Module, config) -> list[nn.Module]:
        """The attention modules in the order of layers. A model must have one for each layer with keys and values."""
        found = [m for m in model.modules() if self.is_attention(m)]
        indices = [m.layer_idx for m in found]
        expected = [i for i, layer in enumerate(self.layers(config)) if layer is not None]
        if sorted(indices) != expected:
            wrong = {
                "without": [i for i in expected if i not in indices],
                "twice": [i for i in expected if indices.count(i) > 1],
                "unknown": sorted(set(indices) - set(expected)),
            }
            said = "; ".join(f"{what}: {', '.join(map(str, which))}" for what, which in wrong.items() if which)
            raise NotImplementedError(
                f"{type(model).__name__} has {len(found)} attention modules that torchsparsekv can reach, for "
                f"{len(expected)} layers ({said}). By default such a module has a layer_idx, and its forward takes "
                f"{' or '.join(NAMES)} and uses ALL_ATTENTION_FUNCTIONS; Family.is_attention can change this{blamed()}"
            )
        return sorted(found, key=lambda m: m.layer_idx)
