"""Add new tokens to the lengths of all rows, and move the begin of their rings.

    length     = seq_len - left_pad                    (seq_len after the new tokens)
    ring_begin = sink + interval * floor((length - sink - window) / interval),   at least sink

So the ring holds the sinks and the last `window` to `window + interval - 1` tokens after them. A row whose length
exceeds `capacity` gets length -1 for good: later ops write nothing for the row, and attention over it is NaN.

Args:
    seq_len []: tokens of the longest row, padding included: what transformers sees.
    left_pad [batch]: padding in front of each row.
    lengths: all four tensors are changed. start gets the old length, previous_ring_begin the old ring_begin.
    pad [batch]: left padding that the mask of this call shows. It counts only for rows without tokens, because later
        masks may cover the new tokens alone.
    tokens: new columns of this call.
    capacity: the most tokens of a row.

Launches: one program for all rows.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed, Of, SymInt
from torchsparsekv.ops._machinery.triton import next_power_of_2, tl, triton
from torchsparsekv.ops.store.views import Lengths, PerRow

Padding = Annotated[Tensor, Of("batch", (torch.int32, torch.int64))]
Total = Annotated[Tensor, Of("", torch.int64)]


def check(seq_len, left_pad, lengths, pad, tokens, capacity, window) -> None:
    if tokens < 1 or lengths.interval < 1 or lengths.sink < 0 or window < 0:
        got = f"{tokens}, {lengths.interval}, {lengths.sink} and {window}"
        raise ValueError(f"need tokens, interval >= 1 and sink, window >= 0, got {got}")


def reference(
    seq_len: Changed[Total], left_pad: Changed[PerRow], lengths: Changed[Lengths], pad: Padding | None, tokens: SymInt,
    capacity: int, window: int,
) -> None:  # fmt: skip
    start, length, previous_ring_begin, ring_begin, sink, interval = lengths
    if pad is not None:
        left_pad.copy_(torch.where(length <= 0, pad, left_pad))
    seq_len += tokens
    start.copy_(length)
    previous_ring_begin.copy_(ring_begin)
    now = (seq_len - left_pad).clamp(min=0)
    fits = (now <= capacity) & (start >= 0)
    steps = torch.div((now - sink - window).clamp(min=0), interval, rounding_mode="floor")
    length.copy_(torch.where(fits, now, -1))
    ring_begin.copy_(torch.where(fits, sink + steps * interval, ring_begin))


@triton.jit(do_not_specialize=["tokens", "interval"])
def _advance(
    seq_len, start, length, previous_ring_begin, ring_begin, left_pad, pad, tokens, capacity, sink, window, interval,
    batch, ROWS: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, ROWS)
    m = b < batch
    total = tl.load(seq_len) + tokens
    old_length = tl.load(length + b, mask=m, other=0)
    old_begin = tl.load(ring_begin + b, mask=m, other=0)
    before = tl.load(left_pad + b, mask=m, other=0)
    before = tl.where(old_length <= 0, tl.load(pad + b, mask=m, other=0).to(tl.int32), before)
    tl.store(left_pad + b, before, mask=m)
    now = tl.maximum(total - before, 0).to(tl.int32)
    fits = (now <= capacity) & (old_length >= 0)
    steps = tl.maximum(now - sink - window, 0) // interval
    tl.store(start + b, old_length, mask=m)
    tl.store(previous_ring_begin + b, old_begin, mask=m)
    tl.store(length + b, tl.where(fits, now, -1), mask=m)
    tl.store(ring_begin + b, tl.where(fits, sink + steps * interval, old_begin), mask=m)
    tl.store(seq_len, total)


def launch(seq_len, left_pad, lengths, pad, tokens, capacity, window) -> None:
    *times, sink, interval = lengths
    batch, pad = left_pad.numel(), left_pad if pad is None else pad  # one kernel serves calls with and without `pad`
    _advance[(1,)](
        seq_len, *times, left_pad, pad, tokens, capacity, sink, window, interval, batch,
        ROWS=next_power_of_2(batch), num_warps=1,
    )  # fmt: skip


advance = register("advance", reference, impls=(by_triton(launch),), check=check)
