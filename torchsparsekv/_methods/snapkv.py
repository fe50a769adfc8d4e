"""SnapKV: the last queries of a prompt choose the prompt tokens that later steps attend to."""
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from torchsparsekv._methods._static import LATEST, QUERIES, ObservingMethod
from torchsparsekv.method import Traits, option
from torchsparsekv.ops.index.observe import NOT_YET, observe
from torchsparsekv.ops.snapkv.keep_leaving import keep_leaving
from torchsparsekv.ops.snapkv.snap_tokens import Pooling, snap_tokens
from torchsparsekv.ops.snapkv.views import SnapSet
from torchsparsekv.ops.store.views import I32, Attention, Leaving, Selection
from torchsparsekv.report import Counts
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState, hot_buffer

POOLINGS = ("avgpool", "maxpool")
OBSERVED = 32  # tokens of the observation window by default, where the window holds as many


@dataclass(frozen=True, kw_only=True)
class SnapKV(ObservingMethod):
    """Of "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469) and its code.

    Steps attend to the `budget` best tokens of the prompt, to its observation window, and to all generated tokens. One
    thing differs: the store is per kv head, so the votes of the query heads of a kv head are summed and then pooled.
    The paper's code repeats the keys and lets every query head select for itself. With one query head per kv head the
    two are equal.

    A generated token is attended to while it is in the window. To be SnapKV, the window must hold the observation
    window and all tokens to be generated. A token that leaves the window is kept if the budget has room, which only
    short prompts leave. Otherwise the token is lost, and `report()` says so.

    The pool keeps all tokens: a second prompt attends to everything, and selects anew from everything.
    """

    name = "snapkv"

    sink: int = 0
    observe: int | None = option(None, f"Tokens of the observation window. None: as `window`, at most {OBSERVED}.")
    kernel_size: int = option(5, "Neighbouring tokens over which votes are pooled, an odd number; 1: no pooling.")
    pooling: str = option("avgpool", "Pooling of votes: avgpool, as in the paper's code, or maxpool.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("kernel_size")
        if self.kernel_size % 2 == 0:
            raise ValueError(f"{self.name}: kernel_size must be odd, got {self.kernel_size}")
        self.check_one_of("pooling", POOLINGS)

    @property
    def dense_threshold(self) -> int:
        """If a prompt is longer, steps leave out some of its tokens, even if the window would hold them."""
        return self.sink + self.budget + self.observed

    @property
    def observed(self) -> int:
        return min(OBSERVED, self.window) if self.observe is None else self.observe

    @cached_property
    def traits(self) -> Traits:
        return Traits(no_rest="retrieves nothing at a step", cannot_crop=QUERIES, no_engine=LATEST)

    def effective(self) -> dict[str, object]:
        """`generates`: the number of tokens that can be generated before the window drops a token that the method must
        keep."""
        return super().effective() | {"generates": self.window - self.observed}

    def report_row(self, s: LayerState, counts: Counts) -> dict[str, Any]:
        """A prompt selects. A step selects only if a token that leaves the window is kept."""
        rate, lost = counts.per_step(int(s.kept.updates.sum())), int(s.kept.lost.max())
        return super().report_row(s, counts) | {"retrieval_rate": rate, "lost": lost}

    def buffers(self, g: Geometry) -> Buffers:
        most = min(self.budget, g.rows)
        one = lambda fill=0, **told: Buffer(g.lead, I32, fill=fill, **told)  # noqa: E731
        kept = SnapSet(
            Buffer((*g.lead, most), I32, fill=-1), count=one(), frontier=one(self.sink), chosen_at=one(NOT_YET),
            updated=one(), updates=one(counts=True), lost=one(),
        )  # fmt: skip
        hot = hot_buffer(g, 1, most, most)
        return super().buffers(g) | {"hot": hot, "observed": self.observed_buffer(g), "kept": kept}

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> None:
        observe(q, s.observed, s.kept.chosen_at, s.lengths)

    def prompted(self, s: LayerState, q: Tensor, k: Tensor, a: Attention) -> None:
        widest = 2 * s.store.pool.shape[2] + 1  # in a wider pooling every token has the same neighbours: all tokens
        pooling = Pooling(min(self.kernel_size, widest), self.pooling == "maxpool")
        spans = s.row_lengths.spans(k.shape[2])
        snap_tokens(k, s.observed, s.kept, s.store.pool, s.lengths, a, pooling, spans)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        keep_leaving(s.kept, s.stats, s.lengths)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        return Selection(s.kept.ids, s.kept.updated, s.kept.frontier)
