"""Dense attention over the same store: the reference for every other method, and what skipped layers run."""
from dataclasses import dataclass

from torchsparsekv.method import Method
from torchsparsekv.state import Buffers, Geometry, RingPlan, store_buffers


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    name = "full"
    retrieves = False
    dense = True

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(sink=0, window=0, interval=1)  # every token goes straight to the pool

    def buffers(self, g: Geometry) -> Buffers:
        return store_buffers(g, self.ring_plan)
