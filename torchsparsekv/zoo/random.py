"""Blocks drawn uniformly at random, new ones at every step: the row that says what a budget is worth by itself."""
from dataclasses import dataclass

from torch import Tensor

from torchsparsekv.method import Attention, Method
from torchsparsekv.ops.select.random_scores import LOW, random_scores
from torchsparsekv.state import LayerState


@dataclass(frozen=True, kw_only=True)
class Random(Method):
    """seed: of the draw. Every layer draws the same blocks in a step, the kv heads each their own."""

    name = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("seed", 0, LOW)

    def select(self, s: LayerState, q: Tensor, a: Attention) -> Tensor:
        heads, rows = s.pool.shape[1:3]
        c = s.clock
        blocks = rows // self.block_size
        return self.best(random_scores(c.length, c.retired, heads, blocks, self.sink, self.block_size, self.seed))
