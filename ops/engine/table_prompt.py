"""Exact causal attention of new tokens of one request over its past and themselves.

The past is the first `past` tokens of the request. They lie in the blocks `table` of the pool, and are gathered in
pieces. The new tokens come as `k` and `v`.
"""
from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import torch_kernels
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops._machinery.triton import cdiv
from torchsparsekv.ops.attend._split import causal_attention, result_like
from torchsparsekv.ops.attend.prompt_attention import PIECE, beyond_torch, by_torch
from torchsparsekv.ops.engine.tables import check_one
from torchsparsekv.ops.engine.views import FlatTokens
from torchsparsekv.ops.store.rows import as_numbers, rows_of
from torchsparsekv.ops.store.views import I32, Attention, Pool

FlatQueries = Annotated[Tensor, Of("tokens q_heads dim", "kv", strided=True)]
Table = Annotated[Tensor, Of("places", I32)]


def check(q, k, v, pool, table, past, block_size, attention) -> None:
    _check.heads(q, k)
    check_one(pool)
    if not 0 <= past <= table.shape[0] * block_size:
        raise ValueError(f"{table.shape[0]} blocks of {block_size} do not hold a past of {past} tokens")


def _past(pool: Pool, table: Tensor, past: int, block_size: int, most: int) -> Iterator[Tensor]:
    """The past in pieces [heads, up to `most` tokens, 2, dim], as the pool stores it."""
    blocks = pool[0].unflatten(1, (-1, block_size))
    for first in range(0, past, most):
        ids = table[first // block_size : cdiv(min(first + most, past), block_size)]
        yield blocks.index_select(1, ids).flatten(1, 2)[:, : past - first]


def reference(
    q: FlatQueries, k: FlatTokens, v: FlatTokens, pool: Pool, table: Table, past: int, block_size: int,
    attention: Attention,
) -> Tensor:  # fmt: skip
    """Exact causal attention of new tokens of one request over its past and themselves.

    Args:
        q: [tokens, q_heads, dim], as engines have it. k, v: [tokens, heads, dim].
        pool: [1, heads, rows, 2, dim].
        table: ids of the blocks of the request [places].
        past: how many tokens lie in these blocks before the new ones.
        block_size: tokens of a block.
        attention: scale, soft cap and extra logits of the model.

    Returns:
        [tokens, q_heads, dim].

    Launches:
        Attention of torch, once per piece of the past and once for the new tokens; the reference where torch has no
        kernel for it.
    """
    x, new = q.transpose(0, 1), rows_of(k, v).transpose(0, 1)
    pieces = [as_numbers(piece, k.dtype) for piece in _past(pool, table, past, block_size, past or 1)]
    rows = torch.cat([*pieces, new], 1)[None]
    return causal_attention(x[None], rows, attention)[0].transpose(0, 1).contiguous()


def launch(q, k, v, pool, table, past, block_size, attention) -> Tensor:
    if beyond_torch(q, past > 0, attention):
        return reference(q, k, v, pool, table, past, block_size, attention)
    x, y, z = (t.transpose(0, 1)[None] for t in (q, k, v))
    most = max(PIECE // block_size, 1) * block_size
    pieces = _past(pool, table, past, block_size, most) if past else None
    return by_torch(x, y, z, pieces, attention)[0].transpose(0, 1).contiguous()


table_prompt = register(
    "table_prompt", reference, impls=(torch_kernels(launch),), fake=result_like, check=check, capturable=False
)
