"""Exact causal attention of a run of new tokens over everything before them.

Used for prompts, chunks of prompts and later turns: the past is the pool (streamed in pieces when it is host memory and
merged by log-sum-exp), the rest is `k` and `v` themselves. Ragged: the new tokens of a row are the last
`length - start` columns; the padding before them gets zeros. `spans` is start and length as host integers, where the
caller has them: without it every layer waits for the device to learn them. The result is laid out [batch, tokens,
heads, head_dim] in memory, as models want it next.
"""
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import torch_kernels
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops.attend._split import causal_attention, empty_result
from torchsparsekv.ops.store.rows import as_numbers, keys_of, rows_of, values_of
from torchsparsekv.ops.store.views import Attention, Lengths, NewKeys, Pool, Queries

PIECE = 16384  # past tokens brought to the device at a time: 64 MiB at 8 heads x 128 in bf16


def check(q, k, v, pool, lengths, attention, spans) -> None:
    _check.heads(q, pool)
    check_spans(spans, q.shape[0])


def check_spans(spans: list[int] | None, batch: int) -> None:
    if spans is not None and len(spans) != 2 * batch:
        raise ValueError(f"spans holds {len(spans)} numbers, batch {batch} needs start and length of every row")


def bounds_of(lengths: Lengths, spans: list[int] | None) -> list[tuple[int, int]]:
    """Start and length of every row on the host: it waits for the device where the caller has not got them."""
    host = torch.tensor(spans).view(2, -1) if spans is not None else torch.stack(lengths[:2]).cpu()
    return list(zip(*host.tolist()))


def reference(
    q: Queries, k: NewKeys, v: NewKeys, pool: Pool, lengths: Lengths, attention: Attention, spans: list[int] | None
) -> Tensor:
    out = empty_result(q).zero_()
    for b, (n0, n) in enumerate(zip(lengths.start.tolist(), lengths.length.tolist())):
        if n < 0:
            out[b] = torch.nan
            continue
        first = q.shape[2] - (n - n0)
        past = as_numbers(pool[b, :, :n0], k.dtype)
        rows = torch.cat([past, rows_of(k[b], v[b])[:, first:]], 1)[None]
        out[b, :, first:] = causal_attention(q[b : b + 1, :, first:], rows, attention)[0]
    return out


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention if q.is_cuda else aten._scaled_dot_product_flash_attention_for_cpu
    out, lse, *_ = flash(q, k, v, 0.0, causal, scale=scale)
    return out.float(), lse.float()


def over_past(q: Tensor, k: Tensor, v: Tensor, pieces: Iterable[Tensor], attention: Attention) -> Tensor:
    """One row of the batch: q, k, v [1, heads, S, D], and its past [heads, rows, 2, D] in pieces on the device."""
    scale = attention.scale
    out, lse = _flash(q, k, v, True, scale)
    for piece in pieces:
        rows = as_numbers(piece, q.dtype)[None]
        more, more_lse = _flash(q, keys_of(rows), values_of(rows), False, scale)
        both = torch.logaddexp(lse, more_lse)
        out = out * (lse - both).exp().unsqueeze(-1) + more * (more_lse - both).exp().unsqueeze(-1)
        lse = both
    if attention.sink_logits is not None:  # one more logit under the softmax, with no value
        out = out * torch.sigmoid(lse - attention.sink_logits.float().view(1, -1, 1)).unsqueeze(-1)
    return out


def brought(past: Tensor) -> Iterator[Tensor]:
    """What lies in the pool, [heads, rows, ...], a piece at a time on the device."""
    for piece in past.split(PIECE, 1) if past.shape[1] else ():
        yield torch.empty_like(piece, memory_format=torch.contiguous_format).copy_(piece)


def beyond_torch(q: Tensor, past: bool, attention: Attention) -> bool:
    """Soft caps, and a past or sinks in fp32 on a GPU: what torch has no kernel for."""
    more = past or attention.sink_logits is not None
    return bool(attention.softcap) or (q.is_cuda and q.dtype == torch.float32 and more)


def by_torch(q: Tensor, k: Tensor, v: Tensor, pieces: Iterable[Tensor] | None, attention: Attention) -> Tensor:
    """One row of the batch with its past, or rows without one, [batch, heads, tokens, head_dim]."""
    if pieces is None and attention.sink_logits is None:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.scale, enable_gqa=gqa)
    return over_past(q, k, v, pieces or (), attention).to(q.dtype)


def launch(q, k, v, pool, lengths, attention, spans) -> Tensor:
    """What torch has for it, with the past in pieces."""
    bounds = bounds_of(lengths, spans)
    if beyond_torch(q, any(n0 for n0, _ in bounds), attention):
        return reference(q, k, v, pool, lengths, attention, spans)
    tokens = q.shape[2]
    if attention.sink_logits is None and all(bound == (0, tokens) for bound in bounds):
        out = by_torch(q, k, v, None, attention)
        return out if out.transpose(1, 2).is_contiguous() else empty_result(q).copy_(out)
    out = empty_result(q).zero_()
    for b, (n0, n) in enumerate(bounds):
        if n < 0:
            out[b] = torch.nan
        elif n > n0:
            new = slice(tokens - (n - n0), None)
            x, y, z = (t[b : b + 1, :, new] for t in (q, k, v))
            pieces = brought(pool[b, :, :n0]) if n0 else None
            out[b, :, new] = by_torch(x, y, z, pieces, attention)[0]
    return out


prompt_attention = register(
    "prompt_attention", reference, impls=(torch_kernels(launch),), fake=empty_result, check=check, capturable=False
)
