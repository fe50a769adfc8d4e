"""At the end of a prompt, choose the tokens of it that are attended to from then on: what its last queries looked at.

SnapKV (arXiv 2404.14469) and its code. The observation window are the last tokens of the prompt; their queries are in
`observed` (ops/index/observe.py). Each query head's attention weights are a softmax over all tokens up to its own,
those of the window included. Their sum over the window and, which is not the paper's, over the query heads of a kv head
are the votes of the tokens before the window. Votes are pooled over neighbours: tokens that there are not count as
zeros where that is a mean. The best that can be retrieved are kept, as many as `kept` has room for; ties go to the
lower position. What is not among them is not attended to again before the next prompt, which chooses anew over
everything. An extra logit of the model does not count.

Nothing is taken out of the pool. The new tokens are in `k`, since the pool may not have them yet. `spans` is as in
ops/attend/prompt_attention.py. Rows without a new token, and those past their capacity, are left alone.
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
from torchsparsekv.ops.snapkv.views import Kept
from torchsparsekv.ops.store.rows import as_numbers, keys_of, only_keys
from torchsparsekv.ops.store.views import Attention, Lengths, NewKeys, Observed, Pool

LOGITS = 1 << 24  # written out at a time, of one kv head: 64 MiB, all of 32 queries x 4 heads at 128K tokens


class Pooling(NamedTuple):
    """The votes of `width` neighbouring tokens, an odd number, become one: their largest, or their mean."""

    width: int
    largest: bool


def check(k, observed, kept, pool, lengths, attention, pooling, spans) -> None:
    _check.heads(observed.queries.transpose(1, 2), pool)
    check_spans(spans, k.shape[0])
    if pooling.width < 1 or pooling.width % 2 == 0:
        raise ValueError(f"votes are pooled over an odd number of tokens, got {pooling.width}")


def window_queries(observed: Observed, b: int, n: int, heads: int) -> Tensor:
    """Those of the last tokens of a row of `n`, oldest first: [heads, observed, group, dim]."""
    window = observed.queries.shape[1]
    at = torch.arange(max(n - window, 0), n, device=observed.queries.device) % window
    return observed.queries[b, at].unflatten(1, (heads, -1)).transpose(0, 1).float()


def votes(queries: Tensor, first: int, keys: Sequence[Tensor], end: int, attention: Attention) -> Tensor:
    """The definition, of one kv head: queries [some, group, dim] of the tokens from `first` on, and the keys of all
    tokens, [tokens, dim], in pieces; the votes of the tokens before `end`."""
    z = torch.cat([queries.flatten(0, 1) @ piece.float().T for piece in keys], 1).unflatten(0, queries.shape[:2])
    z = soft_capped(z.mul_(attention.scale), attention.softcap)
    own = torch.arange(first, first + len(queries), device=z.device)
    later = torch.arange(z.shape[2], device=z.device) > own[:, None]
    return z.masked_fill_(later[:, None], -torch.inf).softmax(-1)[..., :end].sum((0, 1))


def best_of_votes(votes: Tensor, sink: int, most: int, pooling: Pooling) -> Tensor:
    """The positions from `sink` on with the most votes behind pooling, ascending."""
    if len(votes) <= sink:
        return torch.empty(0, dtype=torch.int64, device=votes.device)
    pool = F.max_pool1d if pooling.largest else F.avg_pool1d
    pooled = pool(votes[None], pooling.width, 1, pooling.width // 2)[0, sink:]
    return pooled.argsort(descending=True, stable=True)[:most].sort().values + sink


def _keep(kept: Kept, b: int, h: int, ids: Tensor, frontier: int) -> None:
    kept.ids[b, h] = -1
    kept.ids[b, h, : len(ids)] = ids
    kept.count[b, h], kept.frontier[b, h], kept.lost[b, h] = len(ids), frontier, 0


def reference(
    k: NewKeys, observed: Observed, kept: Changed[Kept], pool: Pool, lengths: Lengths, attention: Attention,
    pooling: Pooling, spans: list[int] | None,
) -> None:  # fmt: skip
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
            _keep(kept, b, h, found, max(end, sink))


def launch(k, observed, kept, pool, lengths, attention, pooling, spans) -> None:
    """A kv head at a time, with its past in pieces."""
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
            _keep(kept, b, h, best_of_votes(found, sink, most, pooling), max(end, sink))


snap_tokens = register("snap_tokens", reference, impls=(torch_kernels(launch),), check=check, capturable=False)
