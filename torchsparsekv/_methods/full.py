"""Dense attention over the same store. Skipped layers run it, and it is the reference of every other method."""
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchsparsekv.method import Method, Traits
from torchsparsekv.report import Counts
from torchsparsekv.state import Buffers, Geometry, LayerState, RingPlan, store_buffers


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    name = "full"

    @cached_property
    def traits(self) -> Traits:
        return Traits(attends="everything", no_rest="attends to every token", cannot_crop="", no_engine="has no index")

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(sink=0, window=0, interval=1)  # every token goes straight to the pool

    def buffers(self, g: Geometry) -> Buffers:
        return store_buffers(g, self.ring_plan)

    def report_row(self, s: LayerState, counts: Counts) -> dict[str, Any]:
        read = {"pool_bytes_read": counts.context * counts.row_bytes}
        return super().report_row(s, counts) | {"attended_per_step": counts.per_step(counts.context)} | read
