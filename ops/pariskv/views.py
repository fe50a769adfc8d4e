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


Uses: TypeAlias = Annotated[Tensor, Of("1 blocks", I32)]


class Counted(NamedTuple):
    """How many retrievable keys of each request have each id, and up to which position they are counted.

    An engine does not say which request a row of the batch holds. So a count records the block of its last counted key,
    and `uses` of that block. If both are unchanged, the row still begins with the same tokens: requests share a block
    only if their texts are equal up to the end of the block. Keys of equal texts, computed in other batches, may have
    other ids where they are rounded; then counts differ by these keys from those of the present blocks.

    counts: per request, kv head and subspace, the number of keys with each id.
    ends: keys at positions below this are counted; 0 if none are.
    blocks: the block of the last counted key.
    uses_then: `uses` of that block when the key was counted.
    uses: how often a token was written to the first row of each block. encode_tokens adds to it.
    """

    counts: Annotated[Tensor, Of("requests heads spaces centroids", I32)]
    ends: Annotated[Tensor, Of("requests heads spaces", I32)]
    blocks: Annotated[Tensor, Of("requests heads spaces", I32)]
    uses_then: Annotated[Tensor, Of("requests heads spaces", I32)]
    uses: Uses
