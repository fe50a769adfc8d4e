"""The only module that allocates. Every tensor keeps its address for the life of the cache."""
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from torchsparsekv import host
from torchsparsekv.ops.index.advance import advance

STATS = ("steps", "context", "near", "selected", "missed")  # columns of LayerState.stats, per (row, kv head)


@dataclass(frozen=True)
class Geometry:
    """The sizes one layer's buffers follow from."""

    batch: int
    kv_heads: int
    head_dim: int
    rows: int  # pool rows per (batch row, kv head): the capacity, in whole blocks
    dtype: torch.dtype
    group: int = 1  # query heads per kv head


@dataclass(frozen=True)
class Timeline:
    """When tokens leave the ring: it keeps `sink` for good, and of the others `window` to `window + interval - 1`."""

    sink: int
    window: int
    interval: int

    @property
    def ring_rows(self) -> int:
        return self.sink + self.window + self.interval


@dataclass(frozen=True)
class Buffer:
    """A tensor a layer needs. `home="pool"` is where the cache keeps its bulk: host memory unless offload="device"."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    home: Literal["device", "pool"] = "device"
    fill: float = 0

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def common_buffers(g: Geometry, t: Timeline) -> dict[str, Buffer]:
    """What every layer has: the pool of all tokens, the ring of near ones, the counters."""
    lead = (g.batch, g.kv_heads)
    return {
        "pool": Buffer((*lead, g.rows, 2, g.head_dim), g.dtype, home="pool"),
        "ring": Buffer((*lead, t.ring_rows, 2, g.head_dim), g.dtype),
        "stats": Buffer((*lead, len(STATS)), torch.int64),
    }


def hot_buffers(g: Geometry, block_size: int, places: int) -> dict[str, Buffer]:
    """The hot buffer of a retrieving layer: `places` blocks on the device and the tables that say which."""
    lead, i32 = (g.batch, g.kv_heads), torch.int32
    return {
        "hot": Buffer((*lead, places, block_size, 2, g.head_dim), g.dtype),
        "table": Buffer((*lead, g.rows // block_size), i32, fill=-1),
        "resident": Buffer((*lead, places), i32, fill=-1),
        "age": Buffer((*lead, places), i32),
        "arrivals": Buffer(lead, i32),
    }


def mark_static(t: Tensor) -> Tensor:
    """CUDA graphs must not copy state in and out: its address never changes."""
    torch._dynamo.mark_static_address(t)
    return t


class Clock:
    """Lengths of the rows of one cache, for all layers that share a timeline. See ops/index/advance.py."""

    def __init__(self, timeline: Timeline, batch: int, capacity: int, device: torch.device):
        self.timeline, self.capacity = timeline, capacity
        self._spans: tuple[int, list[int]] | None = None
        with torch.inference_mode(False):
            self.seq_len = mark_static(torch.zeros((), dtype=torch.int64, device=device))
            start, length, leaving, retired, left_pad = (
                mark_static(torch.zeros(batch, dtype=torch.int32, device=device)) for _ in range(5)
            )
        self.start, self.length, self.leaving, self.retired, self.left_pad = start, length, leaving, retired, left_pad
        self.reset()

    def reset(self) -> None:
        for t in (self.seq_len, self.start, self.length, self.left_pad):
            t.zero_()
        self.leaving.fill_(self.timeline.sink)
        self.retired.fill_(self.timeline.sink)

    def advance(self, tokens: int, pad: Tensor | None = None) -> None:
        """Take in `tokens` more columns; `pad` is the left padding of rows that begin.

        Of a prompt outside a compiled graph the host remembers the lengths too.
        """
        t = self.timeline
        advance(
            self.seq_len, self.start, self.length, self.leaving, self.retired, self.left_pad, pad, tokens,
            self.capacity, t.sink, t.window, t.interval,
        )  # fmt: skip
        if tokens > 1 and not torch.compiler.is_compiling():
            self._spans = (tokens, torch.cat([self.start, self.length]).tolist())

    def spans(self, tokens: int) -> list[int] | None:
        """start and length of the prompt of `tokens` just taken in, as host integers, where the host saw it."""
        if torch.compiler.is_compiling() or self._spans is None or self._spans[0] != tokens:
            return None
        return self._spans[1]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.seq_len, self.start, self.length, self.leaving, self.retired, self.left_pad))


class LayerState:
    """Named tensors of one attention layer. Mutated in place by ops, never re-assigned."""

    if TYPE_CHECKING:  # the attribute names come from the declared buffers

        def __getattr__(self, name: str) -> Tensor: ...

    def __init__(self, buffers: dict[str, Buffer], clock: Clock, device: torch.device, *, pool_on_host: bool):
        self.clock, self.buffers = clock, buffers
        self.pool_on_host = pool_on_host and device.type == "cuda"
        with torch.inference_mode(False):  # else no one outside inference mode could update them
            for name, b in buffers.items():
                if b.home == "pool" and self.pool_on_host:
                    t = host.pinned(b.shape, b.dtype, device)
                else:
                    t = torch.zeros(b.shape, dtype=b.dtype, device=device)
                setattr(self, name, mark_static(t))
        self.reset()

    def reset(self) -> None:
        """Forget the index and the hot buffer. Rows of the pool need no clearing: no length reaches them."""
        for name, b in self.buffers.items():
            if b.home != "pool":
                _fill(getattr(self, name), b.fill)


def _fill(t: Tensor, value: float) -> None:
    """`fill_`, also for fp8, where it is not implemented on every device."""
    if t.dtype.itemsize == 1 and t.dtype.is_floating_point:
        t.view(torch.uint8).zero_()
    else:
        t.fill_(value)


def total_bytes(buffers: dict[str, Buffer], *, pool_on_host: bool) -> tuple[int, int]:
    """(host, device) bytes of a layer, known before anything is allocated."""
    host_bytes = sum(b.nbytes for b in buffers.values() if b.home == "pool" and pool_on_host)
    return host_bytes, sum(b.nbytes for b in buffers.values()) - host_bytes
