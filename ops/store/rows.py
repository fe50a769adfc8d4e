"""How a token lies in memory, in torch and in Triton; csrc/store.cuh says the same in CUDA C++.

A row is a key and, side by side with it, a value. The rows of a head follow one another. The ring holds the sinks in
its first rows and uses the other rows round-robin. tests/ops/store/test_store_law.py forbids any other file to spell
this layout.

A pool holds rows of the model's type, or packed rows: int8 numbers, with one fp32 scale for every GROUP channels of a
key or a value. The dtype of the tensor says which. Layout of a packed row::

    numbers of the key | numbers of the value | scales of the key | scales of the value | padding to whole 16 bytes

So one contiguous, aligned read brings any block, single tokens too.

    scale  = max |x| of the group / 127;   0 if max |x| < LEAST, so that no scale is subnormal (kernels may flush those)
    number = round(x / scale), ties to even;   x = number * scale

A group with a number that is not finite comes back as NaN. Scales are fp32: fp16 would overflow at 65,504, and bf16
would be off by up to 1/256. Because of the padding, 16-bit scales would save nothing at head_dim 64 and 128, and 3 % at
256.
"""
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchsparsekv.ops._machinery.triton import cdiv, tl, triton

STATS = ("steps", "context", "in_ring", "selected", "missed")  # the counters of a (row, kv head)
STEPS, CONTEXT, IN_RING, SELECTED, MISSED = map(tl.constexpr, range(len(STATS)))
COUNTERS = tl.constexpr(len(STATS))
PACKED = torch.int8
CHANNELS, SMALLEST = 64, 2.0**-100
GROUP, LEAST = tl.constexpr(CHANNELS), tl.constexpr(SMALLEST)


# ---------------------------------------------------------------- torch


def packed_half(head_dim: int) -> int:
    """Bytes of half a packed row: a packed row has the shape [2, packed_half]."""
    return head_dim + 8 * cdiv(head_dim, 2 * CHANNELS)


def row_shape(head_dim: int, dtype: torch.dtype | None = None) -> tuple[int, int]:
    return (2, packed_half(head_dim) if dtype is PACKED else head_dim)


def row_width(head_dim: int) -> int:
    """Numbers in a row: those of a key and a value."""
    return 2 * head_dim


def stored_width(rows: Tensor) -> int:
    """Elements of a stored row; a packed row counts its scales and padding too."""
    return math.prod(rows.shape[-2:])


def keys_of(rows: Tensor) -> Tensor:
    """The keys [..., head_dim] of stored rows; packed rows are unpacked to fp32."""
    return as_numbers(rows, torch.float32)[..., 0, :] if rows.dtype is PACKED else rows[..., 0, :]


def only_keys(rows: Tensor) -> Tensor:
    """The smallest slice of stored rows that `keys_of` can read. Packed rows stay whole, for their scales."""
    return rows if rows.dtype is PACKED else rows[..., :1, :]


def values_of(rows: Tensor) -> Tensor:
    return as_numbers(rows, torch.float32)[..., 1, :] if rows.dtype is PACKED else rows[..., 1, :]


def rows_of(keys: Tensor, values: Tensor) -> Tensor:
    return torch.stack([keys, values], -2)


def scales_of(groups: Tensor) -> Tensor:
    """The scale of each group [..., channels] of fp32 numbers; inf if a number is not finite."""
    most = torch.where(groups.isnan(), torch.inf, groups.abs()).amax(-1)
    return torch.where(most < SMALLEST, 0.0, most / 127)


def in_8_bits(x: Tensor, scale: Tensor) -> Tensor:
    known = (scale > 0) & (scale < torch.inf)
    return torch.where(known, x / torch.where(known, scale, 1.0), 0.0).round().to(PACKED)


def as_stored(rows: Tensor, store: Tensor) -> Tensor:
    """Rows [..., 2, head_dim] in the format of the tensor `store`: packed, or as they are."""
    if store.dtype is not PACKED:
        return rows
    x, d = rows.float(), rows.shape[-1]
    scale = scales_of(pad(x, (0, -d % CHANNELS)).unflatten(-1, (-1, CHANNELS)))
    numbers = in_8_bits(x, scale.repeat_interleave(CHANNELS, -1)[..., :d])
    parts = [numbers.flatten(-2), scale.flatten(-2).view(PACKED)]
    whole = torch.cat(parts, -1)
    return pad(whole, (0, 2 * packed_half(d) - whole.shape[-1])).unflatten(-1, (2, -1))


