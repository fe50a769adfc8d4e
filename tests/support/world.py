"""A store in a known state, built from the definition and not by the operators under test."""
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from torchsparsekv.ops.store.views import Lengths, Stats

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float32, torch.float16)
DIMS = (16, 32, 48, 64, 80) + ((128, 256) if DEVICE.type == "cuda" else ())  # the interpreter is slow
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def first(*options):
    return options[0]


def integers(x: torch.Tensor) -> torch.Tensor:
    """Small integers: their sums of products are exact in any order, so no sign, cell or tie differs by rounding."""
    return (x * 8).round()


@dataclass
class World:
    """Rows of `before[b]` tokens to which the last call added up to `tokens`; garbage (NaN) wherever nothing lives."""

    lengths: list[int] = field(default_factory=lambda: [37, 20])
    tokens: int = 1
    heads: int = 2
    group: int = 2
    dim: int = 16
    block: int = 4
    sink: int = 4
    window: int = 6
    interval: int = 4
    rows: int = 64
    dtype: torch.dtype = torch.float32
    seed: int = 0
    pick: Callable = first  # which of several options: the first one, or what hypothesis draws
    past: frozenset[int] = frozenset()  # rows that this call would have put past their capacity

    def __post_init__(self):
        g = self.g = torch.Generator().manual_seed(self.seed)
        self.batch = len(self.lengths)
        shape = (self.batch, self.heads, self.rows, 2, self.dim)
        self.truth = torch.randn(shape, generator=g).to(self.dtype)
        self.q = self.heads_last(self.heads * self.group, self.tokens)
        self.k, self.v = self.heads_last(self.heads, self.tokens), self.heads_last(self.heads, self.tokens)
        i32 = torch.int32
        self.length = torch.tensor(self.lengths, dtype=i32)
        self.start = (self.length - self.tokens).clamp(min=0)
        self.previous_begin, self.begin = self.begins(self.start), self.begins(self.length)
        for b, n in enumerate(self.lengths):
            new = n - int(self.start[b])
            self.truth[b, :, n - new : n] = torch.stack([self.k, self.v], 3)[b, :, self.tokens - new :]
        for b in self.past:  # as advance leaves them
            self.length[b], self.begin[b] = -1, self.previous_begin[b]

    def heads_last(self, heads: int, tokens: int) -> torch.Tensor:
        """[batch, heads, tokens, dim] with the strides transformers gives."""
        return torch.randn((self.batch, tokens, heads, self.dim), generator=self.g).to(self.dtype).transpose(1, 2)

    def begins(self, length: torch.Tensor) -> torch.Tensor:
        """Where rings of rows with so many tokens begin."""
        out = [self.sink + max(0, (int(n) - self.sink - self.window) // self.interval) * self.interval for n in length]
        return torch.tensor(out, dtype=torch.int32)

    @property
    def lengths_view(self) -> Lengths:
        return Lengths(self.start, self.length, self.previous_begin, self.begin, self.sink, self.interval)

    @property
    def ring_rows(self) -> int:
        return self.sink + self.window + self.interval

    def ring(self, length: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        out = torch.full((self.batch, self.heads, self.ring_rows, 2, self.dim), torch.nan, dtype=self.dtype)
        for b in range(self.batch):
            for p in range(int(length[b])):
                if p < self.sink or p >= int(begin[b]):
                    row = p if p < self.sink else self.sink + (p - self.sink) % (self.window + self.interval)
                    out[b, :, row] = self.truth[b, :, p]
        return out

    def pool(self, upto: torch.Tensor) -> torch.Tensor:
        """Rows below `upto` hold their token."""
        out = self.truth.clone()
        for b in range(self.batch):
            out[b, :, int(upto[b]) :] = torch.nan
        return out

    @property
    def blocks(self) -> int:
        return self.rows // self.block

    def stats(self) -> Stats:
        return Stats(torch.zeros(self.batch, self.heads, 5, dtype=torch.int64))

    def sink_logits(self) -> torch.Tensor:
        return torch.randn(self.heads * self.group, generator=self.g).to(self.dtype)

    def chosen(self, n: int) -> torch.Tensor:
        """Distinct random block ids in ascending order, some places empty."""
        ids = torch.full((self.batch, self.heads, n), -1, dtype=torch.int32)
        for b in range(self.batch):
            for h in range(self.heads):
                order = torch.randperm(self.blocks, generator=self.g)
                live = order[: int(torch.randint(0, n + 1, (), generator=self.g))]
                ids[b, h, : len(live)] = live.sort().values
        return ids


@st.composite
def worlds(draw, tokens=st.just(1), **fixed):
    """Ragged lengths at and around the edges of blocks, rings and the capacity; GQA ratios; odd head sizes."""
    block = draw(st.sampled_from([1, 2, 4, 8]))
    sink = block * draw(st.integers(0, 2))
    window = draw(st.integers(1, 9))
    interval = block * draw(st.integers(1, 2))
    rows = block * draw(st.integers(-(-(sink + window + interval) // block), 24))
    edges = [0, 1, block - 1, block, block + 1, sink, sink + window, sink + window + interval, rows - 1, rows]
    some = st.one_of(st.sampled_from(edges), st.integers(0, rows)).map(lambda n: min(n, rows))
    lengths = draw(st.lists(some, min_size=1, max_size=3))
    options = dict(
        lengths=lengths, past=draw(st.frozensets(st.integers(0, len(lengths) - 1), max_size=1)), tokens=draw(tokens),
        heads=draw(st.sampled_from([1, 2, 3])), group=draw(st.sampled_from([1, 2, 3, 4, 7])),
        dim=draw(st.sampled_from(DIMS)),
        block=block, sink=sink, window=window, interval=interval, rows=rows,
        dtype=draw(st.sampled_from(DTYPES)), seed=draw(st.integers(0, 1000)),
        pick=lambda *options: draw(st.sampled_from(options)),
    )  # fmt: skip
    return World(**{**options, **fixed})
