"""The index of ParisKV, as its ops take it."""
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import I32


class Codes(NamedTuple):
    """Keys as ParisKV keeps them: centroid ids, 4-bit codes of directions, weights; and how often each id occurs."""

    ids: Annotated[Tensor, Of("batch heads rows spaces", torch.uint8)]
    codes: Annotated[Tensor, Of("batch heads rows code_bytes", torch.uint8)]
    weights: Annotated[Tensor, Of("batch heads rows spaces", torch.float16)]
    counts: Annotated[Tensor, Of("batch heads spaces centroids", I32)]
