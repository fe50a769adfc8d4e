"""Find the chosen blocks in the hot buffer; bring in the missing ones over the least recently used.

The hot buffer has a number of places per (row, kv head). `resident` says which block stands in each place (-1 none),
`table` where each block stands (-1 nowhere), `age` for how many calls a place has not been asked for. Hits cost
nothing. m misses take the m oldest places that are not hits (empty ones first; ties: the lower place), in order of
place, and their rows are read straight from the pool, which may be host memory.

One kernel: several programs share the misses of a head, each derives the same plan from the state, and the last one to
finish (`arrivals` counts them) commits it. The ids in `blocks` must be distinct within a head.
csrc/fetch.cu does the same with the plan in shared memory, where Triton has to take it through global memory.
"""
import math

import torch
from torch import Tensor

from torchsparsekv.ops import _check, _cuda
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._top import take_top
from torchsparsekv.ops._triton import cdiv, chain, chained, next_power_of_2, sm_count, tl, triton

SCHEMA = (
    "(Tensor blocks, Tensor pool, Tensor(a!) hot, Tensor(b!) table, Tensor(c!) resident, Tensor(d!) age, "
    "Tensor(e!) arrivals, Tensor(f!) stats) -> Tensor"
)
OLDEST = (1 << 16) - 1  # the rank of an empty place; ages saturate below it
ROWS = 16  # pool rows in flight per program and step: 8 KiB at head_dim 128
# What csrc/fetch.cu is for; the rest is left to Triton. A program has the plan of a head in registers, at most 8 places
# a thread, and in 30 KiB of shared memory. It moves 16 bytes at a time.
NATIVE_PLACES, NATIVE_THREADS, NATIVE_BYTES = 4096, (128, 512), 16


def check(blocks, pool, hot, table, resident, age, arrivals, stats) -> None:
    _check.rows(pool, hot=hot)
    _check.dtype((torch.int32,), blocks=blocks, table=table, resident=resident, age=age, arrivals=arrivals)
    _check.contiguous(blocks=blocks, table=table, resident=resident, age=age, arrivals=arrivals)
    _check.shape(hot.shape[:3], resident=resident, age=age)
    _check.shape((*hot.shape[:2], blocks.shape[-1]), blocks=blocks)
    _check.shape((*hot.shape[:2], table.shape[-1]), table=table)
    _check.shape(hot.shape[:2], arrivals=arrivals)
    _check.stats(stats, pool)
    if blocks.shape[-1] > hot.shape[2]:
        raise ValueError(f"{blocks.shape[-1]} blocks do not fit a hot buffer of {hot.shape[2]}")
    if pool.shape[2] != table.shape[2] * hot.shape[3]:
        raise ValueError(f"{pool.shape[2]} pool rows are not {table.shape[2]} blocks of {hot.shape[3]}")


def reference(blocks, pool, hot, table, resident, age, arrivals, stats) -> Tensor:
    pages = pool.unflatten(2, (-1, hot.shape[3]))
    out = torch.full_like(blocks, -1)
    for b in range(blocks.shape[0]):
        for h in range(blocks.shape[1]):
            want, where, have = blocks[b, h], table[b, h], resident[b, h]
            asked = [int(x) for x in want if x >= 0]
            missing = [x for x in asked if where[x] < 0]
            hits = {int(where[x]) for x in asked} - {-1}
            rank = [OLDEST if have[i] < 0 else min(int(age[b, h, i]), OLDEST - 2) for i in range(len(have))]
            free = sorted((i for i in range(len(have)) if i not in hits), key=lambda i: (-rank[i], i))
            for x, i in zip(missing, sorted(free[: len(missing)])):
                if have[i] >= 0:
                    where[have[i]] = -1
                have[i], where[x] = x, i
                hot[b, h, i] = pages[b, h, x]
            out[b, h] = torch.where(want >= 0, where[want.clamp(min=0).long()], -1)
            age[b, h] = (age[b, h] + 1).clamp(max=OLDEST)
            age[b, h, [int(where[x]) for x in asked]] = 0
            stats[b, h, 3] += len(asked)
            stats[b, h, 4] += len(missing)
    return out


