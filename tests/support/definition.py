"""A layer that is driven through prompts and steps, each step of which is compared with its definition."""
from collections.abc import Callable

import torch
from layer import Layer

from torchsparsekv.ops._machinery.chain import use_kernels


def tensors(tokens: int, *, batch=1, seed=1, heads=2, group=2, dim=16):
    """Queries, keys and values. A channel of the keys has a large mean, as in some models."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, n, tokens, dim, generator=g) for n in (heads * group, heads, heads))
    k[..., 3] += 9.0
    return q, k, v


def check_steps(
    method, sizes: list[int], definition: Callable, *, attention=None, pads=(0,), kind: str | None = "reference",
    seed=1,
) -> int:  # fmt: skip
    """Drive a layer through prompts and steps, and compare each step of each row with its definition.

    definition(s, b, q, k, v, a, selection): row `b` of a step in fp64, from its query [heads, dim], and the keys and
    values [kv heads, tokens, dim] of all its tokens.
    """
    q, k, v = tensors(sum(sizes), batch=len(pads), seed=seed)
    layer = Layer(method, batch=len(pads), group=2, left_pad=list(pads), device=torch.device("cpu"))
    layer.attention = attention or layer.attention
    seen: list[tuple] = []

    def on_step(s, q, a, selection, out):
        end = int(s.row_lengths.seq_len)
        for b, pad in enumerate(pads):
            if end > pad:
                want = definition(s, b, q[b, :, 0], k[b, :, pad:end], v[b, :, pad:end], a, selection)
                seen.append((b, end, out[b, :, 0].double(), want))

    layer.state.on_step = on_step
    with use_kernels(kind):
        layer.feed_parts(q, k, v, sizes)
    for b, end, got, want in seen:
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5, msg=f"row {b} at {end} tokens")
    return len(seen)
