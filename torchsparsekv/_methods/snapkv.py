"""SnapKV: at the end of a prompt its last queries choose what of it is attended to from then on."""
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torchsparsekv._methods._static import ObservingMethod
from torchsparsekv.ops.index.observe import NOT_YET, observe
from torchsparsekv.ops.snapkv.keep_leaving import keep_leaving
from torchsparsekv.ops.snapkv.snap_tokens import Pooling, snap_tokens
from torchsparsekv.ops.snapkv.views import Kept
from torchsparsekv.ops.store.views import I32, Attention, Leaving, Selection
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState, hot_buffer

POOLINGS = ("avgpool", "maxpool")


@dataclass(frozen=True, kw_only=True)
class SnapKV(ObservingMethod):
    """Of "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469) and its code.

    Attended to are the `budget` best tokens of the prompt, its observation window, and all that was generated since.
    One thing differs: the store is per kv head, so the votes of the query heads of a kv head are summed, and then
    pooled. The paper's code repeats the keys and lets every query head choose for itself. With one query head a kv head
    it is the paper's.

    What was generated is attended to while it is in the window, so to be SnapKV the window must be as large as the
    observation window and all that is to be generated. A token that leaves it is kept while the budget has room, which
    there is after short prompts only; then it is lost, and `report()` says so.

    Nothing is taken out of the pool: a second prompt attends to everything, and chooses anew from everything.

    observe: None: as many as the window, at most 32.
    kernel_size: votes are pooled over so many neighbouring tokens, an odd number; 1: not at all.
    pooling: "avgpool", their mean, the default of the code; "maxpool", their largest, over 7 tokens in the experiments
        on LongBench.
    """

    name = "snapkv"
    regroups = True
    papers_window: ClassVar[int] = 32

    sink: int = 0
    kernel_size: int = 5
    pooling: str = "avgpool"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("kernel_size")
        if self.kernel_size % 2 == 0:
            raise ValueError(f"{self.name}: kernel_size must be odd, got {self.kernel_size}")
        self.check_one_of("pooling", POOLINGS)

    @property
    def dense_threshold(self) -> int:
        """Of longer prompts some is left out, though the window would hold it."""
        return self.sink + self.budget + self.observed

    def effective(self) -> dict[str, object]:
        """`generates`: so many tokens can be generated before any of them, or of the observation window, leaves it."""
        return super().effective() | {"generates": self.window - self.observed}

    def buffers(self, g: Geometry) -> Buffers:
        most = min(self.budget, g.rows)
        one = lambda fill=0, **told: Buffer(g.lead, I32, fill=fill, **told)  # noqa: E731
        kept = Kept(
            Buffer((*g.lead, most), I32, fill=-1), count=one(), frontier=one(self.sink), at=one(NOT_YET), updated=one(),
            updates=one(counts=True), lost=one(),
        )  # fmt: skip
        hot = hot_buffer(g, 1, most, most)
        return super().buffers(g) | {"hot": hot, "observed": self.observed_buffer(g), "kept": kept}

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> None:
        observe(q, s.observed, s.kept.at, s.lengths)

    def prompted(self, s: LayerState, k: Tensor, a: Attention) -> None:
        widest = 2 * s.store.pool.shape[2] + 1  # beyond it every token has the same neighbours: all
        pooling = Pooling(min(self.kernel_size, widest), self.pooling == "maxpool")
        spans = s.row_lengths.spans(k.shape[2])
        snap_tokens(k, s.observed, s.kept, s.store.pool, s.lengths, a, pooling, spans)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        keep_leaving(s.kept, s.stats, s.lengths)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        return Selection(s.kept.ids, s.kept.updated, s.kept.frontier)
