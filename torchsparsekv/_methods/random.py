"""Blocks drawn uniformly at random, new ones at every step: the row that says what a budget is worth by itself."""
from dataclasses import dataclass

from torch import Tensor

from torchsparsekv.method import Method
from torchsparsekv.ops._machinery.hash import LOW
from torchsparsekv.ops.select.random_scores import random_scores
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.state import LayerState


@dataclass(frozen=True, kw_only=True)
class Random(Method):
    """block_size: consecutive tokens that are drawn together; a power of two.
    seed: of the draw. Every layer draws the same blocks in a step, the kv heads each their own.
    """

    name = "random"

    block_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("seed", 0, LOW)

    @property
    def selects_every_step(self) -> bool:
        return True

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        heads, rows = s.store.pool.shape[1:3]
        return self.best(random_scores(s.lengths, heads, rows // self.block_size, self.block_size, self.seed))
