"""How csrc/sparse_attention.cu is compiled and launched: its shapes, its programs and warps, and its shared memory.

Two ops run it: sparse_attention over a ring and a hot buffer, and listed_attention over the units that are listed for
the requests of an engine. dense_attention takes the same queries (`refused`) with a kernel of its own.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.triton import cdiv, shared_bytes, sm_count
from torchsparsekv.ops.rest.views import NO_REST, Rest
from torchsparsekv.ops.store.views import Attention

# Triton takes other shapes.
DIMS, MOST_HEADS = (64, 128, 256), 8  # head_dim; query heads of a kv head at most
# Warps per program: the least, the most behind fetch, and the most. A program of 16 warps fills a multiprocessor, so it
# cannot start before fetch ends: fetch and attention together take 10.6 us, not 10.4, at 1360 tokens.
WARPS, FETCH_WARPS, MOST_WARPS = 8, 12, 16
TILE = 16  # tokens, or groups of the rest, that a warp takes at a time
RESERVED = 1 << 10  # bytes of shared memory that the driver takes for each program
# Bytes of shared memory of a multiprocessor at the share that ops/_machinery/cuda.py asks for: 40 % of 228 KiB, rounded
# up to a size that the hardware has. A larger share costs more than it gains, since it is taken from the L1.
SHARED_ROOM = 100 << 10
MOST_GROUP = 1 << 15  # pool rows of a group of the rest: a weight times a group must fit fp16


class Launch(NamedTuple):
    kernels: _cuda.Module
    warps: int
    cluster: int
    shared: int  # bytes of dynamic shared memory of a program


def cluster_of(device: torch.device, heads: int) -> int:
    """Programs per kv head, a power of two; above 1 only if every program has a multiprocessor of its own. `heads`: the
    kv heads of all rows together.

    The programs of a cluster need neighbouring multiprocessors, so large clusters do not fill the GPU. A cluster of 8
    starts late if fewer than half of the multiprocessors are free: 16 kv heads take 11.0 us in clusters of 8 and 10.2
    in clusters of 4. A cluster of 4 needs 4.5 multiprocessors a kv head: 28 heads fit on 132, and 32 do not. With the
    rest and 256 selected tokens these take 25 us in clusters of 4, and 19 in clusters of 2.
    """
    room = sm_count(device) / heads
    return 8 if room >= 16 else 4 if room >= 4.5 else 2 if room >= 2 else 1


def warps_of(
    device: torch.device, dim: int, heads: int, cluster: int, tiles: int, rest: bool, most: int = FETCH_WARPS,
    pairs: bool = False,
) -> int:  # fmt: skip
    """Warps per program. Wide heads: 8, because registers allow no more. With the rest: 8 if two such programs share a
    multiprocessor (`pairs`), else 16. Without it: 8 if a multiprocessor runs several programs, else the fewest from 8
    on with as few rounds of tiles as `most`.

    With the rest a program has more to do, and some programs have more tokens than others. 176 kv heads with 256
    selected tokens take 47 us in pairs, and 53 with 16 warps. Programs with more tokens have larger tables, so two do
    not fit: with 1024 tokens 176 kv heads take 127 us with 8 warps, and 92 with 16.
    """
    if dim > 128 or pairs:
        return WARPS
    if rest:
        return MOST_WARPS
    if heads * cluster > sm_count(device):
        return WARPS
    rounds = cdiv(tiles, cluster * most)
    return max(WARPS, cdiv(tiles, cluster * rounds))


def dynamic_bytes(dim: int, group: int, warps: int, cluster: int, tiles: int, groups: int) -> int:
    """Bytes of dynamic shared memory of a program: the tables of the rest, then in their place the sums it sends. The
    tables are the products and tokens of its groups, and its list of tokens with their products. One program may get
    all tokens, so there is room for all."""
    sent = warps * group * (dim + 4) * 4
    tables = 4 * TILE * (cdiv(cdiv(groups, TILE), cluster) * (group + 1) + tiles * (group + 2)) if groups else 0
    return max(tables, sent)


def static_bytes(dim: int, group: int, warps: int, cluster: int, rest: bool) -> int:
    """Bytes of static shared memory of a program: the query and the counts of the list that the rest needs, the sums
    that arrive from the cluster with the bell that announces them (csrc/cluster.cuh), and the peaks and totals of the
    warps."""
    query = 2 * 16 * group * (dim // 4 + 1) + 2 * 4 * warps if rest else 0
    return cdiv(query + 4 * group * dim + 8 * cluster * group + 8 + 64 * warps, 16) * 16


def constants(
    dim: int, group: int, page: int, filled: bool, warps: int, cluster: int, rest_group: int = 0, settled: bool = False,
    named: bool = False, roomy: bool = True, listed: bool = False,
) -> dict[str, int]:  # fmt: skip
    """The constants with which csrc/sparse_attention.cu is compiled, except for BF16. `roomy`: all shared memory of a
    multiprocessor together has room for two programs, so registers should have room for them too."""
    resident = 2 if dim <= 128 and warps == WARPS and roomy else 1
    return dict(
        D=dim, G=group, P=page, FILLED=int(filled), LISTED=int(listed), WARPS=warps, RESIDENT=resident, CLUSTER=cluster,
        GROUP=rest_group, SETTLED=int(settled), NAMED=int(named),
    )  # fmt: skip


def refused(q: Tensor, heads: int, sinks: Tensor | None, *others: Tensor) -> str:
    """Why the kernels do not take queries q [batch, q_heads, 1, dim] of `heads` kv heads; empty if they do. They read
    `others` in words of 16 bytes."""
    dim, group = q.shape[3], q.shape[1] // heads
    if dim not in DIMS or group > MOST_HEADS:
        return f"head_dim {dim} and {group} query heads a kv head are not among {DIMS} and up to {MOST_HEADS}"
    if q.dtype not in (torch.float16, torch.bfloat16) or (sinks is not None and sinks.dtype != q.dtype):
        return f"queries in {q.dtype} with sink logits in {'none' if sinks is None else sinks.dtype}"
    if q.stride(0) % 8 or q.stride(1) % 8 or not _cuda.aligned(q, *others):
        return "tensors are not aligned to 16 bytes"
    return ""


def fit(
    q: Tensor, heads: int, rows: Tensor, page: int, tiles: int, attention: Attention, *others: Tensor, filled: bool,
    listed: bool = False, rest: Rest = NO_REST, groups: int = 0, named: bool = False,
) -> Launch | str:  # fmt: skip
    """The launch for queries q [batch, q_heads, 1, dim] over `tiles` tiles of the tokens in `rows` and `others`, or the
    reason why there is none. groups: those of the rest that a row can have."""
    dim, group, sinks, device = q.shape[3], q.shape[1] // heads, attention.sink_logits, q.device
    if why := refused(q, heads, sinks, rows, *others):
        return why
    with_rest, of_all = rest.sums is not None, q.shape[0] * heads
    if rest.sums is not None:
        odd = rest.sums.dtype is not torch.float16 or not _cuda.aligned(rest.sums)
        if odd or rest.group % page or rest.group > MOST_GROUP:
            return f"sums in {rest.sums.dtype} of groups of {rest.group} with blocks of {page}"
    cluster = cluster_of(device, of_all)
    most_warps = MOST_WARPS if listed else FETCH_WARPS
    dynamic = lambda warps: dynamic_bytes(dim, group, warps, cluster, tiles, groups)  # noqa: E731
    all_bytes = lambda warps: dynamic(warps) + static_bytes(dim, group, warps, cluster, with_rest)  # noqa: E731
    pairs = with_rest and of_all > sm_count(device) and 2 * (all_bytes(WARPS) + RESERVED) <= SHARED_ROOM
    warps = warps_of(device, dim, of_all, cluster, tiles, with_rest, most_warps, pairs)
    taken, most = all_bytes(warps), shared_bytes(device)
    if taken > most:
        return f"a program takes {taken} bytes of shared memory, and {most} are there"
    roomy = 2 * (taken + RESERVED) <= most + RESERVED
    sizes = constants(dim, group, page, filled, warps, cluster, rest.group, rest.settled, named, roomy, listed)
    kernels = _cuda.load("sparse_attention", device, **sizes, BF16=int(q.dtype == torch.bfloat16))
    return kernels if isinstance(kernels, str) else Launch(kernels, warps, cluster, dynamic(warps))
