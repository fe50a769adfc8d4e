"""Move the clock of a cache: how many tokens each row holds, and which of them have left the ring.

`seq_len` counts padded positions (what transformers sees); `length` counts real tokens per row. Tokens leave the ring
for the pool `interval` at a time: those below `retired` are in the pool, `[retired, length)` are in the ring, and the
first `sink` stay in the ring for good. `start` and `leaving` keep the values from before this call, so the ops of the
same step know what is new. `pad` is the left padding that a mask tells of, per row; it counts only for rows that have
no token yet, for later masks may be of the new tokens alone. A row that would overrun `capacity` gets length -1:
nothing is written for it any more and attention over it is NaN, which no one can mistake for an answer.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import next_power_of_2, tl, triton

SCHEMA = (
    "(Tensor(a!) seq_len, Tensor(b!) start, Tensor(c!) length, Tensor(d!) leaving, Tensor(e!) retired, "
    "Tensor(f!) left_pad, Tensor? pad, SymInt tokens, int capacity, int sink, int window, int interval) -> ()"
)


def check(seq_len, start, length, leaving, retired, left_pad, pad, tokens, capacity, sink, window, interval) -> None:
    _check.dtype((torch.int64,), seq_len=seq_len)
    _check.counters(length.numel(), start=start, length=length, leaving=leaving, retired=retired, left_pad=left_pad)
    if pad is not None:
        _check.dtype((torch.int32, torch.int64), pad=pad)
        _check.contiguous(pad=pad)
        _check.shape(left_pad.shape, pad=pad)
    if tokens < 1 or interval < 1 or sink < 0 or window < 0:
        raise ValueError(f"need tokens, interval >= 1 and sink, window >= 0: {tokens}, {interval}, {sink}, {window}")


def reference(
    seq_len, start, length, leaving, retired, left_pad, pad, tokens, capacity, sink, window, interval
) -> None:
    if pad is not None:
        left_pad.copy_(torch.where(length <= 0, pad, left_pad))
    seq_len += tokens
    start.copy_(length)
    leaving.copy_(retired)
    now = (seq_len - left_pad).clamp(min=0)
    fits = (now <= capacity) & (start >= 0)
    steps = torch.div((now - sink - window).clamp(min=0), interval, rounding_mode="floor")
    length.copy_(torch.where(fits, now, -1))
    retired.copy_(torch.where(fits, sink + steps * interval, retired))


@triton.jit
def _advance(
    seq_len, start, length, leaving, retired, left_pad, pad, tokens, capacity, sink, window, interval, batch,
    TOLD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, ROWS)
    m = b < batch
    total = tl.load(seq_len) + tokens
    old_length = tl.load(length + b, mask=m, other=0)
    old_retired = tl.load(retired + b, mask=m, other=0)
    before = tl.load(left_pad + b, mask=m, other=0)
    if TOLD:
        before = tl.where(old_length <= 0, tl.load(pad + b, mask=m, other=0).to(tl.int32), before)
        tl.store(left_pad + b, before, mask=m)
    now = tl.maximum(total - before, 0).to(tl.int32)
    fits = (now <= capacity) & (old_length >= 0)
    steps = tl.maximum(now - sink - window, 0) // interval
    tl.store(start + b, old_length, mask=m)
    tl.store(leaving + b, old_retired, mask=m)
    tl.store(length + b, tl.where(fits, now, -1), mask=m)
    tl.store(retired + b, tl.where(fits, sink + steps * interval, old_retired), mask=m)
    tl.store(seq_len, total)


def cuda(seq_len, start, length, leaving, retired, left_pad, pad, tokens, capacity, sink, window, interval) -> None:
    batch = length.numel()
    _advance[(1,)](
        seq_len, start, length, leaving, retired, left_pad, left_pad if pad is None else pad, tokens, capacity, sink,
        window, interval, batch, TOLD=pad is not None, ROWS=next_power_of_2(batch), num_warps=1,
    )  # fmt: skip


def fake(seq_len: Tensor, *_) -> None: ...


advance = register("advance", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
