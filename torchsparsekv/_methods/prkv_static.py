"""The static half of PRKV by itself: the tokens that the last queries of the prompt looked at."""
from dataclasses import dataclass

from torch import Tensor

from torchsparsekv._methods._static import StaticMethod
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.state import Buffers, Geometry, LayerState, hot_buffer


@dataclass(frozen=True, kw_only=True)
class PRKVStatic(StaticMethod):
    """PRKV with a static share of 1, of single tokens: what its paper compares itself with.

    The paper calls this method SnapKV, and SnapKV+ with `update_every=128`. SnapKV's own paper and code differ; they
    are in _methods/snapkv.py: weights of a softmax over all tokens are summed without a mean over the query heads of a
    kv head, and pooled over neighbouring tokens; unselected tokens are evicted, and every generated token is kept.
    Here nothing is evicted, so a later update can select any token. A generated token is attended to while it is in
    the window; afterwards while the budget holds all that can be retrieved, or where the next set has it.
    """

    name = "prkv_static"

    def buffers(self, g: Geometry) -> Buffers:
        most = min(self.budget, g.rows)
        return super().buffers(g) | self.static_buffers(g, most, most) | {"hot": hot_buffer(g, 1, most, most)}

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        self.choose_static(s, a)
        return Selection(s.static.ids, s.static.updated)
