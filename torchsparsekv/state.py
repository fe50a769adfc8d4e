"""The only module that allocates tensors of a cache. Every tensor keeps its address for the life of the cache."""
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from torchsparsekv import host
from torchsparsekv.ops._machinery.chain import mapped
from torchsparsekv.ops.gather._hot_buffer import check_chosen
from torchsparsekv.ops.rest.views import Rest
from torchsparsekv.ops.store.advance import advance
from torchsparsekv.ops.store.rows import STATS, row_shape
from torchsparsekv.ops.store.views import OWN_POOLS, HotBuffer, KVStore, Lengths, Prefetch, Stats

HOT_BUDGETS = 2  # budgets in a hot buffer, if free memory does not decide
EAGER_ONLY = "a probe works in eager decode only: pass disable_compile=True to generate()"


@dataclass(frozen=True)
class Geometry:
    """The sizes of the buffers of one layer.

    Attributes:
        batch: rows of the batch.
        kv_heads: kv heads of the layer.
        head_dim: channels of a key.
        rows: pool rows per (row of the batch, kv head): the most tokens of a row, in whole blocks.
        dtype: type of keys and values.
        group: query heads per kv head.
        layer: the number of the layer. Layers do some periodic work at different steps, by their numbers.
        layers: the number of layers.
        follows: whether the layer shares the selection of an earlier layer (`LayerState.anchor`).
        pool_dtype: type of the pool. None: `dtype`.
        hot_budgets: the value of `hot_budgets="auto"` in this cache.
    """

    batch: int
    kv_heads: int
    head_dim: int
    rows: int
    dtype: torch.dtype
    group: int = 1
    layer: int = 0
    layers: int = 1
    follows: bool = False
    pool_dtype: torch.dtype | None = None
    hot_budgets: int = HOT_BUDGETS

    @property
    def lead(self) -> tuple[int, int]:
        """(batch, kv_heads), the first sizes of most buffers."""
        return self.batch, self.kv_heads


@dataclass(frozen=True)
class RingPlan:
    """When tokens leave the ring. The ring always keeps the first `sink` tokens, and the latest `window` to `window +
    interval - 1` tokens."""

    sink: int
    window: int
    interval: int

    @property
    def ring_rows(self) -> int:
        return self.sink + self.window + self.interval


