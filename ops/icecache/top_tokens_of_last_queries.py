"""Which tokens each kv head looks for at the end of a prompt, by its last queries.

Of every one of the last QUERIES new tokens the WANTED tokens with the largest product with some query head of the kv
head, ascending, of those that leave the ring with this prompt and stand before it; ties go to the lower token. int32
[batch, kv_heads, queries, WANTED], as columns of `k`; -1 where there are fewer, or no such query. No scale of attention
changes them, so heads of two layers can be compared by what they share (ops/icecache/share_prompt.py).

Runs beside the next layer, unless told to `join` (ops/_machinery/side_stream.py). In Triton a program has TILE tokens of a kv head, for
all of the queries; their scores are stored, 32 MiB of every kv head at 256K tokens, and searched by top_blocks.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.select import top_blocks as top
from torchsparsekv.ops.select._top import GROUP
from torchsparsekv.ops.store.views import Lengths, NewKeys, Queries, Scored

QUERIES, WANTED = 32, 16
TILE = 64


def check(q, k, lengths, join) -> None:
    _check.heads(q, k)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"{q.shape[2]} queries, of {k.shape[2]} tokens")


def last_of(q: Tensor) -> Tensor:
    return q[:, :, max(0, q.shape[2] - QUERIES) :]


def reference(q: Queries, k: NewKeys, lengths: Lengths, join: bool) -> Tensor:
    n, old, new = (t[:, None, None] for t in lengths[1:4])
    by_head = last_of(q).unflatten(1, (k.shape[1], -1))  # [batch, kv heads, group, queries, dim]
    best = (by_head.float() @ k[:, :, None].float().transpose(-1, -2)).amax(2)
    position = n - k.shape[2] + torch.arange(k.shape[2], device=k.device)
    own = position[..., k.shape[2] - best.shape[2] :].movedim(-1, -2)
    there = (position >= old) & (position < new.minimum(own)) & (n > 0)
    best = best.masked_fill(~there[:, None], -torch.inf)
    return top.reference(Scored(best.flatten(0, 1)), WANTED).unflatten(0, k.shape[:2])


@triton.jit(do_not_specialize=["tokens"])
def _sought(
    q, k, out, peaks, length, old_begin, ring_begin, q_b, q_h, q_s, k_b, k_h, k_s, heads, tokens, last,
    G: tl.constexpr, LP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    n, old, new = tl.load(length + b), tl.load(old_begin + b), tl.load(ring_begin + b)
    i, j, d = tl.arange(0, LP), tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, DP)
    own, position = n - last + i, n - tokens + j
    there = (position >= old) & (position < tl.where(n > 0, new, 0))
    best = tl.full((LP, TILE), float("-inf"), tl.float32)
    if tl.max(there.to(tl.int32), 0) > 0:
        key = k + b * k_b + h * k_h + j.to(tl.int64)[:, None] * k_s + d[None, :]
        y = tl.trans(tl.load(key, mask=there[:, None] & (d < D)[None, :], other=0.0))
        column = (tokens - last + i).to(tl.int64)
        for g in tl.static_range(G):
            query = q + b * q_b + (h * G + g) * q_h + column[:, None] * q_s + d[None, :]
            x = tl.load(query, mask=(i < last)[:, None] & (d < D)[None, :], other=0.0)
            best = tl.maximum(best, tl.dot(x, y, input_precision="ieee"))
        best = tl.where(there[None, :] & (position[None, :] < own[:, None]), best, float("-inf"))
    row = bh * last + i
    tl.store(out + row[:, None] * tokens + j[None, :], best, mask=(i < last)[:, None] & (j < tokens)[None, :])
    group, groups = tl.program_id(1) * (TILE // GROUP) + tl.arange(0, TILE // GROUP), tl.cdiv(tokens, GROUP)
    best = tl.max(tl.reshape(best, (LP, TILE // GROUP, GROUP)), 2)
    tl.store(peaks + row[:, None] * groups + group[None, :], best, mask=(i < last)[:, None] & (group < groups)[None, :])


def launch(q, k, lengths, join) -> Tensor:
    (batch, heads, tokens, d), last = k.shape, last_of(q).shape[2]
    with on_side_stream(join, q, k, *lengths[1:4]):
        scores = k.new_empty((batch * heads, last, tokens), dtype=torch.float32)
        peaks = k.new_empty((batch * heads, last, cdiv(tokens, GROUP)), dtype=torch.float32)
        _sought[(batch * heads, cdiv(tokens, TILE))](
            q, k, scores, peaks, *lengths[1:4], *q.stride()[:3], *k.stride()[:3], heads, tokens, last,
            G=q.shape[1] // heads, LP=max(16, next_power_of_2(last)), D=d, DP=next_power_of_2(d), TILE=TILE,
            GROUP=GROUP,
        )  # fmt: skip
        return top.top_blocks(Scored(scores, peaks), WANTED).unflatten(0, (batch, heads))


def fake(q, k, *_) -> Tensor:
    return k.new_empty((*k.shape[:2], last_of(q).shape[2], WANTED), dtype=torch.int32)


top_tokens_of_last_queries = register(
    "top_tokens_of_last_queries", reference, impls=(by_triton(launch),), fake=fake, check=check, capturable=False
)
