"""Keep the queries of the last tokens of a prompt: they are the observation window of what is chosen by it, anew.

Of a single token ops/select/choose_static.py does so, in the launch that it takes anyway.
"""
import torch

from torchsparsekv.ops._impl import triton as by_triton
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._signature import Changed
from torchsparsekv.ops._triton import next_power_of_2, tl, triton
from torchsparsekv.ops.store.views import Lengths, Observed, Queries, Static


def reference(q: Queries, observed: Changed[Observed], static: Changed[Static], lengths: Lengths) -> None:
    window = observed.queries.shape[1]
    for b, (n0, n) in enumerate(torch.stack(lengths[:2], 1).tolist()):
        if n > n0:
            static.at[b] = -1
        for position in range(max(n0, n - window), n):
            observed.queries[b, position % window] = q[b, :, q.shape[2] - n + position]


@triton.jit
def _observe(
    q, queries, at, start, length, q_b, q_h, q_s, q_heads, heads, window, tokens, D: tl.constexpr, DP: tl.constexpr
):
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n0, n = tl.load(start + b), tl.load(length + b)
    if (n > n0) & (h < heads) & (tl.program_id(2) == 0):
        tl.store(at + b * heads + h, -1)
    position = tl.maximum(n - window, 0) + tl.program_id(2)
    if (position >= n0) & (position < n):
        d = tl.arange(0, DP)
        x = tl.load(q + b * q_b + h * q_h + (tokens - n + position) * q_s + d, mask=d < D)
        tl.store(queries + ((b * window + position % window) * q_heads + h) * D + d, x, mask=d < D)


def launch(q, observed, static, lengths) -> None:
    (queries,) = observed
    batch, window, heads, d = queries.shape
    _observe[(batch, heads, window)](
        q, queries, static.at, lengths.start, lengths.length, *q.stride()[:3], heads, static.at.shape[1], window,
        q.shape[2], D=d, DP=next_power_of_2(d), num_warps=1,
    )  # fmt: skip


observe = register("observe", reference, impls=(by_triton(launch),))
