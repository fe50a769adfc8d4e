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
# Of new tokens of any requests: keys or values, and the row of the pool that each has, -1 for none.
FlatTokens: TypeAlias = Annotated[Tensor, Of("tokens heads dim", "kv", strided=True)]
RowOfToken: TypeAlias = Annotated[Tensor, Of("tokens", torch.int64)]
Listed: TypeAlias = Annotated[Tensor, Of("requests heads listed", I32)]
OneQuery: TypeAlias = Annotated[Tensor, Of("requests q_heads 1 dim", "kv", strided=True)]
PerHead: TypeAlias = Annotated[Tensor, Of("batch heads", I32)]
SinkLogits: TypeAlias = Annotated[Tensor, Of("q_heads", FLOATS)]
Fill: TypeAlias = Annotated[Tensor, Of("batch heads blocks", I32)]
Candidates: TypeAlias = Annotated[Tensor, Of("batch heads candidates", I32)]
AskedPages: TypeAlias = Annotated[Tensor, Of("batch heads asked", I32)]
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


class Near(NamedTuple):
    """The ring, always on the device: the sinks, and behind them rows that the newest tokens use in turn."""

    ring: Annotated[Tensor, Of("batch heads ring_rows 2 dim", "kv")]


class Far(NamedTuple):
    """The pool of all tokens, wherever it lives."""

    rows: Pool


class Store(NamedTuple):
    """`Near` and `Far` in one: what tokens are written to, and all that a row holds."""

    ring: Annotated[Tensor, Of("batch heads ring_rows 2 dim", "kv")]
    pool: Pool


class CopiedStore(NamedTuple):
    """`Store`, and of the keys in the pool a coarse copy, or none (ops/index/copy_keys.py)."""

    ring: Annotated[Tensor, Of("batch heads ring_rows 2 dim", "kv")]
    pool: Pool
    coarse: Annotated[Tensor, Of("batch heads rows dim", torch.uint8)] | None = None


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


class Late(NamedTuple):
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


class Units(NamedTuple):
    """Runs of pool rows that are chosen as one: unit u has the rows from first[u] up to first[u + 1], and the mean of
    their keys as its centroid. `unit_count` says how many there are."""

    first: Annotated[Tensor, Of("batch heads units+1", I32)]
    centroid: Annotated[Tensor, Of("batch heads units dim", "kv")]
    unit_count: PerHead


class Segments(NamedTuple):
    """Where the tokens in the ring are cut: `cuts`, one entry for each row of the ring behind the sinks, marks where a
    segment begins, `segment_begin` is where the newest does. Those below `frontier` are in the index already."""

    cuts: Annotated[Tensor, Of("batch heads ring_rows-sink", I32)]
    segment_begin: PerHead
    frontier: PerHead


class Trigger(NamedTuple):
    """What decides about a step: the queries of the last two, used in turn; the length at which a head was last looked
    at; whether it is to retrieve now; how often it has."""

    previous: Annotated[Tensor, Of("batch 2 q_heads dim", "kv")]
    seen: PerHead
    retrieve_now: PerHead
    retrievals: PerHead


class Boundaries(NamedTuple):
    """The rule of find_boundary: see there."""

    tau: float
    per_head: bool
    shortest: int
    longest: int
    memory: float


class Codes(NamedTuple):
    """Keys as ParisKV keeps them: centroid ids, 4-bit codes of directions, weights; and how often each id occurs."""

    ids: Annotated[Tensor, Of("batch heads rows spaces", torch.uint8)]
    codes: Annotated[Tensor, Of("batch heads rows code_bytes", torch.uint8)]
    weights: Annotated[Tensor, Of("batch heads rows spaces", torch.float16)]
    counts: Annotated[Tensor, Of("batch heads spaces centroids", I32)]


class Observed(NamedTuple):
    """The latest queries: the observation window. That of the token at a position is at `position % observed`."""

    queries: ObservedQueries


class Static(NamedTuple):
    """Tokens that are attended to whatever the query, until they are chosen anew.

    ids: the pool rows that they had when they were chosen, ascending, -1 behind them. count: how many there are.
    target: how many there are to be. updated: whether this step chose them anew. at: the length at which they were
    chosen, the first time less `lead`; NOT_YET (ops/index/observe.py): not since the last prompt. lead: by how much the
    second choice comes earlier than its interval, so that layers are due at different steps. every: that interval.
    updates: how often they were chosen. arrived, gone: where the programs that share a head meet (ops/_machinery/grid_barrier.py). done:
    how many have finished, of the programs that decide together (ops/prkv/static_target.py). away: of sets that move
    to the front of the pool (ops/prkv/relocate.py), the home of the token in each row there, -1 where it is its own.
    """

    ids: Annotated[Tensor, Of("batch heads static", I32)]
    count: PerHead
    target: PerHead
    updated: PerHead
    at: PerHead
    lead: PerHead
    every: PerHead
    updates: PerHead
    arrived: PerHead
    gone: PerHead
    done: PerHead
    away: Annotated[Tensor, Of("batch heads static", I32)] | None = None


