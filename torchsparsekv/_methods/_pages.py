"""What methods that keep a volume around the keys of fixed-size pages have in common."""
from dataclasses import dataclass

import torch
from torch import Tensor

from torchsparsekv.method import Method
from torchsparsekv.ops.index.block_bounds import VOLUMES, block_bounds
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.ops.store.views import Attention, Digests, Leaving, Selection
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState

DIGESTS = {"float8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class PageMethod(Method):
    """Keeps a volume per page and attends to the pages whose volume allows the largest q.k.

    block_size: tokens of a page; a power of two.
    digest: storage type of the volumes. Bounds are rounded outwards, so a smaller type makes them looser, never wrong;
        at 512K tokens fp8 halves the 134 MB a layer that bf16 would read per step. Loose bounds choose worse: where key
        channels carry constant biases in the hundreds (Qwen2), fp8 loses recall that bfloat16 keeps.
    """

    block_size: int = 16
    digest: str = "float8"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_of("digest", DIGESTS)

    @property
    def shape(self) -> str:
        """The volume: one of ops/index/block_bounds.py."""
        raise NotImplementedError

    @property
    def selects_every_step(self) -> bool:
        return True

    @property
    def least_capability(self) -> tuple[int, int]:
        return (8, 9) if self.digest == "float8" else super().least_capability

    def buffers(self, g: Geometry) -> Buffers:
        lead, dtype = (*g.lead, g.rows // self.block_size), DIGESTS[self.digest]
        spread = Buffer((*lead, 1), torch.float32) if self.shape == "ball" else Buffer((*lead, g.head_dim), dtype)
        centre = Buffer((*lead, g.head_dim), dtype)
        return super().buffers(g) | {"digests": Digests(centre, spread, self.block_size, VOLUMES.index(self.shape))}

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> None:
        block_bounds(leaving, s.digests, s.lengths)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        self.prompt(s, q, leaving, join=True)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        return self.best(*bound_scores(q, s.digests, s.lengths))
