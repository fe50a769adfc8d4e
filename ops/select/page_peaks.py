"""The largest q.k of every page's tokens, of those that a query sees: the children of the nodes it expands.

Per query head, [batch, q_heads, pages]; -inf where it sees none. In order of it pages come as they do when tokens are
taken from the best down and each brings its page. `visited` has the product of every node that is expanded
(visit_nodes.py): where leaves are codes, a token's is that of its node and that of what it differs by from it.

A program has LOOKED rows of a kv head, in pages from all over: the root's children alone, which every query sees, are
hundreds of pages side by side. First it finds the pages of which some query head sees a token: of each row its node,
and whether that is expanded, many rows at a time. Then it goes through these pages alone: with a tenth of the nodes
expanded a seventh of the rows is read, once for all query heads of the group.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._impl import triton as by_triton
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._signature import Of
from torchsparsekv.ops._triton import cdiv, chain, chained, next_power_of_2, tl, triton
from torchsparsekv.ops.attend._split import load_query
from torchsparsekv.ops.index import _residual
from torchsparsekv.ops.store.views import Leaves, Query

Visited = Annotated[Tensor, Of("batch q_heads nodes", torch.float32)]
LOOKED = 1024  # rows of a program
TILE = 64  # rows that are multiplied at a time, at least a page


def check(q, visited, leaves) -> None:
    _check.heads(q, leaves.key)
    _residual.check_leaves(leaves, q.shape[3], q.dtype)
    if leaves.node.shape[2] % leaves.fill.shape[2]:
        raise ValueError(f"{leaves.node.shape[2]} rows are not whole pages, of which there are {leaves.fill.shape[2]}")


def reference(q: Query, visited: Visited, leaves: Leaves) -> Tensor:
    group = q.shape[1] // leaves.key.shape[1]
    page = leaves.node.shape[2] // leaves.fill.shape[2]
    each = lambda t: t.repeat_interleave(group, 1)  # noqa: E731
    node = each(leaves.node)
    seen = visited.gather(2, node.clamp(min=0).long()).masked_fill(node < 0, -torch.inf)
    codes, keys = leaves.scale.shape[3] > 0, leaves.key
    if codes:
        keys = _residual.difference(keys, leaves.scale, q.shape[3]).to(q.dtype)
    scores = (each(keys).float() @ q.float().transpose(-1, -2))[..., 0]
    scores = torch.where(seen > -torch.inf, scores + seen if codes else scores, -torch.inf)
    return scores.unflatten(2, (-1, page)).amax(-1)


@triton.jit
def _pages_seen(
    visited, node, out, found, bh, part, parts, nodes, rows, G: tl.constexpr, P: tl.constexpr, LOOKED: tl.constexpr
):
    """Into `found` those of this program's pages of which some head sees a token, and how many; the others are -inf to
    all."""
    i, pages = tl.arange(0, LOOKED), rows // P
    page = part + i // P * parts
    u = tl.load(node + bh * rows + page * P + i % P, mask=page < pages, other=-1)
    sees = tl.zeros((LOOKED,), tl.int32)
    for g in tl.static_range(G):
        seen = tl.load(visited + (bh * G + g) * nodes + u, mask=u >= 0, other=float("-inf"))
        sees = tl.maximum(sees, (seen > float("-inf")).to(tl.int32))
    some = tl.max(tl.reshape(sees, (LOOKED // P, P)), 1)
    page = part + tl.arange(0, LOOKED // P) * parts
    nothing = tl.full((LOOKED // P,), float("-inf"), tl.float32)
    for g in tl.static_range(G):
        tl.store(out + (bh * G + g) * pages + page, nothing, mask=(some == 0) & (page < pages))
    tl.store(found + tl.cumsum(some, 0) - 1, page, mask=some != 0)
    return tl.sum(some, 0)


@triton.jit
def _peaks(
    q, visited, key, scale, node, out, found, q_b, q_h, heads, nodes, rows, G: tl.constexpr, GP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, LOOKED: tl.constexpr, TILE: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    found += (bh * parts + part) * (LOOKED // P)
    n = _pages_seen(visited, node, out, found, bh, part, parts, nodes, rows, G, P, LOOKED)
    tl.debug_barrier()
    i, p, g = tl.arange(0, TILE), tl.arange(0, TILE // P), tl.arange(0, GP)
    own = q + bh // heads * q_b + bh % heads * G * q_h
    for first in range(0, n, TILE // P):
        live = first + i // P < n
        r = tl.load(found + first + i // P, mask=live, other=0) * P + i % P
        u = tl.load(node + bh * rows + r, mask=live, other=-1)
        m = (g < G)[:, None] & (u >= 0)[None, :]
        seen = tl.load(visited + ((bh * G + g) * nodes)[:, None] + u[None, :], mask=m, other=float("-inf"))
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
    y_low, y_high = _residual.differences_of(key, scale, row, live, GROUPS, HALF)
    product = tl.dot(low, tl.trans(y_low.to(low.dtype)), input_precision="ieee")
    return tl.dot(high, tl.trans(y_high.to(high.dtype)), product, input_precision="ieee")


def launch(q, visited, leaves) -> Tensor:
    batch, heads, rows, _ = leaves.key.shape
    out, group, page, d = fake(q, visited, leaves), q.shape[1] // heads, rows // leaves.fill.shape[2], q.shape[3]
    tile = max(TILE, page)
    looked = max(tile, min(LOOKED, next_power_of_2(rows)))
    parts = cdiv(rows, looked)
    found = torch.empty((batch * heads, parts, looked // page), dtype=torch.int32, device=q.device)
    _peaks[(batch * heads, parts)](
        q, visited, leaves.key, leaves.scale, leaves.node, out, found, q.stride(0), q.stride(1), heads,
        visited.shape[2], rows, G=group, GP=max(16, next_power_of_2(group)), D=d, DP=next_power_of_2(d), P=page,
        LOOKED=looked, TILE=tile, GROUPS=leaves.scale.shape[3], num_stages=1,
        **chained(q.device, batch * heads * parts),
    )  # fmt: skip
    return out


def fake(q, visited, leaves) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], leaves.fill.shape[2]), dtype=torch.float32)


page_peaks = register("page_peaks", reference, impls=(by_triton(launch),), fake=fake, check=check)
