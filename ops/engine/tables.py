"""Which blocks of a request of a serving engine every step attends to, in torch and in Triton.

A request has its first blocks as sinks. Behind them, blocks become choosable when they are full and all of their tokens
are older than the window; those from `near_begin` on are attended to whatever the query. It is the law of the ring
(ops/store/advance.py) with rings that begin at blocks.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv, tl, triton
from torchsparsekv.ops.engine.views import Requests


def near_begin(requests: Requests, block_size: int) -> Tensor:
    """The position behind the blocks of each request that can be chosen."""
    length, _, sink, window = requests
    blocks = torch.div((length - sink - window).clamp(min=0), block_size, rounding_mode="floor")
    return sink + blocks * block_size


def near_blocks(window: int, block_size: int) -> int:
    """How many blocks stand behind `near_begin` at most."""
    return cdiv(window + block_size - 1, block_size)


@triton.jit
def near_begin_of(length, sink, window, P: tl.constexpr):
    return sink + tl.maximum(length - sink - window, 0) // P * P


def check_tables(requests: Requests, block_size: int) -> None:
    if requests.sink < 0 or requests.window < 1 or requests.sink % block_size:
        got = f"sink {requests.sink}, window {requests.window}"
        raise ValueError(f"need window >= 1 and sink a multiple of {block_size} tokens of a block: {got}")


def check_one(rows: Tensor) -> None:
    if rows.shape[0] != 1:
        raise ValueError(f"an engine has one pool for all of its requests, got {rows.shape[0]}")