@triton.jit
def _fetch(
    blocks, pool, hot, table, resident, age, arrivals, stats, scratch, out, n, places, total,
    OLDEST: tl.constexpr, N: tl.constexpr, C: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    j, s = tl.arange(0, N), tl.arange(0, C)
    blocks += bh * n
    table += bh * total
    resident += bh * places
    age += bh * places
    flags = scratch + (bh * parts + part) * (C + 2 * N)  # private to this program
    victims, missing = flags + C, flags + C + N

    # The plan. Hits mark their places; the misses take the oldest of the others.
    want = tl.load(blocks + j, mask=j < n, other=-1)
    tl.store(flags + s, tl.zeros((C,), tl.int32))
    place = tl.load(table + want, mask=want >= 0, other=-1)
    have = tl.load(resident + s, mask=s < places, other=-1)
    old = tl.load(age + s, mask=s < places, other=0)
    miss = (want >= 0) & (place < 0)
    order = tl.cumsum(miss.to(tl.int32), 0) - 1
    misses = tl.sum(miss.to(tl.int32), 0)
    tl.debug_barrier()
    tl.store(flags + place, tl.full((N,), 1, tl.int32), mask=place >= 0)
    tl.debug_barrier()
    used = tl.load(flags + s) > 0
    rank = tl.where(have < 0, OLDEST, tl.minimum(old, OLDEST - 2) + 1)
    rank = tl.where(used | (s >= places), 0, rank).to(tl.uint32)
    taken = take_top(rank, misses)
    tl.store(victims + tl.cumsum(taken.to(tl.int32), 0) - 1, s, mask=taken)
    tl.store(missing + order, want, mask=miss)
    tl.debug_barrier()
    place = tl.where(miss, tl.load(victims + order, mask=miss, other=-1), place)

    # Move the rows of this program's misses, ROWS at a time.
    r, w = tl.arange(0, ROWS), tl.arange(0, ROW)
    for tile in range(part, tl.cdiv(misses * P, ROWS), parts):
        flat = tile * ROWS + r
        live = flat < misses * P
        source = tl.load(missing + flat // P, mask=live, other=0).to(tl.int64) * P + flat % P
        target = tl.load(victims + flat // P, mask=live, other=0).to(tl.int64) * P + flat % P
        m = live[:, None] & (w < WIDTH)[None, :]
        rows = tl.load(pool + (bh * total * P + source[:, None]) * WIDTH + w[None, :], mask=m, other=0.0)
        tl.store(hot + (bh * places * P + target[:, None]) * WIDTH + w[None, :], rows, mask=m)

    tl.debug_barrier()
    if tl.atomic_add(arrivals + bh, 1) == parts - 1:  # every program of this head has read the state
        tl.store(out + bh * n + j, place, mask=j < n)
        tl.store(table + have, tl.full((C,), -1, tl.int32), mask=taken & (have >= 0))
        tl.store(age + s, tl.where(used | taken, 0, tl.minimum(old + 1, OLDEST)), mask=s < places)
        tl.debug_barrier()
        tl.store(table + want, place, mask=miss)
        tl.store(resident + place, want, mask=miss)
        s3, s4 = stats + bh * 5 + 3, stats + bh * 5 + 4
        tl.store(s3, tl.load(s3) + tl.sum((want >= 0).to(tl.int32), 0))
        tl.store(s4, tl.load(s4) + misses)
        tl.store(arrivals + bh, 0)


def _native(n: int, hot: Tensor) -> dict[str, int] | None:
    """How csrc/fetch.cu is compiled for `n` ids and such a hot buffer, if it is for them."""
    places, block = hot.shape[2], math.prod(hot.shape[3:]) * hot.element_size()
    if places > NATIVE_PLACES or block % NATIVE_BYTES:
        return None
    least, most = NATIVE_THREADS
    threads = min(most, max(least, next_power_of_2(cdiv(places, 4))))  # up to 4 places each, rather than more warps
    ids = max(1, cdiv(n, threads))
    return dict(THREADS=threads, IDS=ids, PLACES=cdiv(places, threads), QUADS=block // NATIVE_BYTES, OLDEST=OLDEST)


def launch(kernel, wanted: Tensor | None, blocks, pool, hot, table, resident, age, arrivals, stats, out) -> None:
    """For the heads that are `wanted` or, if None is given, for all; `kernel` is the Triton kernel of that."""
    batch, heads, places, p = hot.shape[:4]
    n = blocks.shape[2]
    # Programs per head: enough to cover the chip, no more than there can be tiles of misses.
    grid = (batch * heads, max(1, min(cdiv(n * p, ROWS), sm_count(pool.device) // (batch * heads))), 1)
    shape = _native(n, hot) if _cuda.aligned(pool, hot) else None
    kernels = _cuda.load("fetch", hot.device, **shape) if shape else None
    args = blocks, pool, hot, table, resident, age, arrivals, stats
    if shape and kernels:
        kernels.launch("fetch", grid, shape["THREADS"], wanted, *args, out, n, places, table.shape[2])
    else:
        _by_triton(kernel, grid, () if wanted is None else (wanted,), *args, out)


def _by_triton(kernel, grid, first, blocks, pool, hot, table, resident, age, arrivals, stats, out) -> None:
    (places, p, _, d), n = hot.shape[2:], blocks.shape[2]
    wide_n, wide_c, programs = max(16, next_power_of_2(n)), max(16, next_power_of_2(places)), grid[0] * grid[1]
    scratch = torch.empty(programs * (wide_c + 2 * wide_n), dtype=torch.int32, device=blocks.device)
    kernel[grid](
        *first, blocks, pool, hot, table, resident, age, arrivals, stats, scratch, out, n, places, table.shape[2],
        OLDEST=OLDEST, N=wide_n, C=wide_c, P=p, WIDTH=2 * d, ROW=next_power_of_2(2 * d), ROWS=ROWS,
        num_warps=4 if wide_c <= 512 else 8, **chained(hot.device, programs),
    )  # fmt: skip


def cuda(blocks, pool, hot, table, resident, age, arrivals, stats) -> Tensor:
    out = torch.empty_like(blocks)
    launch(_fetch, None, blocks, pool, hot, table, resident, age, arrivals, stats, out)
    return out


def fake(blocks: Tensor, *_) -> Tensor:
    return torch.empty_like(blocks)


fetch = register("fetch", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
