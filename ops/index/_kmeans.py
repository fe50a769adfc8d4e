"""K-means of many short stretches of keys at once: the plain definition, and kernels that are matrix products.

A stretch is at most 4096 keys with its own clusters. Assignment is a product of keys and centroids with a running
maximum; the means are a product of the membership matrix and the keys, so the order of summation is fixed and no float
is added atomically. At 32K tokens, 8 heads of 128 and 16 keys a cluster a round is 34 GFLOP.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._top import take_top
from torchsparsekv.ops._triton import cdiv, next_power_of_2, tl, triton

WIDEST = 4096  # keys of a stretch: what one program can rank at once
SEEDS = 1 << 16
KEYS, CENTRES = 1 << 15, 1 << 14  # bytes of a tile: three stages of them fit the smallest GPUs


# ---------------------------------------------------------------- the definition


def mixed(count: int, seed: int) -> Tensor:
    """An integer hash below 2^31 of each of 0, 1, ... count - 1 and the seed."""
    x = ((torch.arange(count) + 1) * 2654435761 + seed * 9973) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 73244475) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0x7FFFFFFF


def drawn(keys: int, clusters: int, seed: int) -> Tensor:
    """The keys that are the first half of the centroids: one of each of as many parts of the stretch."""
    c = torch.arange(max(1, clusters // 2))
    begin, end = c * keys // len(c), (c + 1) * keys // len(c)
    return begin + mixed(len(c), seed) % (end - begin)


def spread(far: Tensor, count: int, seed: int) -> Tensor:
    """The keys that are the other half, in order of position, from their squared distances to the first [heads, keys].

    Those with the largest ratios of distance and a number from (0, 1], which is a hash: drawn without replacement, with
    chances close to proportional to the distance.
    """
    chance = ((mixed(far.shape[1], seed + SEEDS) >> 15) + 1).to(far.device) / 65536
    return (far / chance).argsort(dim=-1, descending=True, stable=True)[:, :count].sort(-1).values


def nearest(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Of every key the nearest centroid, ties to the lower, and its squared distance."""
    c = centres.float()
    score, name = (x.float() @ c.transpose(-1, -2) - c.square().sum(-1)[:, None] / 2).max(-1)
    return name, (x.float().square().sum(-1) - 2 * score).clamp(min=0)


def means(x: Tensor, name: Tensor, centres: Tensor) -> Tensor:
    """The mean of every cluster in the type of the keys; of an empty one what it was."""
    member = name[:, None] == torch.arange(centres.shape[1], device=x.device)[:, None]
    count = member.sum(-1, keepdim=True)
    total = member.float() @ x.float()
    return torch.where(count > 0, (total / count.clamp(min=1)).to(x.dtype), centres)


def repaired(name: Tensor, far: Tensor, clusters: int) -> Tensor:
    """`name` of one head with no cluster empty: the empty ones in turn take the farthest keys in order of position."""
    count = torch.bincount(name, minlength=clusters)
    empty = (count == 0).nonzero()[:, 0]
    if len(empty) == 0:
        return name
    leads = torch.zeros_like(name, dtype=torch.bool)
    for c in range(clusters):
        leads[(name == c).nonzero()[:1, 0]] = True
    taken = far.masked_fill(leads, -1).argsort(descending=True, stable=True)[: len(empty)].sort().values
    return name.index_put((taken,), empty)


def kmeans(x: Tensor, clusters: int, rounds: int, seed: int) -> tuple[Tensor, Tensor]:
    """Centroids [heads, clusters, head_dim] and the cluster of every key of x [heads, keys, head_dim]."""
    centres = x[:, drawn(x.shape[1], clusters, seed).to(x.device)]
    others = spread(nearest(x, centres)[1], clusters - centres.shape[1], seed)
    centres = torch.cat([centres, x.gather(1, others[..., None].expand(-1, -1, x.shape[2]))], 1)
    for _ in range(rounds):
        name, far = nearest(x, centres)
        centres = means(x, name, centres)
    name = torch.stack([repaired(n, f, clusters) for n, f in zip(name, far)])
    return means(x, name, centres), name


# ---------------------------------------------------------------- kernels: one stretch of one (row, head) each


