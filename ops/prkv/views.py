"""The static set of PRKV, as the ops of the family take it."""
from typing import Annotated, NamedTuple

from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import I32, PerHead


class StaticSet(NamedTuple):
    """The tokens that every step attends to, until the set is chosen anew. Each (row, kv head) has a set of its own.

    ids: the pool rows of the tokens at the moment of the choice, ascending, -1 after the last token.
    count: how many tokens the set has.
    target: how many tokens the set is to have.
    updated: 1 where this step chose the set anew, else 0.
    chosen_at: the length of the row at the last choice; NOT_YET (ops/index/observe.py) before the first choice after a
        prompt. The first choice after a prompt stores its length less `stagger`.
    stagger: how many tokens before its interval ends a head makes its second choice. Layers differ in it, so that they
        choose at different steps.
    updates: how many choices the head has made.
    barrier: the counters ARRIVED and LEFT of the grid barrier of a head (ops/_machinery/grid_barrier.py), and DONE: how
        many programs have finished, of those that decide about one target (ops/prkv/static_target.py).
    every: the interval between two choices, in tokens.
    front_home: of a set that moves to the front of the pool (ops/prkv/relocate.py), the home row of the token that lies
        in each row of the front; -1 where the token is at home.
    """

    ids: Annotated[Tensor, Of("batch heads static", I32)]
    count: PerHead
    target: PerHead
    updated: PerHead
    chosen_at: PerHead
    stagger: PerHead
    updates: PerHead
    barrier: Annotated[Tensor, Of("batch heads 3", I32)]
    every: int
    front_home: Annotated[Tensor, Of("batch heads static", I32)] | None = None
