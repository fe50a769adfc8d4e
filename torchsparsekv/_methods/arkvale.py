"""ArkVale: pages chosen by a volume around their keys, evicted from the device but recallable (NeurIPS 2024)."""
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from torchsparsekv._methods._pages import PageMethod
from torchsparsekv.method import Traits, option
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.state import LayerState

VOLUMES = {"cuboid-mean": "mean-box", "cuboid": "box", "ball": "ball"}  # the paper's names, and those of the op
LAYER = "layer"


@dataclass(frozen=True, kw_only=True)
class ArkVale(PageMethod):
    """The paper's volume is "cuboid-mean": the middle of the per-channel range, and the mean distance to it.

    "cuboid" has half the range instead of the mean distance, as Quest. "ball" is the mean key and the largest distance
    to it, which the paper rejects. With group="layer" all heads of a layer attend to the same pages, as in the authors'
    code. Each kv head scores pages by its mean query, and the pages with the largest mean of these scores win.
    """

    name = "arkvale"

    block_size: int = 32
    group: str = option(
        "mean", "How query heads select together. max, mean: those of a kv head, by their largest score or mean query. "
        "layer: all heads of a layer, by the mean of the scores of the kv heads."
    )
    volume: str = option("cuboid-mean", "Volume around the keys of a page: cuboid-mean (the paper's), cuboid or ball.")

    GROUPS: ClassVar[tuple[str, ...]] = ("max", "mean", LAYER)

    @cached_property
    def traits(self) -> Traits:
        layer = self.group == LAYER
        why = "selects for all heads of a layer" if layer else ""
        return Traits(selects_every_step=True, couples_heads=layer, cannot_crop="", no_engine=why, **self.capability)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_of("volume", VOLUMES)

    @property
    def shape(self) -> str:
        return VOLUMES[self.volume]

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        if self.group != LAYER:
            return super().choose(s, q, a)
        scores, _ = bound_scores(self.asking(q, s.digests), s.digests, s.lengths)
        return self.best(s, scores.mean(1, keepdim=True).expand_as(scores).contiguous())
