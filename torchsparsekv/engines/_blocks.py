"""Keys and values of one layer by block id, for all requests of an engine, with the index of their method.

With every call the engine says where new tokens go, and which blocks each row of the batch has. It does not say which
request a row holds. So a method that keeps state by row must check that the state is of this request
(Method.engine_buffers). Digests depend only on the keys of their block and on one origin. So a block that requests
share is indexed once, and a block that is filled anew keeps nothing but the origin. Tokens become selectable when older
than the window, an interval at a time.

kv="device": the pool is the engine's own cache, and the index lies beside it. kv="host": the pool is pinned host
memory, and the device has the index and one hot buffer for all requests. kv="auto": as "device" if the device has room
for as many blocks as the host. Else as "host", with a hot buffer of `device_gib`. Prompts fill the hot buffer. When it
is full, blocks that no step selected lately leave it. A step that selects them again fetches them from the host.

A method indexes and chooses by the hooks that patch() calls (`Method.written`, `Method.choose`), on a SharedLayer.
ops/engine/__init__.py lists the launches of a prompt and of a decode step.
"""
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchsparsekv import host
from torchsparsekv.engines._options import Options
from torchsparsekv.ops._machinery.triton import cdiv
from torchsparsekv.ops.engine.fetch_shared import fetch_shared
from torchsparsekv.ops.engine.filled_sums import filled_sums
from torchsparsekv.ops.engine.list_units import list_units, listed
from torchsparsekv.ops.engine.listed_attention import listed_attention
from torchsparsekv.ops.engine.table_prompt import table_prompt
from torchsparsekv.ops.engine.tables import lengths_of
from torchsparsekv.ops.engine.views import NO_BLOCK_REST, BlockRest, Copies, Listing, SharedHot
from torchsparsekv.ops.engine.write_tokens import write_tokens
from torchsparsekv.ops.store.views import Attention, BlockTable, KVStore, Lengths
from torchsparsekv.state import Buffer, Geometry, named

ADMITTED = 4096  # units that are brought at a time
OF_ROWS = ("store", "stats", "hot")  # what a method declares for rows with a pool of their own, beside its index


