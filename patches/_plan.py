"""The method and the heads of each layer of a model, and the memory that the layers take."""
import math
from typing import NamedTuple

import torch

from torchsparsekv.method import Method, traits_of
from torchsparsekv.ops.attend.dense_attention import reads_packed
from torchsparsekv.patches._assignment import Assignment, described
from torchsparsekv.patches._family import Kept, Layer
from torchsparsekv.state import HOT_BUDGETS, Buffers, Geometry, RowLengths, checked, named, total_bytes


class MemoryRow(NamedTuple):
    """The bytes of one kind of buffer, over all layers that have it."""

    name: str
    on_host: bool
    layers: int
    nbytes: int


class Memory(NamedTuple):
    """The memory of a cache that does not exist yet. `print(memory)` is a table.

    Attributes:
        batch: rows of the cache.
        max_length: tokens of a row.
        rows: one entry per kind of buffer, with its bytes over all layers.
        notes: how the size of the hot buffers was found.
    """

    batch: int
    max_length: int
    rows: tuple[MemoryRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(r.nbytes for r in self.rows if r.on_host)

    @property
    def device_bytes(self) -> int:
        """Bytes of GPU memory."""
        return sum(r.nbytes for r in self.rows if not r.on_host)

    def __str__(self) -> str:
        lines = [f"a cache of {self.max_length} tokens x batch {self.batch}"]
        lines.append(f"{'buffer':<32} {'layers':>6} {'MiB':>12}")
        for r in self.rows:
            lines.append(f"{r.name:<32} {r.layers:>6} {r.nbytes / 2**20:>12.3f} {'host' if r.on_host else 'device'}")
        total = f"{self.host_bytes / 2**20:.2f} MiB host, {self.device_bytes / 2**20:.2f} MiB device"
        return "\n".join([*lines, f"in all: {total}", *self.notes])


OWN = "linear (transformers)"


class Plan:
    """The layers of a model and the methods chosen for them. A plan knows every buffer before a cache exists."""

    def __init__(
        self, layers: tuple[Layer | None, ...], assignment: Assignment, dtype: torch.dtype, device: torch.device,
        ranks: int, config, pool_dtype: torch.dtype | None = None, kept: Kept | None = None,
    ):  # fmt: skip
        self.layers = tuple(layer and layer.on_rank(ranks) for layer in layers)
        for here, whole, method in zip(self.layers, layers, assignment.methods):
            if here and whole and method and here.kv_heads < whole.kv_heads and method.traits.couples_heads:
                hint = ": pass per_head=True" if hasattr(method, "per_head") else ""
                raise NotImplementedError(
                    f"{method.name} decides by all heads of a layer together, and each of {ranks} ranks has only some "
                    f"heads{hint}"
                )
        self.method, self.methods, self.notes = assignment.method, assignment.methods, assignment.notes
        self.warned = assignment.warned
        self.traits = tuple(None if m is None else traits_of(m) for m in self.methods)
        self.skip_layers, self.dtype, self.device = assignment.skip_layers, dtype, device
        self.pool_dtype = pool_dtype  # None: dtype
        self.config = config  # the config of the text model, by which transformers makes its own layers
        self.kept = kept or {}  # the tensors per row of a layer without keys and values, which transformers keeps
        self.anchors = self._anchors()

    @property
    def attending(self) -> list[int]:
        """The layers with keys and values."""
        return [i for i, m in enumerate(self.methods) if m is not None]

    def _anchors(self) -> dict[int, int]:
        """The earlier layer whose selection a layer shares, for the layers that share one."""
        kinds: dict[int, tuple[Method, int, int]] = {}
        for i, (method, layer) in enumerate(zip(self.methods, self.layers)):
            if method is not None and layer is not None:
                kinds[i] = method, layer.kv_heads, layer.heads
        found: dict[int, int] = {}
        for cls in dict.fromkeys(type(method) for method, *_ in kinds.values()):
            found |= cls.shares_selection({i: kind for i, kind in kinds.items() if isinstance(kind[0], cls)})
        return found

    def pool_said(self) -> tuple[str, ...]:
        """A line if the pool has another type than the model."""
        if self.pool_dtype is None:
            return ()
        own, pool = (str(d).removeprefix("torch.") for d in (self.dtype, self.pool_dtype))
        but = ", except in dense layers" if any(map(self._dense_in_own_type, self.attending)) else ""
        said = f"the pool holds keys and values in {pool} with scales{but}, the model computes in {own}"
        return (f"pool_dtype {pool}: {said}",)

    def reused(self) -> list[str]:
        """A line for each layer whose selection other layers share."""
        of: dict[int, list[int]] = {}
        for i, anchor in self.anchors.items():
            of.setdefault(anchor, []).append(i)
        return [f"layer {', '.join(map(str, others))}: shares the selection of layer {a}" for a, others in of.items()]

    def may_offload(self, i: int) -> bool:
        traits = self.traits[i]
        return traits is not None and traits.attends != "window" and not self._dense_among_others(i)

    def _dense_among_others(self, i: int) -> bool:
        """True for a dense layer among sparse ones. It reads its whole pool at every step, so its pool stays on the
        device."""
        if (traits := self.traits[i]) is None or traits.attends != "everything":
            return False
        return not all(t.attends in ("everything", "window") for t in self.traits if t)

    def _dense_in_own_type(self, i: int) -> bool:
        """True for a dense layer among sparse ones that would be slower over a packed pool."""
        layer = self.layers[i]
        return layer is not None and self._dense_among_others(i) and not reads_packed(layer.head_dim, layer.group)

    def most_budgets(self, length: int) -> int:
        """How many budgets make up `length` tokens, at the smallest budget; 0 if no layer has hot_budgets="auto"."""
        sized = (m for m, t in zip(self.methods, self.traits) if m and t and t.attends == "selected")
        return max((-(-length // m.budget) for m in sized if m.hot_budgets == "auto"), default=0)

    def buffers(self, i: int, batch: int, max_length: int, hot_budgets: int = HOT_BUDGETS) -> Buffers:
        """The buffers of a layer; empty if transformers keeps the state of the layer."""
        method, layer = self.methods[i], self.layers[i]
        if method is None or layer is None:
            return {}
        rows = -(-max_length // method.block_size) * method.block_size
        sizes = (batch, layer.kv_heads, layer.head_dim, rows, self.dtype, layer.group)
        pool = None if self._dense_in_own_type(i) else self.pool_dtype
        g = Geometry(*sizes, i, len(self.layers), i in self.anchors, pool, hot_budgets)
        return checked(method.buffers(g), method.prefetch_async is not None)

    def layer_bytes(
        self, i: int, batch: int, max_length: int, *, pool_on_host: bool, hot_budgets: int = HOT_BUDGETS
    ) -> tuple[int, int]:
        """(host, device) bytes of one layer of a cache, before it exists."""
        if self.methods[i] is None:
            return 0, batch * sum(self._kept_bytes().values())
        on_host = pool_on_host and self.may_offload(i)
        return total_bytes(self.buffers(i, batch, max_length, hot_budgets), pool_on_host=on_host)

    def _kept_bytes(self) -> dict[str, int]:
        """Bytes per row of the tensors of one layer that transformers keeps. It allocates them when a prompt comes."""
        return {name: math.prod(shape) * (dtype or self.dtype).itemsize for name, (shape, dtype) in self.kept.items()}

    def bytes(
        self, batch: int, max_length: int, *, pool_on_host: bool, hot_budgets: int = HOT_BUDGETS
    ) -> tuple[int, int]:
        """The host and device bytes of all layers."""
        each = [
            self.layer_bytes(i, batch, max_length, pool_on_host=pool_on_host, hot_budgets=hot_budgets)
            for i in range(len(self.methods))
        ]
        return sum(h for h, _ in each), sum(d for _, d in each)

    def hot_bytes(self, batch: int, max_length: int, *, pool_on_host: bool, hot_budgets: int = HOT_BUDGETS) -> int:
        """Bytes of the hot buffers of all layers."""
        rows = self.memory(batch, max_length, pool_on_host=pool_on_host, hot_budgets=hot_budgets).rows
        return sum(r.nbytes for r in rows if r.name.startswith("hot."))

    def memory(
        self, batch: int, max_length: int, *, pool_on_host: bool, hot_budgets: int = HOT_BUDGETS,
        notes: tuple[str, ...] = (),
    ) -> "Memory":  # fmt: skip
        """The memory of a cache by buffer, with the lengths of the rows."""
        found: dict[tuple[str, bool], tuple[int, int]] = {}
        for i in self.attending:
            aside = pool_on_host and self.may_offload(i)
            for name, b in named(self.buffers(i, batch, max_length, hot_budgets)).items():
                key = (name, b.is_on_host(aside))
                layers, size = found.get(key, (0, 0))
                found[key] = layers + 1, size + b.nbytes
        rows = [MemoryRow(name, host, layers, size) for (name, host), (layers, size) in found.items()]
        if others := len(self.methods) - len(self.attending):
            for name, nbytes in self._kept_bytes().items():
                rows.append(MemoryRow(f"{name} (transformers)", False, others, others * batch * nbytes))
        rings = {m.ring_plan for m in self.methods if m is not None}
        rows.append(MemoryRow("row lengths", False, len(self.attending), len(rings) * RowLengths.bytes_for(batch)))
        return Memory(batch, max_length, tuple(sorted(rows, key=lambda r: -r.nbytes)), notes)

    def exceptions(self) -> list[str]:
        """`layer: method` for each exception: a skipped layer that does not run `full`, or another layer that does not
        run the model's method. Equal neighbours are one entry."""
        runs: list[tuple[int, int, Method | None]] = []
        for i, m in enumerate(self.methods):
            if m == self.method if i >= self.skip_layers else m and m.name == "full":
                continue
            if runs and runs[-1][1:] == (i - 1, m):
                runs[-1] = (runs[-1][0], i, m)
            else:
                runs.append((i, i, m))
        return [f"{a if a == b else f'{a}-{b}'}: {described(m, self.method) if m else OWN}" for a, b, m in runs]
