"""What methods that bound the keys of fixed-size pages have in common."""
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchsparsekv.method import Attention, Method
from torchsparsekv.ops.index.block_bounds import block_bounds
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.state import Buffer, Geometry, LayerState

DIGESTS = {"float8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class PageMethod(Method):
    """Keeps a bounding volume per page and attends to the pages whose volume allows the largest q.k.

    digest: storage type of the volumes. They are rounded outwards, so a smaller type makes bounds looser, never wrong;
    at 512K tokens fp8 halves the 134 MB a layer that bf16 would read per step. Loose bounds choose worse: where key
    channels carry constant biases in the hundreds (Qwen2), fp8 loses recall that bfloat16 keeps.
    """

    digest: str = "float8"

    box: ClassVar[bool]  # spread per channel, or one radius

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.digest not in DIGESTS:
            raise ValueError(f"{self.name}: digest must be one of {', '.join(DIGESTS)}, got {self.digest!r}")

    @property
    def least_capability(self) -> tuple[int, int]:
        return (8, 9) if self.digest == "float8" else super().least_capability

    def buffers(self, g: Geometry) -> dict[str, Buffer]:
        lead, dtype = (g.batch, g.kv_heads, g.rows // self.block_size), DIGESTS[self.digest]
        spread = Buffer((*lead, g.head_dim), dtype) if self.box else Buffer((*lead, 1), torch.float32)
        return super().buffers(g) | {"centre": Buffer((*lead, g.head_dim), dtype), "spread": spread}

    def update(self, s: LayerState, k: Tensor) -> None:
        c = s.clock
        block_bounds(
            k, s.pool, s.centre, s.spread, c.start, c.length, c.leaving, c.retired, self.timeline.interval,
            self.block_size,
        )  # fmt: skip

    def select(self, s: LayerState, q: Tensor, a: Attention) -> Tensor:
        return self.best(*bound_scores(q, s.centre, s.spread, s.clock.retired, self.sink, self.block_size))
