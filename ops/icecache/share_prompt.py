"""Take a prompt into a sharing layer: match its heads with those of the selecting layer, and copy the pool order.

    source(h) = argmax over heads s of the selecting layer of the number of tokens that top(h) and top(s) share,
                summed over the queries; ties go to s = h, then to the lowest s
    out[h]    = order[source(h)]

top are the results of top_tokens_of_last_queries. Heads of the same number need not look for the same tokens. Heads are
matched when tokens of a row first leave the ring with a prompt, and keep their source for the life of the row. Without
top tokens, and where tokens first leave in a decode step, a head keeps -1: its source is the head of its own number.

Launches: torch kernels on the device, none by Triton. They run beside the next layer, unless `join` is set
(ops/_machinery/side_stream.py).

Paper: appendix C, "reuse", which always takes the head of the same number.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import torch_kernels
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops.icecache.plant_tree import whole_pages
from torchsparsekv.ops.icecache.share_step import head_numbers
from torchsparsekv.ops.icecache.views import SharedSelection
from torchsparsekv.ops.store.store_prompt import Order
from torchsparsekv.ops.store.views import I32, Lengths

TopTokens = Annotated[Tensor, Of("batch heads queries wanted", I32)]


def check(order, top_tokens, source_top_tokens, shared, lengths, page, join) -> None:
    if (top_tokens is None) != (source_top_tokens is None):
        raise ValueError("give the top tokens of this layer and of the selecting layer, both or neither")
    whole_pages(page, lengths, f"pages of {page}")


def common_tokens(top_tokens: Tensor, source_top_tokens: Tensor) -> Tensor:
    """How many tokens each kv head has in common with each head of the selecting layer, summed over the queries:
    [batch, heads, heads]."""
    count = []
    for h in range(top_tokens.shape[1]):
        tokens = top_tokens[:, h, None, ..., None]  # [batch, 1, queries, wanted, 1]
        same = (tokens == source_top_tokens[..., None, :]) & (tokens >= 0)
        count.append(same.flatten(2).sum(-1))
    return torch.stack(count, 1)


def matched(top_tokens: Tensor, source_top_tokens: Tensor) -> Tensor:
    """The head of the selecting layer that each kv head has most tokens in common with: [batch, heads]."""
    same_number = torch.eye(top_tokens.shape[1], dtype=torch.int64, device=top_tokens.device)
    return (2 * common_tokens(top_tokens, source_top_tokens) + same_number).argmax(-1)


def reference(
    order: Order, top_tokens: TopTokens | None, source_top_tokens: TopTokens | None,
    shared: Changed[SharedSelection], lengths: Lengths, page: int, join: bool,
) -> Tensor:  # fmt: skip
    """The order in which the pool takes the tokens of a prompt.

    Args:
        order: [batch, heads, tokens], that of the selecting layer (plant_tree).
        top_tokens, source_top_tokens: [batch, heads, queries, wanted], of this layer and of the selecting layer; both
            or neither.
        shared: written: source_heads, where heads are matched, and fill of the pages that this prompt fills.
        page: tokens of a page.
        join: wait for the result instead of computing it beside the next layer.

    Returns: int32 [batch, heads, tokens].
    """
    _, length, old, new = lengths[:4]
    some_leave = (length > 0) & (new > old)
    if top_tokens is not None and source_top_tokens is not None:
        first = some_leave & (old == lengths.sink)
        matches = matched(top_tokens, source_top_tokens)
        shared.source_heads.copy_(torch.where(first[:, None], matches, shared.source_heads))
    pages = torch.arange(shared.fill.shape[2], device=order.device)
    full = some_leave[:, None] & (pages >= old[:, None] // page) & (pages < new[:, None] // page)
    shared.fill.masked_fill_(full[:, None], page)
    return order.gather(1, head_numbers(shared.source_heads)[..., None].expand_as(order))


def launch(order, top_tokens, source_top_tokens, shared, lengths, page, join) -> Tensor:
    tensors = (order, top_tokens, source_top_tokens, *shared, *lengths[:4])
    with on_side_stream(join, *(t for t in tensors if t is not None)):
        return reference(order, top_tokens, source_top_tokens, shared, lengths, page, join)


def fake(order, *_) -> Tensor:
    return torch.empty_like(order)


share_prompt = register(
    "share_prompt", reference, impls=(torch_kernels(launch),), fake=fake, check=check, capturable=False
)
