"""The bases of methods that retrieve clusters of the prompt, and segments or clusters of generated tokens."""
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops.clusters._kmeans import MAX_STRETCH, SEEDS, Kmeans
from torchsparsekv.ops.clusters._segments import unit_capacity
from torchsparsekv.ops.clusters.close_segments import close_segments
from torchsparsekv.ops.clusters.cluster_keys import WHOLE, cluster_keys
from torchsparsekv.ops.clusters.cluster_ring import MOST_CLUSTERS, cluster_ring
from torchsparsekv.ops.clusters.find_boundary import find_boundary
from torchsparsekv.ops.clusters.pick_units import MOST_ROWS, pick_units
from torchsparsekv.ops.clusters.views import Boundaries, Segments, Trigger, Units
from torchsparsekv.ops.store.rows import row_shape
from torchsparsekv.ops.store.views import Attention, Leaving, Selection
from torchsparsekv.report import Counts
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState, RingPlan

# Clusters that a budget should hold, because the query heads of a group want different clusters. In the tasks multikey
# and multiquery (budget 64, 16K tokens, three samples each) 0.79 of the answers are right with 8 clusters, all with 16.
CLUSTERS = 16
CLUSTERED = "stores the tokens of a prompt in the order of their clusters"  # the reason to refuse crop and engines