@triton.jit
def _stretch(start, length, retired, units, heads, tokens, sink, size, slot, S: tl.constexpr):
    """(row and head, column of the first key, keys, position of the first, first unit, clusters) of stretch `slot`."""
    per_head = tl.cdiv(tokens, S)
    bh, i = (slot // per_head).to(tl.int64), slot % per_head
    b = bh // heads
    n, end = tl.load(length + b), tl.load(retired + b)
    begin = tl.maximum(tl.load(start + b), sink) + i * S
    keys = tl.where(n > 0, tl.maximum(tl.minimum(end - begin, S), 0), 0)
    return bh, tokens - n + begin, keys, begin, tl.load(units + bh) + i * (S // size), tl.maximum(keys // size, 1)


@triton.jit
def _mix(i, seed):
    """`mixed`."""
    x = (i + 1).to(tl.uint32) * 2654435761 + seed * 9973
    x = (x ^ (x >> 15)) * 73244475
    return ((x ^ (x >> 16)) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _seat(
    k, units, centroid, half, pick, c, live, slot, bh, unit, k_b, k_h, k_s, heads, most, clusters, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """The keys in columns `pick` become the centroids c."""
    d = tl.arange(0, DP)
    m = live[:, None] & (d < D)[None, :]
    k += bh // heads * k_b + bh % heads * k_h
    row = tl.load(k + pick.to(tl.int64)[:, None] * k_s + d[None, :], mask=m, other=0.0)
    tl.store(centroid + (bh * most + unit + c[:, None]) * D + d[None, :], row, mask=m)
    _halve(half, slot, c, live, row, clusters)


@triton.jit
def _draw(
    k, units, centroid, half, order, start, length, retired, k_b, k_h, k_s, heads, tokens, most, sink, size, seed,
    S: tl.constexpr, C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The first half of the centroids; and the order of columns, for those that nothing is done with."""
    slot = tl.program_id(0)
    bh, column, keys, _, unit, clusters = _stretch(start, length, retired, units, heads, tokens, sink, size, slot, S)
    at = slot % tl.cdiv(tokens, S) * S + tl.program_id(1) * (S // C * TILE) + tl.arange(0, S // C * TILE)
    tl.store(order + bh * tokens + at, at, mask=at < tokens)
    count = tl.maximum(clusters // 2, 1)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if (keys > 0) & (tl.program_id(1) * TILE < count):
        begin, end = c * keys // count, (c + 1) * keys // count
        pick = column + begin + _mix(c, seed) % tl.maximum(end - begin, 1)
        _seat(
            k, units, centroid, half, pick, c, c < count, slot, bh, unit, k_b, k_h, k_s, heads, most, S // size, D, DP
        )


@triton.jit
def _spread(
    k, units, centroid, half, far, place, start, length, retired, k_b, k_h, k_s, heads, tokens, most, sink, size, seed,
    S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The other half, by distance; `place` serves to list the keys that are chosen."""
    slot = tl.program_id(0)
    bh, column, keys, _, unit, clusters = _stretch(start, length, retired, units, heads, tokens, sink, size, slot, S)
    count = tl.maximum(clusters // 2, 1)
    if (keys > 0) & (clusters > count):
        i, j = tl.arange(0, S), tl.arange(0, TILE)
        at = slot.to(tl.int64) * S
        chance = ((_mix(i, seed) >> 15) + 1).to(tl.float32) / 65536
        weight = tl.div_rn(tl.load(far + at + i, mask=i < keys, other=0.0), chance)
        taken = take_top(tl.where(i < keys, weight.to(tl.uint32, bitcast=True) + 1, 0), clusters - count, S, 16)
        turn = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(place + at + turn, i, mask=taken)
        tl.debug_barrier()
        for first in range(0, clusters - count, TILE):
            live = first + j < clusters - count
            pick = column + tl.load(place + at + first + j, mask=live, other=0)
            _seat(
                k, units, centroid, half, pick, count + first + j, live, slot, bh, unit, k_b, k_h, k_s, heads, most,
                S // size, D, DP,
            )  # fmt: skip


@triton.jit
def _halve(half, slot, c, live, row, clusters):
    """Half the square of centroids, for the assignment: it would have to go through registers for it there."""
    wide = row.to(tl.float32)
    tl.store(half + slot.to(tl.int64) * clusters + c, tl.sum(wide * wide, 1) * 0.5, mask=live)


@triton.jit
def _assign(
    k, units, centroid, half, name, far, start, length, retired, k_b, k_h, k_s, heads, tokens, most, sink, size,
    S: tl.constexpr, FAR: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    CENTRES: tl.constexpr,
):  # fmt: skip
    """Every key to its nearest centroid. Best scores are kept per column of the tile and compared once, at the end.

    With FAR also the squared distance; with HALF of the centroids that are drawn first.
    """
    slot = tl.program_id(0)
    bh, column, keys, _, unit, clusters = _stretch(start, length, retired, units, heads, tokens, sink, size, slot, S)
    if HALF:
        clusters = tl.maximum(clusters // 2, 1)
    if tl.program_id(1) * TILE < keys:
        i = tl.program_id(1) * TILE + tl.arange(0, TILE)
        d, j = tl.arange(0, DP), tl.arange(0, CENTRES)
        m = (i < keys)[:, None] & (d < D)[None, :]
        k += bh // heads * k_b + bh % heads * k_h
        x = tl.load(k + (column + i).to(tl.int64)[:, None] * k_s + d[None, :], mask=m, other=0.0)
        best = tl.full((TILE, CENTRES), float("-inf"), tl.float32)
        tile = tl.zeros((TILE, CENTRES), tl.int32)
        centroid += (bh * most + unit) * D
        half += slot.to(tl.int64) * (S // size)
        for at in range(0, clusters, CENTRES):
            live = at + j < clusters
            at_c = centroid + (at + j)[None, :] * D + d[:, None]
            c = tl.load(at_c, mask=live[None, :] & (d < D)[:, None], other=0.0)
            own = tl.load(half + at + j, mask=live, other=float("inf"))
            score = tl.dot(x, c, input_precision="ieee") - own[None, :]
            better = score > best
            best, tile = tl.where(better, score, best), tl.where(better, at, tile)
        top = tl.max(best, 1)
        chosen = tl.min(tl.where(best == top[:, None], tile + j[None, :], S), 1)
        to = slot.to(tl.int64) * S + i
        tl.store(name + to, chosen, mask=i < keys)
        if FAR:
            x = x.to(tl.float32)
            tl.store(far + to, tl.maximum(tl.sum(x * x, 1) - 2 * top, 0.0), mask=i < keys)


@triton.jit
def _means(
    k, units, centroid, half, name, place, count, start, length, retired, k_b, k_h, k_s, heads, tokens, most, sink,
    size, S: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    CENTRES: tl.constexpr,
):  # fmt: skip
    """The mean of every cluster. With RANK also how many keys it has, and of every key how many of it come before."""
    slot = tl.program_id(0)
    bh, column, keys, _, unit, clusters = _stretch(start, length, retired, units, heads, tokens, sink, size, slot, S)
    c = tl.program_id(1) * CENTRES + tl.arange(0, CENTRES)
    if (keys > 0) & (tl.program_id(1) * CENTRES < clusters):
        i, d = tl.arange(0, TILE), tl.arange(0, DP)
        k += bh // heads * k_b + bh % heads * k_h
        total, members = tl.zeros((CENTRES, DP), tl.float32), tl.zeros((CENTRES,), tl.int32)
        name, place = name + slot.to(tl.int64) * S, place + slot.to(tl.int64) * S
        for at in range(0, keys, TILE):
            live = at + i < keys
            of = tl.load(name + at + i, mask=live, other=-1)
            m = live[:, None] & (d < D)[None, :]
            x = tl.load(k + (column + at + i).to(tl.int64)[:, None] * k_s + d[None, :], mask=m, other=0.0)
            member = c[:, None] == of[None, :]
            total += tl.dot(member.to(x.dtype), x, input_precision="ieee")
            if RANK:
                one = member.to(tl.int32)
                rank = tl.sum(one * (members[:, None] + tl.cumsum(one, 1) - 1), 0)
                tl.store(place + at + i, rank, mask=live & (tl.max(one, 0) > 0))
            members += tl.sum(member.to(tl.int32), 1)
        m = ((members > 0) & (c < clusters))[:, None] & (d < D)[None, :]
        size_of = tl.maximum(members, 1).to(tl.float32)
        mean = tl.div_rn(total, tl.broadcast_to(size_of[:, None], (CENTRES, DP))).to(centroid.dtype.element_ty)
        tl.store(centroid + (bh * most + unit + c[:, None]) * D + d[None, :], mean, mask=m)
        _halve(half, slot, c, (members > 0) & (c < clusters), mean, S // size)
        if RANK:
            tl.store(count + slot.to(tl.int64) * (S // size) + c, members, mask=c < clusters)


@triton.jit
def _repair(
    units, name, far, place, count, start, length, retired, heads, tokens, sink, size, S: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Every empty cluster takes a key; `count` then serves to list the empty ones."""
    slot = tl.program_id(0)
    _, _, keys, _, _, clusters = _stretch(start, length, retired, units, heads, tokens, sink, size, slot, S)
    c, i = tl.arange(0, C), tl.arange(0, S)
    count += slot.to(tl.int64) * (S // size)
    empty = tl.load(count + c, mask=c < tl.where(keys > 0, clusters, 0), other=1) == 0
    lacking = tl.sum(empty.to(tl.int32), 0)
    if lacking > 0:
        at = slot.to(tl.int64) * S + i
        away = tl.load(far + at, mask=i < keys, other=0.0)
        follows = tl.load(place + at, mask=i < keys, other=0) > 0
        key = tl.where(follows & (i < keys), away.to(tl.uint32, bitcast=True) + 1, 0)
        taken = take_top(key, lacking, S, 16)
        tl.debug_barrier()
        tl.store(count + tl.cumsum(empty.to(tl.int32), 0) - 1, c, mask=empty)
        tl.debug_barrier()
        turn = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(name + at, tl.load(count + turn, mask=taken, other=0), mask=taken)


@triton.jit
def _order(
    units, first, order, name, place, count, start, length, retired, heads, tokens, most, sink, size, S: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Where the units begin, and the columns in the order of the pool."""
    slot = tl.program_id(0)
    bh, column, keys, begin, unit, clusters = _stretch(
        start, length, retired, units, heads, tokens, sink, size, slot, S
    )
    if keys > 0:
        c, i = tl.arange(0, C), tl.arange(0, S)
        members = tl.load(count + slot.to(tl.int64) * (S // size) + c, mask=c < clusters, other=0)
        first += bh * (most + 1) + unit
        tl.store(first + 1 + c, begin + tl.cumsum(members, 0), mask=c < clusters)
        before = count + slot.to(tl.int64) * (S // size)  # `first` of the unit before may be another program's
        tl.debug_barrier()
        tl.store(before + c, tl.cumsum(members, 0) - members, mask=c < clusters)
        tl.debug_barrier()
        at = slot.to(tl.int64) * S + i
        of = tl.load(name + at, mask=i < keys, other=0)
        row = tl.load(before + of, mask=i < keys, other=0) + tl.load(place + at, mask=i < keys, other=0)
        tl.store(order + bh * tokens + column + row, column + i, mask=i < keys)


@triton.jit
def _count(units, start, length, retired, heads, sink, size, total, S: tl.constexpr, N: tl.constexpr):
    """The clusters of this call, added to the units."""
    bh = tl.arange(0, N)
    b = bh // heads
    live = bh < total
    begin = tl.maximum(tl.load(start + b, mask=live, other=0), sink)
    keys = tl.maximum(tl.load(retired + b, mask=live, other=0) - begin, 0)
    keys = tl.where(tl.load(length + b, mask=live, other=0) > 0, keys, 0)
    rest = keys % S
    more = keys // S * (S // size) + tl.where(rest > 0, tl.maximum(rest // size, 1), 0)
    tl.store(units + bh, tl.load(units + bh, mask=live, other=0) + more, mask=live)


def launch(
    k: Tensor, units: Tensor, first: Tensor, centroid: Tensor, start: Tensor, length: Tensor, retired: Tensor,
    sink: int, size: int, stretch: int, rounds: int, seed: int,
) -> Tensor:  # fmt: skip
    batch, heads, tokens, d = k.shape
    slots, clusters = batch * heads * cdiv(tokens, stretch), stretch // size
    most = centroid.shape[2]
    new = lambda n, dtype: torch.empty(slots * n, dtype=dtype, device=k.device)  # noqa: E731
    name, place, far = new(stretch, torch.int32), new(stretch, torch.int32), new(stretch, torch.float32)
    half, count = new(clusters, torch.float32), new(clusters, torch.int32)
    order = torch.empty((batch, heads, tokens), dtype=torch.int32, device=k.device)
    now, strides = (start, length, retired), k.stride()[:3]
    at, wide = (heads, tokens, most, sink, size), next_power_of_2(d)
    row = wide * k.element_size()
    keys, centres = min(128, KEYS // row), min(64, CENTRES // row)
    shape = dict(S=stretch, D=d, DP=wide)
    tiles = cdiv(clusters, centres)
    draw = min(16, next_power_of_2(clusters))
    _draw[(slots, cdiv(clusters, draw))](
        k, units, centroid, half, order, *now, *strides, *at, seed, C=clusters, TILE=draw, **shape
    )

    def assign(far_too: bool, first_half: bool) -> None:
        _assign[(slots, cdiv(stretch, keys))](
            k, units, centroid, half, name, far, *now, *strides, *at, FAR=far_too, HALF=first_half, TILE=keys,
            CENTRES=centres, **shape, num_warps=8,
        )  # fmt: skip

    def update(rank: bool) -> None:
        _means[(slots, tiles)](
            k, units, centroid, half, name, place, count, *now, *strides, *at, RANK=rank, TILE=centres,
            CENTRES=centres, **shape,
        )  # fmt: skip

    assign(True, True)
    _spread[(slots,)](
        k, units, centroid, half, far, place, *now, *strides, *at, seed + SEEDS, TILE=draw, **shape, num_warps=8
    )
    for i in range(rounds):
        last = i == rounds - 1
        assign(last, False)
        update(last)
    ends = dict(S=stretch, C=next_power_of_2(clusters), num_warps=8)
    _repair[(slots,)](units, name, far, place, count, *now, heads, tokens, sink, size, **ends)
    update(True)
    _order[(slots,)](units, first, order, name, place, count, *now, *at, **ends)
    total = batch * heads
    _count[(1,)](units, *now, heads, sink, size, total, S=stretch, N=next_power_of_2(total))
    return order
