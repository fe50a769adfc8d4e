"""Views: NamedTuples of the tensors and numbers of one layer that belong together. Ops take views as arguments.

An op writes a view only where its reference says `Changed[View]`. A word in a shape, such as "batch" or "ring_rows", is
the same size in all tensors of one op (ops/_machinery/signature.py). "pools" is "batch", or 1 where the rows of the
batch share one pool (BlockTable). ops/store/rows.py alone says how a token lies in a row of memory.

The views in the order in which a decode step meets them: Token, KVStore, Lengths, Stats (append), Leaving, Digests
(the index), Scored, Selection (the choice), HotBuffer (fetch), Attention (attention).
"""
from typing import Annotated, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.fp8 import FP8
from torchsparsekv.ops._machinery.signature import FLOATS, Of
from torchsparsekv.ops.store.rows import PACKED, packed_half

I32 = torch.int32
# Single tensors that several ops take. "kv" is the type of the model's keys and values.
Query: TypeAlias = Annotated[Tensor, Of("batch q_heads 1 dim", "kv", strided=True)]
Queries: TypeAlias = Annotated[Tensor, Of("batch q_heads tokens dim", "kv", strided=True)]
NewKeys: TypeAlias = Annotated[Tensor, Of("batch heads tokens dim", "kv", strided=True)]
NewToken: TypeAlias = Annotated[Tensor, Of("batch heads 1 dim", "kv", strided=True)]
ObservedQueries: TypeAlias = Annotated[Tensor, Of("batch observed q_heads dim", "kv")]
PerRow: TypeAlias = Annotated[Tensor, Of("batch", I32)]
PerHead: TypeAlias = Annotated[Tensor, Of("batch heads", I32)]
SinkLogits: TypeAlias = Annotated[Tensor, Of("q_heads", FLOATS)]
Fill: TypeAlias = Annotated[Tensor, Of("batch heads blocks", I32)]
Bias: TypeAlias = Annotated[Tensor, Of("batch q_heads candidates", torch.float32)]
Candidates: TypeAlias = Annotated[Tensor, Of("batch heads candidates", I32)]
Ring: TypeAlias = Annotated[Tensor, Of("batch heads ring_rows 2 dim", "kv")]
# The pool is of the type of keys and values, or packed: int8 numbers with their scales (ops/store/rows.py).
Pool: TypeAlias = Annotated[Tensor, Of("batch heads rows 2 dim", "kv", packed=(PACKED, packed_half))]


class Lengths(NamedTuple):
    """How many tokens each row of the batch holds, and which of them are in the ring, before and after this forward.

    A row of the batch at a decode step, by positions of its tokens::

        0 ........ sink .............. previous_ring_begin ...... ring_begin .......... start ... length
        |  sinks    |  in the pool,     |  leave the ring in this  |  stay in the ring    |  new    |
        |  (ring)   |  retrievable      |  forward: ring to pool   |  (window)            |  token  |

    start: tokens before this forward. A prompt or chunk of `tokens` columns, `pad` of them left padding, has
        start = length - (tokens - pad).
    length: tokens after this forward; -1 for a row that has overrun its capacity.
    previous_ring_begin: the oldest token after the sinks that was in the ring before this forward.
    ring_begin: the oldest token after the sinks that is in the ring after this forward. Both are `sink` at first.
    sink: the first tokens of a row. They stay in the ring, and every step attends to them.
    interval: tokens leave the ring in groups of `interval`. In most steps none leaves, and both ring begins are equal.

    Queries can retrieve the tokens from `sink` up to `ring_begin`. A prompt that is longer than the window has
    start < ring_begin: most of its tokens go to the pool without a stay in the ring.
    """

    start: PerRow
    length: PerRow
    previous_ring_begin: PerRow
    ring_begin: PerRow
    sink: int
    interval: int


class BlockTable(NamedTuple):
    """The blocks of each row of the batch, where all rows share one pool. An index of that pool has a batch of 1.

    ids: numbers of blocks in the order of the text. Position p of row b is in block ids[b, p // block_size]. Rows that
        begin alike may share blocks. None: every row has a pool of its own, and its positions are pool rows.
    block_size: tokens of a block; 0 without ids.
    """

    ids: Annotated[Tensor, Of("batch places", I32)] | None = None
    block_size: int = 0


OWN_POOLS = BlockTable()


class Token(NamedTuple):
    """The key and the value of the newest token. q: its query, for methods that keep the latest queries (Observed)."""

    k: NewToken
    v: NewToken
    q: Query | None = None


class KVStore(NamedTuple):
    """All keys and values of a layer.

    ring: on the device. The first rows hold the sinks, and the newest tokens use the other rows round-robin. Every step
        attends to the ring.
    pool: in host memory or on the device. The pool holds every prompt token, and generated tokens once they left the
        ring. The pool row of a token is its position, unless the method orders the tokens of a prompt (store_prompt)
        or moves tokens at a step (such as insert_page). A layer with a sliding window has a pool of 0 rows.
    """

    ring: Ring
    pool: Pool


