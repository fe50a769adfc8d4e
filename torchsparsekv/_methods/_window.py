"""The method of layers with a sliding window: exact attention in the window. Older tokens are dropped."""
import dataclasses
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from torchsparsekv.method import Method, Traits
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.state import Buffers, Geometry, LayerState, RingPlan, hot_buffer, store_buffers


@dataclass(frozen=True, kw_only=True)
class _Window(Method):
    """The model sets this method; users cannot. `window` is the window of the model: a token attends to `window`
    tokens, itself included."""

    name = "window"

    budget: int = 0
    sink: int = 0

    def __post_init__(self) -> None:
        self.check_int("window")

    @cached_property
    def traits(self) -> Traits:
        return Traits(attends="window", no_rest="keeps no pool")

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(sink=0, window=self.window, interval=1)  # so the ring begins exactly a window back

    def buffers(self, g: Geometry) -> Buffers:
        plan = dataclasses.replace(self.ring_plan, window=min(self.window, g.rows))  # a cache may be shorter
        nothing = dataclasses.replace(g, rows=0)
        return store_buffers(nothing, plan) | {"hot": hot_buffer(nothing, 1, slots=0, chosen=0)}

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        return Selection()
