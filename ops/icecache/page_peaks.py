"""Score every page by the largest q.k of its tokens, over the tokens that the query head sees.

    sees(t)   = the parent of t is expanded
    q.k_t     = product of t's node + q . residual of t        where leaves are codes (_residual.py)
              = product of t's node                            where t is that node itself
              = q . k_t                                        where leaves are keys
    page(p)   = max of q.k_t over the tokens of page p that are seen, -inf for none

Pages in descending order of their score are the pages of the best tokens in descending order of the tokens. A node is
expanded if its product is not below `visited.threshold`, or if its number is below `min_nodes` (visit_nodes.py).
Residuals are multiplied in fp16, also by queries in bf16, which are exact in fp16 up to 65504.

Launches: 1. With a tenth of the nodes expanded a seventh of the rows is read, once for all query heads of a kv head.
A Triton program of (batch * kv_heads, parts) first lists those of its pages of which some query head sees a token, then
scores these. csrc/page_peaks.cu shares the listed pages out among the warps of a program; it takes codes, pages of 4, 8
or 16 tokens, and up to 8 query heads a kv head.

Paper: algorithms 3 and 4: find the best tokens, take their pages.
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
from torchsparsekv.ops.icecache._tree import EMPTY_SPAN, NODES_ONLY_SPAN, base_node, base_node_tl
from torchsparsekv.ops.icecache.views import Leaves, Visited
from torchsparsekv.ops.icecache.visit_nodes import MOST_NODES
from torchsparsekv.ops.select._top import GROUP, peaks_of, store_peaks
from torchsparsekv.ops.store.views import Query

ROWS = 1024  # rows of a program
TILE = 64  # rows that are multiplied at a time, at least a page
# Shapes that csrc/page_peaks.cu takes; the others go to Triton.
NATIVE_DIMS, NATIVE_PAGES, NATIVE_GROUP = (64, 128, 256), (4, 8, 16), 8
NATIVE_WARPS = 16  # of a program
RESIDENT = 2  # programs of a multiprocessor; more could not be launched early
NATIVE = dict(
    CHANNELS=_residual.GROUP, GROUP=GROUP, WARPS=NATIVE_WARPS, EMPTY_SPAN=EMPTY_SPAN, NODES_ONLY_SPAN=NODES_ONLY_SPAN
)


def check(q, visited, leaves, min_nodes) -> None:
    _check.heads(q, leaves.key)
    _residual.check_leaves(leaves, q.shape[3], q.dtype)
    nodes, group = visited.products.shape[2:]
    if min_nodes < 1:
        raise ValueError(f"the root is always expanded, so min_nodes must be at least 1, got {min_nodes}")
    if nodes > MOST_NODES:
        raise ValueError(f"at most {MOST_NODES} nodes, got {nodes}")
    if group * leaves.key.shape[1] != q.shape[1]:
        raise ValueError(
            f"products have {group} query heads a kv head, got {q.shape[1]} query heads and {leaves.key.shape[1]} "
            "kv heads"
        )
    if leaves.node.shape[2] % leaves.fill.shape[2]:
        raise ValueError(f"{leaves.node.shape[2]} rows are not {leaves.fill.shape[2]} whole pages")


def products_of(visited: Visited, mark: Tensor, min_nodes: int) -> Tensor:
    """For tokens with these marks (Leaves.node) [batch, kv_heads, n]: the products of each query head with their base
    nodes, [batch, q_heads, n]; -inf for tokens that the query head does not see."""
    products = visited.products.movedim(-1, 2).flatten(1, 2)
    mark = mark.repeat_interleave(visited.products.shape[3], 1)
    product = products.gather(2, base_node(mark).clamp(min=0).long())
    expanded = (mark < min_nodes) | (product >= visited.threshold.flatten(1)[..., None])
    return torch.where((mark != -1) & expanded, product, -torch.inf)


def reference(q: Query, visited: Visited, leaves: Leaves, min_nodes: int) -> tuple[Tensor, Tensor]:
    """Score every page for every query head.

    Args:
        q: [batch, q_heads, 1, dim].
        visited: products [batch, kv_heads, nodes, group] and threshold [batch, kv_heads, group], of visit_nodes.
        leaves: of `rows` pool rows in `pages` pages.
        min_nodes: nodes below this number are expanded whatever their product, the root among them.

    Returns: the fields of `Scored`.
        scores: fp32 [batch, q_heads, pages].
        peaks: fp32 [batch, q_heads, cdiv(pages, GROUP)], the largest score of every group of pages.
    """
    group = q.shape[1] // leaves.key.shape[1]
    page = leaves.node.shape[2] // leaves.fill.shape[2]
    each = lambda t: t.repeat_interleave(group, 1)  # noqa: E731
    seen = products_of(visited, leaves.node, min_nodes)  # [batch, q_heads, rows]
    codes, keys = leaves.scale.shape[3] > 0, leaves.key
    if codes:
        keys = _residual.decode(keys, leaves.scale, q.shape[3])
        keys = keys if q.dtype == torch.float32 else keys.half()
    scores = (each(keys).float() @ q.float().transpose(-1, -2))[..., 0]
    scores = torch.where(seen > -torch.inf, scores + seen if codes else scores, -torch.inf)
    best = scores.unflatten(2, (-1, page)).amax(-1)
    return best, peaks_of(best)


@triton.jit
def _product_of(products, threshold, min_nodes, mark, m, G: tl.constexpr):
    """The product of a query head with the base node of each token, by the marks in Leaves.node; -inf for tokens that
    the query head does not see."""
    base = base_node_tl(mark)
    product = tl.load(products + base * G, mask=m & (mark != -1), other=float("-inf"))
    return tl.where((mark < min_nodes) | (product >= threshold), product, float("-inf"))


@triton.jit
def _list_pages(
    products, threshold, min_nodes, node, out, listed, bh, first, nodes, rows, G: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """List the pages of this program, from page `first` on, of which some query head sees a token; return their number.
    The other pages score -inf."""
    i, pages = tl.arange(0, ROWS), rows // P
    mark = tl.load(node + bh * rows + first * P + i, mask=first * P + i < rows, other=-1)  # [ROWS]
    is_seen = tl.zeros((ROWS,), tl.int32)
    for g in tl.static_range(G):
        product = _product_of(
            products + bh * nodes * G + g, tl.load(threshold + bh * G + g), min_nodes, mark, mark == mark, G
        )
        is_seen = tl.maximum(is_seen, (product > float("-inf")).to(tl.int32))
    some = tl.max(tl.reshape(is_seen, (ROWS // P, P)), 1)  # [pages of the program]
    page = first + tl.arange(0, ROWS // P)
    nothing = tl.full((ROWS // P,), float("-inf"), tl.float32)
    for g in tl.static_range(G):
        tl.store(out + (bh * G + g) * pages + page, nothing, mask=(some == 0) & (page < pages))
    tl.store(listed + tl.cumsum(some, 0) - 1, page, mask=some != 0)
    return tl.sum(some, 0)


@triton.jit
def _score_pages(
    q, products, threshold, key, scale, node, out, peaks, listed, q_b, q_h, heads, nodes, rows, min_nodes,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores and peaks of the pages in ROWS rows. GROUPS is 0 where leaves are keys. `listed` is scratch."""
    wait_for_previous(PDL)
    PAGES: tl.constexpr = ROWS // P
    bh, first_page = tl.program_id(0).to(tl.int64), tl.program_id(1) * PAGES
    listed += (bh * tl.num_programs(1) + tl.program_id(1)) * PAGES
    n = _list_pages(products, threshold, min_nodes, node, out, listed, bh, first_page, nodes, rows, G, P, ROWS)
    tl.debug_barrier()
    i, p, g = tl.arange(0, TILE), tl.arange(0, TILE // P), tl.arange(0, GP)
    queries = q + bh // heads * q_b + bh % heads * G * q_h
    bound = tl.load(threshold + bh * G + g, mask=g < G, other=0.0)[:, None]  # [GP, 1]
    for first in range(0, n, TILE // P):
        live = first + i // P < n
        r = tl.load(listed + first + i // P, mask=live, other=0) * P + i % P
        mark = tl.load(node + bh * rows + r, mask=live, other=-1)  # [TILE]
        seen = _product_of(
            products + bh * nodes * G + g[:, None], bound, min_nodes, mark[None, :], (g < G)[:, None], G
        )  # [GP, TILE]
        if GROUPS == 0:
            d = tl.arange(0, DP)
            m = live[:, None] & (d < D)[None, :]
            y = tl.load(key + (bh * rows + r)[:, None] * D + d[None, :], mask=m, other=0.0)  # [TILE, DP]
            product = tl.dot(load_query(queries, 0, q_h, 0, 0, G, GP, D, DP), tl.trans(y), input_precision="ieee")
        else:
            product = seen + _residual_products(queries, key, scale, bh * rows + r, live, q_h, G, GP, D, DP, GROUPS)
        score = tl.where(seen > float("-inf"), product, float("-inf"))
        page = tl.load(listed + first + p, mask=first + p < n, other=0)
        to = ((bh * G + g) * (rows // P))[:, None] + page[None, :]
        best = tl.max(tl.reshape(score, (GP, TILE // P, P)), 2)  # [GP, pages of the tile]
        tl.store(out + to, best, mask=(g < G)[:, None] & (first + p < n)[None, :])
    tl.debug_barrier()
    page = first_page + tl.arange(0, PAGES)
    for h in tl.static_range(G):
        best = tl.load(out + (bh * G + h) * (rows // P) + page, mask=page < rows // P, other=float("-inf"))
        store_peaks(peaks + (bh * G + h) * tl.cdiv(rows // P, GROUP), best, first_page, rows // P, PAGES, GROUP)


@triton.jit
def _residual_products(
    q, key, scale, row, live, q_h, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """The products of the G queries at `q` with the residuals of rows: [GP, rows]."""
    HALF: tl.constexpr = max(16, DP // 2)  # the smallest factor of tensor cores
    g, c = tl.arange(0, GP), _residual.low_channel_tl(tl.arange(0, HALF))
    low = tl.load(q + g[:, None] * q_h + c[None, :], mask=(g < G)[:, None] & (c < D)[None, :], other=0.0)  # [GP, HALF]
    c += 8
    high = tl.load(q + g[:, None] * q_h + c[None, :], mask=(g < G)[:, None] & (c < D)[None, :], other=0.0)
    if low.dtype == tl.bfloat16:
        low, high = low.to(tl.float16), high.to(tl.float16)
    y_low, y_high = _residual.decode_tl(key, scale, row, live, GROUPS, HALF)
    product = tl.dot(low, tl.trans(y_low.to(low.dtype)), input_precision="ieee")
    return tl.dot(high, tl.trans(y_high.to(high.dtype)), product, input_precision="ieee")


def _fits(q, visited, leaves, min_nodes) -> _cuda.Module | str:
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
    return _cuda.load("page_peaks", q.device, **native(d, group, page, q.dtype == torch.bfloat16))


def native(d: int, group: int, page: int, bf16: bool) -> dict[str, int]:
    """The defines of csrc/page_peaks.cu."""
    return dict(D=d, G=group, P=page, BF16=int(bf16), RESIDENT=RESIDENT, **NATIVE)


def most_groups(group: int) -> int:
    """How many groups of pages a program of csrc/page_peaks.cu takes in one round, at most."""
    return min(96, 384 // group)


def _shared_bytes(group: int, groups: int) -> int:
    """Shared memory for the scores of the pages of `groups` groups, and for the list of these pages."""
    return (4 * group + 2) * groups * GROUP


def _launch_cuda(kernels, q, visited, leaves, min_nodes) -> tuple[Tensor, Tensor]:
    """csrc/page_peaks.cu"""
    (batch, heads, rows), (out, peaks), group = leaves.node.shape, fake(q, visited, leaves), visited.products.shape[3]
    parts = max(1, min(peaks.shape[2], RESIDENT * sm_count(q.device) // (batch * heads)))
    groups = min(most_groups(group), cdiv(peaks.shape[2], parts))
    kernels.launch(
        "page_peaks", (batch * heads, parts, 1), 32 * NATIVE_WARPS, q, *visited, *leaves[:3], leaves.span, out, peaks,
        q.stride(0), q.stride(1), heads, visited.products.shape[2], rows, out.shape[2], groups, min_nodes,
        shared=_shared_bytes(group, groups),
    )  # fmt: skip
    return out, peaks


def _launch_triton(q, visited, leaves, min_nodes) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = leaves.key.shape
    (out, peaks), group = fake(q, visited, leaves), q.shape[1] // heads
    page, d = rows // leaves.fill.shape[2], q.shape[3]
    program_rows = max(TILE, GROUP * page, min(ROWS, next_power_of_2(rows)))
    parts = cdiv(rows, program_rows)
    listed = torch.empty((batch * heads, parts, program_rows // page), dtype=torch.int32, device=q.device)
    _score_pages[(batch * heads, parts)](
        q, visited.products, visited.threshold, leaves.key, leaves.scale, leaves.node, out, peaks, listed, q.stride(0),
        q.stride(1), heads, visited.products.shape[2], rows, min_nodes, G=group, GP=max(16, next_power_of_2(group)),
        D=d, DP=next_power_of_2(d), P=page, ROWS=program_rows, TILE=max(TILE, page), GROUPS=leaves.scale.shape[3],
        GROUP=GROUP, num_stages=1, **launch_early(q.device, batch * heads * parts),
    )  # fmt: skip
    return out, peaks


def fake(q, visited, leaves, *_) -> tuple[Tensor, Tensor]:
    shape = q.shape[0], q.shape[1], leaves.fill.shape[2]
    new = q.new_empty
    return new(shape, dtype=torch.float32), new((*shape[:2], cdiv(shape[2], GROUP)), dtype=torch.float32)


page_peaks = register(
    "page_peaks", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake, check=check
)
