"""How often a step waits for what it chose, of a real model, and how much attention is lost where it does not.

    python benchmarks/quality/waiting.py --model smollm2 --method quest --budgets 64 256 1024 --fetch-late 0.8 0.7 -1

Queries and keys are those of a model over one text, by a dense forward (heads.py). First --prompt tokens at once, then
--steps one by one; the first --settle of these do not count. Every step chooses and fetches by the ops that decoding
has. Without `prefetch_async`, and with every value of it that is asked for:
- turned: share of the choices, of a kv head at a step, that the step waits for, mostly since the query turned.
- late: share of the blocks over the link that come behind a step.
- hits: share of the chosen blocks that were in the hot buffer when they were to be fetched.
- weight: attention weight, of the query on all that it sees, of the tokens that are attended to.
"""
import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchsparsekv.method import make_method
from torchsparsekv.ops.gather.fetch import fetch
from torchsparsekv.ops.gather.prefetch_async import prefetch_async
from torchsparsekv.ops.store.rows import counted
from torchsparsekv.probe import attended_blocks
from torchsparsekv_benchmarks.quality import heads as model_heads
from torchsparsekv_benchmarks.quality.heads import Heads
from torchsparsekv_benchmarks.quality.static_mass import Fed


class Waiting(Fed):
    def step(self) -> Tensor:
        """Heads that turned, of how many; blocks chosen, fetched, fetched late; weight, of how many query heads."""
        s, at, before = self.state, self.at, self.counts()
        choice = self.take(1)
        assert choice is not None
        choice = self.method.in_time(s, self.heads.queries[:, :, at : at + 1], choice)
        fetch(choice, s.store.pool, s.hot, s.stats)
        kept = self.kept(choice._replace(ids=attended_blocks(s)))
        weight = (self.heads.weights(at) * kept.repeat_interleave(self.heads.group, 1)).sum(-1)
        if self.method.prefetch_async is not None:
            prefetch_async(torch.empty_like(self.heads.queries[:, :, :1]), s.prefetch, s.store.pool, s.hot, s.joins)
        heads = s.hot.done_count.numel()
        counts = torch.tensor([heads, weight.sum(), weight.numel()], dtype=torch.float64)
        return torch.cat([self.counts() - before, counts])

    def counts(self) -> Tensor:
        """Since the beginning: choices that a step waited for, blocks chosen, fetched in all, fetched late."""
        s, waits, late = self.state, 0, 0
        chosen, missed = (int(counted(s.stats.counts, name).sum()) for name in ("selected", "missed"))
        if self.method.prefetch_async is not None:
            waits = int(s.prefetch.waits.sum())
            chosen, late = (int(counted(s.prefetch.counts, name).sum()) for name in ("selected", "missed"))
        return torch.tensor([waits, chosen, missed + late, late], dtype=torch.float64)


def measured(heads: Heads, o: argparse.Namespace, budget: int, value: float | None) -> dict[str, Any]:
    method = make_method(o.method, budget=budget, prefetch_async=value, sink=o.sink, window=o.window)
    fed = Waiting(method, heads)
    fed.take(o.prompt)
    total = torch.stack([fed.step() for _ in range(o.steps)])[o.settle :].sum(0).tolist()
    turns, selected, missed, late, asked, weight, many = total
    waits = {"turned": round(turns / asked, 4), "late": round(late / missed, 4)}
    told = {} if value is None else {"prefetch_async": value, **waits}
    return {"budget": budget, **told, "hits": round(1 - missed / selected, 4), "weight": round(weight / many, 5)}


@model_heads.shown
def rows(o: argparse.Namespace) -> Iterator[dict[str, Any]]:
    heads = model_heads.read(o)
    for budget in o.budgets:
        for value in (None, *o.prefetch_async):
            yield measured(heads, o, budget, value)


def main() -> None:
    p = model_heads.stepwise(__doc__, budgets=(64, 256, 1024))
    p.add_argument("--fetch-late", type=float, nargs="+", default=[0.9, 0.8, 0.7, -1.0])
    model_heads.run("waiting", rows, p)


if __name__ == "__main__":
    main()
