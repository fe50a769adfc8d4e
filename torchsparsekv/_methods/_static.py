"""The base of methods with a static set: the observation window, and the updates of the set."""
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops.index.copy_keys import copy_keys
from torchsparsekv.ops.index.observe import NOT_YET, observe
from torchsparsekv.ops.prkv.choose_static import MOST, NEVER, choose_static
from torchsparsekv.ops.prkv.views import StaticSet
from torchsparsekv.ops.store.views import I32, Attention, Leaving, Observed
from torchsparsekv.report import Counts
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState

SOURCES = ("keys", "codes")
QUERIES = "selects by the queries of the latest tokens, and the cache has no queries of the tokens before them"
LATEST = "selects by the latest queries of each request"
OBSERVED = 64  # tokens of the observation window by default, where the window holds as many


@dataclass(frozen=True, kw_only=True)
class ObservingMethod(Method):
    """Keeps the queries of the latest tokens, the observation window, and selects tokens by them.

    The observation window lies in the local window: all that can be retrieved came before its queries.
    """

    observe: int | None = option(None, f"Tokens of the observation window. None: as `window`, at most {OBSERVED}.")

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
        return min(OBSERVED, self.window) if self.observe is None else self.observe

    def effective(self) -> dict[str, object]:
        return super().effective() | {"observe": self.observed}

    def observed_queries(self, s: LayerState) -> Tensor | None:
        return s.observed.queries

    def observed_buffer(self, g: Geometry) -> Observed:
        return Observed(Buffer((g.batch, self.observed, g.kv_heads * g.group, g.head_dim), g.dtype))


@dataclass(frozen=True, kw_only=True)
class StaticMethod(ObservingMethod):
    """Selects a static set of tokens by the latest queries, at the first step after a prompt and at updates.

    update_from="keys": an update reads all keys of the pool twice, over the link if the pool is in host memory.
    update_from="codes": an update reads a copy of the keys in fp8 on the device. The copy has a quarter of the size of
    a 16-bit pool.
    """

    update_every: int | None = option(
        None, "Tokens after which the static set is selected anew. None: at the next prompt."
    )
    update_from: str | None = option(
        None, 'Where an update reads keys: "keys" (pool) or "codes" (device). None: codes with update_every, else keys.'
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update_every is not None:
            self.check_int("update_every", 1, NEVER - 1)
        if self.update_from is not None:
            self.check_one_of("update_from", SOURCES)

    @cached_property
    def traits(self) -> Traits:
        return Traits(no_rest="retrieves nothing at a step", cannot_crop=QUERIES, no_engine=LATEST, **self.capability)

    @property
    def capability(self) -> dict[str, Any]:
        """The device capability that the copy of the keys needs."""
        return dict(least_capability=(8, 9), older_devices='update_from="keys"') if self.copies else {}

    @property
    def source(self) -> str:
        """`update_from`, or its default."""
        return self.update_from or ("keys" if self.update_every is None else "codes")

    @property
    def copies(self) -> bool:
        return self.source == "codes"

    @property
    def every(self) -> int:
        return NEVER if self.update_every is None else self.update_every

    def effective(self) -> dict[str, object]:
        return super().effective() | {"update_from": self.source}

    def report_row(self, s: LayerState, counts: Counts) -> dict[str, Any]:
        """Between two updates no token is selected."""
        rate = counts.per_step(int(s.static.updates.sum()))
        return super().report_row(s, counts) | self.static_share(s) | {"retrieval_rate": rate}

    def static_share(self, s: LayerState) -> dict[str, float]:
        return {"static_share": float(s.static.target.float().mean()) / self.budget}

    def static_buffers(self, g: Geometry, most: int, target: int, *, moves: bool = False) -> Buffers:
        """The buffers of a static set. `target` is the wanted number of tokens. Layers update at different steps."""
        if most > MOST:
            raise ValueError(f"{self.name}: a static set has at most {MOST} tokens, this budget makes it {most}")
        one = lambda fill=0, **told: Buffer(g.lead, I32, fill=fill, **told)  # noqa: E731
        stagger = 0 if self.update_every is None else g.layer * self.update_every // g.layers
        ids, front_home = (Buffer((*g.lead, most), I32, fill=-1) for _ in range(2))
        copy = {"coarse": Buffer((*g.lead, g.rows, g.head_dim), torch.uint8)} if self.copies else {}
        if self.copies and not moves:  # a method that moves the set has pages, and uses the origin of their digests
            copy["origin"] = Buffer((*g.lead, g.head_dim), torch.float32)
        return copy | {
            "observed": self.observed_buffer(g),
            "static": StaticSet(
                ids, count=one(), target=one(target), updated=one(), chosen_at=one(NOT_YET), stagger=one(stagger),
                updates=one(counts=True), barrier=Buffer((*g.lead, 3), I32), every=self.every,
                front_home=front_home if moves else None,
            ),
        }

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> None:
        observe(q, s.observed, s.static.chosen_at, s.lengths)
        self.copy(s, leaving)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        self.copy(s, leaving)

    def copy(self, s: LayerState, leaving: Leaving) -> None:
        if self.copies:
            copy_keys(leaving, s.coarse, s.origin, s.lengths)

    def coarse(self, s: LayerState) -> Tensor | None:
        return s.coarse if self.copies else None

    def origin(self, s: LayerState) -> Tensor | None:
        return s.origin if self.copies else None

    def choose_static(self, s: LayerState, a: Attention) -> None:
        choose_static(s.observed, s.static, s.store, self.coarse(s), self.origin(s), s.lengths, a)
