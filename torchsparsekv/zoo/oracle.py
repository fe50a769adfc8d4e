"""The oracle: exact top-k by true attention weight. Reads every key at every step, so it is for evaluation only."""
from dataclasses import dataclass

from torch import Tensor

from torchsparsekv.method import Attention, Method
from torchsparsekv.ops.select.attention_mass import attention_mass
from torchsparsekv.state import LayerState


@dataclass(frozen=True, kw_only=True)
class Oracle(Method):
    name = "oracle"
    scans = True
    block_size: int = 1

    def select(self, s: LayerState, q: Tensor, a: Attention) -> Tensor:
        c = s.clock
        return self.best(
            attention_mass(q, s.pool, s.ring, c.length, c.retired, self.sink, self.block_size, a.scale, a.softcap)
        )