class SharedLayer:
    """One layer as the hooks of a method see it: a `LayerState` whose rows share one pool.

    Each view of the index is an attribute with its name.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, pool: Tensor, index: dict[str, Any], block_size: int):
        self.store, self.block_size = KVStore(pool[:, :, :0], pool), block_size
        for name, view in index.items():
            setattr(self, name, view)
        self.lengths: Lengths
        self.block_table: BlockTable

    @property
    def row_capacity(self) -> int:
        """The most tokens of a row."""
        assert self.block_table.ids is not None
        return self.block_table.ids.shape[1] * self.block_size

    def of(self, lengths: Lengths, table: Tensor) -> "SharedLayer":
        """The layer at a step of requests with these lengths and blocks."""
        self.lengths, self.block_table = lengths, BlockTable(table, self.block_size)
        return self


class BlockStore:
    """One layer. requests: the largest batch of a step. places: the most blocks of a request."""

    def __init__(
        self, options: Options, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, *, requests: int,
        places: int,
    ):  # fmt: skip
        self.method, self.kv, self.device, self.dtype = options.method, options.kv, device, dtype
        self.heads, self.head_dim, self.block_size, self.requests = heads, head_dim, options.block_size, requests
        self.unit = self.method.block_size  # tokens that are selected together: a block, or one token
        self.plan = self.method.ring_plan
        plan, chosen = self.plan, self._declared(places)["hot"].chosen.shape[2]
        units = listed(chosen, plan.sink, plan.window, plan.interval, self.unit)
        # With room for the listed units alone, each step would drop what the next one needs.
        self.slots = self._least_slots = requests * (units + chosen)
        self.page: Tensor | None = None
        self.pool: Tensor | None = None
        self.layer: SharedLayer | None = None
        self.hot: SharedHot | None = None
        # The parts of the index that belong to no block, such as the origin of digests, which is NaN until it is found.
        of_blocks = self._of_blocks(1)
        self._of_all = {
            name: self._zeros(b.shape, b.dtype) for name, b in named(self._index(1)).items() if name not in of_blocks
        }
        self._forget()
        # Engines measure free memory after this call, and then say how many blocks there are. The rows do not depend
        # on that number.
        self._hot_rows = self._zeros(self._hot_shape()) if options.kv == "host" else None

    # ---- sizes, and memory

    @property
    def on_host(self) -> bool:
        return self.kv != "device"

    def _geometry(self, batch: int, blocks: int) -> Geometry:
        return Geometry(batch, self.heads, self.head_dim, blocks * self.block_size, self.dtype)

    def _declared(self, blocks: int) -> dict[str, Any]:
        return self.method.buffers(self._geometry(1, blocks))

    def _pool(self, blocks: int) -> Buffer:
        return self._declared(blocks)["store"].pool

    def _index(self, blocks: int) -> dict[str, Any]:
        kept = {name: view for name, view in self._declared(blocks).items() if name not in OF_ROWS}
        return kept | self.method.engine_buffers(self._geometry(self.requests, blocks), blocks)

    def _of_blocks(self, blocks: int) -> dict[str, Buffer]:
        """The buffers of the index that grow with the number of blocks."""
        one, two = named(self._index(1)), named(self._index(2))
        return {name: b for name, b in named(self._index(blocks)).items() if one[name].shape != two[name].shape}

    def _hot_shape(self) -> tuple[int, ...]:
        return (1, self.heads, self.slots, self.unit, *self._pool(1).shape[3:])

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def _on_page(self, blocks: int) -> dict[str, Buffer]:
        # The pool is first, and what a method adds for engines is last: all before it begin at multiples of 16 bytes.
        return ({} if self.on_host else {"pool": self._pool(blocks)}) | self._of_blocks(blocks)

    @property
    def page_bytes(self) -> int:
        """Bytes that the engine keeps for a block, rounded up to whole bytes a token."""
        p = self.block_size
        return -(-sum(b.nbytes for b in self._on_page(1).values()) // p) * p

    @property
    def host_bytes(self) -> int:
        """Bytes of a block in host memory."""
        return self._pool(1).nbytes if self.on_host else 0

    @property
    def _unit_bytes(self) -> int:
        return self._pool(1).nbytes * self.unit // self.block_size

    @property
    def least_hot_bytes(self) -> int:
        """Bytes of a hot buffer that has room for a step of all requests."""
        return self._least_slots * self._unit_bytes

    @property
    def hot_bytes(self) -> int:
        """Bytes of the hot buffer."""
        return self.slots * self._unit_bytes

    def reserve(self, room: int) -> None:
        """With kv="auto": allocate a hot buffer of `room` bytes, which has room for a step at least."""
        self.slots = max(self._least_slots, room // self._unit_bytes)
        self._hot_rows = self._zeros(self._hot_shape())

    def allocate(self, blocks: int) -> None:
        """Allocate the pool of `blocks` blocks in host memory, and the tables of the hot buffer."""
        units = blocks * self.block_size // self.unit
        if not self.on_host or (self.hot is not None and self.hot.slot_of.shape[2] == units):
            return
        b = self._pool(blocks)
        self.pool = None  # frees the pool of another size
        on_gpu = self.device.type == "cuda"
        self.pool = host.pinned(b.shape, b.dtype, self.device) if on_gpu else self._zeros(b.shape)
        lead, i32 = (1, self.heads), torch.int32
        none = self._zeros((*lead, units + self.slots), i32) - 1
        slot_of, block_of = (t.contiguous() for t in none.split([units, self.slots], 2))
        if self._hot_rows is None:
            raise RuntimeError('kv="auto" needs a hot buffer: reserve it first')
        used, hand = self._zeros((*lead, self.slots), i32), self._zeros(lead, i32)
        self.hot = SharedHot(self._hot_rows, slot_of, block_of, used, hand)

    def bind(self, page: Tensor) -> None:
        """Use the engine's memory [blocks, page_bytes]: with kv="device" the pool, then the index of all blocks."""
        place = page.data_ptr(), page.shape, page.stride()
        if self.page is not None and (self.page.data_ptr(), self.page.shape, self.page.stride()) == place:
            return
        if not page.is_contiguous():
            raise ValueError(f"a block store needs memory without gaps, got {page.shape} with strides {page.stride()}")
        parts, at, flat = dict[str, Tensor](), 0, page.view(torch.uint8).flatten()
        for name, b in self._on_page(page.shape[0]).items():
            parts[name] = flat[at : at + b.nbytes].view(b.dtype).view(b.shape)
            at += b.nbytes
        if self.page is not None:
            self._forget()
        self.page, self.pool = page, parts.get("pool", self.pool)
        assert self.pool is not None
        self.layer = SharedLayer(self.pool, self._views(parts | self._of_all), self.block_size)

    def _forget(self) -> None:
        """Empty the parts of the index that belong to no block."""
        for t in self._of_all.values():
            t.fill_(torch.nan if t.dtype.is_floating_point else 0)

    def _views(self, parts: dict[str, Tensor]) -> dict[str, Any]:
        """The views of the index, with these tensors."""
        found = dict[str, Any]()
        for name, view in self._index(1).items():
            fields = [f for f in getattr(view, "_fields", ()) if f"{name}.{f}" in parts]
            found[name] = view._replace(**{f: parts[f"{name}.{f}"] for f in fields}) if fields else parts[name]
        return found

    # ---- what an engine calls in a step

    def lengths(self, length: Tensor) -> Lengths:
        """The lengths of requests with `length` tokens each, for a step; all layers of one method can share them."""
        return lengths_of(length, self.plan.sink, self.plan.window, self.plan.interval)

    def write(self, k: Tensor, v: Tensor, to: Tensor) -> None:
        """Store new tokens [tokens, heads, head_dim] of any requests in the rows `to` of the pool, -1 for none."""
        layer: Any = self._ready()  # the hooks of a method take it for a LayerState
        write_tokens(k, v, to, layer.store.pool, Copies(*self.hot[:2]) if self.hot is not None else Copies())
        self.method.written(layer, k, to)
        if self.method.rest:
            filled_sums(k, v, to, layer.store.pool, layer.rest)

    def decode(self, q: Tensor, lengths: Lengths, table: Tensor, a: Attention, out: Tensor) -> None:
        """Attention of one query of every request, [requests, query heads, head_dim] as `out`; its token has been
        written."""
        layer: Any = self._ready().of(lengths, table)
        x = q.unsqueeze(2)
        selected = self.method.choose(layer, x, a).ids
        ids, fill = list_units(selected, lengths, layer.block_table, self.plan.window, self.unit)
        pool = layer.store.pool.unflatten(2, (-1, self.unit))
        if self.hot is not None:
            ids, pool = fetch_shared(ids, layer.store.pool, self.hot), self.hot.rows
        rest = BlockRest(layer.rest.sums, self.block_size, table, selected) if self.method.rest else NO_BLOCK_REST
        listed_attention(x, pool, Listing(ids, fill), lengths, a, out.unsqueeze(2), rest)

    def prompt(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, past: int, a: Attention) -> Tensor:
        """Attention of new tokens of one request behind `past` others, in blocks of `table`; all have been written."""
        out = table_prompt(q, k, v, self._ready().store.pool, table, past, self.block_size, a)
        if self.kv == "auto":
            self._admit(table[past // self.block_size : cdiv(past + len(k), self.block_size)])
        return out

    def _admit(self, blocks: Tensor) -> None:
        """Bring blocks of a prompt to the hot buffer, the newest of them if there are more than it holds."""
        pool, hot = self._ready().store.pool, self.hot
        assert hot is not None
        parts = torch.arange(self.block_size // self.unit, device=blocks.device, dtype=blocks.dtype)
        units = (blocks[:, None] * len(parts) + parts).flatten()[-self.slots :]
        for some in units.split(ADMITTED):
            fetch_shared(some.expand(1, self.heads, -1).contiguous(), pool, hot)

    def _ready(self) -> SharedLayer:
        if self.layer is None:
            raise RuntimeError("keys and values have no place yet: the engine has to bind its memory first")
        return self.layer
