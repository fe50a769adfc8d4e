"""Tokens of a serving engine and its shared hot buffer, as the ops of the family take them."""
from typing import Annotated, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import FLOATS, Of
from torchsparsekv.ops.store.views import I32, PerHead

# New tokens of any requests, one after the other, and the pool row in which each is stored, -1 for none.
FlatTokens: TypeAlias = Annotated[Tensor, Of("tokens heads dim", "kv", strided=True)]
RowOfToken: TypeAlias = Annotated[Tensor, Of("tokens", torch.int64)]
# The units that each request (a row of the batch) attends to, or one number for each of them. A unit is a block of the
# engine, or a part of one: a method that selects single tokens has units of one token.
Listed: TypeAlias = Annotated[Tensor, Of("requests heads listed", I32)]


class Listing(NamedTuple):
    """The units that each request attends to.

    ids: their places in the pool or in the hot buffer; -1 for none. Units that the method selected stand last.
    fill: of each listed unit, how many of its first rows hold a token.
    """

    ids: Listed
    fill: Listed


class BlockRest(NamedTuple):
    """What stands for the tokens that a step does not retrieve (ops/rest/__init__.py): each block of an engine that
    lies behind the sinks and before `ring_begin` is a group.

    sums: row i is the sum of the keys and the sum of the values of block i of the pool, divided by `group`. None:
        nothing is estimated.
    group: tokens of a block; 0 without sums.
    table: the blocks of each request, in the order of the text.
    selected: the units that the method selected, by their place in the text; -1 for none.
    """

    sums: Annotated[Tensor, Of("pools heads blocks 2 dim", FLOATS)] | None = None
    group: int = 0
    table: Annotated[Tensor, Of("requests places", I32)] | None = None
    selected: Annotated[Tensor, Of("requests heads selected", I32)] | None = None


NO_BLOCK_REST = BlockRest()


class SharedHot(NamedTuple):
    """A hot buffer for all requests: units that were fetched lately, in slots on the device. The fields are those of
    `HotBuffer` (ops/store/views.py), with the units of the engine's pool in place of the blocks of a row's pool."""

    rows: Annotated[Tensor, Of("batch heads slots block_size 2 dim", "kv")]
    slot_of: Annotated[Tensor, Of("batch heads blocks", I32)]
    block_of: Annotated[Tensor, Of("batch heads slots", I32)]
    used: Annotated[Tensor, Of("batch heads slots", I32)]
    hand: PerHead


class Copies(NamedTuple):
    """The fields of `SharedHot` with which write_tokens keeps copies equal to the pool. None: there is no hot buffer.
    """

    rows: Annotated[Tensor, Of("batch heads slots block_size 2 dim", "kv")] | None = None
    slot_of: Annotated[Tensor, Of("batch heads blocks", I32)] | None = None
