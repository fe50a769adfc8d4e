"""What methods have in common that retrieve clusters of the prompt and segments of what was generated."""
from dataclasses import dataclass

import torch
from torch import Tensor

from torchsparsekv.method import Method
from torchsparsekv.ops.index._kmeans import SEEDS, WIDEST
from torchsparsekv.ops.index._segments import unit_capacity
from torchsparsekv.ops.index.cluster_keys import Kmeans, cluster_keys
from torchsparsekv.ops.index.find_boundary import find_boundary
from torchsparsekv.ops.index.settle_segments import settle_segments
from torchsparsekv.ops.select.pick_units import MOST_ROWS, pick_units
from torchsparsekv.ops.store.rows import row_shape
from torchsparsekv.ops.store.views import Attention, Boundaries, Choice, Near, Segments, Trigger, Units
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState, RingPlan

# That a budget should hold: the query heads of a group each want others. Of multikey and multiquery, 64 tokens of 16K,
# three samples each, 0.79 is right with 8, all with 16.
CLUSTERS = 16


@dataclass(frozen=True, kw_only=True)
class ClusterMethod(Method):
    """Prompts by k-means cluster, generated tokens by temporal segment, one mean key each; whole units are retrieved.

    cluster_size: tokens per cluster on average. None: 16, or fewer where the budget would not hold 16
        clusters (64 tokens: 4 each; 128: 8). A prompt that has fewer beyond window and sinks is one cluster. Each
        prompt, turn or chunk of one is clustered for itself.
    stretch: tokens that are clustered together; a power of two.
    rounds: of k-means. 3 come within 2 % of convergence, where keys drift within 6; 4 within 1.5 and 4.
    seed: of the first centroids.
    cosine: keys are compared by their directions alone, not by their Euclidean distance.
    """

    regroups = True

    cluster_size: int | None = None
    stretch: int = WIDEST
    rounds: int = 3
    seed: int = 0
    cosine: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster_size is not None:
            self.check_int("cluster_size", 2, WIDEST)
        self.check_int("stretch", 2, WIDEST, power=True)
        self.check_int("rounds", 1, 100)
        self.check_int("seed", 0, SEEDS - 1)
        if not isinstance(self.cosine, bool):
            raise TypeError(f"{self.name}: cosine must be a bool, got {self.cosine!r}")
        if self.stretch < self.per_cluster:
            raise ValueError(f"{self.name}: stretch {self.stretch} is below cluster_size {self.per_cluster}")
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
        """`cluster_size`, or what it is by default."""
        if self.cluster_size is not None:
            return self.cluster_size
        share = max(2, self.budget // CLUSTERS)
        return min(16, 1 << (share.bit_length() - 1))

    def effective(self) -> dict[str, object]:
        return super().effective() | {"cluster_size": self.per_cluster}

    @property
    def rule(self) -> Boundaries:
        """Retrieve where the likeness to the last query is below tau, and cut segments of so many tokens."""
        raise NotImplementedError

    # ---- what it declares

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(self.sink, self.window, 2 * self.rule.longest)

    def buffers(self, g: Geometry) -> Buffers:
        if g.rows > MOST_ROWS:
            raise ValueError(f"{self.name}: a cache row holds at most {MOST_ROWS} tokens, got {g.rows}")
        plan, lead, i32 = self.ring_plan, g.lead, torch.int32
        # Behind the window: what waits to leave, a segment not yet whole, and as much again before a boundary is forced
        # for want of room.
        span = plan.window + plan.interval + 2 * self.rule.longest
        units = unit_capacity(g.rows, plan.interval, min(self.rule.shortest, self.per_cluster))
        at_sink, none = Buffer(lead, i32, fill=self.sink), Buffer(lead, i32)
        return super().buffers(g) | {
            "near": Near(Buffer((*lead, self.sink + span, *row_shape(g.head_dim)), g.dtype)),
            "units": Units(
                first=Buffer((*lead, units + 1), i32, fill=self.sink),
                centroid=Buffer((*lead, units, g.head_dim), g.dtype),
                unit_count=none,
            ),
            "segments": Segments(cuts=Buffer((*lead, span), i32), segment_begin=at_sink, frontier=at_sink),
            "trigger": Trigger(
                previous=Buffer((g.batch, 2, g.kv_heads * g.group, g.head_dim), g.dtype),
                seen=Buffer(lead, i32, fill=-1), retrieve_now=none, retrievals=none,
            ),
            "pick_done": none,
        }  # fmt: skip

    # ---- the index

    def prompt(self, s: LayerState, q: Tensor, k: Tensor, *, join: bool) -> Tensor:
        settle_segments(s.near, s.units, s.segments, s.lengths, self.rule.longest)
        return cluster_keys(
            k, s.units, s.lengths, Kmeans(self.per_cluster, self.stretch, self.rounds, self.seed, self.cosine), join
        )

    def step(self, s: LayerState, q: Tensor, k: Tensor) -> None:
        find_boundary(q, s.near, s.units, s.segments, s.trigger, s.stats, s.lengths, self.rule)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Choice:
        now = s.trigger.retrieve_now
        rows = pick_units(q, s.units, now, s.pick_done, s.hot.chosen.shape[2], a.scale)
        return Choice(rows, now, s.segments.frontier)
