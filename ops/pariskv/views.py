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
    """How many retrievable keys of each request have each id, and how far that is counted.

    An engine does not say which request a row of the batch has at a step, so every count names the block in which it
    ends. While that block stays in its place and in use, so do all tokens before it: blocks are shared only by
    requests whose texts are equal up to the end of the block.

    counts: per request, kv head and subspace, the number of keys with each id.
    ends: the keys at positions below this one are counted, 0 for none.
    blocks: the block of the last of these keys.
    uses_then: `uses` of that block at that time.
    uses: how often each block was begun. encode_tokens counts it.
    """

    counts: Annotated[Tensor, Of("requests heads spaces centroids", I32)]
    ends: Annotated[Tensor, Of("requests heads spaces", I32)]
    blocks: Annotated[Tensor, Of("requests heads spaces", I32)]
    uses_then: Annotated[Tensor, Of("requests heads spaces", I32)]
    uses: Uses