class Leaving(NamedTuple):
    """Where an index reads the keys of the tokens that leave the ring in this forward (ops/index/_leaving.py).

    The tokens with positions from `previous_ring_begin` up to `ring_begin` leave (`Lengths`). The view holds more keys:
    new: the keys of all new tokens of this forward, those that stay in the ring included. The last columns are the new
        tokens of a row, from position `start` on; the columns before them are padding.
    pool: the pool. An index reads the leaving keys of earlier tokens, before `start`, there.
    """

    new: NewKeys
    pool: Pool


class Selection(NamedTuple):
    """The blocks that a query attends to beside the ring.

    ids: numbers of blocks of the pool, distinct within a head; -1 in unused places. None: the method selects nothing.
    retrieve_now: heads with 0 keep the blocks of their last selection. None: every head takes `ids`.
    frontier: the first position that a head attends to in the ring, after the sinks. None: `Lengths.ring_begin`.
    fill: the number of rows of each block that hold a token, counted from its first row. None: all rows hold one.
    bias: a number that each query head adds to the logits of a block, after the soft cap; -inf: the head leaves the
        block out. There is one number for every place in `HotBuffer.chosen`. None: nothing is added.
    """

    ids: Candidates | None = None
    retrieve_now: PerHead | None = None
    frontier: PerHead | None = None
    fill: Fill | None = None
    bias: Bias | None = None


class HotBuffer(NamedTuple):
    """The hot buffer: a cache on the device for blocks of the pool. Each kv head has its own slots.

    rows: the keys and values of the blocks. A slot has room for one block.
    slot_of: the slot of a block, counted from 0; -1 if the block has no slot. Test `slot >= 0`.
    block_of: the block that a slot holds; -1 if the slot is empty.
    used: 1 for a block that was selected again since the hand passed its slot, else 0.
    hand: the slot at which the next miss begins to look for one (ops/gather/fetch.py).
    done_count: scratch of fetch. It counts the programs of a head that have read the state, and is 0 between calls.
    chosen: the slots of the last selection, which attention reads; -1 for none. They are slot numbers, not block ids.
    """

    rows: Annotated[Tensor, Of("batch heads slots block_size 2 dim", "kv")]
    slot_of: Annotated[Tensor, Of("batch heads blocks", I32)]
    block_of: Annotated[Tensor, Of("batch heads slots", I32)]
    used: Annotated[Tensor, Of("batch heads slots", I32)]
    hand: PerHead
    done_count: PerHead
    chosen: Candidates


class Prefetch(NamedTuple):
    """The state of a method that may fetch after attention, for the next step (ops/gather/query_drift_gate.py).

    query: the queries of the previous step.
    seen: the length of the row at the previous step; -1 before the first step.
    now: 1 for heads whose selection is fetched before this step attends.
    later: 1 for heads whose selection is fetched after this step attends. They attend to the previous selection.
    frontier: the first position that a head attends to in the ring (see Selection).
    waits: the number of steps at which a head was fetched `now`.
    ids: the blocks that this step selected.
    counts: as Stats, for the fetches after attention. `selected` counts the blocks of heads with `now` too: they are
        in the hot buffer by then.
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
    """Counters of every (row of the batch, kv head). STATS in ops/store/rows.py names the columns."""

    counts: Annotated[Tensor, Of("batch heads 5", torch.int64)]


class Attention(NamedTuple):
    """The parameters of the model's attention: softmax(softcap * tanh(scale * q.k / softcap)) v.

    softcap: 0 for a model without a soft cap.
    sink_logits: one more logit per query head in the softmax, without a value, as gpt-oss has them.
    """

    scale: float
    softcap: float = 0.0
    sink_logits: SinkLogits | None = None


class Digests(NamedTuple):
    """A volume around the keys of every block of `block_size` tokens (ops/index/block_bounds.py).

    centre: the middle of the volume.
    spread: half its width in every channel (a box, spread = dim), or its radius (a ball, spread = 1).
    volume: the kind of the volume, an index into VOLUMES.
    origin: the point of a head that is subtracted from its keys (ops/index/_origin.py).
    """

    centre: Annotated[Tensor, Of("pools heads blocks dim", (*FLOATS, FP8))]
    spread: Annotated[Tensor, Of("pools heads blocks spread", (*FLOATS, FP8))]
    block_size: int
    volume: int
    origin: Annotated[Tensor, Of("pools heads dim", torch.float32)]


class Observed(NamedTuple):
    """The observation window: the queries of the last `observed` tokens. The query of a position is at
    `position % observed`."""

    queries: ObservedQueries


class Scored(NamedTuple):
    """Scores of n blocks (or tokens) per kv head; -inf for a block that cannot be selected.

    peaks: the maximum of every GROUP scores (ops/select/_top.py), if the scoring op wrote it: selection is faster then.
    A scoring op may return the plain tuple (scores, peaks): ops that take a Scored accept it.
    """

    scores: Annotated[Tensor, Of("batch heads n", torch.float32)]
    peaks: Annotated[Tensor, Of("batch heads groups", torch.float32)] | None = None
