"""The static set of PRKV, as its ops take it."""
from typing import Annotated, NamedTuple

from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import I32, PerHead


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