@dataclass(frozen=True)
class Buffer:
    """A tensor that a layer needs.

    Attributes:
        shape: its shape.
        dtype: its type.
        home: "device", or "pool" for a tensor that lives where the pool lives (`offload`).
        fill: its value in a new cache and after `reset()`.
        counts: whether the tensor counts events for the report. Nothing else reads it. A fork starts with zeros.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    home: Literal["device", "pool"] = "device"
    fill: float = 0
    counts: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def is_on_host(self, pool_on_host: bool) -> bool:
        return self.home == "pool" and pool_on_host


# Buffers by name. A value is a Buffer, or a view (ops/store/views.py) of buffers and numbers: `state.hot` is a view of
# the tensors that are declared here.
Buffers = dict[str, Any]


def each(buffers: Buffers) -> Iterator[Buffer]:
    return iter(named(buffers).values())


def named(buffers: Buffers) -> dict[str, Buffer]:
    """All buffers by name. A buffer of a view is called `view.field`."""
    found: dict[str, Buffer] = {}
    for name, given in buffers.items():
        parts = {f"{name}.{f}": b for f, b in given._asdict().items()} if hasattr(given, "_asdict") else {name: given}
        found |= {said: b for said, b in parts.items() if isinstance(b, Buffer)}
    return found


# The attributes of a LayerState beside its buffers and the members of its class.
OF_STATE = {
    "row_lengths", "buffers", "anchor", "followers", "pool_on_host", "admits", "on_step", "on_prompt", "override_query",
    "override_ids", "joins", "_takers", "_handed",
}  # fmt: skip


def checked(buffers: Buffers, late: bool) -> Buffers:
    """The buffers that `buffers()` of a method returned, if they are valid."""
    if missing := [name for name in ("store", "stats") if name not in buffers]:
        raise TypeError(f"buffers() of a method must extend super().buffers(g); missing: {', '.join(missing)}")
    if ("prefetch" in buffers) != late:
        raise TypeError(
            "buffers() of a method must have `prefetch` if prefetch_async is set, and only then; hot_buffers() makes it"
        )
    if taken := sorted(buffers.keys() & (OF_STATE | set(dir(LayerState)))):
        raise TypeError(f"buffers() of a method: LayerState has {', '.join(taken)} itself; choose another name")
    for name, given in buffers.items():
        view = hasattr(given, "_asdict")
        if not all(isinstance(b, (Buffer, int, type(None)) if view else Buffer) for b in (given if view else (given,))):
            raise TypeError(f"buffers() of a method: {name} must be a Buffer or a view of Buffers, got {given!r}")
    return buffers


def store_buffers(g: Geometry, plan: RingPlan) -> Buffers:
    """The buffers of every layer: the pool, the ring and the counters."""
    pool = g.pool_dtype or g.dtype
    return {
        "store": KVStore(
            ring=Buffer((*g.lead, plan.ring_rows, *row_shape(g.head_dim)), g.dtype),
            pool=Buffer((*g.lead, g.rows, *row_shape(g.head_dim, pool)), pool, home="pool"),
        ),
        "stats": Stats(Buffer((*g.lead, len(STATS)), torch.int64, counts=True)),
    }


def hot_buffer(g: Geometry, block_size: int, slots: int, chosen: int) -> HotBuffer:
    """The hot buffer of a retrieving layer: `slots` blocks on the device. A step attends to at most `chosen` of them.
    """
    check_chosen(chosen)
    i32 = torch.int32
    return HotBuffer(
        rows=Buffer((*g.lead, slots, block_size, *row_shape(g.head_dim)), g.dtype),
        slot_of=Buffer((*g.lead, g.rows // block_size), i32, fill=-1),
        block_of=Buffer((*g.lead, slots), i32, fill=-1),
        used=Buffer((*g.lead, slots), i32),
        hand=Buffer(g.lead, i32),
        done_count=Buffer(g.lead, i32),
        chosen=Buffer((*g.lead, chosen), i32, fill=-1),
    )


def prefetch_buffers(g: Geometry, chosen: int) -> Prefetch:
    """The buffers of a layer with `prefetch_async`, beside its hot buffer."""
    none, waits = Buffer(g.lead, torch.int32), Buffer(g.lead, torch.int32, counts=True)
    return Prefetch(
        query=Buffer((g.batch, g.kv_heads * g.group, g.head_dim), g.dtype),
        seen=Buffer(g.lead, torch.int32, fill=-1), now=none, later=none, frontier=none, waits=waits,
        ids=Buffer((*g.lead, chosen), torch.int32, fill=-1),
        counts=Buffer((*g.lead, len(STATS)), torch.int64, counts=True),
    )  # fmt: skip


def rest_buffers(g: Geometry, group: int) -> Rest:
    """The sums of groups of `group` tokens, for a layer with `estimate_rest`.

    The sums are in fp16 for bf16 models too. If the keys have a mean of 100 in all channels, fp16 changes the output by
    0.4 % at most, and bf16 by 4 %. At a mean of 600, fp16 changes the output by up to 1.5 %.
    """
    return Rest(means_buffer(g, -(-g.rows // group)), group)


def means_buffer(g: Geometry, count: int) -> Buffer:
    """Room for `count` means of keys and values of each kv head."""
    dtype = torch.float32 if g.dtype is torch.float32 else torch.float16
    return Buffer((*g.lead, count, *row_shape(g.head_dim)), dtype)


def mark_static(t: Tensor) -> Tensor:
    """Promise a fixed address, so that CUDA graphs do not copy the tensor in and out."""
    torch._dynamo.mark_static_address(t)
    return t


class RowLengths:
    """Lengths of the rows of one cache, for all layers that share a ring plan. See ops/store/advance.py."""

    def __init__(self, plan: RingPlan, batch: int, capacity: int, device: torch.device):
        self.plan, self.capacity = plan, capacity
        self._spans: tuple[int, list[int]] | None = None
        with torch.inference_mode(False):
            self.seq_len = mark_static(torch.zeros((), dtype=torch.int64, device=device))
            self.left_pad, *times = (
                mark_static(torch.zeros(batch, dtype=torch.int32, device=device)) for _ in range(5)
            )
        self.view = Lengths._make((*times, plan.sink, plan.interval))
        self.reset()

    def reset(self) -> None:
        for t in (self.seq_len, self.left_pad, self.view.start, self.view.length):
            t.zero_()
        self.view.previous_ring_begin.fill_(self.plan.sink)
        self.view.ring_begin.fill_(self.plan.sink)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.seq_len, self.left_pad, *self.view[:4])

    def copy_from(self, other: "RowLengths") -> None:
        """Copy the lengths of another cache. One row of that cache may fill several rows of this one."""
        for to, source in zip(self.tensors(), other.tensors()):
            to.copy_(source)

    def advance(self, tokens: int, pad: Tensor | None = None) -> None:
        """Add `tokens` new columns. `pad` is the left padding of rows that begin.

        For a prompt outside a compiled graph the host remembers the lengths too. A graph that contains a prompt must
        clear the remembered lengths, because layers outside the graph would use those of the prompt before.
        """
        advance(self.seq_len, self.left_pad, self.view, pad, tokens, self.capacity, self.plan.window)
        if tokens > 1:
            compiling = torch.compiler.is_compiling()
            self._spans = None if compiling else (tokens, torch.cat(self.view[:2]).tolist())

    def spans(self, tokens: int) -> list[int] | None:
        """Start and length of each row in the prompt of `tokens` columns that came last, as host integers. None if the
        host does not know them."""
        if torch.compiler.is_compiling() or self._spans is None or self._spans[0] != tokens:
            return None
        return self._spans[1]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    @staticmethod
    def bytes_for(batch: int) -> int:
        """The bytes of the lengths of a cache that does not exist yet: one total, and five numbers per row."""
        return torch.int64.itemsize + 5 * batch * torch.int32.itemsize


class LayerState:
    """The named tensors of one attention layer, in views. Ops change them in place; they are never re-assigned.

    anchor: the state of the selecting layer, if this layer shares the selection of an earlier layer; else None. While a
    prompt is stored, the anchor publishes data that its followers consume. joins: whether the current stream waits, at
    the end of this layer, for the asynchronous fetches of this layer and the layers before it.
    """

    block_table = OWN_POOLS

    if TYPE_CHECKING:  # the attribute names come from the declared buffers

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self, buffers: Buffers, row_lengths: RowLengths, device: torch.device, *, pool_on_host: bool,
        anchor: "LayerState | None" = None,
    ):  # fmt: skip
        self.row_lengths, self.buffers, self.anchor = row_lengths, buffers, anchor
        self.followers, self._takers = 0, 0
        self._handed: Any = None
        self.joins = True
        if anchor is not None:
            anchor.followers += 1
        self.pool_on_host = pool_on_host and device.type == "cuda"
        self.admits = pool_on_host  # a prompt fills the hot buffer, which saves misses that wait for the link
        # For probes and benchmarks: `on_step` is called with the selection and output of every decode step
        # (torchsparsekv/probe.py), `on_prompt` with the queries, keys and values of every prompt; `override_query`
        # replaces the model's queries, and `override_ids` the blocks that were chosen.
        self.on_step: Callable | None = None
        self.on_prompt: Callable | None = None
        self.override_query: Callable | None = None
        self.override_ids: Callable | None = None
        with torch.inference_mode(False):  # inference tensors could not be updated outside inference mode
            for name, given in buffers.items():
                view = isinstance(given, tuple)
                made = [self._made(b, device) for b in (given if view else (given,))]
                setattr(self, name, type(given)(*made) if view else made[0])
        self.reset()

    def _made(self, b: Buffer | float | None, device: torch.device) -> Tensor | float | None:
        return mark_static(self._allocated(b, device)) if isinstance(b, Buffer) else b

    def _allocated(self, b: Buffer, device: torch.device) -> Tensor:
        if b.home == "pool" and self.pool_on_host:
            return host.pinned(b.shape, b.dtype, device)
        return torch.zeros(b.shape, dtype=b.dtype, device=device)

    @property
    def lengths(self) -> Lengths:
        return self.row_lengths.view

    @property
    def row_capacity(self) -> int:
        """The most tokens of a row."""
        return self.store.pool.shape[2]

    def publish(self, what: Any) -> None:
        """Keep data of a prompt until every layer that follows this one has consumed it."""
        self._takers = self.followers
        self._handed = what if self._takers else None

    def consume(self) -> Any:
        what = self._handed
        if what is None:
            raise RuntimeError("nothing was published: a sharing layer took a prompt before its selecting layer")
        self._takers -= 1
        if not self._takers:
            self._handed = None
        return what

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> "LayerState":
        """A copy of the state with `fn` applied to its tensors, and to the tensors of its anchor."""
        new = copy.copy(self)
        for name in self.buffers:
            setattr(new, name, mapped(getattr(self, name), fn))
        new.row_lengths = copy.copy(self.row_lengths)
        new.row_lengths.view = mapped(self.lengths, fn)
        new.anchor = self.anchor and self.anchor.mapped(fn)
        return new

    def tensors(self) -> Iterator[tuple[Buffer, Tensor]]:
        """Every tensor with its Buffer."""
        for name, given in self.buffers.items():
            t = getattr(self, name)
            parts = zip(given, t) if isinstance(given, tuple) else ((given, t),)
            yield from ((b, x) for b, x in parts if isinstance(b, Buffer))

    def copy_from(self, other: "LayerState", rows: int | None) -> None:
        """Copy the state of another layer, without its counters. Of the pool, copy the first `rows` rows; None: all.
        One row of the other batch may fill several rows of this batch."""
        resized: tuple[Tensor, ...] = ()
        if "hot" in self.buffers and self.hot.rows.shape[2] != other.hot.rows.shape[2]:
            copy_chosen(self.hot, other.hot)
            resized = self.hot
        for (b, to), (_, source) in zip(self.tensors(), other.tensors()):
            if any(to is t for t in resized):
                continue
            if b.counts:
                to.zero_()
                continue
            if to is self.store.pool:
                to, source = to[:, :, :rows], source[:, :, :rows]
            to.copy_(source)

    def reset(self) -> None:
        """Give every tensor but the pool its initial value. The pool keeps old rows, which no length reaches."""
        self._handed = None
        for b, t in self.tensors():
            if t is not self.store.pool:
                _fill(t, b.fill)


def copy_chosen(to: HotBuffer, source: HotBuffer) -> None:
    """Fill a hot buffer of another size with the blocks of the last selection. One row of `source` may fill several
    rows."""
    for t in (to.slot_of, to.block_of):
        t.fill_(-1)
    to.used.zero_()
    live = source.chosen >= 0
    slot = source.chosen.clamp(min=0).long()
    place = torch.arange(slot.shape[2], device=slot.device, dtype=torch.int32).expand(to.chosen.shape)
    to.chosen.copy_(torch.where(live, place, -1))
    to.block_of[:, :, : slot.shape[2]] = torch.where(live, source.block_of.gather(2, slot), -1)
    row, head, at = (to.block_of >= 0).nonzero(as_tuple=True)
    to.slot_of[row, head, to.block_of[row, head, at].long()] = at.int()
    rows = source.rows.flatten(3).gather(2, slot[..., None].expand(-1, -1, -1, source.rows[0, 0, 0].numel()))
    to.rows[:, :, : slot.shape[2]] = rows.unflatten(3, source.rows.shape[3:])
    to.hand.fill_(slot.shape[2] % to.block_of.shape[2])


def _fill(t: Tensor, value: float) -> None:
    """`fill_` for all types. fp8 has no `fill_` on some devices."""
    if t.dtype.itemsize == 1 and t.dtype.is_floating_point:
        t.copy_(torch.full((), value, device=t.device))
    else:
        t.fill_(value)


def total_bytes(buffers: Buffers, *, pool_on_host: bool) -> tuple[int, int]:
    """The host and device bytes of the buffers of a layer. Nothing is allocated."""
    host_bytes = sum(b.nbytes for b in each(buffers) if b.is_on_host(pool_on_host))
    return host_bytes, sum(b.nbytes for b in each(buffers)) - host_bytes
