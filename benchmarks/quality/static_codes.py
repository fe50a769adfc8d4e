"""Static sets chosen by the fp8 copy of the keys (`update_from="codes"`), against those by the keys, of a real model.

    python benchmarks/quality/static_codes.py --model smollm2 --at 4096 8191 --sizes 64 256 1024

Queries and keys are those of a model over one text, by a dense forward (heads.py). At the first step behind each of
--at tokens both sets are chosen, of each kv head of each layer:
- overlap: share of the set by the keys that is in the set by the copy, mean over heads, and of the worst one.
- held: what the set by the copy has of the score of the set by the keys, which is the most that so many can have; the
  score is the attention weight by which sets are chosen, exact.
"""
import argparse
from typing import Any

import torch
from torch import Tensor

from torchsparsekv.method import make_method
from torchsparsekv.ops.prkv.choose_static import window_scores
from torchsparsekv.ops.store.views import Attention
from torchsparsekv_benchmarks.quality import heads as model_heads
from torchsparsekv_benchmarks.quality.heads import Heads
from torchsparsekv_benchmarks.quality.static_mass import Fed


def chosen(heads: Heads, at: int, o: argparse.Namespace, size: int, source: str) -> tuple[Tensor, int, int]:
    """The set [layers, kv heads, size] behind so many tokens; where what can be retrieved ends; the window."""
    if not size <= at - o.sink - o.window:
        raise ValueError(f"{at} tokens have no {size} behind {o.sink} sinks and before a window of {o.window}")
    near = dict(sink=o.sink, window=o.window)
    method: Any = make_method("prkv", budget=size, block_size=1, static_ratio=1.0, update_from=source, **near)
    fed = Fed(method, heads)
    fed.take(at)
    fed.take(1)
    return fed.state.static.ids, int(fed.state.lengths.ring_begin[0]), method.observed


def compared(heads: Heads, at: int, o: argparse.Namespace, size: int) -> dict[str, Any]:
    exact, end, window = chosen(heads, at, o, size, "keys")
    coarse, _, _ = chosen(heads, at, o, size, "codes")
    overlap, held = [], []
    for layer, head in torch.cartesian_prod(*map(torch.arange, exact.shape[:2])).tolist():
        want, got = exact[layer, head].long(), coarse[layer, head].long()
        group = slice(head * heads.group, (head + 1) * heads.group)
        queries = heads.queries[layer, group, at + 1 - window : at + 1].transpose(0, 1)
        score = window_scores(queries, heads.keys[layer, head, :end], Attention(heads.scale))
        overlap.append(float(torch.isin(want, got).float().mean()))
        held.append(float(score[got].sum() / score[want].sum()))
    mean = lambda x: round(sum(x) / len(x), 4)  # noqa: E731
    return {"overlap": mean(overlap), "least_overlap": min(overlap), "held": mean(held), "least_held": min(held)}


@model_heads.shown
def rows(o: argparse.Namespace):
    heads = model_heads.read(o)
    for at in o.at:
        for size in o.sizes:
            yield {"at": at, "size": size, **compared(heads, at, o, size), "heads": heads.keys[:, :, 0, 0].numel()}


def main() -> None:
    p = model_heads.parser(__doc__)
    p.add_argument("--at", type=int, nargs="+", default=[8191])
    p.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024])
    model_heads.run("static_codes", rows, p)


if __name__ == "__main__":
    main()
