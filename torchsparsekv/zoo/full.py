"""Dense attention over the same store: the reference for every other method, and what skipped layers run."""
from dataclasses import dataclass

from torch import Tensor

from torchsparsekv.method import Attention, Method
from torchsparsekv.ops.attend.dense_attention import dense_attention
from torchsparsekv.state import Buffer, Geometry, LayerState, Timeline, common_buffers


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    name = "full"
    retrieves = False
    dense = True

    block_size: int = 1

    @property
    def timeline(self) -> Timeline:
        return Timeline(sink=0, window=0, interval=1)  # every token goes straight to the pool

    def buffers(self, g: Geometry) -> dict[str, Buffer]:
        return common_buffers(g, self.timeline)

    def attend(self, s: LayerState, q: Tensor, a: Attention) -> Tensor:
        return dense_attention(q, s.pool, s.clock.length, a.sinks, a.scale, a.softcap)
