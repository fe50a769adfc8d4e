"""The index of MagicPIG, and the sample of a step."""
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import PerHead

MOST_BITS = 15  # of a code, an int16 that is not negative


class Signatures(NamedTuple):
    """The hash codes of the keys.

    codes: the code of every key in every table. Bit j is set if the key minus the mean key lies on the positive side of
        plane j (ops/magicpig/_planes.py).
    centre: the mean key of a head, which is subtracted from every key.
    """

    codes: Annotated[Tensor, Of("batch heads tables rows", torch.int16)]
    centre: Annotated[Tensor, Of("batch heads dim", torch.float32)]


class Sample(NamedTuple):
    """The sample of the last step.

    asked: the codes of the queries.
    used: the query heads of a kv head sampled with this many tables, always the first ones; 0: they attend to every
        token.
    """

    asked: Annotated[Tensor, Of("batch q_heads tables", torch.int16)]
    used: PerHead


def check_bits(bits: int, seed: int) -> None:
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"bits must be from 1 to {MOST_BITS}, got {bits}")
    if not 0 <= seed < 1 << 16:
        raise ValueError(f"seed must be from 0 to {(1 << 16) - 1}, got {seed}")
