"""How often what a query chooses is on the device already, and what guessing it ahead would find, of a real model.

    python benchmarks/quality/misses.py --model smollm2 --method quest --budgets 256 1024 --hot-budgets 1 2 4 8

Queries and keys are those of a model over one text, by a dense forward (heads.py). First --prompt tokens at once, then
--steps one by one; the first --settle of these do not count. Every step chooses and fetches by the ops that decoding
has, of every layer and kv head. Of every size of the hot buffer:
- hits: share of the chosen blocks that were in it.
- fetched: blocks that crossed the link, guessed or missed, for every one that was chosen.

And with guesses, which are fetched before they are known to be right, into a buffer of --guessed budgets:
- `runners up`: behind what the step before chose, the next best of it, half as many.
- `layer below`: what the layer would choose by what the layer below was given: its own norm, projection and rotary
  positions on it, and its own index. In a step that would be a second projection and a second choice.
"""
import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchsparsekv.method import make_method
from torchsparsekv.ops.gather.fetch import fetch
from torchsparsekv.ops.store.rows import counted
from torchsparsekv.ops.store.views import Selection
from torchsparsekv_benchmarks.quality import heads as model_heads
from torchsparsekv_benchmarks.quality.heads import Heads
from torchsparsekv_benchmarks.quality.static_mass import Fed

RUNNERS_UP, BELOW = "runners up", "layer below"


class Guessing(Fed):
    """Fetches what is chosen, and before or behind it what is guessed."""

    def __init__(self, name: str, heads: Heads, guess: str | None, **hyper):
        super().__init__(make_method(name, **hyper), heads)
        self.guess = guess

    def step(self) -> Tensor:
        """Blocks that were chosen, those of them that were missing, and those that were guessed and missing."""
        at, guessed = self.at, 0
        chosen: Any = self.take(1)
        if self.guess == BELOW:
            guessed = self.fetch(self.ids(self.method, self.heads.below, at))[1]
        selected, missed = self.fetch(chosen.ids)
        if self.guess == RUNNERS_UP:
            more = dataclasses.replace(self.method, budget=self.method.budget * 3 // 2)
            guessed = self.fetch(self.ids(more, self.heads.queries, at))[1]
        return torch.tensor([selected, missed, guessed], dtype=torch.float64)

    def ids(self, method: Any, queries: Any, at: int) -> Tensor:
        """What a method chooses by the query of token `at`."""
        return method.choose(self.state, queries[:, :, at : at + 1], self.attention).ids

    def fetch(self, ids: Tensor) -> tuple[int, int]:
        """Blocks that were asked for, and those of them that were missing."""
        s = self.state
        room = torch.nn.functional.pad(s.hot.chosen, (0, ids.shape[-1] - s.hot.chosen.shape[-1]))
        before = s.stats.counts.clone()
        fetch(Selection(ids), s.store.pool, s.hot._replace(chosen=room), s.stats)
        new = s.stats.counts - before
        return int(counted(new, "selected").sum()), int(counted(new, "missed").sum())


def measured(heads: Heads, o: argparse.Namespace, budget: int, hot_budgets: int, guess: str | None) -> dict[str, Any]:
    hyper = dict(budget=budget, hot_budgets=hot_budgets, sink=o.sink, window=o.window)
    fed = Guessing(o.method, heads, guess, **hyper)
    fed.take(o.prompt)
    each = torch.stack([fed.step() for _ in range(o.steps)])
    selected, missed, guessed = each[o.settle :].sum(0).tolist()
    told = {} if guess is None else {"guess": guess}
    return {
        "budget": budget, "hot_budgets": hot_budgets, **told, "hits": round(1 - missed / selected, 4),
        "fetched": round((missed + guessed) / selected, 4),
    }  # fmt: skip


@model_heads.shown
def rows(o: argparse.Namespace) -> Iterator[dict[str, Any]]:
    heads = model_heads.read(o, below=True)
    for budget in o.budgets:
        ways = [(hot, None) for hot in o.hot_budgets] + [(o.guessed, guess) for guess in (RUNNERS_UP, BELOW)]
        for hot, guess in ways:
            yield measured(heads, o, budget, hot, guess)


def main() -> None:
    p = model_heads.stepwise(__doc__, budgets=(256, 1024))
    p.add_argument("--hot-budgets", type=int, nargs="+", default=[1, 2, 4, 8])
    p.add_argument("--guessed", type=int, default=2)
    model_heads.run("misses", rows, p)


if __name__ == "__main__":
    main()
