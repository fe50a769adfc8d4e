"""The oracle: exact top-k by true attention weight. Reads every key at every step, so it is for evaluation only."""
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops.select.attention_mass import attention_mass
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.report import Counts
from torchsparsekv.state import LayerState


@dataclass(frozen=True, kw_only=True)
class Oracle(Method):
    name = "oracle"

    block_size: int = option(1, "Consecutive tokens that are selected and moved together; a power of two.")

    @cached_property
    def traits(self) -> Traits:
        return Traits(selects_every_step=True, cannot_crop="", no_engine="reads every key at every step")

    def report_row(self, s: LayerState, counts: Counts) -> dict[str, Any]:
        """A step also reads the keys, half of every row, of all tokens outside the ring."""
        row = super().report_row(s, counts)
        keys = (counts.context - counts.in_ring) * counts.row_bytes // 2
        return row | {"pool_bytes_read": row["pool_bytes_read"] + keys}

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        return self.best(s, attention_mass(q, s.store, s.lengths, self.block_size, a))
