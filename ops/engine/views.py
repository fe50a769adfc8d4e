"""Requests of a serving engine and their blocks, as the ops take them."""
from typing import Annotated, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import I32

FlatTokens: TypeAlias = Annotated[Tensor, Of("tokens heads dim", "kv", strided=True)]
RowOfToken: TypeAlias = Annotated[Tensor, Of("tokens", torch.int64)]
Listed: TypeAlias = Annotated[Tensor, Of("requests heads listed", I32)]
OneQuery: TypeAlias = Annotated[Tensor, Of("requests q_heads 1 dim", "kv", strided=True)]


class Requests(NamedTuple):
    """Requests of a serving engine: how many tokens each has by now, and the ids of the blocks that these are in, in
    order. Ids of blocks are shared: requests that begin alike have some in common. Every step attends to the `sink`
    first tokens of a request and to at least the `window` latest ones; blocks between these can be chosen."""

    length: Annotated[Tensor, Of("requests", I32)]
    table: Annotated[Tensor, Of("requests places", I32)]
    sink: int
    window: int


class SharedHot(NamedTuple):
    """A hot buffer for all requests: the blocks that were fetched lately, by block id and kv head, as in `Hot`."""

    rows: Annotated[Tensor, Of("batch heads slots block_size 2 dim", "kv")]
    slot_of: Annotated[Tensor, Of("batch heads blocks", I32)]
    block_of: Annotated[Tensor, Of("batch heads slots", I32)]
    age: Annotated[Tensor, Of("batch heads slots", I32)]


class Copies(NamedTuple):
    """What of `SharedHot` an op needs that keeps it equal to the pool; nothing where there is none."""

    rows: Annotated[Tensor, Of("batch heads slots block_size 2 dim", "kv")] | None = None
    slot_of: Annotated[Tensor, Of("batch heads blocks", I32)] | None = None
