"""RetroInfer: the best clusters are retrieved, the next best are estimated by their means (arXiv 2505.02922)."""
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from torchsparsekv._methods._clusters import CLUSTERED, RingClusters
from torchsparsekv.method import Traits, option
from torchsparsekv.ops.rest.views import Rest
from torchsparsekv.ops.retroinfer.estimate_units import ONE, estimate_units
from torchsparsekv.ops.retroinfer.unit_means import unit_means
from torchsparsekv.ops.store.views import Attention, Leaving, Selection
from torchsparsekv.state import Buffers, Geometry, LayerState, means_buffer


@dataclass(frozen=True, kw_only=True)
class RetroInfer(RingClusters):
    """The budget holds the best clusters, of about 16 tokens. The mean key and the mean value of each of the next best
    clusters stand for its tokens.

    Keys are compared by cosine, after their mean is taken out.
    """

    name = "retroinfer"
    centred: ClassVar[bool] = True

    sink: int = 4
    window: int = 64
    cluster_size: int | None = option(
        16, "Mean tokens of a cluster. None: 16, or fewer where the budget would not hold 16 clusters."
    )
    rounds: int = 10
    every: int = 1024
    new_clusters: int = 64
    estimated: float = option(0.232, "Share of all clusters that a step estimates by their means, from 0 to 1.")

    def __post_init__(self) -> None:
        share = self.estimated
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ValueError(f"{self.name}: estimated must be a share from 0 to 1, got {share!r}")
        super().__post_init__()

    # ---- what it declares

    def buffers(self, g: Geometry) -> Buffers:
        found = super().buffers(g)
        return found | {"means": means_buffer(g, found["units"].centroid.shape[2])}

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            moves_leaving=True, no_rest="estimates the rest by the means of its clusters", cannot_crop=CLUSTERED,
            no_engine=CLUSTERED,
        )  # fmt: skip

    # ---- the index

    def prompt_values(self, s: LayerState, leaving: Leaving, v: Tensor, order: Tensor | None, *, join: bool) -> None:
        unit_means(leaving, v, s.units, s.means, s.lengths, order, join)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        super().step(s, q, leaving)
        unit_means(leaving, None, s.units, s.means, s.lengths, None, True)

    def rest_of(self, s: LayerState, q: Tensor, selection: Selection, a: Attention) -> Rest:
        share = round(self.estimated * ONE)
        return Rest(s.means, 0, estimate_units(q, s.units, selection.ids, share, a.scale))
