"""The index of PQCache."""
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops.store.views import PerRow


class Codebook(NamedTuple):
    """The product quantizer of every head, and the codes of the keys.

    centroids: the centroids of every space. A space is a part of `width` neighbouring channels.
    codes: per key and space, the number of the nearest centroid.
    learned: 1 for rows whose centroids k-means has learned from a prompt. In other rows the first keys that leave the
        ring are the centroids.
    """

    centroids: Annotated[Tensor, Of("batch heads spaces centroids width", "kv")]
    codes: Annotated[Tensor, Of("batch heads rows spaces", torch.uint8)]
    learned: PerRow


def check_codebook(codebook: Codebook, dim: int) -> None:
    """Refuse spaces that do not cover the channels of a key, and centroids whose numbers do not fit a code."""
    spaces, centroids, width = codebook.centroids.shape[2:]
    if spaces * width != dim:
        raise ValueError(f"{spaces} spaces of {width} channels do not cover head_dim {dim}")
    if not 1 <= centroids <= 256:
        raise ValueError(f"a code of one byte names 1 to 256 centroids, got {centroids}")
