"""The index of ShadowKV."""
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import Fill


class Landmarks(NamedTuple):
    """The landmark of every chunk, and what marks it as an outlier.

    keys: the landmark of each chunk, the mean of its keys.
    cosines: the least cosine of a key of the chunk to the landmark.
    outlier: 1 for chunks that every step attends to.
    """

    keys: Annotated[Tensor, Of("batch heads blocks dim", "kv")]
    cosines: Annotated[Tensor, Of("batch heads blocks", torch.float32)]
    outlier: Fill


def check_chunks(block_size: int, rows: int, blocks: int) -> None:
    """Refuse `blocks` chunks that do not cover exactly a pool of `rows` rows."""
    if block_size < 1 or blocks * block_size != rows:
        raise ValueError(f"{rows} pool rows are not {blocks} chunks of {block_size}")
