"""Which summary of a page finds the pages with the most attention weight? On the keys and queries of a real model.

    python benchmarks/research/page_summaries.py --out benchmarks/results/quality/page_summaries.json

After a prompt, every eighth of the last 256 queries selects pages by each summary, for each kv head of every second
layer. The measure is the share of the attention weight outside sinks and window that the pages hold, averaged over
queries, heads and layers.
Minutes on a CPU; needs `make real-model ONLY='qwen-0.5b sympy moby-dick'`.
"""
import statistics

import torch
from torch import Tensor

from torchsparsekv_benchmarks.research._recorded import parser, recorded, write

PAGE, SINK, WINDOW, BUDGET, EACH, FIRST_LAYER = 16, 64, 256, 1024, 8, 2
EXACT = "the exact weight of the page, the best possible"


def rules(pages: Tensor, queries: Tensor) -> dict[tuple[str, str], Tensor]:
    """[heads, n, pages] for each summary and query. pages [heads, pages, PAGE, dim], queries [heads, group, n, dim]."""
    low, high, mean = pages.amin(2), pages.amax(2), pages.mean(2)
    middle, size, asked = (low + high) / 2, (high - low) / 2, queries.mean(1, keepdim=True)
    away = (pages - middle[:, :, None]).abs().mean(2)

    def score(q: Tensor, centre: Tensor, spread: Tensor | None = None) -> Tensor:
        found = q @ centre[:, None].transpose(-1, -2)
        return (found if spread is None else found + q.abs() @ spread[:, None].transpose(-1, -2)).amax(1)

    summaries = {"bounds (`quest`)": (middle, size), "middle and mean distance (`arkvale`)": (middle, away),
                 "mean key (`pagemean`)": (mean, None)}  # fmt: skip
    return {
        (name, said): score(q, *parts)
        for name, parts in summaries.items()
        for said, q in (("largest score of a head", queries), ("mean query", asked))
    }  # fmt: skip


def shares(q: Tensor, k: Tensor) -> dict[tuple[str, str], float]:
    """Of one layer: q [q_heads, tokens, dim], k [heads, tokens, dim]."""
    heads, tokens, dim = k.shape
    queries = q[:, -WINDOW::EACH].unflatten(0, (heads, -1))
    logits = torch.einsum("hgqd,hnd->hgqn", queries, k) * dim**-0.5
    pages = (tokens - SINK - WINDOW) // PAGE
    inside = slice(SINK, SINK + pages * PAGE)
    weight = logits.softmax(-1)[..., inside].unflatten(-1, (pages, PAGE)).sum(-1)  # [heads, group, queries, pages]
    scores = rules(k[:, inside].unflatten(1, (pages, PAGE)), queries) | {(EXACT, "-"): weight.mean(1)}
    out = {}
    for rule, by in scores.items():
        chosen = by.topk(BUDGET // PAGE, -1).indices[:, None].expand(-1, weight.shape[1], -1, -1)
        out[rule] = float((weight.gather(-1, chosen).sum(-1) / weight.sum(-1)).mean())
    return out


@torch.no_grad()
def main() -> None:
    o, rows = parser(__doc__, tokens=6144).parse_args(), []
    for text, _, found in recorded(o, o.tokens):
        layers = [shares(x.queries[0], x.keys[0]) for i, x in found.items() if i >= FIRST_LAYER and i % 2 == 0]
        rows += [
            {"text": text, "summary": s, "query": q, "share": statistics.fmean(x[s, q] for x in layers)}
            for s, q in layers[0]
        ]
    write(o, "page_summaries", rows, tokens=o.tokens, page=PAGE, budget=BUDGET)


if __name__ == "__main__":
    main()
