"""Write a run of new tokens (a prompt, a chunk of one, a second turn) into the pool and the ring.

Afterwards the pool holds every token of the row, the ring its sinks and its newest tokens. Ragged: the new tokens of a
row are the last `length - start` columns of `k` and `v`, what stands before them is left padding. The copy into the
pool runs beside the next layer, unless told to `join` (ops/_side.py).

With `order` [batch, kv_heads, tokens] a column's row of the pool takes the token of column `order[column]` instead of
its own: a method that moves groups of tokens together writes them side by side. It permutes new tokens that do not stay
in the ring, among themselves.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._side import beside
from torchsparsekv.ops._triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.index.append import ring_row

SCHEMA = (
    "(Tensor k, Tensor v, Tensor(a!) ring, Tensor(b!) pool, Tensor start, Tensor length, Tensor leaving, "
    "Tensor retired, Tensor? order, int sink, bool join) -> ()"
)
TILE = 16
# Few programs with much in flight: they fill the host link and leave the SMs to the next layer.
COPIERS, COPY_TILE = 8, 64


def check(k, v, ring, pool, start, length, leaving, retired, order, sink, join) -> None:
    _check.rows(pool, ring=ring)
    _check.dense_last(k=k, v=v)
    _check.same_dtype(k=k, v=v, pool=pool)
    _check.shape((*pool.shape[:2], k.shape[2], pool.shape[-1]), k=k, v=v)
    _check.counters(k.shape[0], start=start, length=length, leaving=leaving, retired=retired)
    if order is not None:
        _check.dtype((torch.int32,), order=order)
        _check.contiguous(order=order)
        _check.shape(k.shape[:3], order=order)


def reference(k, v, ring, pool, start, length, leaving, retired, order, sink, join) -> None:
    for b in range(k.shape[0]):
        n0, n, old, new = (int(t[b]) for t in (start, length, leaving, retired))
        if n <= 0:
            continue
        kept = torch.cat([torch.arange(min(n0, sink)), torch.arange(max(old, sink), max(n0, sink))])
        pool[b][:, kept] = ring[b][:, ring_row(kept, sink, ring.shape[2])]
        rows = torch.stack([k[b], v[b]], 2)
        if order is not None:
            moved = order[b].long()[..., None, None].expand_as(rows)
            pool[b, :, n0:n] = rows.gather(1, moved)[:, k.shape[2] - (n - n0) :]
        rows = rows[:, k.shape[2] - (n - n0) :]
        if order is None:
            pool[b, :, n0:n] = rows
        pos = torch.arange(n0, n)
        pos = pos[(pos < sink) | (pos >= new)]
        ring[b][:, ring_row(pos, sink, ring.shape[2])] = rows[:, pos - n0]


@triton.jit
def _flush(
    ring, pool, start, leaving, heads, ring_rows, pool_rows, sink,
    D: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ring rows from before this call go to the pool, so that the pool alone is the whole past."""
    bh = tl.program_id(0).to(tl.int64)
    n0, old = tl.load(start + bh // heads), tl.load(leaving + bh // heads)
    r = tl.program_id(1) * TILE + tl.arange(0, TILE)
    turn = ring_rows - sink
    pos = tl.where(r < sink, r, old + ((r - old) % turn + turn) % turn)
    c = tl.arange(0, ROW)
    m = ((pos < n0) & (r < ring_rows))[:, None] & (c < 2 * D)[None, :]
    rows = tl.load(ring + (bh * ring_rows + r[:, None]) * 2 * D + c[None, :], mask=m, other=0.0)
    tl.store(pool + (bh * pool_rows + pos[:, None]) * 2 * D + c[None, :], rows, mask=m)


@triton.jit
def _write(
    k, v, out, start, length, retired, order, k_b, k_h, k_s, v_b, v_h, v_s, heads, tokens, out_rows, sink, tiles,
    TO_RING: tl.constexpr, ORDERED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid-stride over (row, head, tile of columns); `out` is the pool, or the ring for the positions it keeps."""
    per_head = tl.cdiv(tokens, TILE)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        bh = (tile // per_head).to(tl.int64)
        b, h = bh // heads, bh % heads
        n0, n, new = tl.load(start + b), tl.load(length + b), tl.load(retired + b)
        col = (tile % per_head) * TILE + tl.arange(0, TILE)
        pos = n - tokens + col
        keep = (col < tokens) & (pos >= n0)
        at = pos
        if TO_RING:
            keep = keep & ((pos < sink) | (pos >= new))
            at = tl.where(pos < sink, pos, sink + tl.maximum(pos - sink, 0) % (out_rows - sink))
        if (n > 0) & (tl.max(keep.to(tl.int32), 0) > 0):
            d = tl.arange(0, DP)
            m = keep[:, None] & (d < D)[None, :]
            if ORDERED:
                col = tl.load(order + bh * tokens + col, mask=keep, other=0)
            far = col.to(tl.int64)[:, None]
            rows_k = tl.load(k + b * k_b + h * k_h + far * k_s + d[None, :], mask=m, other=0.0)
            rows_v = tl.load(v + b * v_b + h * v_h + far * v_s + d[None, :], mask=m, other=0.0)
            to = out + (bh * out_rows + at[:, None]) * 2 * D + d[None, :]
            tl.store(to, rows_k, mask=m)
            tl.store(to + D, rows_v, mask=m)


def cuda(k, v, ring, pool, start, length, leaving, retired, order, sink, join) -> None:
    batch, heads, pool_rows, _, d = pool.shape
    tokens, ring_rows = k.shape[2], ring.shape[2]
    strides = (*k.stride()[:3], *v.stride()[:3])
    _flush[(batch * heads, cdiv(ring_rows, TILE))](
        ring, pool, start, leaving, heads, ring_rows, pool_rows, sink, D=d, ROW=next_power_of_2(2 * d), TILE=TILE
    )

    def write(out, rows, programs, tile, to_ring):
        tiles = batch * heads * cdiv(tokens, tile)
        ordered = order is not None and not to_ring
        args = (k, v, out, start, length, retired, order if ordered else length, *strides, heads, tokens, rows, sink)
        wide = dict(D=d, DP=next_power_of_2(d), TILE=tile, num_warps=8 if tile > TILE else 4)
        _write[(min(tiles, programs),)](*args, tiles, TO_RING=to_ring, ORDERED=ordered, **wide)

    write(ring, ring_rows, 4096, TILE, True)
    used = (k, v, pool, start, length, retired)
    with beside(join, *used, *(() if order is None else (order,))):
        write(pool, pool_rows, 4096 if join else COPIERS, COPY_TILE, False)


def fake(k: Tensor, *_) -> None: ...


store_prompt = register(
    "store_prompt", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check, capturable=False
)
