"""What clusters and segments keep, as their ops take it."""
from typing import Annotated, NamedTuple

from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import I32, PerHead


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
