"""RaaS: the prompt, and the pages that recent steps attended to most. The page unused for longest is evicted."""
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from torchsparsekv._methods._pages import PageMethod
from torchsparsekv.method import Traits, option
from torchsparsekv.ops.index.block_bounds import block_bounds
from torchsparsekv.ops.index.observe import NOT_YET
from torchsparsekv.ops.raas.keep_prompt_pages import keep_prompt_pages
from torchsparsekv.ops.raas.stamp_pages import MILLION, WIDEST, stamp_pages
from torchsparsekv.ops.raas.views import EVICTED, PageSet
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.ops.store.views import I32, Attention, Leaving, Selection
from torchsparsekv.report import Counts
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState, hot_buffer


@dataclass(frozen=True, kw_only=True)
class RaaS(PageMethod):
    """Of "RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning" (arXiv 2502.11147) and its code.

    At each step the better half of the kept pages, by Quest's bound, gets the time stamp of the step. If the budget is
    full, a page that leaves the window takes the place of the page with the oldest stamp. Generated pages do not evict
    pages of the prompt. No step reads an evicted page again.

    The pool keeps evicted pages, because a prompt attends to everything, whatever the method.
    """

    name = "raas"

    share: float = option(0.5, "Share of the kept pages that get a new stamp at each step.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.share, bool) or not isinstance(self.share, (int, float)) or not 0 <= self.share <= 1:
            raise ValueError(f"{self.name}: share must be from 0 to 1, got {self.share!r}")

    @cached_property
    def traits(self) -> Traits:
        why = "selects by the queries of all steps, and the cache has no queries"
        one = "evicts pages by the queries of one request"
        return Traits(no_rest="evicts pages", cannot_crop=why, no_engine=one, **self.capability)

    @property
    def shape(self) -> str:
        return "box"

    def report_row(self, s: LayerState, counts: Counts) -> dict[str, Any]:
        """A step selects anew if a page joins the kept pages."""
        rate = counts.per_step(int(s.pages.updates.sum()))
        return super().report_row(s, counts) | {"retrieval_rate": rate}

    def buffers(self, g: Geometry) -> Buffers:
        most, blocks = min(self.budget, g.rows) // self.block_size, g.rows // self.block_size
        if most > WIDEST:
            raise ValueError(f"{self.name}: a budget must be at most {WIDEST} pages, got {most} pages")
        one = lambda fill=0, **told: Buffer(g.lead, I32, fill=fill, **told)  # noqa: E731
        pages = PageSet(
            Buffer((*g.lead, most), I32, fill=-1), count=one(), stamps=Buffer((*g.lead, blocks), I32, fill=EVICTED + 1),
            prompt_end=one(), chosen_at=one(NOT_YET), updated=one(), updates=one(counts=True),
        )  # fmt: skip
        return super().buffers(g) | {"hot": hot_buffer(g, self.block_size, most, most), "pages": pages}

    def prompted(self, s: LayerState, q: Tensor, k: Tensor, a: Attention) -> None:
        scores, _ = bound_scores(self.asking(q[:, :, -1:], s.digests), s.digests, s.lengths)
        keep_prompt_pages(s.pages, scores, s.lengths, self.block_size)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        block_bounds(leaving, s.digests, s.lengths)
        stamp_pages(self.asking(q, s.digests), s.digests, s.pages, s.lengths, round(self.share * MILLION))

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        return Selection(s.pages.ids, s.pages.updated)
