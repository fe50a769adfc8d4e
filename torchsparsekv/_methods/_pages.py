"""The base of methods that keep a volume around the keys of each page."""
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops.engine.filled_bounds import filled_bounds
from torchsparsekv.ops.index.block_bounds import ONE_SPREAD, VOLUMES, block_bounds
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.ops.store.views import Attention, Digests, Leaving, Selection
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState

DIGESTS = {"float8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class PageMethod(Method):
    """Keeps a volume per page and attends to the pages whose volume allows the largest q.k.

    Bounds of a volume are rounded outwards, so a `digest` of fewer bits makes bounds looser, never wrong. Volumes are
    stored as differences to the middle of the first keys of a row. So a bias of slowly rotating channels costs little
    precision.
    """

    block_size: int = option(16, "Tokens of a page; a power of two.")
    digest: str = option("float8", "Storage type of page digests: float8, bfloat16 or float32; float8 is read fastest.")
    group: str = option(
        "max", "How the query heads of a kv head choose: by their largest score (max), or by their mean query (mean)."
    )

    GROUPS: ClassVar[tuple[str, ...]] = ("max", "mean")
    REST_HELPS: ClassVar[bool] = False

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            selects_every_step=True, rest_helps=self.REST_HELPS, cannot_crop="", no_engine="", **self.capability
        )

    @property
    def capability(self) -> dict[str, Any]:
        """The device capability that the digests need."""
        return dict(least_capability=(8, 9), older_devices='digest="bfloat16"') if self.digest == "float8" else {}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_of("digest", DIGESTS)
        self.check_one_of("group", self.GROUPS)

    @property
    def shape(self) -> str:
        """The kind of volume: one of VOLUMES in ops/index/block_bounds.py."""
        raise NotImplementedError

    def buffers(self, g: Geometry) -> Buffers:
        lead, dtype = (*g.lead, g.rows // self.block_size), DIGESTS[self.digest]
        spread = Buffer((*lead, 1), torch.float32) if self.shape in ONE_SPREAD else Buffer((*lead, g.head_dim), dtype)
        centre = Buffer((*lead, g.head_dim), dtype)
        origin = Buffer((*g.lead, g.head_dim), torch.float32)
        digests = Digests(centre, spread, self.block_size, VOLUMES.index(self.shape), origin)
        return super().buffers(g) | {"digests": digests}

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> None:
        block_bounds(leaving, s.digests, s.lengths)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        self.prompt(s, q, leaving, join=True)

    def written(self, s: LayerState, k: Tensor, to: Tensor) -> None:
        filled_bounds(k, to, s.store.pool, s.digests)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        return self.best(s, *bound_scores(self.asking(q, s.digests), s.digests, s.lengths, table=s.block_table))

    def asking(self, q: Tensor, digests: Digests) -> Tensor:
        """The queries that digests are compared with: all, or their mean for each kv head."""
        return q if self.group == "max" else q.unflatten(1, (digests.centre.shape[1], -1)).mean(2)
