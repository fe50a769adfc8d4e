"""PRKV: one budget for a static set of single tokens and for pages that every step selects."""
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from torchsparsekv._methods._pages import PageMethod
from torchsparsekv._methods._static import QUERIES, StaticMethod
from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops.index.block_bounds import block_bounds
from torchsparsekv.ops.index.observe import observe
from torchsparsekv.ops.prkv.static_target import static_target
from torchsparsekv.ops.prkv.update_static_set import update_static_set
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.ops.store.views import Attention, Leaving, Selection
from torchsparsekv.report import Counts
from torchsparsekv.state import Buffers, Geometry, LayerState

VOLUMES = {"cuboid-mean": "mean-box", "mean": "mean"}  # the names of the option, and those of the op


@dataclass(frozen=True, kw_only=True)
class PRKV(StaticMethod, PageMethod):
    """Of "PRKV: Page Restructured KV Cache for High Accuracy and Efficiency LLM Generation", algorithm 1.

    The static set has `static_ratio` of the budget, in whole pages (rounded down). Steps select the other pages by
    their digest, which is ArkVale's unless `volume` says otherwise; a ratio of 0 is ArkVale. With "auto" each layer
    decides at the first step after a prompt, by the tokens that the first and the last query of the observation window
    agree on (appendix G); the report shows the share of each layer.
    """

    name = "prkv"

    block_size: int = 32
    group: str = "mean"
    volume: str = option("cuboid-mean", "Digest of a page: cuboid-mean (of ArkVale, as in the paper) or mean.")
    update_every: int | None = 128
    static_ratio: float | str = option(0.25, 'Share of the budget for the static set. "auto": each layer decides.')
    per_head: bool = option(False, 'With static_ratio="auto", each kv head decides for itself.')

    @cached_property
    def traits(self) -> Traits:
        needs = [self.capability] if self.copies else []
        if self.digest == "float8":
            needs.append(dict(least_capability=(8, 9), older_devices='digest="bfloat16"'))
        return Traits(
            couples_heads=self.static_ratio == "auto" and not self.per_head,
            selects_every_step=True,
            moves_selected=bool(self.static),
            no_rest="moves tokens in the pool unless static_ratio=0" if self.static else "",
            cannot_crop=QUERIES if self.static else "",
            no_engine="moves the static set of each request within the pool",
            least_capability=max((n["least_capability"] for n in needs), default=(8, 0)),
            older_devices=", ".join(n["older_devices"] for n in needs),
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_of("volume", VOLUMES)
        ratio = self.static_ratio
        if ratio != "auto" and (isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1):
            raise ValueError(f'{self.name}: static_ratio must be in [0, 1] or "auto", got {ratio!r}')
        if not isinstance(self.per_head, bool):
            raise TypeError(f"{self.name}: per_head must be a bool, got {self.per_head!r}")

    @property
    def shape(self) -> str:
        return VOLUMES[self.volume]

    @property
    def static(self) -> int:
        """The most tokens of the static set, in whole pages."""
        share = 1 if self.static_ratio == "auto" else float(self.static_ratio)
        return int(round(self.budget * share, 6)) // self.block_size * self.block_size

    def effective(self) -> dict[str, object]:
        return super().effective() | {"static": "auto" if self.static_ratio == "auto" else self.static}

    def report_row(self, s: LayerState, counts: Counts) -> dict[str, Any]:
        """Every step selects pages beside the static set."""
        return Method.report_row(self, s, counts) | (self.static_share(s) if self.static else {})

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
            observe(q, s.observed, s.static.chosen_at, s.lengths)
        self.summarise(s, leaving)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        """Write digests and the copy of the keys, unless `update_static_set` in `choose` does so in time.

        Without a static set, only this hook writes digests. With static_ratio="auto", `static_target` reads the copy
        before `update_static_set` runs.
        """
        if not self.static or self.static_ratio == "auto":
            self.summarise(s, leaving)

    def summarise(self, s: LayerState, leaving: Leaving) -> None:
        """Write digests and the copy of the keys in one launch."""
        block_bounds(leaving, s.digests, s.lengths, self.coarse(s))

    def origin(self, s: LayerState) -> Tensor | None:
        return s.digests.origin if self.copies else None

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        if not self.static:
            return PageMethod.choose(self, s, q, a)
        coarse = self.coarse(s)
        if self.static_ratio == "auto":
            most = min(self.budget, s.static.ids.shape[2])
            static_target(s.observed, s.static, s.store.pool, coarse, s.lengths, most, self.per_head)
        update_static_set(s.observed, s.static, s.store, coarse, s.hot, s.digests, s.lengths, a)
        return self.best(s, *bound_scores(self.asking(q, s.digests), s.digests, s.lengths, s.static.count))
