"""Which tokens of a request every step attends to.

The first tokens of a request are its sinks. Later tokens can be selected, `interval` at a time, once all `interval`
tokens are older than the window. Tokens that can be selected end at `ring_begin`. Every step attends to all tokens
from `ring_begin` on:

    ring_begin = sink + max(length - sink - window, 0) rounded down to whole intervals

This is the rule of the ring (ops/store/advance.py), so engines and `patch` select from the same tokens.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv
from torchsparsekv.ops.store.views import Lengths


def lengths_of(length: Tensor, sink: int, window: int, interval: int) -> Lengths:
    """The lengths of requests with `length` tokens each, as ops of a decode step read them."""
    groups = torch.div((length - sink - window).clamp(min=0), interval, rounding_mode="floor")
    begin = (groups * interval + sink).to(torch.int32)
    return Lengths(length, length, begin, begin, sink, interval)


def near_units(window: int, interval: int, unit: int) -> int:
    """The most units of `unit` tokens from `ring_begin` on."""
    return cdiv(window + interval - 1, unit)


def check_one(rows: Tensor) -> None:
    if rows.shape[0] != 1:
        raise ValueError(f"an engine has one pool for all of its requests, got {rows.shape[0]}")
