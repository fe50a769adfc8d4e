"""The tokens that SnapKV keeps, as the ops of the family take them."""
from typing import Annotated, NamedTuple

from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import I32, PerHead


class SnapSet(NamedTuple):
    """The tokens that a step attends to beside the ring. Each (row, kv head) has its own.

    snap_tokens fills it at the end of a prompt; keep_leaving adds tokens that leave the ring.

    ids: the positions of the tokens, ascending, -1 after the last token.
    count: how many tokens there are.
    frontier: the position from which on attention reads the ring. At the end of a prompt the observation window begins
        there; later it moves on with the ring.
    chosen_at: the length of the row when tokens last joined; NOT_YET (ops/index/observe.py) between a prompt and its
        first step.
    updated: 1 where this step has tokens to fetch, else 0.
    updates: how many steps had tokens to fetch.
    lost: how many tokens left the ring since the last prompt and found no room.
    """

    ids: Annotated[Tensor, Of("batch heads kept", I32)]
    count: PerHead
    frontier: PerHead
    chosen_at: PerHead
    updated: PerHead
    updates: PerHead
    lost: PerHead
