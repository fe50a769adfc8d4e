"""Exact causal attention of a run of new tokens over everything before them.

Used for prompts, chunks of prompts and later turns: the past is the pool (streamed in pieces when it is host memory and
merged by log-sum-exp), the rest is `k` and `v` themselves. Ragged: the new tokens of a row are the last
`length - start` columns; the padding before them gets zeros.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops.attend._split import softmax_attention

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor pool, Tensor start, Tensor length, Tensor? sinks, float scale, "
    "float softcap) -> Tensor"
)
QUERIES = 256  # per step of the plain path: bounds the score matrix
PIECE = 16384  # past tokens brought to the device at a time: 64 MiB at 8 heads x 128 in bf16


def check(q, k, v, pool, start, length, sinks, scale, softcap) -> None:
    _check.rows(pool)
    _check.heads(q, pool)
    _check.dense_last(q=q, k=k, v=v)
    _check.same_dtype(q=q, k=k, v=v, pool=pool)
    _check.shape((*pool.shape[:2], q.shape[2], pool.shape[-1]), k=k, v=v)
    _check.sinks(sinks, q)
    _check.counters(q.shape[0], start=start, length=length)


def reference(q, k, v, pool, start, length, sinks, scale, softcap) -> Tensor:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
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


def cuda(q, k, v, pool, start, length, sinks, scale, softcap) -> Tensor:
    if softcap or sinks is not None or (q.dtype == torch.float32 and not bool((start == 0).all())):
        return reference(q, k, v, pool, start, length, sinks, scale, softcap)
    tokens = q.shape[2]
    spans = list(zip(*torch.stack([start, length]).tolist()))  # prompts may wait for the host, decode may not
    if all((n0, n) == (0, tokens) for n0, n in spans):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.contiguous()
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for b, (n0, n) in enumerate(spans):
        if n < 0:
            out[b] = torch.nan
        elif n > n0:
            new = slice(tokens - (n - n0), None)
            x, y, z = (t[b : b + 1, :, new] for t in (q, k, v))
            if n0:
                out[b, :, new] = _over_past(x, y, z, pool[b, :, :n0], scale)[0].to(q.dtype)
            else:
                gqa = q.shape[1] != k.shape[1]
                out[b, :, new] = F.scaled_dot_product_attention(x, y, z, is_causal=True, scale=scale, enable_gqa=gqa)[0]
    return out


def fake(q: Tensor, *_) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


prompt_attention = register(
    "prompt_attention", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check, capturable=False
)
