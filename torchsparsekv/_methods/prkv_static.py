"""The static half of PRKV by itself: the tokens that the last queries of the prompt looked at."""
from dataclasses import dataclass

from torch import Tensor

from torchsparsekv._methods._static import StaticMethod
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.state import Buffers, Geometry, LayerState, hot_buffer


@dataclass(frozen=True, kw_only=True)
class PRKVStatic(StaticMethod):
    """PRKV with a static share of 1, of single tokens: what its paper compares itself with.

    That paper calls it SnapKV, and SnapKV+ where it is updated (`update_every`: 128 there). It is not what SnapKV's own
    paper and code are, which is _methods/snapkv.py: these sum the weights, of a softmax over all tokens, without a mean over
    the query heads of a kv head, pool them over neighbouring tokens, evict what is not chosen, and keep every generated
    token. Here nothing is evicted, so the set can be chosen anew. Generated tokens are attended to while they are in
    the window, and afterwards as long as the budget holds all that can be retrieved, or if they are in the next set.
    """

    name = "prkv_static"
    regroups = True

    def buffers(self, g: Geometry) -> Buffers:
        most = min(self.budget, g.rows)
        return super().buffers(g) | self.static_buffers(g, most, most) | {"hot": hot_buffer(g, 1, most, most)}

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        self.choose_static(s, a)
        return Selection(s.static.ids, s.static.updated)
