"""The largest q.k of every page's tokens, of those that a query sees: the children of the nodes it expands.

Per query head, [batch, q_heads, pages]; -inf where it sees none. In order of it pages come as they do when tokens are
taken from the best down and each brings its page. `visited` has the product of every node that is expanded
(visit_nodes.py): where leaves are codes, a token's is that of its node and that of what it differs by from it.

On an H200: a program per (kv head, 64 rows of the pool), so that one read of a key serves all query heads of the
group. Nodes of rows are read for all (4 bytes each), keys or codes only of rows that some head sees: with a tenth of
the nodes expanded a tenth of the keys, and as siblings share pages, whole tiles are passed by.
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
TILE = 64  # rows of a program, at least a page


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
def _peaks(
    q, visited, key, scale, node, out, q_b, q_h, heads, nodes, rows, G: tl.constexpr, GP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    r, g = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, GP)
    u = tl.load(node + bh * rows + r, mask=r < rows, other=-1)
    m = (g < G)[:, None] & (u >= 0)[None, :]
    seen = tl.load(visited + ((bh * G + g) * nodes)[:, None] + u[None, :], mask=m, other=float("-inf"))
    sees = seen > float("-inf")
    score = tl.full((GP, TILE), float("-inf"), tl.float32)
    if tl.max(sees.to(tl.int32)) > 0:
        some = tl.max(sees.to(tl.int32), 0) > 0
        own = q + bh // heads * q_b + bh % heads * G * q_h
        if GROUPS == 0:
            d = tl.arange(0, DP)
            y = tl.load(
                key + (bh * rows + r)[:, None] * D + d[None, :], mask=some[:, None] & (d < D)[None, :], other=0.0
            )
            product = tl.dot(load_query(own, 0, q_h, 0, 0, G, GP, D, DP), tl.trans(y), input_precision="ieee")
        else:
            product = seen + _of_codes(own, key, scale, bh * rows + r, some, q_h, G, GP, D, DP, GROUPS)
        score = tl.where(sees, product, float("-inf"))
    best = tl.max(tl.reshape(score, (GP, TILE // P, P)), 2)
    page = tl.program_id(1) * (TILE // P) + tl.arange(0, TILE // P)
    at = ((bh * G + g) * (rows // P))[:, None] + page[None, :]
    tl.store(out + at, best, mask=(g < G)[:, None] & (page < rows // P)[None, :])


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
    tiles = cdiv(rows, tile)
    _peaks[(batch * heads, tiles)](
        q, visited, leaves.key, leaves.scale, leaves.node, out, q.stride(0), q.stride(1), heads, visited.shape[2], rows,
        G=group, GP=max(16, next_power_of_2(group)), D=d, DP=next_power_of_2(d), P=page, TILE=tile,
        GROUPS=leaves.scale.shape[3], **chained(q.device, batch * heads * tiles),
    )  # fmt: skip
    return out


def fake(q, visited, leaves) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], leaves.fill.shape[2]), dtype=torch.float32)


page_peaks = register("page_peaks", reference, impls=(by_triton(launch),), fake=fake, check=check)
