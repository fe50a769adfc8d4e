"""What SnapKV keeps of a prompt, as its ops take it."""
from typing import Annotated, NamedTuple

from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import I32, PerHead


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
