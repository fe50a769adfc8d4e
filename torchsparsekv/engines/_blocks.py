"""Keys and values of one layer by block id, for all requests of an engine, with the digests of their blocks.

Nothing is kept per row of a batch: with every call the engine says where new tokens go, and which blocks a request has.
A block gets its digest when its last row is written, from all of its keys. So blocks that requests share are indexed
once, and an earlier use of a block leaves no trace. Only full blocks older than the window can be selected.

kv="device": the pool is the engine's own cache, and the digests lie beside it. kv="host": the pool is pinned host
memory, and the device has the digests and one hot buffer for all requests.

ops/engine/__init__.py lists the launches of a prompt and of a decode step.
"""
import torch
from torch import Tensor

from torchsparsekv import host
from torchsparsekv.engines._options import Options
from torchsparsekv.ops.engine.fetch_shared import fetch_shared
from torchsparsekv.ops.engine.filled_bounds import filled_bounds
from torchsparsekv.ops.engine.list_blocks import list_blocks
from torchsparsekv.ops.engine.listed_attention import listed_attention
from torchsparsekv.ops.engine.table_prompt import table_prompt
from torchsparsekv.ops.engine.table_scores import table_scores
from torchsparsekv.ops.engine.tables import near_blocks
from torchsparsekv.ops.engine.views import Copies, Requests, SharedHot
from torchsparsekv.ops.engine.write_tokens import write_tokens
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.ops.store.views import Attention, Digests
from torchsparsekv.state import Buffer, Geometry


class BlockStore:
    """One layer. requests: the most requests of a step. places: the most blocks of a request."""

    def __init__(
        self, options: Options, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, *, requests: int,
        places: int,
    ):  # fmt: skip
        self.method, self.on_host, self.device, self.dtype = options.method, options.kv == "host", device, dtype
        self.heads, self.head_dim = heads, head_dim
        p = self.method.block_size
        self.chosen = min(self.method.budget // p, places)
        listed = self.method.sink // p + near_blocks(self.method.window, p) + self.chosen
        self.slots = requests * (listed + self.chosen)  # with room for the listed blocks alone, it would thrash
        self.page: Tensor | None = None
        self.pool: Tensor | None = None
        self.digests: Digests | None = None
        self.hot: SharedHot | None = None
        self._origin = self._zeros((1, heads, head_dim), torch.float32).fill_(torch.nan)  # until filled_bounds finds it
        # Engines measure free memory after this call, and then say how many blocks there are. The rows do not depend
        # on that number.
        self._hot_rows = self._zeros(self._hot_shape()) if self.on_host else None

    # ---- sizes, and memory

    def _buffers(self, blocks: int) -> tuple[Buffer, Digests]:
        rows = blocks * self.method.block_size
        found = self.method.buffers(Geometry(1, self.heads, self.head_dim, rows, self.dtype))
        return found["store"].pool, found["digests"]

    def _hot_shape(self) -> tuple[int, ...]:
        pool, _ = self._buffers(self.slots)
        return (1, self.heads, self.slots, self.method.block_size, *pool.shape[3:])

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def _on_page(self, blocks: int) -> list[Buffer]:
        pool, digests = self._buffers(blocks)
        return [digests.centre, digests.spread, *([] if self.on_host else [pool])]

    @property
    def page_bytes(self) -> int:
        """Bytes that the engine keeps for a block, rounded up to whole bytes a token."""
        p = self.method.block_size
        return -(-sum(b.nbytes for b in self._on_page(1)) // p) * p

    @property
    def host_bytes(self) -> int:
        """Bytes of a block in host memory."""
        return self._buffers(1)[0].nbytes if self.on_host else 0

    def allocate(self, blocks: int) -> None:
        """Allocate the pool of `blocks` blocks in host memory, and the tables of the hot buffer."""
        if not self.on_host or (self.hot is not None and self.hot.slot_of.shape[2] == blocks):
            return
        b, _ = self._buffers(blocks)
        self.pool = None  # frees the pool of another size
        on_gpu = self.device.type == "cuda"
        self.pool = host.pinned(b.shape, b.dtype, self.device) if on_gpu else self._zeros(b.shape)
        lead, i32 = (1, self.heads), torch.int32
        none = self._zeros((*lead, blocks + self.slots), i32) - 1
        slot_of, block_of = (t.contiguous() for t in none.split([blocks, self.slots], 2))
        assert self._hot_rows is not None
        used, hand = self._zeros((*lead, self.slots), i32), self._zeros(lead, i32)
        self.hot = SharedHot(self._hot_rows, slot_of, block_of, used, hand)

    def bind(self, page: Tensor) -> None:
        """Use the engine's memory, bytes [blocks, page_bytes]: digests of all blocks, then the pool if it is there."""
        if self.page is not None and self.page.data_ptr() == page.data_ptr() and self.page.shape == page.shape:
            return
        parts, at, flat = [], 0, page.view(torch.uint8).flatten()
        for b in self._on_page(page.shape[0]):
            parts.append(flat[at : at + b.nbytes].view(b.dtype).view(b.shape))
            at += b.nbytes
        self.page, (centre, spread, *pool) = page, parts
        declared = self._buffers(1)[1]
        self.digests = declared._replace(centre=centre, spread=spread, origin=self._origin)
        if pool:
            (self.pool,) = pool

    # ---- what an engine calls in a step

    def write(self, k: Tensor, v: Tensor, to: Tensor) -> None:
        """Store new tokens [tokens, heads, head_dim] of any requests in the rows `to` of the pool, -1 for none."""
        pool, digests = self._ready()
        write_tokens(k, v, to, pool, Copies(*self.hot[:2]) if self.hot is not None else Copies())
        filled_bounds(k, to, pool, digests)

    def decode(self, q: Tensor, length: Tensor, table: Tensor, a: Attention) -> Tensor:
        """Attention of one query of every request, [requests, query heads, head_dim]; its token has been written."""
        (pool, digests), method = self._ready(), self.method
        requests, x = Requests(length, table, method.sink, method.window), q.unsqueeze(2)
        best = top_blocks(table_scores(method.asking(x, digests), digests, requests), min(self.chosen, table.shape[1]))
        ids, fill = list_blocks(best, requests, method.block_size)
        if self.hot is not None:
            ids, pool = fetch_shared(ids, pool, self.hot), self.hot.rows.flatten(2, 3)
        return listed_attention(x, pool, ids, fill, requests, method.block_size, a).squeeze(2)

    def prompt(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, past: int, a: Attention) -> Tensor:
        """Attention of new tokens of one request behind `past` others, in blocks of `table`; all have been written."""
        return table_prompt(q, k, v, self._ready()[0], table, past, self.method.block_size, a)

    def _ready(self) -> tuple[Tensor, Digests]:
        if self.pool is None or self.digests is None:
            raise RuntimeError("keys and values have no place yet: the engine has to bind its memory first")
        return self.pool, self.digests
