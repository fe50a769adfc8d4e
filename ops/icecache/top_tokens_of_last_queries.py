"""Find the tokens that each kv head looks for at the end of a prompt.

    score(query i, token t) = max over the query heads of the group of q_i.k_t
    top[i]                  = the WANTED tokens of the largest scores, of those that leave the ring in this prompt and
                              precede query i; the lower token first among equal scores

for the last QUERIES queries of the prompt. The scale of attention does not change the result, so share_prompt compares
heads of different layers by the tokens that they have in common.

Launches: a kernel of (batch * kv_heads, cdiv(tokens, TILE)) programs that scores TILE tokens for all queries, and
top_blocks. The scores are stored: 32 MiB a kv head at 256K tokens. They run beside the next layer, unless `join` is set
(ops/_machinery/side_stream.py).

Not in the paper, where heads are matched by their number (appendix C).
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
        raise ValueError(f"each token needs its query, got {q.shape[2]} queries of {k.shape[2]} tokens")


def last_queries(q: Tensor) -> Tensor:
    return q[:, :, max(0, q.shape[2] - QUERIES) :]


def reference(q: Queries, k: NewKeys, lengths: Lengths, join: bool) -> Tensor:
    """The top tokens of the last queries.

    Args:
        q: [batch, q_heads, tokens, dim].
        k: [batch, kv_heads, tokens, dim].
        join: wait for the result instead of computing it beside the next layer.

    Returns: int32 [batch, kv_heads, min(tokens, QUERIES), WANTED], ascending columns of `k`, -1 where there are fewer.
    """
    n, old, new = (t[:, None, None] for t in lengths[1:4])
    by_head = last_queries(q).unflatten(1, (k.shape[1], -1))  # [batch, kv_heads, group, queries, dim]
    best = (by_head.float() @ k[:, :, None].float().transpose(-1, -2)).amax(2)  # [batch, kv_heads, queries, tokens]
    position = n - k.shape[2] + torch.arange(k.shape[2], device=k.device)
    query_position = position[..., k.shape[2] - best.shape[2] :].movedim(-1, -2)
    candidate = (position >= old) & (position < new.minimum(query_position)) & (n > 0)
    best = best.masked_fill(~candidate[:, None], -torch.inf)
    return top.reference(Scored(best.flatten(0, 1)), WANTED).unflatten(0, k.shape[:2])


@triton.jit(do_not_specialize=["tokens"])
def _score_tokens(
    q, k, out, peaks, length, old_begin, ring_begin, q_b, q_h, q_s, k_b, k_h, k_s, heads, tokens, queries,
    G: tl.constexpr, QP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Scores [queries, tokens] of a kv head and their peaks; -inf for tokens that are no candidates of a query."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    n, old, new = tl.load(length + b), tl.load(old_begin + b), tl.load(ring_begin + b)
    i, j, d = tl.arange(0, QP), tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, DP)
    query_position, position = n - queries + i, n - tokens + j
    leaves = (position >= old) & (position < tl.where(n > 0, new, 0))
    best = tl.full((QP, TILE), float("-inf"), tl.float32)
    if tl.max(leaves.to(tl.int32), 0) > 0:
        key = k + b * k_b + h * k_h + j.to(tl.int64)[:, None] * k_s + d[None, :]
        y = tl.trans(tl.load(key, mask=leaves[:, None] & (d < D)[None, :], other=0.0))  # [DP, TILE]
        column = (tokens - queries + i).to(tl.int64)
        for g in tl.static_range(G):
            query = q + b * q_b + (h * G + g) * q_h + column[:, None] * q_s + d[None, :]
            x = tl.load(query, mask=(i < queries)[:, None] & (d < D)[None, :], other=0.0)  # [QP, DP]
            best = tl.maximum(best, tl.dot(x, y, input_precision="ieee"))
        best = tl.where(leaves[None, :] & (position[None, :] < query_position[:, None]), best, float("-inf"))
    row = bh * queries + i
    tl.store(out + row[:, None] * tokens + j[None, :], best, mask=(i < queries)[:, None] & (j < tokens)[None, :])
    group, groups = tl.program_id(1) * (TILE // GROUP) + tl.arange(0, TILE // GROUP), tl.cdiv(tokens, GROUP)
    best = tl.max(tl.reshape(best, (QP, TILE // GROUP, GROUP)), 2)
    m = (i < queries)[:, None] & (group < groups)[None, :]
    tl.store(peaks + row[:, None] * groups + group[None, :], best, mask=m)


def launch(q, k, lengths, join) -> Tensor:
    (batch, heads, tokens, d), queries = k.shape, last_queries(q).shape[2]
    with on_side_stream(join, q, k, *lengths[1:4]):
        scores = k.new_empty((batch * heads, queries, tokens), dtype=torch.float32)
        peaks = k.new_empty((batch * heads, queries, cdiv(tokens, GROUP)), dtype=torch.float32)
        _score_tokens[(batch * heads, cdiv(tokens, TILE))](
            q, k, scores, peaks, *lengths[1:4], *q.stride()[:3], *k.stride()[:3], heads, tokens, queries,
            G=q.shape[1] // heads, QP=max(16, next_power_of_2(queries)), D=d, DP=next_power_of_2(d), TILE=TILE,
            GROUP=GROUP,
        )  # fmt: skip
        return top.top_blocks(Scored(scores, peaks), WANTED).unflatten(0, (batch, heads))


def fake(q, k, *_) -> Tensor:
    return k.new_empty((*k.shape[:2], last_queries(q).shape[2], WANTED), dtype=torch.int32)


top_tokens_of_last_queries = register(
    "top_tokens_of_last_queries", reference, impls=(by_triton(launch),), fake=fake, check=check, capturable=False
)
