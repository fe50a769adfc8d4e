"""The keys that leave the ring in this call: what every index takes in."""
from collections.abc import Iterator

import torch
from torch import Tensor


def leaving_keys(
    k: Tensor, pool: Tensor, start: Tensor, length: Tensor, leaving: Tensor, retired: Tensor
) -> Iterator[tuple[int, int, int, Tensor]]:
    """(row, first position, end, keys [kv_heads, tokens, head_dim]) of every row where some leave.

    Positions from `start` on are new: their keys come from `k`, whose last columns they are, the others from the pool.
    """
    spans = torch.stack([start, length, leaving, retired], 1).tolist()
    for b, (n0, n, old, new) in enumerate(spans):
        if n <= 0 or new <= old:
            continue
        fresh = min(max(old, n0), new)
        column = k.shape[2] - n
        yield b, old, new, torch.cat([pool[b, :, old:fresh, 0], k[b, :, column + fresh : column + new]], 1)