@dataclass(frozen=True, kw_only=True)
class ClusterMethod(Method):
    """Retrieves whole units by their mean keys: clusters of a prompt, and segments of generated tokens.

    Each prompt, turn or chunk of a prompt is clustered by itself. Fewer than twice `cluster_size` tokens become one
    cluster.
    """

    cluster_size: int | None = option(
        None, f"Mean tokens of a cluster. None: 16, or fewer where the budget would not hold {CLUSTERS} clusters."
    )
    stretch: int | None = option(
        MAX_STRETCH, "Prompt tokens that are clustered together, a power of two. None: the whole prompt."
    )
    rounds: int = option(3, "Rounds of k-means.")
    seed: int = option(0, "Seed of the first centroids.")
    cosine: bool = option(False, "Compare keys by direction alone. False: by Euclidean distance.")

    centred: ClassVar[bool] = False  # whether k-means first subtracts the mean of the keys

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster_size is not None:
            self.check_int("cluster_size", 2, MAX_STRETCH)
        self.check_int("rounds", 1, 100)
        self.check_int("seed", 0, SEEDS - 1)
        if not isinstance(self.cosine, bool):
            raise TypeError(f"{self.name}: cosine must be a bool, got {self.cosine!r}")
        if self.stretch is not None:
            self.check_int("stretch", 2, MAX_STRETCH, power=True)
            if self.stretch < self.per_cluster:
                raise ValueError(f"{self.name}: stretch {self.stretch} is below cluster_size {self.per_cluster}")
        self.check_units()

    def check_units(self) -> None:
        """Check the lengths of segments, and that the budget holds one unit of each kind."""
        shortest, longest = self.rule.shortest, self.rule.longest
        if shortest > longest:
            raise ValueError(f"{self.name}: segments need shortest <= longest, got {shortest}, {longest}")
        if self.budget < max(self.per_cluster, longest):
            raise ValueError(
                f"{self.name}: budget {self.budget} is below one unit: a cluster has {self.per_cluster} tokens, a "
                f"segment up to {longest}"
            )

    @property
    def per_cluster(self) -> int:
        """`cluster_size`, or its default."""
        if self.cluster_size is not None:
            return self.cluster_size
        share = max(2, self.budget // CLUSTERS)
        return min(16, 1 << (share.bit_length() - 1))

    def effective(self) -> dict[str, object]:
        return super().effective() | {"cluster_size": self.per_cluster}

    @property
    def kmeans(self) -> Kmeans:
        """The settings of k-means for a prompt."""
        return Kmeans(self.per_cluster, self.stretch or WHOLE, self.rounds, self.seed, self.cosine, self.centred)

    @property
    def rule(self) -> Boundaries:
        """The rule of retrieval (a cosine with an earlier query that is below tau) and the lengths of segments."""
        raise NotImplementedError

    # ---- what it declares

    def report_row(self, s: LayerState, counts: Counts) -> dict[str, Any]:
        """Steps retrieve at boundaries alone (ops/clusters/find_boundary.py)."""
        rate = counts.per_step(int(s.trigger.retrievals.sum()))
        return super().report_row(s, counts) | {"retrieval_rate": rate}

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(self.sink, self.window, 2 * self.rule.longest)

    def units(self, g: Geometry, least: int) -> Buffers:
        """The buffers of the units. Segments have `least` tokens or more, clusters have `per_cluster` tokens in the
        mean."""
        if g.rows > MOST_ROWS:
            raise ValueError(f"{self.name}: a cache row holds at most {MOST_ROWS} tokens, got {g.rows}")
        units, i32 = unit_capacity(g.rows, self.ring_plan.interval, least), torch.int32
        return super().buffers(g) | {
            "units": Units(
                first=Buffer((*g.lead, units + 1), i32, fill=self.sink),
                centroid=Buffer((*g.lead, units, g.head_dim), g.dtype),
                unit_count=Buffer(g.lead, i32),
            ),
            "pick_done": Buffer(g.lead, i32),
        }

    def buffers(self, g: Geometry) -> Buffers:
        plan, lead, i32 = self.ring_plan, g.lead, torch.int32
        # The ring holds, beside sinks and window: `interval` tokens that wait to leave, an open segment of `longest`
        # tokens, and `longest` tokens more before the full ring forces a boundary.
        span = plan.window + plan.interval + 2 * self.rule.longest
        at_sink, none = Buffer(lead, i32, fill=self.sink), Buffer(lead, i32)
        ring = Buffer((*lead, self.sink + span, *row_shape(g.head_dim)), g.dtype)
        stored = self.units(g, min(self.rule.shortest, self.per_cluster))
        return stored | {
            "store": stored["store"]._replace(ring=ring),
            "segments": Segments(cuts=Buffer((*lead, span), i32), segment_begin=at_sink, frontier=at_sink),
            "trigger": Trigger(
                previous=Buffer((g.batch, 2, g.kv_heads * g.group, g.head_dim), torch.float32),
                seen=Buffer(lead, i32, fill=-1), retrieve_now=none, retrievals=Buffer(lead, i32, counts=True),
            ),
        }  # fmt: skip

    # ---- the index

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> Tensor:
        close_segments(s.store.ring, s.units, s.segments, s.lengths, self.rule.longest)
        return cluster_keys(leaving.new, s.units, s.lengths, self.kmeans, join)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        find_boundary(q, s.store.ring, s.units, s.segments, s.trigger, s.stats, s.lengths, self.rule)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        now = s.trigger.retrieve_now
        rows = pick_units(q, s.units, now, s.pick_done, s.hot.chosen.shape[2], a.scale)
        return Selection(rows, now, s.segments.frontier)


@dataclass(frozen=True, kw_only=True)
class RingClusters(ClusterMethod):
    """Retrieves clusters at every step. Generated tokens stay in the ring until `every` of them are older than the
    window. Then they become `new_clusters` clusters.
    """

    cosine: bool = True
    every: int = option(320, "Generated tokens that are clustered together.")
    new_clusters: int = option(4, "Clusters that are made of `every` generated tokens.")

    def __post_init__(self) -> None:
        self.check_int("every", most=MAX_STRETCH)
        self.check_int("new_clusters", most=MOST_CLUSTERS)
        if self.every % self.new_clusters:
            raise ValueError(
                f"{self.name}: every must be a multiple of new_clusters {self.new_clusters}, got {self.every}"
            )
        super().__post_init__()

    def check_units(self) -> None:
        """Accept any budget: a budget below one unit takes a part of the unit."""

    @property
    def new_size(self) -> int:
        """The mean number of tokens in a cluster of generated tokens."""
        return self.every // self.new_clusters

    @property
    def new_kmeans(self) -> Kmeans:
        """The settings of k-means for generated tokens."""
        return Kmeans(self.new_size, self.every, self.rounds, self.seed, self.cosine, self.centred)

    # ---- what it declares

    def report_row(self, s: LayerState, counts: Counts) -> dict[str, Any]:
        return Method.report_row(self, s, counts)

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(self.sink, self.window, self.every)

    def buffers(self, g: Geometry) -> Buffers:
        return self.units(g, min(self.new_size, self.per_cluster)) | {"always": Buffer(g.lead, torch.int32, fill=1)}

    @cached_property
    def traits(self) -> Traits:
        return Traits(selects_every_step=True, moves_leaving=True, cannot_crop=CLUSTERED, no_engine=CLUSTERED)

    # ---- the index

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> Tensor:
        cluster_ring(s.store, s.units, s.lengths, self.new_kmeans)
        return cluster_keys(leaving.new, s.units, s.lengths, self.kmeans, join)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        cluster_ring(s.store, s.units, s.lengths, self.new_kmeans)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        return Selection(pick_units(q, s.units, s.always, s.pick_done, s.hot.chosen.shape[2], a.scale))
