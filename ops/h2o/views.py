"""The tokens that H2O keeps, as the ops of the family take them."""
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import I32, PerHead

Received = Annotated[Tensor, Of("batch heads rows", torch.float32)]


class HeavySet(NamedTuple):
    """The tokens that a step attends to beside the ring. Each (row, kv head) has its own.

    ids: the positions of the kept tokens, in no order; -1 after the first `count` places.
    count: how many tokens are kept.
    received: the attention that each token received so far, by position: softmax weights, summed over queries and over
        the query heads of the kv head. -inf for a token that was evicted before the last prompt.
    chosen_at: the length of the row at its last step; NOT_YET (ops/index/observe.py) between a prompt and its first
        step.
    updated: 1 where this step has tokens to fetch, else 0.
    updates: how many steps had tokens to fetch.
    """

    ids: Annotated[Tensor, Of("batch heads kept", I32)]
    count: PerHead
    received: Received
    chosen_at: PerHead
    updated: PerHead
    updates: PerHead
