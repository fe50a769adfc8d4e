"""Many layers of one method over one pinned pool, to time the kernels of a decode step on."""
from functools import partial
from typing import Any

import torch

from torchsparsekv import host
from torchsparsekv.method import Method
from torchsparsekv.state import Geometry, LayerState, RowLengths
from torchsparsekv_benchmarks.speed import _common


class Layers:
    """`calls` states of one method: as many inputs as a replay needs for each to be new to the caches."""

    def __init__(self, method: Method, g: Geometry, q_heads: int, calls: int, device: torch.device):
        self.method: Any = method
        self.lengths = RowLengths(method.ring_plan, g.batch, g.rows, device)
        buffers = method.buffers(g)
        rows = buffers["store"].pool
        pool = host.pinned(rows.shape, rows.dtype, device)  # one for all of them
        buffers["store"] = buffers["store"]._replace(pool=pool)
        self.states = [LayerState(buffers, self.lengths, device, pool_on_host=False) for _ in range(calls)]
        new = lambda heads: torch.randn(1, 1, heads, g.head_dim, device=device, dtype=g.dtype).transpose(1, 2)  # noqa: E731
        self.q, self.k = [new(q_heads) for _ in range(calls)], new(g.kv_heads)

    def time(self, f, refresh=lambda: None) -> float:
        """Microseconds of `f`, a function of the number of a call and its state."""
        return _common.time_graph([partial(f, i, s) for i, s in enumerate(self.states)], refresh)

    def still(self) -> None:
        """Nothing leaves the ring, as on most steps."""
        self.lengths.view.previous_ring_begin.copy_(self.lengths.view.ring_begin)

    def leaving(self) -> None:
        """As many tokens as ever do at a time leave the ring; `still` takes it back."""
        self.lengths.view.previous_ring_begin.copy_(self.lengths.view.ring_begin - self.lengths.view.interval)
