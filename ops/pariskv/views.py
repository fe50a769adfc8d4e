"""The index of ParisKV."""
from typing import Annotated, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import I32

Ids: TypeAlias = Annotated[Tensor, Of("pools heads rows spaces", torch.uint8)]


class Codes(NamedTuple):
    """The compressed keys of ParisKV.

    ids: per key and subspace, the number of the nearest sign pattern (the centroid).
    codes: per key, a 4-bit code per rotated coordinate, two to a byte: a sign, and one of 8 magnitudes.
    weights: per key and subspace, the factor that makes <direction, q> an estimate of <key, q>.
    counts: how many retrievable keys of a row have each id.
    """

    ids: Ids
    codes: Annotated[Tensor, Of("pools heads rows code_bytes", torch.uint8)]
    weights: Annotated[Tensor, Of("pools heads rows spaces", torch.float16)]
    counts: Annotated[Tensor, Of("batch heads spaces centroids", I32)]
