"""The oracle: exact top-k by true attention weight. Reads every key at every step, so it is for evaluation only."""
from dataclasses import dataclass

from torch import Tensor

from torchsparsekv.method import Method
from torchsparsekv.ops.select.attention_mass import attention_mass
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.state import LayerState


@dataclass(frozen=True, kw_only=True)
class Oracle(Method):
    """block_size: consecutive tokens that are chosen and moved together; a power of two."""

    name = "oracle"
    scans = True

    block_size: int = 1

    @property
    def selects_every_step(self) -> bool:
        return True

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        return self.best(attention_mass(q, s.store, s.lengths, self.block_size, a))
