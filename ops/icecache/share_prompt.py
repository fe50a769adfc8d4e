"""A layer that follows another takes in a prompt: each of its kv heads has the pages of one of that layer's heads.

Heads of the same number need not look for the same tokens. So when tokens of a row first leave the ring with a prompt,
each kv head is given the head of the layer that it follows whose tokens it shares most of (ops/icecache/top_tokens_of_last_queries.py,
counted query by query; ties go to that of its own number, then to the lowest), for as long as the row lives. Without
`sought`, and where tokens first leave while decoding, heads stay -1: that of its own number.

Returns the `order` in which the pool takes its tokens (ops/icecache/plant_tree.py), head by head the one that it follows.
Pages that are full with this prompt are so in `followed.fill`. Runs beside the next layer, unless told to `join`.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import torch_kernels
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops.icecache.plant_tree import whole_pages
from torchsparsekv.ops.icecache.share_step import followed_by
from torchsparsekv.ops.icecache.views import Followed
from torchsparsekv.ops.store.store_prompt import Order
from torchsparsekv.ops.store.views import I32, Lengths

Sought = Annotated[Tensor, Of("batch heads queries wanted", I32)]


def check(order, sought, its, followed, lengths, page, join) -> None:
    if (sought is None) != (its is None):
        raise ValueError("what this layer looks for, and what the one that it follows does, are given both or neither")
    whole_pages(page, lengths, f"pages of {page}")


def shared(sought: Tensor, its: Tensor) -> Tensor:
    """How many tokens each kv head has in common with each head of the other layer, over the queries: [batch, heads,
    heads]."""
    count = [((s := sought[:, h, None, ..., None]) == its[..., None, :]) & (s >= 0) for h in range(sought.shape[1])]
    return torch.stack([c.flatten(2).sum(-1) for c in count], 1)


def matched(sought: Tensor, its: Tensor) -> Tensor:
    """The head of the other layer that each kv head shares most with."""
    own = torch.eye(sought.shape[1], dtype=torch.int64, device=sought.device)
    return (2 * shared(sought, its) + own).argmax(-1)


def reference(
    order: Order, sought: Sought | None, its: Sought | None, followed: Changed[Followed], lengths: Lengths, page: int,
    join: bool,
) -> Tensor:  # fmt: skip
    _, length, old, new = lengths[:4]
    came = (length > 0) & (new > old)
    if sought is not None and its is not None:
        first = came & (old == lengths.sink)
        followed.heads.copy_(torch.where(first[:, None], matched(sought, its), followed.heads))
    at = torch.arange(followed.fill.shape[2], device=order.device)
    full = came[:, None] & (at >= old[:, None] // page) & (at < new[:, None] // page)
    followed.fill.masked_fill_(full[:, None], page)
    return order.gather(1, followed_by(followed.heads)[..., None].expand_as(order))


def launch(order, sought, its, followed, lengths, page, join) -> Tensor:
    with on_side_stream(join, *(t for t in (order, sought, its, *followed, *lengths[:4]) if t is not None)):
        return reference(order, sought, its, followed, lengths, page, join)


def fake(order, *_) -> Tensor:
    return torch.empty_like(order)


share_prompt = register(
    "share_prompt", reference, impls=(torch_kernels(launch),), fake=fake, check=check, capturable=False
)
