"""H2O: the tokens that received the most attention so far, and the latest tokens. All others are evicted."""
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops.h2o.add_attention import add_attention
from torchsparsekv.ops.h2o.add_prompt_attention import add_prompt_attention
from torchsparsekv.ops.h2o.evict_lightest import evict_lightest
from torchsparsekv.ops.h2o.keep_heaviest import keep_heaviest
from torchsparsekv.ops.h2o.views import HeavySet
from torchsparsekv.ops.index.observe import NOT_YET
from torchsparsekv.ops.store.views import I32, Attention, Leaving, Selection
from torchsparsekv.report import Counts
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState, hot_buffer


@dataclass(frozen=True, kw_only=True)
class H2O(Method):
    """Of "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (arXiv 2306.14048).

    Every token has the sum of the attention that it received, from all queries of the prompt and of the steps since. A
    step attends to the window and to the `budget` kept tokens. If the budget is full, a token that leaves the window
    takes the place of the kept token with the smallest sum, or is evicted itself. No step reads an evicted token again.

    The store is per kv head, so the sums of the query heads of a kv head are added up. The pool keeps evicted tokens,
    because a prompt attends to everything, whatever the method.
    """

    name = "h2o"

    sink: int = 0
    prompt_queries: int | None = option(None, "Last queries of a prompt, or of a chunk, that count. None: all.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_queries is not None:
            self.check_int("prompt_queries")

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            all_queries=True, no_rest="evicts tokens",
            cannot_crop="selects by the attention of all queries, and the cache has no queries",
            no_engine="evicts tokens by the queries of one request",
        )  # fmt: skip

    def report_row(self, s: LayerState, counts: Counts) -> dict[str, Any]:
        """A step selects anew if a token joins the kept tokens."""
        rate = counts.per_step(int(s.heavy.updates.sum()))
        return super().report_row(s, counts) | {"retrieval_rate": rate}

    def buffers(self, g: Geometry) -> Buffers:
        most = min(self.budget, g.rows)
        one = lambda fill=0, **told: Buffer(g.lead, I32, fill=fill, **told)  # noqa: E731
        heavy = HeavySet(
            Buffer((*g.lead, most), I32, fill=-1), count=one(), received=Buffer((*g.lead, g.rows), torch.float32),
            chosen_at=one(NOT_YET), updated=one(), updates=one(counts=True),
        )  # fmt: skip
        return super().buffers(g) | {"hot": hot_buffer(g, 1, most, most), "heavy": heavy}

    def prompted(self, s: LayerState, q: Tensor, k: Tensor, a: Attention) -> None:
        spans = s.row_lengths.spans(k.shape[2])
        add_prompt_attention(q, k, s.heavy, s.store.pool, s.lengths, a, spans, self.prompt_queries or 0)
        keep_heaviest(s.heavy, s.lengths)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        evict_lightest(s.heavy, s.lengths)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        return Selection(s.heavy.ids, s.heavy.updated)

    def attended(self, s: LayerState, q: Tensor, a: Attention) -> None:
        add_attention(q, s.store.ring, s.hot, s.heavy.received, s.lengths, a)
