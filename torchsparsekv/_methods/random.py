"""Blocks drawn at random at every step: the baseline that shows what a budget is worth without an index."""
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops._machinery.hash import LOW
from torchsparsekv.ops.select.random_scores import random_scores
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.state import LayerState


@dataclass(frozen=True, kw_only=True)
class Random(Method):
    """Each kv head draws its own blocks. Every layer draws the same blocks in a step."""

    name = "random"

    block_size: int = option(16, "Consecutive tokens that are drawn together; a power of two.")
    seed: int = option(0, "Seed of the draw.")

    @cached_property
    def traits(self) -> Traits:
        return Traits(selects_every_step=True, cannot_crop="", no_engine="is for comparisons only")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("seed", 0, LOW)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        heads, rows = s.store.pool.shape[1:3]
        return self.best(s, random_scores(s.lengths, heads, rows // self.block_size, self.block_size, self.seed))