def as_numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored rows as [..., 2, head_dim]. Packed rows are unpacked to `dtype`; other rows keep their type."""
    if rows.dtype is not PACKED:
        return rows
    half = rows.shape[-1]
    d = half - 8 * cdiv(half, packed_half(2 * CHANNELS))
    whole, groups = rows.flatten(-2), cdiv(d, CHANNELS)
    numbers, scale, _ = whole.split([2 * d, 8 * groups, whole.shape[-1] - 2 * d - 8 * groups], -1)
    scale = scale.contiguous().view(torch.float32).unflatten(-1, (2, groups))
    x = numbers.unflatten(-1, (2, d)).to(torch.float32)
    for group, group_scale in zip(x.split(CHANNELS, -1), scale.unsqueeze(-1).unbind(-2)):
        group *= group_scale  # in place: a scale for every channel of a long pool would double the memory
    return x.to(dtype)


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
    """Add each amount to the counter of its name. `counts` is [..., len(STATS)]."""
    for name, amount in amounts.items():
        counts[..., STATS.index(name)] += amount


def counted(counts: Tensor, name: str) -> Tensor:
    return counts[..., STATS.index(name)]


# ---------------------------------------------------------------- Triton


@triton.jit
def row_at(store, head, row, rows, D: tl.constexpr):
    """Pointer to a row of a head, which begins with its key. The store has `rows` rows per head."""
    if store.dtype.element_ty == tl.int8:
        return store + (head * rows + row) * (2 * D + 16 * ((D + 2 * GROUP - 1) // (2 * GROUP)))
    else:
        return store + (head * rows + row) * (2 * D)


@triton.jit
def value_at(row, D: tl.constexpr):
    """Pointer to the value of the row at `row`; from a channel of the key, to the same channel of the value."""
    return row + D


@triton.jit
def in_row(c, D: tl.constexpr):
    """Whether `c` is the index of a number of a row."""
    return c < 2 * D


@triton.jit
def load_row(row, c, live, there, D: tl.constexpr):
    """Numbers `c` of the rows at the pointers `row`; packed rows come in fp32. 0 where the row is not `live` or the
    number is not `there`. `row` and `live` broadcast with `c` and `there`."""
    return _load(row, c, live, there, D, 0, 2 * ((D + GROUP - 1) // GROUP))


@triton.jit
def load_key(row, d, live, there, D: tl.constexpr):
    """Channels `d` of the keys of rows, with the arguments of `load_row`."""
    return _load(row, d, live, there, D, 0, (D + GROUP - 1) // GROUP)


@triton.jit
def load_value(row, d, live, there, D: tl.constexpr):
    """Channels `d` of the values of rows, with the arguments of `load_row`."""
    return _load(row, D + d, live, there, D, (D + GROUP - 1) // GROUP, 2 * ((D + GROUP - 1) // GROUP))


@triton.jit
def store_row(row, c, x, live, there, D: tl.constexpr):
    """Store `x` [rows, n] as the numbers `c` [1, n] of the rows at the pointers `row` [rows, 1]: whole keys and values.
    Returns the numbers as a later load reads them."""
    return _store(row, c, x, live, there, D, 0, 2 * ((D + GROUP - 1) // GROUP))


@triton.jit
def store_key(row, d, x, live, there, D: tl.constexpr):
    return _store(row, d, x, live, there, D, 0, (D + GROUP - 1) // GROUP)


@triton.jit
def store_value(row, d, x, live, there, D: tl.constexpr):
    return _store(row, D + d, x, live, there, D, (D + GROUP - 1) // GROUP, 2 * ((D + GROUP - 1) // GROUP))


@triton.jit
def _scale_at(row, g, D: tl.constexpr):
    """Pointer to the scale of group `g` of a packed row; the groups of the key come first."""
    return (row + 2 * D).to(tl.pointer_type(tl.float32)) + g


@triton.jit
def _group_of(c, D: tl.constexpr):
    """The group of number `c` of a row."""
    return c // D * ((D + GROUP - 1) // GROUP) + c % D // GROUP


@triton.jit
def _load(row, c, live, there, D: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    if row.dtype.element_ty == tl.int8:
        x = tl.load(row + c, mask=live & there, other=0).to(tl.float32)
        scale = tl.zeros_like(x)
        for g in tl.static_range(FIRST, LAST):
            group_scale = tl.load(_scale_at(row, g, D), mask=live, other=0.0)
            scale = tl.where(_group_of(c, D) == g, group_scale, scale)
        return x * scale
    else:
        return tl.load(row + c, mask=live & there, other=0.0)


@triton.jit
def size_of(x):
    """|x|, or inf for NaN."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def scale_of(most):
    """The scale of a group (see `scales_of`) from its largest magnitude `most`."""
    return tl.where(most < LEAST, 0.0, tl.div_rn(most, tl.full(most.shape, 127.0, tl.float32)))


