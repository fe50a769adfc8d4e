"""The static half of PRKV by itself: the tokens that the latest queries attend to most."""
from dataclasses import dataclass

from torch import Tensor

from torchsparsekv._methods._static import StaticMethod
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.state import Buffers, Geometry, LayerState, hot_buffer


@dataclass(frozen=True, kw_only=True)
class PRKVStatic(StaticMethod):
    """PRKV with a static share of 1, of single tokens: the baseline of the PRKV paper.

    The paper calls this method SnapKV, and SnapKV+ with `update_every=128`. SnapKV itself (_methods/snapkv.py) differs:
    - its softmax is over all tokens, those of the window included;
    - it pools scores over neighbouring tokens;
    - it evicts the tokens that it does not select, and keeps every generated token.

    Here nothing is evicted, so a later update can select any token. A step attends to a generated token in the window.
    Older generated tokens are attended to if the budget holds all retrievable tokens, or if a later set selects them.
    """

    name = "prkv_static"

    def buffers(self, g: Geometry) -> Buffers:
        most = min(self.budget, g.rows)
        return super().buffers(g) | self.static_buffers(g, most, most) | {"hot": hot_buffer(g, 1, most, most)}

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        self.choose_static(s, a)
        return Selection(s.static.ids, s.static.updated)
