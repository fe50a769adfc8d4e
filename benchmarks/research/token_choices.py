"""How much attention weight do selections hold, and how far is their attention from dense? On a real model.

    python benchmarks/research/token_choices.py --out benchmarks/results/quality/token_choices.json

Keys, values and queries of a prompt are recorded once. In every sixth layer, every method takes the keys and values
into a layer of its own, as a prompt does. Every sixteenth of the last 256 queries then selects, and attends to sinks,
window and selection. Dense attention of the same query is over all tokens.

share: share of the attention weight outside sinks and window that a step attends to: selected tokens, and tokens that
    wait in the ring.
read: the number of these tokens.
error: the error of the attention output, relative to dense attention.

Minutes on a CPU; needs `make real-model ONLY='qwen-0.5b sympy moby-dick'`.
"""
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor

from torchsparsekv.method import Method, make_method
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.state import Geometry, LayerState, RowLengths
from torchsparsekv_benchmarks.quality import replay
from torchsparsekv_benchmarks.research._recorded import parser, recorded, write

SINK, WINDOW, EACH, FIRST_LAYER, NTH_LAYER = 64, 256, 16, 2, 6
BUDGETS = (64, 256, 1024)
METHODS: tuple[tuple[str, dict], ...] = (
    ("oracle", {}),
    ("pqcache", {}),
    ("pqcache", dict(rounds=3)),
    ("pqcache", dict(m=4)),
    ("magicpig", {}),
    ("magicpig", dict(bits=8, tables=75)),
    ("shadowkv", {}),
    ("shadowkv", dict(outliers=0)),
    ("pariskv", {}),
    ("quest", {}),
    ("clusterkv", {}),
    ("random", dict(block_size=1)),
)


def layer_of(method: Method, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> LayerState:
    """A layer that has taken a prompt in."""
    (_, heads, tokens, dim), rows = k.shape, -(-k.shape[2] // 64) * 64
    lengths = RowLengths(method.ring_plan, 1, rows, k.device)
    g = Geometry(1, heads, dim, rows, k.dtype, q.shape[1] // heads)
    state = LayerState(method.buffers(g), lengths, k.device, pool_on_host=False)
    lengths.advance(tokens)
    method.ingest(state, q, k, v, a, join=True)
    return state


def chosen(method: Method, s: Any, q: Tensor, a: Attention) -> tuple[Tensor, Tensor]:
    """What one query adds to the logits of the pool rows, [heads, group, rows]: -inf where it does not attend to a row.
    Besides, which rows its kv head reads, [heads, rows]."""
    ids, pool = method.choose(s, q, a).ids, s.store.pool
    assert ids is not None
    heads, rows = pool.shape[1:3]
    size, blocks = method.block_size, torch.arange(rows // method.block_size, dtype=torch.int32)
    each = blocks.expand(1, heads, -1).contiguous()
    # As if every block were in the hot buffer: `weigh` reads what is chosen there.
    s.hot = s.hot._replace(rows=pool.unflatten(2, (-1, size)), slot_of=each, block_of=each, used=each, chosen=ids)
    bias = method.weigh(s, q, a)
    bias = torch.zeros(1, q.shape[1], ids.shape[2]) if bias is None else bias
    added = torch.full((heads, q.shape[1] // heads, len(blocks) + 1), -torch.inf)
    at = torch.where(ids[0] >= 0, ids[0], len(blocks)).long()
    added.scatter_(2, at[:, None].expand(-1, added.shape[1], -1), bias[0].unflatten(0, added.shape[:2]))
    read = torch.zeros(heads, len(blocks) + 1).scatter_(1, at, 1.0)
    return added[..., :-1].repeat_interleave(size, 2), read[:, :-1].repeat_interleave(size, 1)


def measured(method: Method, x: replay.Prompted) -> dict[str, float]:
    """The means over the queries of one layer."""
    s = layer_of(method, x.queries, x.keys, x.values, x.attention)
    end, (heads, group) = int(s.lengths.ring_begin[0]), (x.keys.shape[1], x.queries.shape[1] // x.keys.shape[1])
    stored = s.store.pool[0]  # in the order of the method, whole but for the tokens of the ring
    row, tokens = torch.arange(stored.shape[1]), x.keys.shape[2]
    near = (row < SINK) | ((row >= end) & (row < tokens))
    far = (row >= SINK) & (row < tokens - WINDOW)  # the same tokens whatever the method: some may wait in the ring
    stored[:, near] = torch.stack([x.keys, x.values], 3)[0, :, near[:tokens]]
    shares, errors, reads = [], [], []
    for i in range(x.queries.shape[2] - WINDOW, x.queries.shape[2], EACH):
        q = x.queries[:, :, i : i + 1]
        added, read = chosen(method, s, q, x.attention)
        z = q[0, :, 0].unflatten(0, (heads, group)) @ stored[:, :, 0].transpose(-1, -2) * x.attention.scale
        z[..., tokens:] = -torch.inf
        weight = z.softmax(-1)
        dense = weight @ stored[:, :, 1]
        out = torch.where(near, z, z + added).softmax(-1) @ stored[:, :, 1]
        held = far & ((read > 0) | near)
        shares.append(float((weight * held[:, None]).sum(-1).div((weight * far).sum(-1)).mean()))
        errors.append(float(((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean()))
        reads.append(float(held.sum(-1).float().mean()))
    return {name: statistics.fmean(x) for name, x in (("share", shares), ("error", errors), ("read", reads))}


@torch.no_grad()
def main() -> None:
    o, rows = parser(__doc__, tokens=6144).parse_args(), []
    for text, _, of_model in recorded(o, o.tokens):
        layers = [x for i, x in of_model.items() if i >= FIRST_LAYER and i % NTH_LAYER == FIRST_LAYER]
        for method, hyper in METHODS:
            for budget in BUDGETS:
                began = time.perf_counter()
                made = make_method(method, budget=budget, sink=SINK, window=WINDOW, **hyper)
                found = [measured(made, x) for x in layers]
                means = {key: statistics.fmean(x[key] for x in found) for key in found[0]}
                rows.append({"text": text, "method": method, "hyper": hyper, "budget": budget, **means})
                print(f"{rows[-1]} {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    write(o, "token_choices", rows, tokens=o.tokens, sink=SINK, window=WINDOW)


if __name__ == "__main__":
    main()
