"""The sums of groups of pool rows, as the ops take them."""
from typing import Annotated, NamedTuple

from torch import Tensor

from torchsparsekv.ops._machinery.signature import FLOATS, Of


class Rest(NamedTuple):
    """The sums of the keys and values of every group of pool rows (ops/rest/group_sums.py).

    sums: row g is the sum of the keys and the sum of the values in the pool rows g * group to (g + 1) * group, of
        tokens that have left the ring. None: nothing is estimated.
    group: pool rows of a group; 0 without sums.
    """

    sums: Annotated[Tensor, Of("batch heads groups 2 dim", FLOATS)] | None = None
    group: int = 0


NO_REST = Rest()
