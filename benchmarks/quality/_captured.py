"""Keys and queries of a model on a text, in the shape of the synthetic ones of _recall.py."""
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

CAPTURE = "torchsparsekv_capture"


@dataclass
class Captured:
    """One layer: keys [heads, total, d] as attention has them, and queries [n, heads * group, d] of the tokens after
    them."""

    keys: Tensor
    queries: Tensor
    taken: int = field(default=0, init=False)

    @property
    def heads(self) -> int:
        return self.keys.shape[0]

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.heads

    @property
    def total(self) -> int:
        return self.keys.shape[1]

    @property
    def d(self) -> int:
        return self.keys.shape[2]

    def query(self, end: int) -> Tensor:
        """The next one, from the first on again when all were given."""
        self.taken += 1
        return self.queries[(self.taken - 1) % len(self.queries)]


@torch.no_grad()
def captured(model: Any, ids: Tensor, steps: int) -> dict[int, Captured]:
    """By layer, of one forward over ids [tokens]; the last `steps` tokens are those that ask."""
    found: dict[int, Captured] = {}

    def attention(module, query, key, value, attention_mask, **kwargs):
        asking = query[0, :, -steps:].transpose(0, 1)
        found[module.layer_idx] = Captured(key[0, :, :-steps].float().cpu(), asking.float().cpu())
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(CAPTURE, attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(CAPTURE)
    try:
        model(ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    return found
