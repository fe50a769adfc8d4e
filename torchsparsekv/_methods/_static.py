"""What methods with a static set have in common: an observation window, and when the set is chosen anew."""
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchsparsekv.method import Method
from torchsparsekv.ops.index.copy_keys import copy_keys
from torchsparsekv.ops.index.observe import NOT_YET, observe
from torchsparsekv.ops.prkv.choose_static import MOST, NEVER, choose_static
from torchsparsekv.ops.prkv.views import Static
from torchsparsekv.ops.store.views import I32, Attention, Leaving, Observed
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState

SOURCES = ("keys", "codes")


@dataclass(frozen=True, kw_only=True)
class ObservingMethod(Method):
    """Keeps the queries of the latest tokens: tokens are chosen by them.

    observe: tokens of the observation window. They must be in the local window, so that all that can be retrieved came
        before them. None: as many as the window, at most `papers_window`.
    """

    papers_window: ClassVar[int] = 64

    observe: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observe is not None:
            self.check_int("observe", 1)
            if self.observe > self.window:
                raise ValueError(
                    f"{self.name}: observe {self.observe} is above window {self.window}: tokens would be scored by "
                    "queries that came before them"
                )

    @property
    def observed(self) -> int:
        return min(self.papers_window, self.window) if self.observe is None else self.observe

    def effective(self) -> dict[str, object]:
        return super().effective() | {"observe": self.observed}

    def observed_queries(self, s: LayerState) -> Tensor | None:
        return s.observed.queries

    def observed_buffer(self, g: Geometry) -> Observed:
        return Observed(Buffer((g.batch, self.observed, g.kv_heads * g.group, g.head_dim), g.dtype))


@dataclass(frozen=True, kw_only=True)
class StaticMethod(ObservingMethod):
    """At the first step after a prompt chooses a set of tokens by the latest queries.

    update_every: tokens after which the set is chosen anew. None: not before the next prompt.
    update_from: what it is chosen by. "keys": those of the pool, all of which cross the link, twice each time, where it
        is in host memory. "codes": a copy of the keys in fp8 on the device, an extra quarter of the pool. None: codes
        where the set is chosen anew while decoding.
    """

    update_every: int | None = None
    update_from: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update_every is not None:
            self.check_int("update_every", 1, NEVER - 1)
        if self.update_from is not None:
            self.check_one_of("update_from", SOURCES)

    @property
    def least_capability(self) -> tuple[int, int]:
        return (8, 9) if self.copies else super().least_capability

    @property
    def source(self) -> str:
        """`update_from`, or what it is by default."""
        return self.update_from or ("keys" if self.update_every is None else "codes")

    @property
    def copies(self) -> bool:
        return self.source == "codes"

    @property
    def every(self) -> int:
        return NEVER if self.update_every is None else self.update_every

    def effective(self) -> dict[str, object]:
        return super().effective() | {"update_from": self.source}

    def static_buffers(self, g: Geometry, most: int, target: int, *, moves: bool = False) -> Buffers:
        """For at most so many tokens, of which `target` are wanted. The layers take turns in choosing anew."""
        if most > MOST:
            raise ValueError(f"{self.name}: a static set has at most {MOST} tokens, this budget makes it {most}")
        one = lambda fill=0, **told: Buffer(g.lead, I32, fill=fill, **told)  # noqa: E731
        lead = 0 if self.update_every is None else g.layer * self.update_every // g.layers
        ids, away = (Buffer((*g.lead, most), I32, fill=-1) for _ in range(2))
        copy = {"coarse": Buffer((*g.lead, g.rows, g.head_dim), torch.uint8)} if self.copies else {}
        return copy | {
            "observed": self.observed_buffer(g),
            "static": Static(
                ids, count=one(), target=one(target), updated=one(), at=one(NOT_YET), lead=one(lead),
                every=one(self.every), updates=one(counts=True), arrived=one(), gone=one(), done=one(),
                away=away if moves else None,
            ),
        }

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> None:
        observe(q, s.observed, s.static.at, s.lengths)
        self.copy(s, leaving)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        self.copy(s, leaving)

    def copy(self, s: LayerState, leaving: Leaving) -> None:
        if self.copies:
            copy_keys(leaving, s.coarse, s.lengths)

    def coarse(self, s: LayerState) -> Tensor | None:
        return s.coarse if self.copies else None

    def choose_static(self, s: LayerState, a: Attention) -> None:
        choose_static(s.observed, s.static, s.store, self.coarse(s), s.lengths, a)
