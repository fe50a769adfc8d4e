"""The tensors of ClusterKV and LouisKV: units of the index, segments in the ring, and what triggers a retrieval."""
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import I32, PerHead


class Units(NamedTuple):
    """Runs of pool rows that are retrieved together: clusters of a prompt, and segments of generated tokens.

    first: unit u has the pool rows from first[u] up to first[u + 1].
    centroid: the mean key of each unit.
    unit_count: the number of units of each head.
    """

    first: Annotated[Tensor, Of("batch heads units+1", I32)]
    centroid: Annotated[Tensor, Of("batch heads units dim", "kv")]
    unit_count: PerHead


class Segments(NamedTuple):
    """Where the tokens in the ring are cut into segments, which are not yet units.

    cuts: one entry per ring row after the sinks: 1 if the token in that row begins a segment.
    segment_begin: the position at which the newest segment begins.
    frontier: tokens below this position are in the index, as units; tokens from this position on are in the ring.
    """

    cuts: Annotated[Tensor, Of("batch heads ring_rows-sink", I32)]
    segment_begin: PerHead
    frontier: PerHead


class Trigger(NamedTuple):
    """What decides whether a decode step retrieves.

    previous: the query that the next query is compared with, in two halves. A step at length n reads half (n - 1) % 2
        and writes half n % 2, so programs of other heads may still read while one writes. It is in fp32: with `memory`
        near 1 a mean in bf16 never moves.
    seen: the row length at the last check. A value other than `length - 1` means that a prompt came in between.
    retrieve_now: 1 if the head retrieves at this step.
    retrievals: how often the head has retrieved.
    """

    previous: Annotated[Tensor, Of("batch 2 q_heads dim", torch.float32)]
    seen: PerHead
    retrieve_now: PerHead
    retrievals: PerHead


class Boundaries(NamedTuple):
    """The rule by which ops/clusters/find_boundary.py finds boundaries between segments.

    tau: a mean cosine below this value is a boundary.
    per_head: average the cosines over the query heads of each kv head, instead of over all query heads.
    shortest, longest: the least and the most tokens of a segment.
    memory: the weight of the past in the query that a new query is compared with. 0 compares with the last step alone.
    """

    tau: float
    per_head: bool
    shortest: int
    longest: int
    memory: float
