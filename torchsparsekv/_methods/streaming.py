"""StreamingLLM: the sinks and the window, nothing retrieved (arXiv 2309.17453). The baseline without an index."""
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.state import Buffers, Geometry, LayerState, hot_buffer


@dataclass(frozen=True, kw_only=True)
class Streaming(Method):
    name = "streaming"

    block_size: int = option(16, "Tokens that leave the window together; a power of two.")

    @cached_property
    def traits(self) -> Traits:
        return Traits(attends="recent", no_rest="retrieves nothing", cannot_crop="", no_engine="selects nothing")

    @property
    def dense_threshold(self) -> int:
        """The method has no use for a budget."""
        return self.sink + self.window

    def buffers(self, g: Geometry) -> Buffers:
        return super().buffers(g) | {"hot": hot_buffer(g, self.block_size, slots=0, chosen=0)}

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        return Selection()
