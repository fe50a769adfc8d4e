"""Keep the queries of the last tokens of a prompt in the observation window, and mark that no head has selected yet.

    observed[p % window] = q of p     for the last `window` new positions p
    at = NOT_YET                      for rows with new tokens

Methods that select by the last queries of a prompt read this window. At a decode step `append` keeps the query.

Args:
    q [batch, q_heads, tokens, dim]: the queries of the prompt; those of a row are in its last columns.
    observed [batch, window, q_heads, dim], changed.
    at [batch, heads], changed: the length at which a head last selected.

Launches: batch * q_heads * window programs, one per query that may be kept.
"""
import torch

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import next_power_of_2, tl, triton
from torchsparsekv.ops.store.views import Lengths, Observed, PerHead, Queries

NOT_YET = -(1 << 31)  # below every length, also if an offset is subtracted from the length
NOT_SINCE = tl.constexpr(NOT_YET)  # the same in kernels


def reference(q: Queries, observed: Changed[Observed], at: Changed[PerHead], lengths: Lengths) -> None:
    window = observed.queries.shape[1]
    for b, (n0, n) in enumerate(torch.stack(lengths[:2], 1).tolist()):
        if n > n0:
            at[b] = NOT_YET
        for position in range(max(n0, n - window), n):
            observed.queries[b, position % window] = q[b, :, q.shape[2] - n + position]


@triton.jit(do_not_specialize=["tokens"])
def _observe(
    q, queries, at, start, length, q_b, q_h, q_s, q_heads, heads, window, tokens, D: tl.constexpr, DP: tl.constexpr
):
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    n0, n = tl.load(start + b), tl.load(length + b)
    if (n > n0) & (h < heads) & (tl.program_id(2) == 0):
        tl.store(at + b * heads + h, NOT_SINCE)
    position = tl.maximum(n - window, 0) + tl.program_id(2)
    if (position >= n0) & (position < n):
        d = tl.arange(0, DP)
        column = (tokens - n + position).to(tl.int64)
        x = tl.load(q + b * q_b + h * q_h + column * q_s + d, mask=d < D)
        tl.store(queries + ((b * window + position % window) * q_heads + h) * D + d, x, mask=d < D)


def launch(q, observed, at, lengths) -> None:
    (queries,) = observed
    batch, window, heads, d = queries.shape
    _observe[(batch, heads, window)](
        q, queries, at, lengths.start, lengths.length, *q.stride()[:3], heads, at.shape[1], window,
        q.shape[2], D=d, DP=next_power_of_2(d), num_warps=1,
    )  # fmt: skip


observe = register("observe", reference, impls=(by_triton(launch),))
