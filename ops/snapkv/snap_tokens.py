"""Choose the tokens of a prompt that steps attend to: those that its last queries attend to most.

With the queries q of the observation window (the last tokens of the prompt), positions i, and all keys up to a query:

    w[i, g, j] = softmax over j <= i of (scale * q[i, g] . key[j]),  soft-capped where the model does that
    votes[j]   = sum of w[i, g, j] over the window and the query heads g of the kv head, for j before the window
    pooled     = votes, pooled over `width` neighbours; the mean counts neighbours that do not exist as zeros
    kept       = the tokens j >= sink with the most pooled votes, as many as there is room for, ascending;
                 ties go to the lower position

The other tokens stay in the pool, but are not attended to until the next prompt chooses from all tokens. The extra
logit of a model with attention sinks is left out.

SnapKV (arXiv 2404.14469, section 4, and its code). Summing over the query heads of a kv head is not the paper's: there
every query head chooses for itself, from keys that are repeated for it.
"""
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import torch_kernels
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops.attend._split import soft_capped
from torchsparsekv.ops.attend.prompt_attention import bounds_of, brought, check_spans
from torchsparsekv.ops.snapkv.views import SnapSet
from torchsparsekv.ops.store.rows import as_numbers, keys_of, only_keys
from torchsparsekv.ops.store.views import Attention, Lengths, NewKeys, Observed, Pool

LOGITS = 1 << 24  # of one kv head at a time: 64 MiB, which is 32 queries x 4 heads at 128K tokens


class Pooling(NamedTuple):
    """How votes are pooled: over `width` neighbouring tokens, an odd number; the largest of them, or their mean."""

    width: int
    largest: bool


def check(k, observed, kept, pool, lengths, attention, pooling, spans) -> None:
    _check.heads(observed.queries.transpose(1, 2), pool)
    check_spans(spans, k.shape[0])
    if pooling.width < 1 or pooling.width % 2 == 0:
        raise ValueError(f"votes are pooled over an odd number of tokens, got {pooling.width}")


def window_queries(observed: Observed, b: int, n: int, heads: int) -> Tensor:
    """The queries of the last tokens of a row of `n`, oldest first: [heads, window, group, dim]."""
    window = observed.queries.shape[1]
    places = torch.arange(max(n - window, 0), n, device=observed.queries.device) % window
    return observed.queries[b, places].unflatten(1, (heads, -1)).transpose(0, 1).float()


def votes(queries: Tensor, first: int, keys: Sequence[Tensor], end: int, attention: Attention) -> Tensor:
    """The votes [end] of one kv head, from queries [some, group, dim] of the tokens from `first` on and the keys of all
    tokens, [tokens, dim], in pieces."""
    z = torch.cat([queries.flatten(0, 1) @ piece.float().T for piece in keys], 1).unflatten(0, queries.shape[:2])
    z = soft_capped(z.mul_(attention.scale), attention.softcap)
    position = torch.arange(first, first + len(queries), device=z.device)
    later = torch.arange(z.shape[2], device=z.device) > position[:, None]
    return z.masked_fill_(later[:, None], -torch.inf).softmax(-1)[..., :end].sum((0, 1))


def best_of_votes(votes: Tensor, sink: int, most: int, pooling: Pooling) -> Tensor:
    """The `most` positions from `sink` on with the most pooled votes, ascending."""
    if len(votes) <= sink:
        return torch.empty(0, dtype=torch.int64, device=votes.device)
    pool = F.max_pool1d if pooling.largest else F.avg_pool1d
    pooled = pool(votes[None], pooling.width, 1, pooling.width // 2)[0, sink:]
    return pooled.argsort(descending=True, stable=True)[:most].sort().values + sink


def _store(kept: SnapSet, b: int, h: int, ids: Tensor, frontier: int) -> None:
    kept.ids[b, h] = -1
    kept.ids[b, h, : len(ids)] = ids
    kept.count[b, h], kept.frontier[b, h], kept.lost[b, h] = len(ids), frontier, 0


def reference(
    k: NewKeys, observed: Observed, kept: Changed[SnapSet], pool: Pool, lengths: Lengths, attention: Attention,
    pooling: Pooling, spans: list[int] | None,
) -> None:  # fmt: skip
    """Choose the tokens of a prompt that steps attend to: those that its last queries attend to most.

    Args:
        k: keys of the new tokens [batch, heads, tokens, dim]; the pool may not have them yet.
        observed: the observation window, queries [batch, window, q_heads, dim].
        kept: gets the new `ids`, `count` and `frontier` (where the window begins); `lost` becomes 0.
        pool: [batch, heads, rows, 2, dim], the tokens before this prompt.
        lengths: the prompt of a sequence is its tokens from `start` up to `length`. Rows without a new token, and
            rows past their capacity, stay as they are.
        attention: scale and soft cap of the model.
        pooling: width and kind.
        spans: `start` and `length` of all rows as host integers, or None (ops/attend/prompt_attention.py).

    Launches:
        Kernels of torch, one kv head after the other. Without `spans` the op waits for the device.
    """
    heads, sink, most = k.shape[1], lengths.sink, kept.ids.shape[2]
    for b, (n0, n) in enumerate(torch.stack(lengths[:2], 1).tolist()):
        if n <= n0:
            continue
        queries = window_queries(observed, b, n, heads)
        end = n - queries.shape[1]
        past = keys_of(as_numbers(pool[b, :, :n0], k.dtype))
        keys = torch.cat([past, k[b, :, k.shape[2] - (n - n0) :]], 1)
        for h in range(heads):
            found = best_of_votes(votes(queries[h], end, [keys[h]], end, attention), sink, most, pooling)
            _store(kept, b, h, found, max(end, sink))


def launch(k, observed, kept, pool, lengths, attention, pooling, spans) -> None:
    """One kv head at a time; the keys of its past come in pieces, its queries in parts with up to LOGITS logits."""
    heads, sink, most = k.shape[1], lengths.sink, kept.ids.shape[2]
    for b, (n0, n) in enumerate(bounds_of(lengths, spans)):
        if n <= n0:
            continue
        queries = window_queries(observed, b, n, heads)
        end, some = n - queries.shape[1], max(1, LOGITS // (n * queries.shape[2]))
        for h in range(heads):
            pieces = brought(only_keys(pool[b, h : h + 1, :n0]))
            past = (keys_of(as_numbers(piece, k.dtype))[0] for piece in pieces)
            keys = [*past, k[b, h, k.shape[2] - (n - n0) :]]
            parts = enumerate(queries[h].split(some))
            found = sum(votes(x, end + i * some, keys, end, attention) for i, x in parts)
            _store(kept, b, h, best_of_votes(found, sink, most, pooling), max(end, sink))


snap_tokens = register("snap_tokens", reference, impls=(torch_kernels(launch),), check=check, capturable=False)
