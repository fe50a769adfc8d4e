"""The largest q.k of every page's tokens, of those that a query sees: the children of the nodes it expands.

Per query head, [batch, q_heads, pages]; -inf where it sees none. In order of it pages come as they do when tokens are
taken from the best down and each brings its page.

On an H200: a program per (kv head, 64 rows of the pool), so that one read of a key serves all query heads of the
group. Nodes of rows are read for all (4 bytes each), keys only of rows that some head sees: with a tenth of the nodes
expanded a tenth of the keys, and as siblings share pages, whole tiles are passed by.
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
from torchsparsekv.ops.store.views import Leaves, Query

Visited = Annotated[Tensor, Of("batch q_heads nodes", torch.uint8)]
TILE = 64  # rows of a program, at least a page


def check(q, visited, leaves) -> None:
    _check.heads(q, leaves.key)
    if leaves.node.shape[2] % leaves.fill.shape[2]:
        raise ValueError(f"{leaves.node.shape[2]} rows are not whole pages, of which there are {leaves.fill.shape[2]}")


def reference(q: Query, visited: Visited, leaves: Leaves) -> Tensor:
    group = q.shape[1] // leaves.key.shape[1]
    page = leaves.node.shape[2] // leaves.fill.shape[2]
    node = leaves.node.repeat_interleave(group, 1)
    sees = (node >= 0) & (visited.gather(2, node.clamp(min=0).long()) > 0)
    scores = (leaves.key.float().repeat_interleave(group, 1) @ q.float().transpose(-1, -2))[..., 0]
    return torch.where(sees, scores, -torch.inf).unflatten(2, (-1, page)).amax(-1)


@triton.jit
def _peaks(
    q, visited, key, node, out, q_b, q_h, heads, nodes, rows, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    r, g, d = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, GP), tl.arange(0, DP)
    u = tl.load(node + bh * rows + r, mask=r < rows, other=-1)
    m = (g < G)[:, None] & (u >= 0)[None, :]
    sees = tl.load(visited + ((bh * G + g) * nodes)[:, None] + u[None, :], mask=m, other=0) > 0
    score = tl.full((GP, TILE), float("-inf"), tl.float32)
    if tl.max(sees.to(tl.int32)) > 0:
        x = load_query(q, q_b, q_h, bh // heads, bh % heads, G, GP, D, DP)
        some = tl.max(sees.to(tl.int32), 0) > 0
        y = tl.load(key + (bh * rows + r)[:, None] * D + d[None, :], mask=some[:, None] & (d < D)[None, :], other=0.0)
        score = tl.where(sees, tl.dot(x, tl.trans(y), input_precision="ieee"), float("-inf"))
    best = tl.max(tl.reshape(score, (GP, TILE // P, P)), 2)
    page = tl.program_id(1) * (TILE // P) + tl.arange(0, TILE // P)
    at = ((bh * G + g) * (rows // P))[:, None] + page[None, :]
    tl.store(out + at, best, mask=(g < G)[:, None] & (page < rows // P)[None, :])


def launch(q, visited, leaves) -> Tensor:
    batch, heads, rows, d = leaves.key.shape
    out, group, page = fake(q, visited, leaves), q.shape[1] // heads, rows // leaves.fill.shape[2]
    tile = max(TILE, page)
    tiles = cdiv(rows, tile)
    _peaks[(batch * heads, tiles)](
        q, visited, leaves.key, leaves.node, out, q.stride(0), q.stride(1), heads, visited.shape[2], rows, G=group,
        GP=max(16, next_power_of_2(group)), D=d, DP=next_power_of_2(d), P=page, TILE=tile,
        **chained(q.device, batch * heads * tiles),
    )  # fmt: skip
    return out


def fake(q, visited, leaves) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], leaves.fill.shape[2]), dtype=torch.float32)


page_peaks = register("page_peaks", reference, impls=(by_triton(launch),), fake=fake, check=check)
