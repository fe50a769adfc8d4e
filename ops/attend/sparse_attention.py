"""Attention of one query token over the ring (sinks, window) and the chosen blocks in the hot buffer.

Of the ring the sinks count and what stands from `retired` on, which is one position per row or one per (row, kv head).
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check, _cuda
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import cdiv, chain, chained, sm_count, tl, triton
from torchsparsekv.ops.attend._rows import ring_positions
from torchsparsekv.ops.attend._split import Parts, load_query, softmax_attention, step, store_part, tile_of

SCHEMA = (
    "(Tensor q, Tensor ring, Tensor hot, Tensor places, Tensor length, Tensor retired, Tensor? sinks, int sink, "
    "float scale, float softcap) -> Tensor"
)
# What csrc/sparse_attention.cu is for; other shapes and types are left to Triton.
NATIVE_DIMS, NATIVE_GROUP = (64, 128, 256), 8  # query heads of a kv head
# Programs of a kv head, and warps of each. 16 warps would take a tile of 1360 tokens each, but they fill a
# multiprocessor, and such a program cannot be launched before fetch is done: 10.6 instead of 10.4 us for both. With
# clusters of 16, which not every GPU has, they take 17.
NATIVE_CLUSTER, NATIVE_WARPS = 8, 8


def check(q, ring, hot, places, length, retired, sinks, sink, scale, softcap) -> None:
    _check.rows(ring, hot=hot)
    _check.one_query(q, ring)
    _check.sinks(sinks, q)
    _check.same_dtype(q=q, ring=ring)
    _check.dtype((torch.int32,), places=places)
    _check.contiguous(places=places)
    _check.shape((*hot.shape[:2], places.shape[-1]), places=places)
    _check.counters(q.shape[0], length=length)
    if retired.dim() == 1:
        return _check.counters(q.shape[0], retired=retired)
    _check.dtype((torch.int32,), retired=retired)
    _check.contiguous(retired=retired)
    _check.shape(ring.shape[:2], retired=retired)


def reference(q, ring, hot, places, length, retired, sinks, sink, scale, softcap) -> Tensor:
    per_head = retired.view(q.shape[0], -1).expand(-1, ring.shape[1])
    near = torch.stack([ring_positions(ring.shape[2], length, r, sink) for r in per_head.unbind(1)], 1) >= 0
    at = places.clamp(min=0).long()[..., None, None, None].expand(*places.shape, *hot.shape[3:])
    chosen = hot.gather(2, at).flatten(2, 3)
    found = (places >= 0).repeat_interleave(hot.shape[3], -1)
    rows = torch.cat([ring, chosen], 2)
    live = torch.cat([near, found], -1)
    rows = rows.masked_fill(~live[..., None, None], 0)
    live = live.repeat_interleave(q.shape[1] // ring.shape[1], 1).unsqueeze(2)
    out = softmax_attention(q, rows[..., 0, :], rows[..., 1, :], live, sinks, scale, softcap)
    return torch.where((length < 0).view(-1, 1, 1, 1), torch.nan, out).contiguous()


@triton.jit
def _attend(
    q, ring, hot, places, length, retired, parts, tops, totals, q_b, q_h, heads, ring_rows, hot_blocks, n, sink, scale,
    softcap, splits, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr, PER_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    x = load_query(q, q_b, q_h, b, h, G, GP, D, DP)
    top = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DP), tl.float32)
    i = tl.arange(0, TILE)
    end, old = tl.load(length + b), tl.load(retired + (bh if PER_HEAD else b))
    turn = ring_rows - sink
    near_tiles = tl.cdiv(ring_rows, TILE)
    for tile in range(split, near_tiles, splits):
        row = tile * TILE + i
        pos = tl.where(row < sink, row, old + ((row - old) % turn + turn) % turn)
        live = (row < ring_rows) & (pos < tl.where(row < sink, tl.minimum(end, sink), end))
        rows = ring + (bh * ring_rows + row) * 2 * D
        top, total, acc = step(x, rows, live, top, total, acc, scale, softcap, D, DP)
    first = (split - near_tiles % splits + splits) % splits  # go on dealing tiles where the ring stopped
    for tile in range(first, tl.cdiv(n * P, TILE), splits):
        token = tile * TILE + i
        place = tl.load(places + bh * n + token // P, mask=token < n * P, other=-1)
        rows = hot + ((bh * hot_blocks + tl.maximum(place, 0)) * P + token % P) * 2 * D
        top, total, acc = step(x, rows, place >= 0, top, total, acc, scale, softcap, D, DP)
    store_part(parts, tops, totals, bh * splits + split, acc, top, total, GP, DP)


def cuda(q, ring, hot, places, length, retired, sinks, sink, scale, softcap) -> Tensor:
    kernels = _native(q, ring, hot, sinks)
    rest = places, length, retired, sinks, sink, scale, softcap
    return _by_cuda(kernels, q, ring, hot, *rest) if kernels else _by_triton(q, ring, hot, *rest)


def _cluster(q: Tensor, ring: Tensor) -> int:
    """Programs per kv head: a power of two, for at most one program a multiprocessor; 8 of them find their places
    together only where half are free (128 programs: 11.0 us, in clusters of 4 10.2 with 64)."""
    room = max(1, sm_count(q.device) // (ring.shape[0] * ring.shape[1]))
    return NATIVE_CLUSTER if room >= 2 * NATIVE_CLUSTER else min(NATIVE_CLUSTER // 2, 1 << room.bit_length() - 1)


def _native(q, ring, hot, sinks) -> _cuda.Module | None:
    """The kernel of csrc/sparse_attention.cu, if these arguments are what it is for."""
    d, group = q.shape[3], q.shape[1] // ring.shape[1]
    fits = d in NATIVE_DIMS and group <= NATIVE_GROUP and q.dtype in (torch.float16, torch.bfloat16)
    if not fits or (sinks is not None and sinks.dtype != q.dtype):
        return None
    if q.stride(0) % 8 or q.stride(1) % 8 or not _cuda.aligned(q, ring, hot):
        return None
    sizes = dict(D=d, G=group, P=hot.shape[3], WARPS=NATIVE_WARPS, CLUSTER=_cluster(q, ring))
    return _cuda.load("sparse_attention", q.device, **sizes, BF16=int(q.dtype == torch.bfloat16))


def _by_cuda(kernels, q, ring, hot, places, length, retired, sinks, sink, scale, softcap) -> Tensor:
    batch, heads, ring_rows, _, d = ring.shape
    out, warps, p = fake(q), NATIVE_WARPS, hot.shape[3]
    kernels.launch(
        "attend", (batch * heads * _cluster(q, ring), 1, 1), 32 * warps, q, ring, hot, places, length, retired, sinks,
        out, q.stride(0), q.stride(1), heads, heads if retired.dim() == 1 else 1, ring_rows, hot.shape[2] * p,
        places.shape[2] * p, sink, float(scale), float(softcap), shared=warps * q.shape[1] // heads * (d + 4) * 4,
    )  # fmt: skip
    return out


def _by_triton(q, ring, hot, places, length, retired, sinks, sink, scale, softcap) -> Tensor:
    batch, heads, ring_rows = ring.shape[:3]
    n, p, d = places.shape[2], hot.shape[3], q.shape[3]
    tile = tile_of(q)  # one tile a program at batch 1; two stages, since there is seldom a third tile to prefetch
    tiles = cdiv(ring_rows, tile) + cdiv(n * p, tile)
    splits = max(1, min(tiles, cdiv(2 * sm_count(q.device), batch * heads)))
    parts = Parts(q, heads, splits)
    _attend[(batch * heads, splits)](
        q, ring, hot, places, length, retired, parts.acc, parts.top, parts.total, q.stride(0), q.stride(1), heads,
        ring_rows, hot.shape[2], n, sink, scale, softcap, splits, D=d, P=p, TILE=tile, PER_HEAD=retired.dim() == 2,
        **parts.shape(), num_stages=2, **chained(q.device, batch * heads * splits),
    )  # fmt: skip
    return parts.combine(q, length, sinks)


def fake(q: Tensor, *_) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


sparse_attention = register("sparse_attention", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
