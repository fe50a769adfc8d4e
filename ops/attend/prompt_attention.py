"""Exact causal attention of the new tokens of a prompt, a chunk of a prompt or a later turn.

    out of position p = softmax(scale * q.k, with soft cap and sink logit) v    over positions 0 .. p

The past (positions below `start`) comes from the pool, in pieces of PIECE tokens; the new tokens come from `k` and `v`.
The parts are merged by their log-sum-exp. Rows are ragged: the new tokens of a row are the last `length - start`
columns; the padding before them gets zeros.

Args:
    q [batch, q_heads, tokens, dim]; k, v [batch, heads, tokens, dim]
    pool [batch, heads, rows, 2, dim], or packed.
    spans: start of every row, then length of every row, as host integers. None: every layer waits for the device to
        learn them.

Returns: out [batch, q_heads, tokens, dim], with tokens before heads in memory, as models read it next; NaN for a row
with length -1.
Launches: torch's kernels. For a soft cap, and for a past or sink logits in fp32 on a GPU, torch has none: the reference
runs.
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

PIECE = 16384  # tokens of the past that are copied to the device at a time: 64 MiB at 8 heads x 128 in bf16


def check(q, k, v, pool, lengths, attention, spans) -> None:
    _check.heads(q, pool)
    check_spans(spans, q.shape[0])


def check_spans(spans: list[int] | None, batch: int) -> None:
    if spans is not None and len(spans) != 2 * batch:
        raise ValueError(f"spans holds {len(spans)} numbers, batch {batch} needs start and length of every row")


def bounds_of(lengths: Lengths, spans: list[int] | None) -> list[tuple[int, int]]:
    """(start, length) of every row on the host. Without `spans` this waits for the device."""
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
    """Attention of one row of the batch: q, k, v [1, heads, S, D], and its past in pieces [heads, rows, 2, D]."""
    scale = attention.scale
    out, lse = _flash(q, k, v, True, scale)
    for piece in pieces:
        rows = as_numbers(piece, q.dtype)[None]
        piece_out, piece_lse = _flash(q, keys_of(rows), values_of(rows), False, scale)
        both = torch.logaddexp(lse, piece_lse)
        out = out * (lse - both).exp().unsqueeze(-1) + piece_out * (piece_lse - both).exp().unsqueeze(-1)
        lse = both
    if attention.sink_logits is not None:  # one more logit in the softmax, without a value
        out = out * torch.sigmoid(lse - attention.sink_logits.float().view(1, -1, 1)).unsqueeze(-1)
    return out


def brought(past: Tensor) -> Iterator[Tensor]:
    """Copy the past [heads, rows, ...] from the pool to the device, one piece at a time."""
    for piece in past.split(PIECE, 1) if past.shape[1] else ():
        yield torch.empty_like(piece, memory_format=torch.contiguous_format).copy_(piece)


def beyond_torch(q: Tensor, past: bool, attention: Attention) -> bool:
    """Whether torch has no kernel for this: for a soft cap, and for a past or sink logits in fp32 on a GPU."""
    more = past or attention.sink_logits is not None
    return bool(attention.softcap) or (q.is_cuda and q.dtype == torch.float32 and more)


def by_torch(q: Tensor, k: Tensor, v: Tensor, pieces: Iterable[Tensor] | None, attention: Attention) -> Tensor:
    """Attention by torch: of one row with its past in `pieces`, or of all rows without a past (None)."""
    if pieces is None and attention.sink_logits is None:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.scale, enable_gqa=gqa)
    return over_past(q, k, v, pieces or (), attention).to(q.dtype)


def launch(q, k, v, pool, lengths, attention, spans) -> Tensor:
    """By torch's kernels, or by the reference where torch has none."""
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
