"""Exact causal attention of a run of new tokens over everything before them.

Used for prompts, chunks of prompts and later turns: the past is the pool (streamed in pieces when it is host memory and
merged by log-sum-exp), the rest is `k` and `v` themselves. Ragged: the new tokens of a row are the last
`length - start` columns; the padding before them gets zeros. `spans` is start and length as host integers, where the
caller has them: without it every layer waits for the device to learn them. The result is laid out [batch, tokens,
heads, head_dim] in memory, as models want it next.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops.attend._split import softmax_attention

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor pool, Tensor start, Tensor length, Tensor? sinks, float scale, "
    "float softcap, int[]? spans) -> Tensor"
)
QUERIES = 256  # per step of the plain path: bounds the score matrix
PIECE = 16384  # past tokens brought to the device at a time: 64 MiB at 8 heads x 128 in bf16


def check(q, k, v, pool, start, length, sinks, scale, softcap, spans) -> None:
    _check.rows(pool)
    _check.heads(q, pool)
    _check.dense_last(q=q, k=k, v=v)
    _check.same_dtype(q=q, k=k, v=v, pool=pool)
    _check.shape((*pool.shape[:2], q.shape[2], pool.shape[-1]), k=k, v=v)
    _check.sinks(sinks, q)
    _check.counters(q.shape[0], start=start, length=length)
    if spans is not None and len(spans) != 2 * q.shape[0]:
        raise ValueError(f"spans holds {len(spans)} numbers, batch {q.shape[0]} needs start and length of every row")


def _empty(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3])).transpose(1, 2)


def reference(q, k, v, pool, start, length, sinks, scale, softcap, spans) -> Tensor:
    out = _empty(q).zero_()
    for b, (n0, n) in enumerate(zip(start.tolist(), length.tolist())):
        if n < 0:
            out[b] = torch.nan
            continue
        new = n - n0
        first = q.shape[2] - new
        keys = torch.cat([pool[b, :, :n0, 0], k[b, :, first:]], 1)[None]
        values = torch.cat([pool[b, :, :n0, 1], v[b, :, first:]], 1)[None]
        for i in range(0, new, QUERIES):
            x = q[b, :, first + i : first + min(i + QUERIES, new)][None]
            end = n0 + i + x.shape[2]
            pos = torch.arange(n0 + i, end, device=q.device)
            live = torch.arange(end, device=q.device) <= pos[:, None]
            part = softmax_attention(x, keys[:, :, :end], values[:, :, :end], live, sinks, scale, softcap)
            out[b, :, first + i : first + i + x.shape[2]] = part[0]
    return out


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention if q.is_cuda else aten._scaled_dot_product_flash_attention_for_cpu
    out, lse, *_ = flash(q, k, v, 0.0, causal, scale=scale)
    return out.float(), lse.float()


def _over_past(q: Tensor, k: Tensor, v: Tensor, past: Tensor, scale: float) -> Tensor:
    """One row: q, k, v [1, heads, S, D], past [heads, n0, 2, D] in the pool."""
    out, lse = _flash(q, k, v, True, scale)
    for piece in past.split(PIECE, 1):
        rows = torch.empty_like(piece, memory_format=torch.contiguous_format).copy_(piece)[None]
        more, more_lse = _flash(q, rows[..., 0, :], rows[..., 1, :], False, scale)
        both = torch.logaddexp(lse, more_lse)
        out = out * (lse - both).exp().unsqueeze(-1) + more * (more_lse - both).exp().unsqueeze(-1)
        lse = both
    return out


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def cuda(q, k, v, pool, start, length, sinks, scale, softcap, spans) -> Tensor:
    rows = torch.tensor(spans).view(2, -1) if spans is not None else torch.stack([start, length]).cpu()
    bounds = list(zip(*rows.tolist()))
    if softcap or sinks is not None or (q.dtype == torch.float32 and any(n0 for n0, _ in bounds)):
        return reference(q, k, v, pool, start, length, sinks, scale, softcap, spans)
    tokens = q.shape[2]
    if all(bound == (0, tokens) for bound in bounds):
        out = _causal(q, k, v, scale)
        return out if out.transpose(1, 2).is_contiguous() else _empty(q).copy_(out)
    out = _empty(q).zero_()
    for b, (n0, n) in enumerate(bounds):
        if n < 0:
            out[b] = torch.nan
        elif n > n0:
            new = slice(tokens - (n - n0), None)
            x, y, z = (t[b : b + 1, :, new] for t in (q, k, v))
            part = _over_past(x, y, z, pool[b, :, :n0], scale) if n0 else _causal(x, y, z, scale)
            out[b, :, new] = part[0].to(q.dtype)
    return out


def fake(q: Tensor, *_) -> Tensor:
    return _empty(q)


prompt_attention = register(
    "prompt_attention", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check, capturable=False
)
