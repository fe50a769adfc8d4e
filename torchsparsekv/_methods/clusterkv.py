"""ClusterKV: clusters of keys by cosine, retrieved at every step (arXiv 2412.03213)."""
from dataclasses import dataclass

import torch
from torch import Tensor

from torchsparsekv._methods._clusters import ClusterMethod
from torchsparsekv.ops.clusters._kmeans import WIDEST, Kmeans
from torchsparsekv.ops.clusters.cluster_keys import cluster_keys
from torchsparsekv.ops.clusters.cluster_ring import MOST_CLUSTERS, cluster_ring
from torchsparsekv.ops.clusters.pick_units import pick_units
from torchsparsekv.ops.clusters.views import Boundaries
from torchsparsekv.ops.store.views import Attention, Leaving, Selection
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState, RingPlan

RUNS = 8  # that leave the ring at a time
ALWAYS = 2.0  # no cosine reaches it: retrieves at every step


@dataclass(frozen=True, kw_only=True)
class ClusterKV(ClusterMethod):
    """Clusters of about 80 tokens, of a whole prompt and of every 320 tokens that are generated.

    cluster_size: tokens per cluster on average; the paper's C0 = L / 80. Of a cluster that the budget does not hold the
        first tokens are taken. None: as louiskv has it.
    rounds: of k-means; the paper's code has up to 20.
    every, new_clusters: generated tokens are attended to until there are `every` behind the window, and then become so
        many clusters; the paper's m and C+.
    run: not the paper's: generated tokens form a unit this many at a time, as they come, and those two say nothing. The
        mean key of a long run hides its tokens: of what our model wrote itself, 0.94 is recalled with 4 and 0.31 with
        16, at 64 tokens. The index is sized for units of this length. What was measured as `clusterkv` before this was
        the paper's had cosine=False, cluster_size=None, stretch=4096, rounds=3, run=4, sink=64.
    """

    name = "clusterkv"

    sink: int = 16
    cluster_size: int | None = 80
    stretch: int | None = None
    rounds: int = 20
    cosine: bool = True
    every: int = 320
    new_clusters: int = 4
    run: int | None = None

    def __post_init__(self) -> None:
        if self.run is not None:
            self.check_int("run", most=WIDEST)
        self.check_int("every", most=WIDEST)
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
        """Generated tokens of a cluster, on average."""
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

    @property
    def selects_every_step(self) -> bool:
        return self.run is None

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
