"""ClusterKV: clusters of keys by cosine, retrieved at every step (arXiv 2412.03213)."""
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchsparsekv._methods._clusters import CLUSTERED, ClusterMethod
from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops.clusters._kmeans import MAX_STRETCH, Kmeans
from torchsparsekv.ops.clusters.cluster_keys import cluster_keys
from torchsparsekv.ops.clusters.cluster_ring import MOST_CLUSTERS, cluster_ring
from torchsparsekv.ops.clusters.pick_units import pick_units
from torchsparsekv.ops.clusters.views import Boundaries
from torchsparsekv.ops.store.views import Attention, Leaving, Selection
from torchsparsekv.report import Counts
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState, RingPlan

RUNS = 8  # tokens that leave the ring together
ALWAYS = 2.0  # above every cosine, so every step retrieves


@dataclass(frozen=True, kw_only=True)
class ClusterKV(ClusterMethod):
    """Clusters of about 80 tokens, of a whole prompt and of every 320 generated tokens.

    Of a cluster that the budget does not hold, the first tokens are taken. Generated tokens are attended to until
    `every` of them are behind the window; then they become `new_clusters` clusters (the paper's m and C+). With `run`,
    which the paper does not have, generated tokens form units of `run` tokens as they come, and `every` and
    `new_clusters` have no effect; the mean key of a long run hides its tokens.
    """

    name = "clusterkv"

    sink: int = 16
    cluster_size: int | None = option(80, "Mean tokens of a cluster, the paper's C0 = L / 80. None: as louiskv.")
    stretch: int | None = None
    rounds: int = 20
    cosine: bool = True
    every: int = option(320, "Generated tokens that are clustered together, the paper's m.")
    new_clusters: int = option(4, "Clusters that `every` generated tokens become, the paper's C+.")
    run: int | None = option(None, "Generated tokens of a unit, instead of `every` and `new_clusters`. None: clusters.")

    def __post_init__(self) -> None:
        if self.run is not None:
            self.check_int("run", most=MAX_STRETCH)
        self.check_int("every", most=MAX_STRETCH)
        self.check_int("new_clusters", most=MOST_CLUSTERS)
        if self.every % self.new_clusters:
            raise ValueError(
                f"{self.name}: every must be a multiple of new_clusters {self.new_clusters}, got {self.every}"
            )
        super().__post_init__()

    def check_units(self) -> None:
        if self.run is not None:
            super().check_units()

    @property
    def new_size(self) -> int:
        """The mean number of tokens in a cluster of generated tokens."""
        return self.every // self.new_clusters

    @property
    def rule(self) -> Boundaries:
        assert self.run is not None
        return Boundaries(ALWAYS, False, self.run, self.run, 0.0)

    # ---- what it declares

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(self.sink, self.window, self.every if self.run is None else RUNS * self.run)

    def buffers(self, g: Geometry) -> Buffers:
        if self.run is not None:
            return super().buffers(g)
        return self.units(g, min(self.new_size, self.per_cluster)) | {"always": Buffer(g.lead, torch.int32, fill=1)}

    @cached_property
    def traits(self) -> Traits:
        clusters = self.run is None
        return Traits(selects_every_step=clusters, moves_leaving=clusters, cannot_crop=CLUSTERED, no_engine=CLUSTERED)

    def report_row(self, s: LayerState, counts: Counts) -> dict[str, Any]:
        return Method.report_row(self, s, counts) if self.run is None else super().report_row(s, counts)

    # ---- the index

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> Tensor:
        if self.run is not None:
            return super().prompt(s, q, leaving, join=join)
        self.step(s, q, leaving)
        return cluster_keys(leaving.new, s.units, s.lengths, self.kmeans, join)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        if self.run is not None:
            return super().step(s, q, leaving)
        own = Kmeans(self.new_size, self.every, self.rounds, self.seed, self.cosine)
        cluster_ring(s.store, s.units, s.lengths, own)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        if self.run is not None:
            return super().choose(s, q, a)
        return Selection(pick_units(q, s.units, s.always, s.pick_done, s.hot.chosen.shape[2], a.scale))
