"""Queries and keys of a real model's attention layers over a text, by one dense forward.

They are those that transformers hands to attention, so rotary positions and norms of heads are applied.
"""
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NAME = "torchsparsekv_heads"


@dataclass(frozen=True, eq=False)
class Heads:
    """Of some layers of a model over one text; layers are stacked as rows of a batch.

    queries [layers, query heads, tokens, dim] and keys [layers, kv heads, tokens, dim] in float32.
    """

    queries: Tensor = field(repr=False)
    keys: Tensor = field(repr=False)
    scale: float
    layers: tuple[int, ...]

    def weights(self, at: int) -> Tensor:
        """Of the query of token `at` on all that it sees: [layers, query heads, tokens]."""
        keys = self.keys[:, :, : at + 1]
        q = self.queries[:, :, at].unflatten(1, (keys.shape[1], -1))
        return (q @ keys.transpose(-1, -2) * self.scale).softmax(-1).flatten(1, 2)


@contextlib.contextmanager
def attending(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """The model's attention by `attend(sdpa, module, q, k, v, mask, **more)`. It must be one whose attention
    transformers dispatches by name, as of all it has now."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, functools.partial(attend, AttentionInterface()["sdpa"]))
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def heads_of(model: Any, ids: Tensor, layers: Sequence[int]) -> Heads:
    """`ids` [tokens]."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    scales: set[float] = set()

    def taking(sdpa, module, q, k, v, mask, **more):
        if module.layer_idx in layers:
            found[module.layer_idx] = q[0].float(), k[0].float()
            scales.add(float(more.get("scaling") or q.shape[-1] ** -0.5))
        return sdpa(module, q, k, v, mask, **more)

    with attending(model, taking):
        model(ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    (scale,) = scales
    q, k = (torch.stack([found[i][j] for i in layers]).cpu() for j in (0, 1))
    return Heads(q, k, scale, tuple(layers))
