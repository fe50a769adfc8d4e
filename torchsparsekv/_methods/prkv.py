"""PRKV: one budget of single tokens that stay and of pages that are chosen at every step."""
from dataclasses import dataclass

from torch import Tensor

from torchsparsekv._methods._pages import PageMethod
from torchsparsekv._methods._static import StaticMethod
from torchsparsekv.ops.index.block_bounds import block_bounds
from torchsparsekv.ops.index.observe import observe
from torchsparsekv.ops.prkv.static_target import static_target
from torchsparsekv.ops.prkv.update_static_set import update_static_set
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.ops.store.views import Attention, Leaving, Selection
from torchsparsekv.state import Buffers, Geometry, LayerState


@dataclass(frozen=True, kw_only=True)
class PRKV(StaticMethod, PageMethod):
    """Of "PRKV: Page Restructured KV Cache for High Accuracy and Efficiency LLM Generation", algorithm 1.

    static_ratio: share of the budget that is static, in whole pages (rounded down). The others are pages by their
        digest, which is ArkVale's; 0 is ArkVale. The paper has 0.25. "auto": each layer decides at the first step after
        a prompt, by the tokens that the first and the last query of the observation window agree on (appendix G); the
        report says what it found.
    per_head: with "auto", each kv head decides for itself.
    """

    name = "prkv"
    regroups = True

    block_size: int = 32
    update_every: int | None = 128
    static_ratio: float | str = 0.25
    per_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        ratio = self.static_ratio
        if ratio != "auto" and (isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1):
            raise ValueError(f'{self.name}: static_ratio must be in [0, 1] or "auto", got {ratio!r}')
        if not isinstance(self.per_head, bool):
            raise TypeError(f"{self.name}: per_head must be a bool, got {self.per_head!r}")

    @property
    def shape(self) -> str:
        return "mean-box"

    @property
    def static(self) -> int:
        """Tokens of the static set: whole pages. At most, where it is found."""
        share = 1 if self.static_ratio == "auto" else float(self.static_ratio)
        return int(round(self.budget * share, 6)) // self.block_size * self.block_size

    @property
    def couples_heads(self) -> bool:
        return self.static_ratio == "auto" and not self.per_head

    @property
    def selects_every_step(self) -> bool:
        return not self.static

    def effective(self) -> dict[str, object]:
        return super().effective() | {"static": "auto" if self.static_ratio == "auto" else self.static}

    def buffers(self, g: Geometry) -> Buffers:
        most = min(self.static, g.rows)
        if not self.static:
            return super().buffers(g)
        return super().buffers(g) | self.static_buffers(g, most, most, moves=True)

    def observed_queries(self, s: LayerState) -> Tensor | None:
        return super().observed_queries(s) if self.static else None

    @property
    def copies(self) -> bool:
        return bool(self.static) and self.source == "codes"  # torch 2.11 cannot trace a property of super()

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> None:
        if self.static:
            observe(q, s.observed, s.static.at, s.lengths)
        self.summarise(s, leaving)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        """What left is summarised by the launch that sees to the static set, but where `static_target` comes before."""
        if not self.static or self.static_ratio == "auto":
            self.summarise(s, leaving)

    def summarise(self, s: LayerState, leaving: Leaving) -> None:
        """The copy of keys is made where their digests are, in one launch."""
        block_bounds(leaving, s.digests, s.lengths, self.coarse(s))

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        if not self.static:
            return PageMethod.choose(self, s, q, a)
        coarse = self.coarse(s)
        if self.static_ratio == "auto":
            most = min(self.budget, s.static.ids.shape[2])
            static_target(s.observed, s.static, s.store.pool, coarse, s.lengths, most, self.per_head)
        update_static_set(s.observed, s.static, s.store, coarse, s.hot, s.digests, s.lengths, a)
        return self.best(*bound_scores(q, s.digests, s.lengths, s.static.count))
