"""The largest q.k of every page's tokens, of those that a query sees: the children of the nodes it expands.

Per query head, [batch, q_heads, pages]; -inf where it sees none. In order of it pages come as they do when tokens are
taken from the best down and each brings its page. `visited` has the products of nodes, and the least of those that are
expanded (visit_nodes.py), as nodes below number `always` are anyway, the root among them. Where leaves are codes, a
token's product is that of its node and that of what it differs by from it; tokens that are nodes themselves differ by
nothing. The second result are the peaks of these (ops/select/_top.py). What is behind codes is taken in fp16, also for queries
in bf16, which are exact in fp16 up to 65504.

With a tenth of the nodes expanded a seventh of the rows is read, once for all query heads of the group. In Triton a
program has LOOKED rows of a kv head: first it finds the pages of which some query head sees a token, then it goes
through these alone. csrc/page_peaks.cu shares out what it finds among the warps of a program.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import (
    cdiv,
    launch_early,
    next_power_of_2,
    sm_count,
    tl,
    triton,
    wait_for_previous,
)
from torchsparsekv.ops.attend._split import load_query
from torchsparsekv.ops.icecache import _residual
from torchsparsekv.ops.icecache._tree import NO_SPAN, OWN_SPAN, base_in, base_of
from torchsparsekv.ops.icecache.views import Leaves, Visited
from torchsparsekv.ops.icecache.visit_nodes import MOST_NODES
from torchsparsekv.ops.select._top import GROUP, peaks_of, store_peaks
from torchsparsekv.ops.store.views import Query

LOOKED = 1024  # rows of a program
TILE = 64  # rows that are multiplied at a time, at least a page
# What csrc/page_peaks.cu is for; other shapes and types are left to Triton. Warps of a program, and programs on a
# multiprocessor: with more of them they could not be launched early.
NATIVE_DIMS, NATIVE_PAGES, NATIVE_GROUP = (64, 128, 256), (4, 8, 16), 8
NATIVE_WARPS, RESIDENT = 16, 2
NATIVE_TILE = 16  # tokens multiplied at a time
NATIVE = dict(CHANNELS=_residual.GROUP, GROUP=GROUP, WARPS=NATIVE_WARPS, NO_SPAN=NO_SPAN, OWN_SPAN=OWN_SPAN)


def check(q, visited, leaves, always) -> None:
    _check.heads(q, leaves.key)
    _residual.check_leaves(leaves, q.shape[3], q.dtype)
    nodes, group = visited.products.shape[2:]
    if always < 1:
        raise ValueError(f"the root is expanded always, so at least 1 node, got {always}")
    if nodes > MOST_NODES:
        raise ValueError(f"at most {MOST_NODES} nodes, got {nodes}")
    if group * leaves.key.shape[1] != q.shape[1]:
        raise ValueError(f"products with {group} query heads a kv head, where {q.shape[1]} have {leaves.key.shape[1]}")
    if leaves.node.shape[2] % leaves.fill.shape[2]:
        raise ValueError(f"{leaves.node.shape[2]} rows are not whole pages, of which there are {leaves.fill.shape[2]}")


def products_of(visited: Visited, node: Tensor, always: int) -> Tensor:
    """Of tokens, by Leaves.node, the products of each query head with the nodes that they are, or whose children they
    are; -inf where it does not see them."""
    products = visited.products.movedim(-1, 2).flatten(1, 2)
    node = node.repeat_interleave(visited.products.shape[3], 1)
    of = base_of(node).clamp(min=0).long()
    product = products.gather(2, of)
    expanded = (node < always) | (product >= visited.least.flatten(1)[..., None])
    return torch.where((node != -1) & expanded, product, -torch.inf)


def reference(q: Query, visited: Visited, leaves: Leaves, always: int) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // leaves.key.shape[1]
    page = leaves.node.shape[2] // leaves.fill.shape[2]
    each = lambda t: t.repeat_interleave(group, 1)  # noqa: E731
    seen = products_of(visited, leaves.node, always)
    codes, keys = leaves.scale.shape[3] > 0, leaves.key
    if codes:
        keys = _residual.difference(keys, leaves.scale, q.shape[3])
        keys = keys if q.dtype == torch.float32 else keys.half()
    scores = (each(keys).float() @ q.float().transpose(-1, -2))[..., 0]
    scores = torch.where(seen > -torch.inf, scores + seen if codes else scores, -torch.inf)
    best = scores.unflatten(2, (-1, page)).amax(-1)
    return best, peaks_of(best)


@triton.jit
def _product_of(products, least, always, u, m, G: tl.constexpr):
    """With the node that a token is, or that it is a child of, by what Leaves.node has; -inf where it is not seen.
    `least` is that of nodes that are expanded; those below number `always` are anyway."""
    of = base_in(u)
    product = tl.load(products + of * G, mask=m & (u != -1), other=float("-inf"))
    return tl.where((u < always) | (product >= least), product, float("-inf"))


@triton.jit
def _pages_seen(
    products, least, always, node, out, found, bh, first, nodes, rows, G: tl.constexpr, P: tl.constexpr,
    LOOKED: tl.constexpr,
):  # fmt: skip
    """Into `found` those of this program's pages, from `first` on, of which some head sees a token, and how many; the
    others are -inf to all."""
    i, pages = tl.arange(0, LOOKED), rows // P
    u = tl.load(node + bh * rows + first * P + i, mask=first * P + i < rows, other=-1)
    sees = tl.zeros((LOOKED,), tl.int32)
    for g in tl.static_range(G):
        seen = _product_of(products + bh * nodes * G + g, tl.load(least + bh * G + g), always, u, u == u, G)
        sees = tl.maximum(sees, (seen > float("-inf")).to(tl.int32))
    some = tl.max(tl.reshape(sees, (LOOKED // P, P)), 1)
    page = first + tl.arange(0, LOOKED // P)
    nothing = tl.full((LOOKED // P,), float("-inf"), tl.float32)
    for g in tl.static_range(G):
        tl.store(out + (bh * G + g) * pages + page, nothing, mask=(some == 0) & (page < pages))
    tl.store(found + tl.cumsum(some, 0) - 1, page, mask=some != 0)
    return tl.sum(some, 0)


@triton.jit
def _peaks(
    q, products, least, key, scale, node, out, peaks, found, q_b, q_h, heads, nodes, rows, always, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, LOOKED: tl.constexpr, TILE: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    MINE: tl.constexpr = LOOKED // P
    bh, from_page = tl.program_id(0).to(tl.int64), tl.program_id(1) * MINE
    found += (bh * tl.num_programs(1) + tl.program_id(1)) * MINE
    n = _pages_seen(products, least, always, node, out, found, bh, from_page, nodes, rows, G, P, LOOKED)
    tl.debug_barrier()
    i, p, g = tl.arange(0, TILE), tl.arange(0, TILE // P), tl.arange(0, GP)
    own = q + bh // heads * q_b + bh % heads * G * q_h
    of_head = tl.load(least + bh * G + g, mask=g < G, other=0.0)[:, None]
    for first in range(0, n, TILE // P):
        live = first + i // P < n
        r = tl.load(found + first + i // P, mask=live, other=0) * P + i % P
        u = tl.load(node + bh * rows + r, mask=live, other=-1)
        seen = _product_of(products + bh * nodes * G + g[:, None], of_head, always, u[None, :], (g < G)[:, None], G)
        if GROUPS == 0:
            d = tl.arange(0, DP)
            m = live[:, None] & (d < D)[None, :]
            y = tl.load(key + (bh * rows + r)[:, None] * D + d[None, :], mask=m, other=0.0)
            product = tl.dot(load_query(own, 0, q_h, 0, 0, G, GP, D, DP), tl.trans(y), input_precision="ieee")
        else:
            product = seen + _of_codes(own, key, scale, bh * rows + r, live, q_h, G, GP, D, DP, GROUPS)
        score = tl.where(seen > float("-inf"), product, float("-inf"))
        page = tl.load(found + first + p, mask=first + p < n, other=0)
        at = ((bh * G + g) * (rows // P))[:, None] + page[None, :]
        best = tl.max(tl.reshape(score, (GP, TILE // P, P)), 2)
        tl.store(out + at, best, mask=(g < G)[:, None] & (first + p < n)[None, :])
    tl.debug_barrier()
    page = from_page + tl.arange(0, MINE)
    for h in tl.static_range(G):
        best = tl.load(out + (bh * G + h) * (rows // P) + page, mask=page < rows // P, other=float("-inf"))
        store_peaks(peaks + (bh * G + h) * tl.cdiv(rows // P, GROUP), best, from_page, rows // P, MINE, GROUP)


@triton.jit
def _of_codes(
    q, key, scale, row, live, q_h, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """The product of G queries at `q` with what the codes of rows stand for."""
    HALF: tl.constexpr = max(16, DP // 2)  # the least that tensor cores multiply
    g, c = tl.arange(0, GP), _residual.channel_of(tl.arange(0, HALF))
    low = tl.load(q + g[:, None] * q_h + c[None, :], mask=(g < G)[:, None] & (c < D)[None, :], other=0.0)
    c += 8
    high = tl.load(q + g[:, None] * q_h + c[None, :], mask=(g < G)[:, None] & (c < D)[None, :], other=0.0)
    if low.dtype == tl.bfloat16:
        low, high = low.to(tl.float16), high.to(tl.float16)
    y_low, y_high = _residual.differences_of(key, scale, row, live, GROUPS, HALF)
    product = tl.dot(low, tl.trans(y_low.to(low.dtype)), input_precision="ieee")
    return tl.dot(high, tl.trans(y_high.to(high.dtype)), product, input_precision="ieee")


def _fits(q, visited, leaves, always) -> _cuda.Module | str:
    d, heads, page = q.shape[3], leaves.key.shape[1], leaves.node.shape[2] // leaves.fill.shape[2]
    group = q.shape[1] // heads
    if leaves.scale.shape[3] == 0:
        return "leaves that are keys, not codes"
    if d not in NATIVE_DIMS or page not in NATIVE_PAGES or group > NATIVE_GROUP:
        return f"head_dim {d}, pages of {page} and {group} query heads a kv head"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"queries in {q.dtype}"
    if not _cuda.aligned(q, *visited, leaves.key, leaves.scale) or any(x % 4 for x in q.stride()[:2]):
        return "tensors are not aligned"
    return _cuda.load(
        "page_peaks", q.device, D=d, G=group, P=page, BF16=int(q.dtype == torch.bfloat16), TURN=most_groups(group),
        RESIDENT=RESIDENT, **NATIVE,
    )  # fmt: skip


def most_groups(group: int) -> int:
    """Of pages, that a program looks at before it multiplies."""
    return min(96, 384 // group)


def _shared_bytes(group: int, page: int, turn: int) -> int:
    """For peaks of `turn` groups, and numbers of tiles."""
    return 4 * group * turn * GROUP + 2 * turn * GROUP * page // NATIVE_TILE


def _launch_cuda(kernels, q, visited, leaves, always) -> tuple[Tensor, Tensor]:
    """csrc/page_peaks.cu"""
    (batch, heads, rows), (out, peaks), group = leaves.node.shape, fake(q, visited, leaves), visited.products.shape[3]
    page = rows // out.shape[2]
    parts = max(1, min(peaks.shape[2], RESIDENT * sm_count(q.device) // (batch * heads)))
    turn = min(most_groups(group), cdiv(peaks.shape[2], parts))
    kernels.launch(
        "page_peaks", (batch * heads, parts, 1), 32 * NATIVE_WARPS, q, *visited, *leaves[:3], leaves.span, out, peaks,
        q.stride(0), q.stride(1), heads, visited.products.shape[2], rows, out.shape[2], turn, always,
        shared=_shared_bytes(group, page, turn),
    )  # fmt: skip
    return out, peaks


def _launch_triton(q, visited, leaves, always) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = leaves.key.shape
    (out, peaks), group = fake(q, visited, leaves), q.shape[1] // heads
    page, d = rows // leaves.fill.shape[2], q.shape[3]
    looked = max(TILE, GROUP * page, min(LOOKED, next_power_of_2(rows)))
    parts = cdiv(rows, looked)
    found = torch.empty((batch * heads, parts, looked // page), dtype=torch.int32, device=q.device)
    _peaks[(batch * heads, parts)](
        q, visited.products, visited.least, leaves.key, leaves.scale, leaves.node, out, peaks, found, q.stride(0),
        q.stride(1), heads, visited.products.shape[2], rows, always, G=group, GP=max(16, next_power_of_2(group)), D=d,
        DP=next_power_of_2(d), P=page, LOOKED=looked, TILE=max(TILE, page), GROUPS=leaves.scale.shape[3], GROUP=GROUP,
        num_stages=1, **launch_early(q.device, batch * heads * parts),
    )  # fmt: skip
    return out, peaks


def fake(q, visited, leaves, *_) -> tuple[Tensor, Tensor]:
    shape = q.shape[0], q.shape[1], leaves.fill.shape[2]
    new = q.new_empty
    return new(shape, dtype=torch.float32), new((*shape[:2], cdiv(shape[2], GROUP)), dtype=torch.float32)


page_peaks = register(
    "page_peaks", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake, check=check
)
