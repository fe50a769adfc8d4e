"""ClusterKV: clusters of the prompt's keys, retrieved at every step (arXiv 2412.03213)."""
from dataclasses import dataclass

from torchsparsekv.ops.index._kmeans import WIDEST
from torchsparsekv.ops.store.views import Boundaries
from torchsparsekv.state import RingPlan
from torchsparsekv.zoo._clusters import ClusterMethod

RUNS = 8  # that leave the ring at a time
ALWAYS = 2.0  # no cosine reaches it: retrieves at every step


@dataclass(frozen=True, kw_only=True)
class ClusterKV(ClusterMethod):
    """By default not the paper's definition (docs/methods/clusterkv.md): clusters are Euclidean and of 16 keys, of one
    stretch of the prompt each; the paper clusters all of it by cosine, about 80 keys each (`cosine`, `cluster_size`).

    run: generated tokens form a unit this many at a time; the paper clusters them too, 320 at a time. The mean key of a
        long run hides its tokens: of what our model wrote itself, 0.94 is recalled with 4 and 0.31 with 16, at 64
        tokens. The index is sized for units of this length.
    """

    name = "clusterkv"

    run: int = 4

    def __post_init__(self) -> None:
        self.check_int("run", most=WIDEST)
        super().__post_init__()

    @property
    def rule(self) -> Boundaries:
        return Boundaries(ALWAYS, False, self.run, self.run, 0.0)

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(self.sink, self.window, RUNS * self.run)
