"""ClusterKV: clusters of keys by cosine, retrieved at every step (arXiv 2412.03213)."""
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from torchsparsekv._methods._clusters import CLUSTERED, ClusterMethod, RingClusters
from torchsparsekv.method import Traits, option
from torchsparsekv.ops.clusters._kmeans import MAX_STRETCH
from torchsparsekv.ops.clusters.views import Boundaries
from torchsparsekv.ops.store.views import Attention, Leaving, Selection
from torchsparsekv.report import Counts
from torchsparsekv.state import Buffers, Geometry, LayerState, RingPlan

RUNS = 8  # tokens that leave the ring together
ALWAYS = 2.0  # above every cosine, so every step retrieves


@dataclass(frozen=True, kw_only=True)
class ClusterKV(RingClusters):
    """Clusters of about 80 tokens, of a whole prompt and of every 320 generated tokens.

    If the budget does not hold the whole of a cluster, a step takes its first tokens. With `run`, which the paper does
    not have, generated tokens form units of `run` tokens in their order, as segments of louiskv do. Then `every` and
    `new_clusters` have no effect. In a long run the mean key says little about single tokens.
    """

    name = "clusterkv"

    sink: int = 16
    cluster_size: int | None = option(
        80, "Mean tokens of a cluster; 80 as in the paper (C0 = L / 80). None: 16, or fewer where the budget would not "
        "hold 16 clusters."
    )
    stretch: int | None = None
    rounds: int = 20
    run: int | None = option(None, "Generated tokens form segments of this many tokens. None: clusters.")

    def __post_init__(self) -> None:
        if self.run is not None:
            self.check_int("run", most=MAX_STRETCH)
        super().__post_init__()

    @property
    def base(self) -> type[ClusterMethod]:
        """The base class that handles generated tokens: as clusters, or with `run` as segments."""
        return RingClusters if self.run is None else ClusterMethod

    def check_units(self) -> None:
        self.base.check_units(self)

    @property
    def rule(self) -> Boundaries:
        assert self.run is not None
        return Boundaries(ALWAYS, False, self.run, self.run, 0.0)

    # ---- what it declares

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(self.sink, self.window, self.every if self.run is None else RUNS * self.run)

    def buffers(self, g: Geometry) -> Buffers:
        return self.base.buffers(self, g)

    @cached_property
    def traits(self) -> Traits:
        clusters = self.run is None
        return Traits(selects_every_step=clusters, moves_leaving=clusters, cannot_crop=CLUSTERED, no_engine=CLUSTERED)

    def report_row(self, s: LayerState, counts: Counts) -> dict[str, Any]:
        return self.base.report_row(self, s, counts)

    # ---- the index

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> Tensor:
        return self.base.prompt(self, s, q, leaving, join=join)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        self.base.step(self, s, q, leaving)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        return self.base.choose(self, s, q, a)
