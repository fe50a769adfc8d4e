"""Does a query before or after RoPE tell better when to select anew? On the keys and queries of a real model.

    python benchmarks/research/drift_rules.py --out benchmarks/results/quality/drift_rules.json

LouisKV selects anew where the mean cosine of the query heads with the step before falls below a threshold. Its code
compares queries after RoPE, which rotates them by one position a step. For the last 256 tokens of a text a layer
selects the exact best tokens at the steps that a rule names, and keeps them in between. Each rule gets the threshold at
which a given share of the steps selects. The measure is the share of the attention weight outside sinks and window that
the selected tokens hold, compared with that of a selection at every step. Minutes on a CPU; needs `make real-model
ONLY='qwen-0.5b sympy moby-dick'`.
"""
import statistics

import torch
from torch import Tensor

from torchsparsekv_benchmarks.research._recorded import parser, recorded, write

STEPS, SINK, WINDOW, BUDGET, FIRST_LAYER = 256, 64, 256, 256, 2
RATES = (0.1, 0.25, 0.5, 0.75)  # shares of the steps that select


def turned_back(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries before RoPE: q [heads, tokens, dim], cos and sin [tokens, dim]."""
    first, second = q.chunk(2, -1)
    return q * cos - torch.cat([-second, first], -1) * sin


def drift(q: Tensor) -> Tensor:
    """[steps - 1]: the mean over heads of the cosine with the step before."""
    return torch.cosine_similarity(q[:, 1:], q[:, :-1], dim=-1).mean(0)


def selecting(rule: str, cosines: dict[str, Tensor], rate: float) -> Tensor:
    """Which steps select; the first one always does."""
    steps = torch.arange(STEPS)
    if rule == "every k-th step":
        return (steps * rate).floor() > ((steps - 1) * rate).floor()
    value = cosines[rule]
    return torch.cat([torch.tensor([True]), value <= value.quantile(rate)])


def kept(q: Tensor, k: Tensor, now: Tensor) -> float:
    """The share of the attention weight that stale selections hold. q [q_heads, STEPS, dim], k [heads, tokens, dim]."""
    heads, tokens, dim = k.shape
    logits = torch.einsum("hgqd,hnd->hgqn", q.unflatten(0, (heads, -1)), k) * dim**-0.5
    at, newest = torch.arange(tokens), tokens - STEPS + torch.arange(STEPS)
    weight = logits.masked_fill(at > newest[:, None], -torch.inf).softmax(-1).mean(1)  # [heads, STEPS, tokens]
    far = (at >= SINK) & (at < tokens - STEPS - WINDOW)  # of all steps, so that no selection grows old by its window
    weight = weight * far
    best = weight.topk(BUDGET, -1).indices
    last = torch.where(now, torch.arange(STEPS), 0).cummax(0).values
    return float((weight.gather(-1, best[:, last]).sum(-1) / weight.sum(-1).clamp(min=1e-9)).mean())


@torch.no_grad()
def main() -> None:
    o, rows = parser(__doc__, tokens=6144).parse_args(), []
    for text, model, layers in recorded(o, o.tokens):
        cos, sin = model.model.rotary_emb(torch.zeros(1, 1), torch.arange(o.tokens - STEPS, o.tokens)[None])
        found: dict[tuple[str, float], list[float]] = {}
        means: dict[str, list[float]] = {}
        for i, x in layers.items():
            if i < FIRST_LAYER or i % 2:
                continue
            q, k = x.queries[0, :, -STEPS:], x.keys[0]
            cosines = {"after RoPE": drift(q), "before RoPE": drift(turned_back(q, cos[0], sin[0]))}
            every = kept(q, k, torch.ones(STEPS, dtype=torch.bool))
            for rule in (*cosines, "every k-th step"):
                for rate in RATES:
                    found.setdefault((rule, rate), []).append(kept(q, k, selecting(rule, cosines, rate)) / every)
            for rule, value in cosines.items():
                means.setdefault(rule, []).append(float(value.mean()))
        rows += [
            {"text": text, "rule": rule, "rate": rate, "kept": statistics.fmean(x)}
            | ({"cosine": statistics.fmean(means[rule])} if rule in means else {})
            for (rule, rate), x in found.items()
        ]
    write(o, "drift_rules", rows, tokens=o.tokens, steps=STEPS, budget=BUDGET)


if __name__ == "__main__":
    main()
