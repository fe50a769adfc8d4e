"""Which blocks of a request every step attends to, in torch and in Triton.

The first blocks of a request are its sinks. A block behind them can be selected once it is full and all of its tokens
are older than the window. The position `near_begin` is where these blocks end; every step attends to all blocks from
there on:

    near_begin = sink + max(length - sink - window, 0) rounded down to whole blocks

This is the law of the ring (ops/store/advance.py) for rings that begin at block boundaries.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv, tl, triton
from torchsparsekv.ops.engine.views import Requests


def near_begin(requests: Requests, block_size: int) -> Tensor:
    """The position behind the blocks of each request that can be selected, [requests]."""
    length, _, sink, window = requests
    blocks = torch.div((length - sink - window).clamp(min=0), block_size, rounding_mode="floor")
    return sink + blocks * block_size


def near_blocks(window: int, block_size: int) -> int:
    """The most blocks that can stand behind `near_begin`."""
    return cdiv(window + block_size - 1, block_size)


@triton.jit
def near_begin_of(length, sink, window, P: tl.constexpr):
    """`near_begin` of one request, with blocks of P tokens."""
    return sink + tl.maximum(length - sink - window, 0) // P * P


def check_tables(requests: Requests, block_size: int) -> None:
    if requests.sink < 0 or requests.window < 1 or requests.sink % block_size:
        got = f"sink {requests.sink}, window {requests.window}"
        raise ValueError(f"need window >= 1 and sink a multiple of {block_size} tokens of a block: {got}")


def check_one(rows: Tensor) -> None:
    if rows.shape[0] != 1:
        raise ValueError(f"an engine has one pool for all of its requests, got {rows.shape[0]}")
