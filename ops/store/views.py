"""What belongs together in the store and in the indices, as the ops take it.

A view groups tensors of one layer; an op says `Changed[View]` where it writes it. Sizes by the same name are the same
in the whole op (ops/_machinery/signature.py). Where a token lies within a row is said in ops/store/rows.py, and nowhere else.
"""
from typing import Annotated, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.fp8 import FP8
from torchsparsekv.ops._machinery.signature import FLOATS, Of
from torchsparsekv.ops.store.rows import PACKED, packed_half

I32 = torch.int32
# Tensors that several ops take by themselves. "kv" is the type of keys and values.
Query: TypeAlias = Annotated[Tensor, Of("batch q_heads 1 dim", "kv", strided=True)]
Queries: TypeAlias = Annotated[Tensor, Of("batch q_heads tokens dim", "kv", strided=True)]
NewKeys: TypeAlias = Annotated[Tensor, Of("batch heads tokens dim", "kv", strided=True)]
NewToken: TypeAlias = Annotated[Tensor, Of("batch heads 1 dim", "kv", strided=True)]
ObservedQueries: TypeAlias = Annotated[Tensor, Of("batch observed q_heads dim", "kv")]
PerRow: TypeAlias = Annotated[Tensor, Of("batch", I32)]
PerHead: TypeAlias = Annotated[Tensor, Of("batch heads", I32)]
SinkLogits: TypeAlias = Annotated[Tensor, Of("q_heads", FLOATS)]
Fill: TypeAlias = Annotated[Tensor, Of("batch heads blocks", I32)]
Candidates: TypeAlias = Annotated[Tensor, Of("batch heads candidates", I32)]
Ring: TypeAlias = Annotated[Tensor, Of("batch heads ring_rows 2 dim", "kv")]
# Of the type of keys and values, or packed.
Pool: TypeAlias = Annotated[Tensor, Of("batch heads rows 2 dim", "kv", packed=(PACKED, packed_half))]


class Lengths(NamedTuple):
    """How many tokens the rows of a batch hold, and where their rings begin, before and after this call.

    Tokens leave the ring `interval` at a time, but for the `sink` first ones, which stay. So the tokens from `sink` up
    to `ring_begin` are those that can be retrieved; at this call those from `previous_ring_begin` on joined them.
    """

    start: PerRow
    length: PerRow
    previous_ring_begin: PerRow
    ring_begin: PerRow
    sink: int
    interval: int


class Token(NamedTuple):
    """Key and value of the newest token, and its query where that is kept."""

    k: NewToken
    v: NewToken
    q: Query | None = None


class KVStore(NamedTuple):
    """All keys and values of a layer.

    ring: on the device: the sinks, and behind them rows that the newest tokens use round-robin. Every step attends to it.
    pool: on the device or in host memory: all tokens of prompts, and generated tokens once they have left the ring.
    """

    ring: Ring
    pool: Pool


class Leaving(NamedTuple):
    """The keys of the tokens that leave the ring in this call: what every index stores.

    Tokens of this call have their keys in the last columns of `new`, earlier tokens in `pool`. `Lengths` says which
    positions leave: from `previous_ring_begin` up to `ring_begin`.
    """

    new: NewKeys
    pool: Pool


class Selection(NamedTuple):
    """What a query attends to beside the ring.

    ids: blocks of the pool, distinct within a head, -1 for none. None: a method that selects nothing.
    retrieve_now: heads with 0 keep the blocks that they selected last. None: every head takes `ids`.
    frontier: per head, the position from which on the ring counts. None: where the ring begins.
    fill: of every block of the pool, how many of its first rows hold a token. None: all rows.
    """

    ids: Candidates | None = None
    retrieve_now: PerHead | None = None
    frontier: PerHead | None = None
    fill: Fill | None = None


class Hot(NamedTuple):
    """The hot buffer: the blocks that were fetched lately, in slots on the device.

    slot_of: the slot of each block, -1 if it is in none. block_of: the block in each slot, -1 if it is empty.
    age: for how many calls of fetch a slot has not been asked for. done_count: of the programs that share a head in
    fetch, how many have read its plan. chosen: the slots of what was chosen last, -1 for none: what attention reads.
    """

    rows: Annotated[Tensor, Of("batch heads slots block_size 2 dim", "kv")]
    slot_of: Annotated[Tensor, Of("batch heads blocks", I32)]
    block_of: Annotated[Tensor, Of("batch heads slots", I32)]
    age: Annotated[Tensor, Of("batch heads slots", I32)]
    done_count: PerHead
    chosen: Candidates


class Prefetch(NamedTuple):
    """What of a choice waits until the step has attended, of a method that fetches late (ops/gather/query_drift_gate.py).

    query: the queries of the step before. seen: the length at which a head was last looked at. now, later: whether what
    this step chose is fetched before it attends, or behind it. frontier: where attention takes over to the ring. waits:
    how often a step waited for what its head chose. ids: what this step chose. counts: as in Stats, of fetches behind
    steps; `selected` are all blocks that were chosen, for by then those that a step waited for are there.
    """

    query: Annotated[Tensor, Of("batch q_heads dim", "kv")]
    seen: PerHead
    now: PerHead
    later: PerHead
    frontier: PerHead
    waits: PerHead
    ids: Candidates
    counts: Annotated[Tensor, Of("batch heads 5", torch.int64)]


class Stats(NamedTuple):
    """Counters of every (row, kv head); ops/store/rows.py has the names of the columns."""

    counts: Annotated[Tensor, Of("batch heads 5", torch.int64)]


class Attention(NamedTuple):
    """What a model wants of its attention beside queries, keys and values; one extra logit per query head, or none."""

    scale: float
    softcap: float = 0.0
    sink_logits: SinkLogits | None = None


class Digests(NamedTuple):
    """A volume around the keys of every block of so many tokens: its centre, and its spread per channel, or one radius.
    Which volume: a number of VOLUMES in ops/index/block_bounds.py."""

    centre: Annotated[Tensor, Of("batch heads blocks dim", (*FLOATS, FP8))]
    spread: Annotated[Tensor, Of("batch heads blocks spread", (*FLOATS, FP8))]
    block_size: int
    volume: int


class Observed(NamedTuple):
    """The latest queries: the observation window. That of the token at a position is at `position % observed`."""

    queries: ObservedQueries


class Scored(NamedTuple):
    """Scores of what can be chosen, with their peaks (ops/select/_top.py) where the op that scored has written them too. What
    such an op returns, (scores, peaks), stands for one."""

    scores: Annotated[Tensor, Of("batch heads n", torch.float32)]
    peaks: Annotated[Tensor, Of("batch heads groups", torch.float32)] | None = None