class Kept(NamedTuple):
    """What of a prompt is attended to from its end on (ops/snapkv/snap_tokens.py), and what left the ring later and
    found room (ops/snapkv/keep_leaving.py).

    ids: the tokens, ascending, -1 behind them. count: how many there are. frontier: where attention takes over to the
    ring: at the end of a prompt where its observation window begins, later where the ring does. at: the length at which
    tokens last joined, NOT_YET: no step since the last prompt. updated: whether some did at this step. updates: how
    often. lost: how many left the ring since the last prompt and found no room.
    """

    ids: Annotated[Tensor, Of("batch heads kept", I32)]
    count: PerHead
    frontier: PerHead
    at: PerHead
    updated: PerHead
    updates: PerHead
    lost: PerHead


class Tree(NamedTuple):
    """The inner nodes of a tree of keys: node 0 is the root, every other one is a token that was promoted.

    A node of level l has as children tokens of level l - 1, and all tokens of the highest level are children of the
    root. key: the promoted keys. code, scale: the same in 8 bits a channel, as queries are compared with them
    (ops/icecache/_tree.py: coded). norm2: their squared norms. parent: the node above. level: from 2 on; 0 for the root.
    open_page: the page that takes the node's next generated token, -1 for none. radius2: the largest squared norm of a
    key so far, the c^2 of the lifted space. done_count: of the programs that share a head, how many are through.
    """

    key: Annotated[Tensor, Of("batch heads nodes dim", "kv")]
    code: Annotated[Tensor, Of("batch heads nodes dim", PACKED)]
    scale: Annotated[Tensor, Of("batch heads nodes", torch.float32)]
    norm2: Annotated[Tensor, Of("batch heads nodes", torch.float32)]
    parent: Annotated[Tensor, Of("batch heads nodes", I32)]
    level: Annotated[Tensor, Of("batch heads nodes", I32)]
    open_page: Annotated[Tensor, Of("batch heads nodes", I32)]
    node_count: PerHead
    page_count: PerHead
    radius2: Annotated[Tensor, Of("batch heads", torch.float32)]
    done_count: PerHead
    placed: Annotated[Tensor, Of("batch heads page", I32)]


class Leaves(NamedTuple):
    """By pool row: the key of the token there, and the node it is a child of; of a token that is a node itself -2 less
    the number of that; -1 where no retrievable token is. `fill`: how many rows of a page hold one; they are its first.
    span: of the nodes in a page the least in the lower 16 bits and the greatest in the upper ones (ops/icecache/_tree.py:
    spans_of).

    key: the key itself, and then there are no scales; or 4-bit codes of what it differs by from its node in 8 bits,
    nothing where it is a node itself (ops/icecache/_residual.py).
    """

    key: Annotated[Tensor, Of("batch heads rows width", (*FLOATS, torch.uint8))]
    scale: Annotated[Tensor, Of("batch heads rows groups", torch.float16)]
    node: Annotated[Tensor, Of("batch heads rows", I32)]
    fill: Fill
    span: Annotated[Tensor, Of("batch heads blocks", I32)]


class Followed(NamedTuple):
    """Of a layer that follows another, by its own kv heads: the head of that one that each follows, -1 for that of the
    same number; the pages which that one chose, and how many rows of each page hold a token."""

    heads: PerHead
    asked: AskedPages
    fill: Fill


class Promotion(NamedTuple):
    """Which tokens rise in the tree, up to `levels`. every > 0: a seeded one of every so many. every = 0: each with
    `chance` of 2^31. What is drawn is a function of seed, position and level."""

    every: int
    chance: int
    levels: int
    seed: int


class View(NamedTuple):
    """How many nodes of a level a query expands: `share` millionths of those there are, but `least` at least and `most`
    at most; and nodes below number `least` anyway, the root among them."""

    share: int
    least: int
    most: int
    levels: int


class Visited(NamedTuple):
    """The products of nodes with the query heads of their kv head: of those that one reaches, which are the children of
    nodes that it expands, and -inf for the others. And the least product of nodes that it expands, of those that have
    tokens as children; the first nodes are expanded whatever theirs are. What visit_nodes returns stands for one."""

    products: Annotated[Tensor, Of("batch heads nodes group", torch.float32)]
    least: Annotated[Tensor, Of("batch heads group", torch.float32)]


class Scored(NamedTuple):
    """Scores of what can be chosen, with their peaks (ops/select/_top.py) where the op that scored has written them too. What
    such an op returns, (scores, peaks), stands for one."""

    scores: Annotated[Tensor, Of("batch heads n", torch.float32)]
    peaks: Annotated[Tensor, Of("batch heads groups", torch.float32)] | None = None


class Asked(NamedTuple):
    """Ids of blocks, distinct within a head, -1 for none. Heads whose `retrieve_now` is 0 keep what they chose last;
    without it all choose anew."""

    ids: Candidates
    retrieve_now: PerHead | None = None


class Reach(NamedTuple):
    """What of a choice attention sees.

    frontier: where attention takes over from what is retrieved to the ring, per head. None: where the ring begins.
    fill: how many of the first rows of every block hold a token. None: all.
    """

    frontier: PerHead | None = None
    fill: Fill | None = None


class Choice(NamedTuple):
    """What an index answers: `Asked` and `Reach` in one."""

    ids: Tensor
    retrieve_now: Tensor | None = None
    frontier: Tensor | None = None
    fill: Tensor | None = None

    @property
    def asked(self) -> Asked:
        return Asked(self.ids, self.retrieve_now)

    @property
    def reach(self) -> Reach:
        return Reach(self.frontier, self.fill)
