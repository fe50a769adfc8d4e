"""Write the newest token of every row into the ring, and move the tokens that leave the ring into the pool.

Ring rows are `[sink rows | window + interval rows used in turn]`. On most steps nothing leaves (`leaving == retired`)
and the copy returns at once; on the others it writes `interval` rows to the pool, which may be host memory.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import cdiv, chain, chained, next_power_of_2, tl, triton

SCHEMA = (
    "(Tensor k, Tensor v, Tensor(a!) ring, Tensor(b!) pool, Tensor(c!) stats, Tensor length, Tensor leaving, "
    "Tensor retired, int sink, int interval) -> ()"
)
TILE = 16  # rows a program copies at once: 8 KiB at head_dim 128, the size at which writes to the host saturate


def check(k, v, ring, pool, stats, length, leaving, retired, sink, interval) -> None:
    _check.rows(pool, ring=ring)
    _check.dense_last(k=k, v=v)
    _check.same_dtype(k=k, v=v, pool=pool)
    _check.shape((*pool.shape[:2], 1, pool.shape[-1]), k=k, v=v)
    _check.stats(stats, pool)
    _check.counters(k.shape[0], length=length, leaving=leaving, retired=retired)
    if ring.shape[2] < sink + interval:
        raise ValueError(f"a ring of {ring.shape[2]} rows cannot hold {sink} sink rows and {interval} leaving at once")


def ring_row(pos: Tensor, sink: int, ring_rows: int) -> Tensor:
    """The ring row that holds position `pos` while it is in the ring."""
    return torch.where(pos < sink, pos, sink + (pos - sink) % (ring_rows - sink))


def reference(k, v, ring, pool, stats, length, leaving, retired, sink, interval) -> None:
    for b in range(k.shape[0]):
        n, old, new = (int(t[b]) for t in (length, leaving, retired))
        newest = torch.stack([k[b, :, 0], v[b, :, 0]], 1)
        if n > 0:
            ring[b, :, int(ring_row(torch.tensor(n - 1), sink, ring.shape[2]))] = newest
        if new > old and n > 0:
            pos = torch.arange(old, new)
            pool[b, :, old:new] = ring[b, :, ring_row(pos, sink, ring.shape[2])]
        if n > 0:
            stats[b] += torch.tensor([1, n, min(n, sink) + max(n - new, 0), 0, 0])


@triton.jit
def _append(
    k, v, ring, pool, stats, length, leaving, retired, k_b, k_h, v_b, v_h, heads, ring_rows, pool_rows, sink,
    D: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    b, h = bh // heads, bh % heads
    n = tl.load(length + b)
    old, new = tl.load(leaving + b), tl.load(retired + b)
    if n > 0:
        turn = ring_rows - sink
        c = tl.arange(0, ROW)  # one row: K then V
        live = c < 2 * D
        newest = tl.load(k + b * k_b + h * k_h + c, mask=c < D, other=0.0)
        newest += tl.load(v + b * v_b + h * v_h + c - D, mask=(c >= D) & live, other=0.0)
        ring += bh * ring_rows * 2 * D
        if part == 0:
            last = n - 1
            at = tl.where(last < sink, last, sink + tl.maximum(last - sink, 0) % turn)
            tl.store(ring + at * 2 * D + c, newest, mask=live)
            s = stats + bh * 5
            tl.store(s, tl.load(s) + 1)
            tl.store(s + 1, tl.load(s + 1) + n)
            tl.store(s + 2, tl.load(s + 2) + tl.minimum(n, sink) + tl.maximum(n - new, 0))
        if old + part * TILE < new:
            pos = old + part * TILE + tl.arange(0, TILE)
            m = (pos < new)[:, None] & live[None, :]
            at = sink + tl.maximum(pos - sink, 0) % turn
            rows = tl.load(ring + at[:, None] * 2 * D + c[None, :], mask=m, other=0.0)
            # With window 0 the newest token leaves in the same step; another program may still be writing it.
            rows = tl.where((pos == n - 1)[:, None], newest[None, :], rows)
            tl.store(pool + (bh * pool_rows + pos[:, None]) * 2 * D + c[None, :], rows, mask=m)


def cuda(k, v, ring, pool, stats, length, leaving, retired, sink, interval) -> None:
    batch, heads, rows, _, d = pool.shape
    _append[(batch * heads, cdiv(interval, TILE))](
        k, v, ring, pool, stats, length, leaving, retired, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        heads, ring.shape[2], rows, sink, D=d, ROW=next_power_of_2(2 * d), TILE=TILE, 
        **chained(ring.device, batch * heads * cdiv(interval, TILE)),
    )  # fmt: skip


def fake(k: Tensor, *_) -> None: ...


append = register("append", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
