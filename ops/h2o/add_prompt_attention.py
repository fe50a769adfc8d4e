"""Add the attention that the queries of a prompt pay to every token, the past included.

    w[i, g, j]  = softmax over j <= i of (scale * q[i, g] . key[j]),  soft-capped where the model does that
    received[j] += sum of w[i, g, j] over the new positions i and the query heads g of the kv head

An extra logit of the model takes its part of the softmax. Tokens that steps evicted before this prompt get -inf, which
no later sum changes. Evicted are the tokens outside sinks and ring that the last step did not keep. Nothing is evicted
between two prompts without a step, so the chunks of a prompt add up to the whole prompt.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.attend._split import capped, soft_capped, tile_of
from torchsparsekv.ops.attend.prompt_attention import bounds_of, brought, check_spans
from torchsparsekv.ops.h2o.views import HeavySet
from torchsparsekv.ops.index.observe import NOT_YET
from torchsparsekv.ops.store.rows import as_numbers, keys_of, only_keys
from torchsparsekv.ops.store.views import Attention, Lengths, NewKeys, Pool, Queries

LOGITS = 1 << 22  # of one kv head at a time in the reference: 16 MiB


def check(q, k, heavy, pool, lengths, attention, spans, last) -> None:
    _check.heads(q, pool)
    check_spans(spans, q.shape[0])
    if last < 0:
        raise ValueError(f"last must be 0 (all queries) or more, got {last}")


def forget_evicted(heavy: HeavySet, b: int, sink: int, begin: int) -> None:
    """Mark the tokens of row `b` that steps evicted, if there was a step since its last prompt."""
    stepped = heavy.chosen_at[b] != NOT_YET
    place = torch.arange(heavy.received.shape[2], device=heavy.ids.device)
    ids = torch.where(heavy.ids[b] < 0, len(place), heavy.ids[b]).long()
    kept = torch.zeros(len(ids), len(place) + 1, dtype=torch.bool, device=ids.device).scatter_(1, ids, True)[:, :-1]
    heavy.received[b].masked_fill_(stepped[:, None] & (place >= sink) & (place < begin) & ~kept, -torch.inf)
    heavy.chosen_at[b] = NOT_YET


def paid(queries: Tensor, first: int, keys: Tensor, attention: Attention, extra: Tensor | None) -> Tensor:
    """The attention that queries [tokens, group, dim] of the positions from `first` on pay to each key of `keys` [keys,
    dim]. `extra` [group]: one more logit of each query head."""
    out = keys.new_zeros(len(keys))
    some = max(1, LOGITS // (len(keys) * queries.shape[1]))
    for i in range(0, len(queries), some):
        x = queries[i : i + some]
        end = first + i + len(x)
        z = soft_capped((x @ keys[:end].T).mul_(attention.scale), attention.softcap)  # [some, group, end]
        later = torch.arange(end, device=z.device) > torch.arange(end - len(x), end, device=z.device)[:, None]
        z = z.masked_fill_(later[:, None], -torch.inf)
        if extra is None:
            out[:end] += z.softmax(-1).sum((0, 1))
        else:
            total = torch.logaddexp(z.logsumexp(-1), extra)
            out[:end] += (z - total[..., None]).exp_().sum((0, 1))
    return out


def reference(
    q: Queries, k: NewKeys, heavy: Changed[HeavySet], pool: Pool, lengths: Lengths, attention: Attention,
    spans: list[int] | None, last: int,
) -> None:  # fmt: skip
    """Add the attention that the queries of a prompt pay to every token, the past included.

    Args:
        q, k: queries and keys of the new tokens; the pool may not have them yet.
        heavy: `received` changes; `chosen_at` becomes NOT_YET for rows with new tokens.
        pool: [batch, heads, rows, 2, dim], the tokens before this prompt.
        lengths: the prompt of a sequence is its tokens from `start` up to `length`. Rows without a new token, and
            rows past their capacity, stay as they are.
        attention: scale, soft cap and extra logit of the model.
        spans: `start` and `length` of all rows as host integers, or None (ops/attend/prompt_attention.py).
        last: the number of last new queries that count; 0: all new queries.

    Launches:
        Two kernels for each row. The first computes the log-sum-exp of every query. In the second, a program takes a
        tile of keys and goes through the queries at or after these keys. Without `spans` the op waits for the device.
    """
    heads = k.shape[1]
    for b, (n0, n) in enumerate(torch.stack(lengths[:2], 1).tolist()):
        if n <= n0:
            continue
        forget_evicted(heavy, b, lengths.sink, int(lengths.previous_ring_begin[b]))
        new = n - n0
        counted = min(new, last or new)
        keys = torch.cat([keys_of(as_numbers(pool[b, :, :n0], k.dtype)), k[b, :, k.shape[2] - new :]], 1).float()
        queries = q[b, :, q.shape[2] - counted :].unflatten(0, (heads, -1)).transpose(1, 2).float()
        for h in range(heads):
            extra = None
            if attention.sink_logits is not None:
                extra = attention.sink_logits.float().unflatten(0, (heads, -1))[h]
            heavy.received[b, h, :n] += paid(queries[h], n - counted, keys[h], attention, extra)


@triton.jit
def _totals(
    q, keys, extra, lse, q_h, q_s, first, count, n, scale, softcap, EXTRA: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of TILE queries of one query head over the keys up to their positions."""
    head = tl.program_id(1).to(tl.int64)
    i, d, j = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DP), tl.arange(0, TILE)
    there = (i < count)[:, None] & (d < D)[None, :]
    x = tl.load(q + head * q_h + i.to(tl.int64)[:, None] * q_s + d[None, :], mask=there, other=0.0)
    top, total = tl.full((TILE,), float("-inf"), tl.float32), tl.zeros((TILE,), tl.float32)
    end = tl.minimum(first + tl.program_id(0) * TILE + TILE, n)
    for at in range(0, end, TILE):
        pos = at + j
        m = (d < D)[:, None] & (pos < n)[None, :]
        k = tl.load(keys + ((head // G) * n + pos)[None, :] * D + d[:, None], mask=m, other=0.0)
        z = capped(tl.dot(x, k, input_precision="ieee") * scale, softcap)
        z = tl.where(pos[None, :] <= (first + i)[:, None], z, float("-inf"))
        peak = tl.maximum(top, tl.max(z, 1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(z - safe[:, None]), 1)
        top = peak
    if EXTRA:
        logit = tl.load(extra + head).to(tl.float32)
        peak = tl.maximum(top, logit)
        total = total * tl.exp(top - peak) + tl.exp(logit - peak)
        top = peak
    tl.store(lse + head * count + i, top + tl.log(total), mask=i < count)


@triton.jit
def _columns(
    q, keys, lse, received, q_h, q_s, first, count, n, rows, scale, softcap, G: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The attention that TILE keys of one kv head receive from all queries at or after them."""
    h = tl.program_id(1).to(tl.int64)
    pos, d, t = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DP), tl.arange(0, TILE)
    there = (pos < n)[:, None] & (d < D)[None, :]
    k = tl.load(keys + (h * n + pos)[:, None] * D + d[None, :], mask=there, other=0.0)  # [TILE, DP]
    out = tl.zeros((TILE,), tl.float32)
    begin = tl.maximum(tl.program_id(0) * TILE - first, 0) // TILE * TILE
    for g in range(G):
        head = h * G + g
        for at in range(begin, count, TILE):
            i = at + t
            m = (d < D)[:, None] & (i < count)[None, :]
            x = tl.load(q + head * q_h + i.to(tl.int64)[None, :] * q_s + d[:, None], mask=m, other=0.0)  # [DP, TILE]
            total = tl.load(lse + head * count + i, mask=i < count, other=0.0)
            z = capped(tl.dot(k, x, input_precision="ieee") * scale, softcap)
            live = (pos[:, None] <= (first + i)[None, :]) & (i < count)[None, :]
            out += tl.sum(tl.exp(tl.where(live, z - total[None, :], float("-inf"))), 1)
    at = received + h * rows + pos
    tl.store(at, tl.load(at, mask=pos < n, other=0.0) + out, mask=pos < n)


def launch(q, k, heavy, pool, lengths, attention, spans, last) -> None:
    heads, (_, q_heads, _, d) = k.shape[1], q.shape
    begins = lengths.previous_ring_begin
    for b, (n0, n) in enumerate(bounds_of(lengths, spans)):
        if n <= n0:
            continue
        forget_evicted(heavy, b, lengths.sink, begins[b])
        new = n - n0
        count = min(new, last or new)
        past = [keys_of(as_numbers(piece, k.dtype)) for piece in brought(only_keys(pool[b, :, :n0]))]
        keys = torch.cat([*past, k[b, :, k.shape[2] - new :]], 1).contiguous()
        x, extra = q[b, :, q.shape[2] - count :], attention.sink_logits
        lse = torch.empty(q_heads, count, dtype=torch.float32, device=q.device)
        shape = dict(G=q_heads // heads, D=d, DP=max(16, next_power_of_2(d)), TILE=tile_of(q))
        same = (*x.stride()[:2], n - count, count, n)
        capping = (attention.scale, attention.softcap)
        _totals[(cdiv(count, tile_of(q)), q_heads)](
            x, keys, lse if extra is None else extra, lse, *same, *capping, EXTRA=extra is not None, **shape
        )
        _columns[(cdiv(n, tile_of(q)), heads)](
            x, keys, lse, heavy.received[b], *same, heavy.received.shape[2], *capping, **shape
        )


add_prompt_attention = register(
    "add_prompt_attention", reference, impls=(by_triton(launch),), check=check, capturable=False
)
