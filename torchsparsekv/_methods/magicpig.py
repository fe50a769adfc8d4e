"""MagicPIG: a weighted sample of tokens by locality-sensitive hashing (arXiv 2410.16179)."""
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops.magicpig.find_collisions import find_collisions
from torchsparsekv.ops.magicpig.hash_keys import hash_keys
from torchsparsekv.ops.magicpig.hash_prompt import hash_prompt
from torchsparsekv.ops.magicpig.sample_bias import sample_bias
from torchsparsekv.ops.magicpig.views import MOST_BITS, Sample, Signatures
from torchsparsekv.ops.store.views import Attention, Leaving, Selection
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState

MOST_TABLES = 1024


@dataclass(frozen=True, kw_only=True)
class MagicPIG(Method):
    """A query head samples the tokens that share its code in two hash tables or more. It divides the weight of a token
    by the chance that the token is sampled.

    The query heads of a kv head share the budget. A step uses as many of the tables as possible without a sample above
    the budget. If all retrievable tokens of a row fit into the budget, a step attends to all of them.
    """

    name = "magicpig"

    sink: int = 4
    bits: int = option(10, "Bits of a hash code, the paper's K.")
    tables: int = option(150, "Hash tables, the paper's L.")
    seed: int = option(0, "Seed of the random planes that give the bits.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("bits", 1, MOST_BITS)
        self.check_int("tables", 2, MOST_TABLES)
        self.check_int("seed", 0, (1 << 16) - 1)

    # ---- what it declares

    def buffers(self, g: Geometry) -> Buffers:
        return super().buffers(g) | {
            "signatures": Signatures(
                codes=Buffer((*g.lead, self.tables, g.rows), torch.int16),
                centre=Buffer((*g.lead, g.head_dim), torch.float32),
            ),
            "sample": Sample(
                asked=Buffer((g.batch, g.kv_heads * g.group, self.tables), torch.int16),
                used=Buffer(g.lead, torch.int32),
            ),
        }

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            no_rest="estimates what it does not retrieve by its sample", cannot_crop="",
            no_engine="hashes keys after subtracting the mean key of a request",
        )  # fmt: skip

    # ---- the index

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> None:
        hash_prompt(leaving, s.signatures, s.lengths, self.bits, self.seed, join)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        hash_keys(leaving, s.signatures, s.lengths, self.bits, self.seed)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        budget = min(self.budget, s.store.pool.shape[2])
        return self.best(s, *find_collisions(q, s.signatures, s.sample, s.lengths, self.bits, self.seed, budget))

    def weigh(self, s: LayerState, q: Tensor, a: Attention) -> Tensor:
        return sample_bias(q, s.hot, s.signatures, s.sample, self.bits)
