"""Requests of a serving engine and their blocks, as the ops of the family take them."""
from typing import Annotated, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import I32, PerHead

# New tokens of any requests, one behind the other, and the row of the pool that each is stored in, -1 for none.
FlatTokens: TypeAlias = Annotated[Tensor, Of("tokens heads dim", "kv", strided=True)]
RowOfToken: TypeAlias = Annotated[Tensor, Of("tokens", torch.int64)]
# The blocks that a step attends to, or one number for each of them.
Listed: TypeAlias = Annotated[Tensor, Of("requests heads listed", I32)]
OneQuery: TypeAlias = Annotated[Tensor, Of("requests q_heads 1 dim", "kv", strided=True)]


class Requests(NamedTuple):
    """The requests of a step, and where their tokens are.

    length: how many tokens each request has, the newest included. 0: the row pads the batch.
    table: the ids of the blocks of each request, in order. Requests that begin alike may share blocks.
    sink: how many first tokens of a request every step attends to; whole blocks.
    window: how many newest tokens every step attends to at least. Blocks between the two can be selected (tables.py).
    """

    length: Annotated[Tensor, Of("requests", I32)]
    table: Annotated[Tensor, Of("requests places", I32)]
    sink: int
    window: int


class SharedHot(NamedTuple):
    """A hot buffer for all requests: blocks that were fetched lately, in slots on the device. The fields are those of
    `HotBuffer` (ops/store/views.py), with blocks by their id in place of a row's."""

    rows: Annotated[Tensor, Of("batch heads slots block_size 2 dim", "kv")]
    slot_of: Annotated[Tensor, Of("batch heads blocks", I32)]
    block_of: Annotated[Tensor, Of("batch heads slots", I32)]
    used: Annotated[Tensor, Of("batch heads slots", I32)]
    hand: PerHead


class Copies(NamedTuple):
    """The fields of `SharedHot` that keep the copies of blocks equal to the pool. None: there is no hot buffer."""

    rows: Annotated[Tensor, Of("batch heads slots block_size 2 dim", "kv")] | None = None
    slot_of: Annotated[Tensor, Of("batch heads blocks", I32)] | None = None