@triton.jit
def packed_number(x, scale):
    """`in_8_bits` in Triton."""
    return number_of(x, scale).to(tl.int8)


@triton.jit
def number_of(x, scale):
    """`packed_number` as fp32."""
    known = (scale > 0) & (scale < float("inf"))
    number = tl.div_rn(tl.where(known, x, 0.0), tl.where(known, scale, 1.0))
    return (number + 12582912.0) - 12582912.0  # adding 1.5 * 2^23 rounds to an integer


@triton.jit
def _store(row, c, x, live, there, D: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    if row.dtype.element_ty == tl.int8:
        wide = x.to(tl.float32)
        size = tl.where(live & there, size_of(wide), 0.0)
        scale = tl.zeros_like(wide)
        for g in tl.static_range(FIRST, LAST):
            most = tl.max(tl.where(_group_of(c, D) == g, size, 0.0), 1)[:, None]
            group_scale = scale_of(most)
            tl.store(_scale_at(row, g, D), group_scale, mask=live)
            scale = tl.where(_group_of(c, D) == g, group_scale, scale)
        number = number_of(wide, scale)
        tl.store(row + c, number.to(tl.int8), mask=live & there)
        return (number * scale).to(x.dtype)
    else:
        tl.store(row + c, x, mask=live & there)
        return x


@triton.jit
def copy_rows(source, target, live, D: tl.constexpr, ROW: tl.constexpr):
    """Copy the rows at pointers `source` [rows] to the pointers `target` [rows] where `live`. Either may be packed."""
    c = tl.arange(0, ROW)[None, :]
    rows = load_row(source[:, None], c, live[:, None], in_row(c, D), D)
    store_row(target[:, None], c, rows, live[:, None], in_row(c, D), D)


@triton.jit
def new_row(k, v, c, D: tl.constexpr):
    """Numbers `c` of the row that the key at `k` and the value at `v` make."""
    row = tl.load(k + c, mask=c < D, other=0.0)
    row += tl.load(v + c - D, mask=(c >= D) & (c < 2 * D), other=0.0)
    return row


@triton.jit
def ring_row_of(position, sink, span):
    """`ring_row` in Triton. `span` is the number of rows that are used round-robin."""
    return tl.where(position < sink, position, sink + tl.maximum(position - sink, 0) % span)


@triton.jit
def turn_of(position, sink, span):
    """The index, among the `span` ring rows that are used round-robin, of the row of a token after the sinks."""
    return tl.maximum(position - sink, 0) % span


@triton.jit
def ring_position_of(row, begin, sink, span):
    """Position of the token in a ring row, if the row holds one: the caller compares the position with the length."""
    return tl.where(row < sink, row, begin + ((row - begin) % span + span) % span)


@triton.jit
def add_count(counts, head, COLUMN: tl.constexpr, amount):
    """Add to one counter of a head. This is not atomic: only one program of the head may call it."""
    at = counts + head * COUNTERS + COLUMN
    tl.store(at, tl.load(at) + amount)
