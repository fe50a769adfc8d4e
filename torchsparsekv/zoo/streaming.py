"""StreamingLLM: the sinks and the window, nothing retrieved (arXiv 2309.17453). The baseline without an index."""
from dataclasses import dataclass

import torch
from torch import Tensor

from torchsparsekv.method import Attention, Method
from torchsparsekv.state import Buffer, Geometry, LayerState, common_buffers


@dataclass(frozen=True, kw_only=True)
class Streaming(Method):
    name = "streaming"
    retrieves = False

    def buffers(self, g: Geometry) -> dict[str, Buffer]:
        empty = (g.batch, g.kv_heads, 0)
        return common_buffers(g, self.timeline) | {
            "hot": Buffer((*empty, self.block_size, 2, g.head_dim), g.dtype),
            "nothing": Buffer(empty, torch.int32),
        }

    def places(self, s: LayerState, q: Tensor, a: Attention) -> Tensor:
        return s.nothing
