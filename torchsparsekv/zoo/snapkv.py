"""A static set: the tokens that the last queries of the prompt looked at (SnapKV, as PRKV has it; NeurIPS 2024)."""
from dataclasses import dataclass

from torch import Tensor

from torchsparsekv.ops.store.views import Attention, Choice
from torchsparsekv.state import Buffers, Geometry, LayerState, hot_buffer
from torchsparsekv.zoo._static import StaticMethod


@dataclass(frozen=True, kw_only=True)
class SnapKV(StaticMethod):
    """PRKV with a static share of 1, of single tokens, which it compares itself with.

    It differs from SnapKV's own code: scores are averaged over the query heads of a kv head, not pooled over
    neighbouring tokens, and the softmax leaves out the local window. Nothing is evicted, so the set can be chosen anew
    (`update_every`: the paper's SnapKV+ has 128). Generated tokens are attended to while they are in the window, and
    afterwards as long as the budget holds all that can be retrieved, or if they are in the next set.
    """

    name = "snapkv"
    regroups = True

    def buffers(self, g: Geometry) -> Buffers:
        most = min(self.budget, g.rows)
        return super().buffers(g) | self.static_buffers(g, most, most) | {"hot": hot_buffer(g, 1, most, most)}

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Choice:
        self.choose_static(s, q, a)
        return Choice(s.static.ids, s.static.updated)
