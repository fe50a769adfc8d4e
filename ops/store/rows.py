"""How a token lies in memory, in torch and in Triton; csrc/store.cuh says the same in CUDA C++.

A row is a key and, side by side with it, a value. Rows of a head follow one another. The ring has the sinks in front
and uses the rows behind them in turn. tests/test_store_law.py sees to it that nobody else spells any of this.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._triton import tl, triton

STATS = ("steps", "context", "near", "selected", "missed")  # the counters of a (row, kv head)
STEPS, CONTEXT, NEAR, SELECTED, MISSED = map(tl.constexpr, range(len(STATS)))
COUNTERS = tl.constexpr(len(STATS))


# ---------------------------------------------------------------- torch


def row_shape(head_dim: int) -> tuple[int, int]:
    return (2, head_dim)


def row_width(head_dim: int) -> int:
    """Numbers in a row."""
    return 2 * head_dim


def keys_of(rows: Tensor) -> Tensor:
    return rows[..., 0, :]


def values_of(rows: Tensor) -> Tensor:
    return rows[..., 1, :]


def rows_of(keys: Tensor, values: Tensor) -> Tensor:
    return torch.stack([keys, values], -2)


def ring_row(position: Tensor, sink: int, ring_rows: int) -> Tensor:
    """The ring row that holds a token while it is in the ring."""
    return torch.where(position < sink, position, sink + (position - sink) % (ring_rows - sink))


def ring_positions(ring_rows: int, length: Tensor, begin: Tensor, sink: int) -> Tensor:
    """Position of the token in each ring row, [batch, ring_rows]; -1 where the row holds none."""
    row = torch.arange(ring_rows, device=length.device)
    position = torch.where(row < sink, row, begin[:, None] + (row - begin[:, None]) % (ring_rows - sink))
    end = torch.where(row < sink, length.clamp(max=sink)[:, None], length[:, None])
    return torch.where(position < end, position, -1)


def count(counts: Tensor, **amounts: Tensor | int) -> None:
    """Add to the counters of these names; `counts` is all of them, or those of some rows and heads."""
    for name, amount in amounts.items():
        counts[..., STATS.index(name)] += amount


def counted(counts: Tensor, name: str) -> Tensor:
    return counts[..., STATS.index(name)]


# ---------------------------------------------------------------- Triton


@triton.jit
def row_at(store, head, row, rows, D: tl.constexpr):
    """Pointer to a row of a head (its key), of stores with `rows` rows a head."""
    return store + (head * rows + row) * (2 * D)


@triton.jit
def value_at(row, D: tl.constexpr):
    """Pointer to the value of a row, or to the same channel of the value as of the key."""
    return row + D


@triton.jit
def in_row(c, D: tl.constexpr):
    """Whether a row has a number `c`."""
    return c < 2 * D


@triton.jit
def new_row(k, v, c, D: tl.constexpr):
    """Numbers `c` of the row made of a key and a value."""
    row = tl.load(k + c, mask=c < D, other=0.0)
    row += tl.load(v + c - D, mask=(c >= D) & (c < 2 * D), other=0.0)
    return row


@triton.jit
def ring_row_of(position, sink, span):
    """`ring_row`; `span` is how many rows are used in turn."""
    return tl.where(position < sink, position, sink + tl.maximum(position - sink, 0) % span)


@triton.jit
def turn_of(position, sink, span):
    """Of a token behind the sinks, which of the rows used in turn is its own."""
    return tl.maximum(position - sink, 0) % span


@triton.jit
def ring_position_of(row, begin, sink, span):
    """Position of the token in a ring row, if it holds one."""
    return tl.where(row < sink, row, begin + ((row - begin) % span + span) % span)


@triton.jit
def add_count(counts, head, COLUMN: tl.constexpr, amount):
    at = counts + head * COUNTERS + COLUMN
    tl.store(at, tl.load(at) + amount)
