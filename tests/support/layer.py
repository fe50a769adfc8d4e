"""One layer of one method, without a model."""
import torch
from cases import IN_BLOCKS
from world import DEVICE

from torchsparsekv.method import make_method
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.state import Geometry, LayerState, RowLengths

SINK, WINDOW, BLOCK = 8, 6, 4
SMALL = dict(sink=SINK, window=WINDOW)
PAGES = dict(SMALL, block_size=BLOCK)


def small(name: str, **hyper):
    """A method of small sizes; one of single tokens has no block size."""
    return make_method(name, **{**(PAGES if name in IN_BLOCKS else SMALL), **hyper})


class Layer:
    """One layer of one method, called as patches/_attention.py calls it."""

    def __init__(
        self, method, *, batch=1, heads=2, group=1, dim=16, rows=256, left_pad=None, device=DEVICE,
        dtype=torch.float32, pool_dtype=None,
    ):  # fmt: skip
        self.method, self.attention = method, Attention(scale=dim**-0.5)
        self.device, self.row_lengths = device, RowLengths(method.ring_plan, batch, rows, device)
        self.row_lengths.left_pad.copy_(torch.tensor(left_pad or [0] * batch))
        buffers = method.buffers(Geometry(batch, heads, dim, rows, dtype, group, pool_dtype=pool_dtype))
        self.state = LayerState(buffers, self.row_lengths, device, pool_on_host=False)

    def feed(self, q, k, v):
        """New tokens; q [batch, query heads, tokens, dim]. One is a decode step, more are a prompt or part of one."""
        q, k, v = (t.to(self.device) for t in (q, k, v))
        self.row_lengths.advance(q.shape[2])
        if q.shape[2] == 1:
            return self.method.decode(self.state, q, k, v, self.attention)
        return self.method.prefill(self.state, q, k, v, self.attention, last=True)

    def feed_parts(self, q, k, v, sizes):
        assert sum(sizes) == q.shape[2]
        return [self.feed(*t) for t in zip(*(x.split(list(sizes), 2) for x in (q, k, v)))]

    def choose(self, q):
        """Ids of the blocks that it would attend to."""
        return self.method.choose(self.state, q.to(self.device), self.attention).ids.cpu()


def frontier(length: int, sink=SINK, window=WINDOW, block=BLOCK) -> int:
    """Tokens in [sink, frontier) are retrievable: whole pages that leave `window` tokens behind them."""
    return sink + max(0, (length - sink - window) // block) * block
