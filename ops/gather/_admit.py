"""Bring the newest blocks of a prompt into the hot buffer by calls of `fetch`, until the buffer is full."""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.triton import cdiv
from torchsparsekv.ops.gather.fetch import fetch
from torchsparsekv.ops.store.rows import STATS
from torchsparsekv.ops.store.views import HotBuffer, Lengths, Selection, Stats


def admit(pool: Tensor, hot: HotBuffer, lengths: Lengths, most: int, join: bool) -> None:
    """Bring the newest full blocks that left the ring in this call into the hot buffer.

    The blocks come from the pool, after the copy of the prompt into the pool (ops/store/store_prompt.py). The hit rate
    does not count them. Of two blocks the hand meets the older one first.

    Args:
        most: the most tokens that can leave the ring in this call.
        join: whether the current stream waits (ops/_machinery/side_stream.py).
    """
    (batch, heads, n), slots, p = hot.chosen.shape, hot.block_of.shape[2], hot.rows.shape[3]
    if not n:
        return
    with on_side_stream(join, pool, *hot, *lengths[:4]):
        uncounted = Stats(torch.zeros((batch, heads, len(STATS)), dtype=torch.int64, device=pool.device))
        end = lengths.ring_begin // p
        begin = torch.maximum(torch.full_like(end, cdiv(lengths.sink, p)), lengths.previous_ring_begin // p)
        begin = torch.maximum(begin, end - slots)
        for first in range(0, min(slots, cdiv(most, p)), n):
            ids = begin[:, None] + torch.arange(first, first + n, dtype=torch.int32, device=pool.device)
            ids = torch.where(ids < end[:, None], ids, -1)
            fetch(Selection(ids[:, None].expand(batch, heads, n).contiguous()), pool, hot, uncounted)
