"""What methods have in common that retrieve clusters of the prompt and segments of what was generated."""
from dataclasses import dataclass

import torch
from torch import Tensor

from torchsparsekv.method import Attention, Method
from torchsparsekv.ops.gather.refetch import refetch
from torchsparsekv.ops.index._kmeans import SEEDS, WIDEST
from torchsparsekv.ops.index._segments import unit_capacity
from torchsparsekv.ops.index.append import append
from torchsparsekv.ops.index.cluster_keys import cluster_keys
from torchsparsekv.ops.index.find_boundary import find_boundary
from torchsparsekv.ops.index.settle_segments import settle_segments
from torchsparsekv.ops.index.store_prompt import store_prompt
from torchsparsekv.ops.select.pick_units import MOST_ROWS, pick_units
from torchsparsekv.state import Buffer, Geometry, LayerState, Timeline

# That a budget should hold: the query heads of a group each want others. Of multikey and multiquery, 64 tokens of 16K,
# three samples each, 0.79 is right with 8, all with 16.
CLUSTERS = 16


@dataclass(frozen=True, kw_only=True)
class ClusterMethod(Method):
    """Prompts by k-means cluster, generated tokens by temporal segment, one mean key each; whole units are retrieved.

    cluster_size: tokens per cluster on average; a power of two. None: 16, or fewer where the budget would not hold 16
        clusters (64 tokens: 4 each; 128: 8). A prompt that has fewer beyond window and sinks is one cluster. Each
        prompt, turn or chunk of one is clustered for itself.
    stretch: tokens that are clustered together; a power of two.
    rounds: of k-means. 3 come within 2 % of convergence, where keys drift within 6; 4 within 1.5 and 4.
    seed: of the first centroids.
    """

    regroups = True

    block_size: int = 1
    cluster_size: int | None = None
    stretch: int = WIDEST
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster_size is not None:
            self.check_int("cluster_size", 2, WIDEST, power=True)
        self.check_int("stretch", 2, WIDEST, power=True)
        self.check_int("rounds", 1, 100)
        self.check_int("seed", 0, SEEDS - 1)
        if self.block_size != 1:
            raise ValueError(f"{self.name} retrieves units of any size: block_size must be 1, got {self.block_size}")
        if self.stretch < self.per_cluster:
            raise ValueError(f"{self.name}: stretch {self.stretch} is below cluster_size {self.per_cluster}")
        shortest, longest = self.segment
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

    def settled(self) -> dict[str, object]:
        return super().settled() | {"cluster_size": self.per_cluster}

    @property
    def segment(self) -> tuple[int, int]:
        """The least and the most tokens of a segment."""
        raise NotImplementedError

    @property
    def trigger(self) -> tuple[float, bool]:
        """Retrieve where the likeness to the last query is below this, and whether each kv head decides for itself."""
        return 2.0, False  # no cosine reaches it: at every step

    # ---- what it declares

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.sink, self.window, 2 * self.segment[1])

    def buffers(self, g: Geometry) -> dict[str, Buffer]:
        if g.rows > MOST_ROWS:
            raise ValueError(f"{self.name}: a cache row holds at most {MOST_ROWS} tokens, got {g.rows}")
        t, lead, i32 = self.timeline, (g.batch, g.kv_heads), torch.int32
        # Behind the window: what waits for the clock, a segment not yet whole, and as much again before a boundary is
        # forced for want of room.
        turn = t.window + t.interval + 2 * self.segment[1]
        units = unit_capacity(g.rows, t.interval, min(self.segment[0], self.per_cluster))
        per_head = dict.fromkeys(("wanted", "units", "retrievals", "picked"), 0)
        per_head |= {"seen": -1, "begun": self.sink, "frontier": self.sink}
        return super().buffers(g) | {
            "ring": Buffer((*lead, self.sink + turn, 2, g.head_dim), g.dtype),
            "cuts": Buffer((*lead, turn), i32),
            "first": Buffer((*lead, units + 1), i32, fill=self.sink),
            "centroid": Buffer((*lead, units, g.head_dim), g.dtype),
            "previous": Buffer((g.batch, 2, g.kv_heads * g.group, g.head_dim), g.dtype),
            "chosen": Buffer((*lead, min(self.budget, g.rows)), i32, fill=-1),
            **{name: Buffer(lead, i32, fill=value) for name, value in per_head.items()},
        }

    # ---- the stages

    def frontier(self, s: LayerState) -> Tensor:
        return s.frontier

    def take_in(self, s: LayerState, k: Tensor, v: Tensor, *, join: bool) -> None:
        c, (_, longest) = s.clock, self.segment
        settle_segments(
            s.ring, s.cuts, s.begun, s.frontier, s.units, s.first, s.centroid, c.start, c.length, c.retired, self.sink,
            longest,
        )  # fmt: skip
        order = cluster_keys(
            k, s.units, s.first, s.centroid, c.start, c.length, c.retired, self.sink, self.per_cluster, self.stretch,
            self.rounds, self.seed, join,
        )  # fmt: skip
        store_prompt(k, v, s.ring, s.pool, c.start, c.length, c.leaving, c.retired, order, self.sink, join)

    def decode(self, s: LayerState, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
        c, t = s.clock, self.timeline
        append(k, v, s.ring, s.pool, s.stats, c.length, c.leaving, c.retired, t.sink, t.interval)
        find_boundary(
            q, s.ring, s.previous, s.seen, s.cuts, s.begun, s.frontier, s.units, s.first, s.centroid, s.wanted,
            s.retrievals, s.stats, c.length, c.retired, t.sink, *self.trigger, *self.segment,
        )  # fmt: skip
        return self.attend(s, q, a)

    def select(self, s: LayerState, q: Tensor, a: Attention) -> Tensor:
        return pick_units(q, s.centroid, s.first, s.units, s.wanted, s.picked, s.chosen.shape[2], a.scale)

    def places(self, s: LayerState, q: Tensor, a: Attention) -> Tensor:
        rows = self.select(s, q, a)
        refetch(s.wanted, rows, s.pool, s.hot, s.table, s.resident, s.age, s.arrivals, s.stats, s.chosen)
        return s.chosen
