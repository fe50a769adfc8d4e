"""Many tokens came: take those that leave the ring into the tree, and say in which order the pool should hold them.

Which of them rise is drawn (ops/icecache/_tree.py); every risen one becomes a node, as long as there is room for nodes,
and every token is a child of the nearest node one level above its own, of those that were there and those that came
with it. Whole pages of new tokens are laid out by (parent, projection): so the children of a node stand side by side,
siblings share pages, and all pages are full. Many pages are then dealt out, so that neighbours are not ranked by the
same program (ops/icecache/_tree.py: dealt_out). The tokens that were in the ring before, and those up to the next page
behind them, stay where they are, in pages of their own.

Returns that order as columns of `k`, int32 [batch, kv_heads, tokens]; other columns stay where they are. Runs beside
the next layer unless told to `join` (ops/_machinery/side_stream.py); only the ring is read before, as the new tokens go there at once.

The sort is torch's, on the device and without waiting for it. The kernels, each a program per (row, head, tile of
tokens): one that reads every key once, for all that has to be known of it alone; the search for parents, which goes
over all nodes by tensor cores (128K keys against 8K nodes are 0.27 TFLOP a kv head and no score is stored); and the
copy into the index by page.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, next_power_of_2, shared_bytes, tl, triton
from torchsparsekv.ops.attend._split import tile_of
from torchsparsekv.ops.icecache import _residual, _tree
from torchsparsekv.ops.icecache.views import Leaves, Promotion, Tree
from torchsparsekv.ops.store.rows import keys_of, ring_row, ring_row_of
from torchsparsekv.ops.store.views import Lengths, NewKeys, Ring

NODES, STAGES = 2, 3  # tiles of nodes that a program compares tokens with at a time, and of loads of these


def check(k, ring, tree, leaves, lengths, promotion, join) -> None:
    _tree.check_promotion(promotion)
    _residual.check_leaves(leaves, k.shape[3], k.dtype)
    check_pages(leaves, lengths)


def check_pages(leaves: Leaves, lengths: Lengths) -> int:
    """How many rows a page has."""
    rows, pages = leaves.node.shape[2], leaves.fill.shape[2]
    return whole_pages(0 if rows % pages else rows // pages, lengths, f"{rows} rows in {pages} pages")


def whole_pages(page: int, lengths: Lengths, said: str) -> int:
    """That many rows, if sinks and what leaves the ring at a time are whole pages of them."""
    if page < 1 or lengths.sink % page or lengths.interval % page:
        raise ValueError(f"{said}: sink {lengths.sink} and interval {lengths.interval} must be whole pages")
    return page


def reference(
    k: NewKeys, ring: Ring, tree: Changed[Tree], leaves: Changed[Leaves], lengths: Lengths, promotion: Promotion,
    join: bool,
) -> Tensor:  # fmt: skip
    batch, heads, tokens, _ = k.shape
    page = check_pages(leaves, lengths)
    order = torch.arange(tokens, dtype=torch.int32, device=k.device).expand(batch, heads, -1).contiguous()
    for b, (n0, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= 0 or new <= old:
            continue
        before, column = torch.arange(old, max(old, min(n0, new)), device=k.device), tokens - n
        held = keys_of(ring[b])[:, ring_row(before, lengths.sink, ring.shape[2])]
        x = torch.cat([held, k[b, :, column + old + len(before) : column + new]], 1)
        position = torch.arange(old, new, device=k.device)
        moves = position >= cdiv(max(n0, old), page) * page
        for h in range(heads):
            own = Tree(*(t[b, h] for t in tree))
            node, itself = _planted(x[h], position, own, promotion)
            along = _tree.projections(x[h], own.radius2, promotion.seed)
            takes = _tree.arrangement(node, along, moves, torch.ones_like(moves), page)
            at = (b, h, slice(old, new))
            of = torch.where(itself < 0, itself, node)[takes]
            _residual.keep(leaves, at, x[h][takes], of, own)
            order[b, h, column + position[moves]] = (column + old + takes[moves]).int()
        leaves.fill[b, :, old // page : new // page] = page
    leaves.span.copy_(_tree.spans_of(leaves.node, leaves.span.shape[2]))
    return order


def _planted(x: Tensor, position: Tensor, tree: Tree, promotion: Promotion) -> tuple[Tensor, Tensor]:
    """New children of one head: the risen ones become nodes. Returns the parents of all, and of the risen ones what
    Leaves.node has of them, 0 of the others."""
    tree.radius2.copy_(torch.maximum(tree.radius2, x.float().square().sum(-1).amax()))
    level, count = _tree.levels_of(position, promotion), int(tree.node_count)
    risen = (level > 1).nonzero()[:, 0]
    level[risen[len(tree.level) - count :]] = 1  # no room
    risen = risen[: len(tree.level) - count]
    new = slice(count, count + len(risen))
    tree.key[new], tree.level[new] = x[risen], level[risen].int()
    tree.code[new], tree.scale[new] = _tree.coded(x[risen])
    tree.norm2[new] = x[risen].float().square().sum(-1)
    tree.node_count.add_(len(risen))
    node = _tree.nearest(x, level, tree.key, tree.level, tree.radius2)
    tree.parent[new] = node[risen]
    itself = torch.zeros_like(node)
    itself[risen] = _tree.own(torch.arange(count, new.stop, dtype=torch.int32, device=node.device))
    return node, itself


@triton.jit
def _take_in(
    k, ring, x, level, number, own_level, itself, norm2, along, sign, key, code, scale, node_norm2, key_level, before,
    start, length, old_begin, ring_begin, k_b, k_h, k_s, heads, tokens, columns, ring_rows, sink, nodes,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The tokens from `old_begin` on into `x`, their squared norms and their products with `sign`. Those that rise go
    into the tree too, behind the `before` nodes that there are, by their number; and all levels as they are then: 1
    where there was no room, 0 where no token is."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n, old, new = tl.load(start + b), tl.load(length + b), tl.load(old_begin + b), tl.load(ring_begin + b)
    i, d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DP)
    position = old + i
    live = (i < tokens) & (position < tl.where(n > 0, new, 0))
    came = (live & (position >= n0))[:, None] & (d < D)[None, :]
    held = (live & (position < n0))[:, None] & (d < D)[None, :]
    row = ring_row_of(position, sink, ring_rows - sink).to(tl.int64)
    column = (columns - n + position).to(tl.int64)
    of_k = tl.load(k + b * k_b + h * k_h + column[:, None] * k_s + d[None, :], mask=came, other=0.0)
    of_ring = tl.load(ring + (bh * ring_rows + row)[:, None] * D + d[None, :], mask=held, other=0.0)
    values = tl.where(came, of_k, of_ring)
    tl.store(x + (bh * tokens + i)[:, None] * D + d[None, :], values, mask=came | held)
    wide = values.to(tl.float32)
    signs = tl.load(sign + d, mask=d < D, other=0.0)
    tl.store(norm2 + bh * tokens + i, tl.sum(wide * wide, 1), mask=i < tokens)
    tl.store(along + bh * tokens + i, tl.sum(wide * signs[None, :], 1), mask=i < tokens)
    own = tl.load(level + b * tokens + i, mask=live, other=0)
    node = tl.load(before + bh) + tl.load(number + b * tokens + i, mask=live, other=0)
    fits = (own > 1) & (node < nodes)
    own = tl.where(fits, own, tl.minimum(own, 1))
    tl.store(own_level + bh * tokens + i, own, mask=i < tokens)
    tl.store(itself + bh * tokens + i, tl.where(fits, _tree.own_in(node), 0), mask=i < tokens)
    tl.store(key_level + bh * nodes + node, own, mask=fits)
    _tree.keep_node(values, bh * nodes + node, fits, key, code, scale, node_norm2, D, DP)


@triton.jit
def _parents(
    x, level, itself, key, norm2, key_level, parent, radius2, node_count, out, tokens, nodes,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Of all tokens, and into the tree of those that are nodes now."""
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    own = tl.load(level + bh * tokens + i, mask=i < tokens, other=0)
    node = tl.zeros((TILE,), tl.int32)
    if tl.max(own, 0) > 0:
        d = tl.arange(0, DP)
        m = (own > 0)[:, None] & (d < D)[None, :]
        rows = tl.load(x + (bh * tokens + i)[:, None] * D + d[None, :], mask=m, other=0.0)
        _, node = _tree.nearest_of(
            rows, own, key + bh * nodes * D, norm2 + bh * nodes, key_level + bh * nodes, tl.load(radius2 + bh), 1,
            tl.load(node_count + bh), D, DP, NODES,
        )  # fmt: skip
        place = _tree.own_in(tl.load(itself + bh * tokens + i, mask=own > 1, other=0))
        tl.store(parent + bh * nodes + place, node, mask=own > 1)
    tl.store(out + bh * tokens + i, node, mask=i < tokens)


@triton.jit
def _arrange(
    x, takes, node, itself, code, scale, row_key, row_scale, row_node, fill, order, start, length, old_begin,
    ring_begin, heads, tokens, columns, rows, nodes, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Rows from `old_begin` on take their tokens."""
    bh = tl.program_id(1).to(tl.int64)
    b = bh // heads
    n0, n, old, new = tl.load(start + b), tl.load(length + b), tl.load(old_begin + b), tl.load(ring_begin + b)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = old + i
    live = (i < tokens) & (row < tl.where(n > 0, new, 0))
    if tl.max(live.to(tl.int32), 0) > 0:
        d = tl.arange(0, DP)
        take = tl.load(takes + bh * tokens + i, mask=live, other=0)
        m = live[:, None] & (d < D)[None, :]
        values = tl.load(x + (bh * tokens + take)[:, None] * D + d[None, :], mask=m, other=0.0)
        own = tl.load(itself + bh * tokens + take, mask=live, other=0)
        of = tl.where(own < 0, own, tl.load(node + bh * tokens + take, mask=live, other=0))
        _residual.keep_of(
            values, of, bh * rows + row, live, code + bh * nodes * D, scale + bh * nodes, row_key, row_scale, row_node,
            D, DP, TILE, GROUPS,
        )  # fmt: skip
        tl.store(fill + bh * (rows // P) + row // P, tl.full((TILE,), P, tl.int32), mask=live & (row % P == 0))
        moves = live & (row >= tl.cdiv(tl.maximum(n0, old), P) * P)
        first = columns - n
        tl.store(order + bh * columns + first + row, (first + old + take).to(tl.int32), mask=moves)


def launch(k, ring, tree, leaves, lengths, promotion, join) -> Tensor:
    held = keys_of(ring).clone()
    with on_side_stream(join, k, held, *tree, *leaves, *lengths[:4]):
        return _launch(k, held, tree, leaves, lengths, promotion)


def _launch(k, held, tree, leaves, lengths, promotion) -> Tensor:
    page, columns, nodes = check_pages(leaves, lengths), k.shape[2], tree.key.shape[2]
    tokens = min(columns + held.shape[2] - lengths.sink, leaves.node.shape[2])
    start, length, old, new = (t[:, None].long() for t in lengths[:4])
    position = old + torch.arange(tokens, device=k.device)
    live = (position < new) & (length > 0)
    taken = _take_in_all(k, held, torch.where(live, _tree.levels_of(position, promotion), 0), tree, lengths, promotion)
    node = _find_parents(taken, tree)
    moves = live & (position >= (torch.maximum(start, old) + page - 1) // page * page)
    moves, live = (t[:, None].expand_as(node) for t in (moves, live))
    takes = _tree.arrangement(node, taken.along, moves, live, page).int()
    order = torch.arange(columns, dtype=torch.int32, device=k.device).expand(*k.shape[:2], -1).contiguous()
    grid, heads, wide = _tiles(taken.x)
    _arrange[grid](
        taken.x, takes, node, taken.itself, tree.code, tree.scale, *leaves[:4], order, *lengths[:4], heads, tokens,
        columns, leaves.node.shape[2], nodes, P=page, GROUPS=leaves.scale.shape[3], **wide,
        **_residual.UNFUSED,
    )  # fmt: skip
    leaves.span.copy_(_tree.spans_of(leaves.node, leaves.span.shape[2]))
    return order


class _Taken(NamedTuple):
    """Tokens that leave the ring, level and projection each; and of those that rise, as far as there was room, what
    Leaves.node has of them, 0 of the others."""

    x: Tensor
    level: Tensor
    along: Tensor
    itself: Tensor


def _tiles(x: Tensor) -> tuple[tuple[int, int], int, dict[str, int]]:
    """The grid of a kernel over all tokens of x [batch, heads, tokens, dim], the heads, and what it is compiled for."""
    (batch, heads, tokens, d), tile = x.shape, tile_of(x)
    return (cdiv(tokens, tile), batch * heads), heads, dict(D=d, DP=next_power_of_2(d), TILE=tile)


def _take_in_all(k, held, level, tree, lengths, promotion) -> _Taken:
    """Of the levels [batch, tokens] that tokens have by their position, 0 where none is."""
    lead, tokens, (rows, d) = k.shape[:2], level.shape[1], held.shape[2:]
    x = k.new_empty(*lead, tokens, d)
    own, itself = level.new_empty(2, *lead, tokens, dtype=torch.int32)
    norm2, along = x.new_empty(2, *lead, tokens, dtype=torch.float32)
    rises = (level > 1).int()
    number = rises.cumsum(-1, dtype=torch.int32) - rises
    before, sign = tree.node_count.clone(), _tree.signs(d, promotion.seed, k.device)
    grid, heads, wide = _tiles(x)
    _take_in[grid](
        k, held, x, level.int(), number, own, itself, norm2, along, sign, tree.key, tree.code, tree.scale,
        tree.norm2, tree.level, before, *lengths[:4], *k.stride()[:3], heads, tokens, k.shape[2], rows, lengths.sink,
        tree.key.shape[2], **wide,
    )  # fmt: skip
    tree.node_count.copy_((before + rises.sum(-1, keepdim=True)).clamp(max=tree.key.shape[2]))
    tree.radius2.copy_(torch.maximum(tree.radius2, norm2.amax(-1)))
    along += sign[-1] * _tree.lift_by(norm2, tree.radius2[..., None])
    return _Taken(x, own, along, itself)


def _find_parents(t: _Taken, tree: Tree) -> Tensor:
    node, (grid, _, wide) = torch.empty_like(t.level), _tiles(t.x)
    _parents[grid](
        t.x, t.level, t.itself, tree.key, tree.norm2, tree.level, tree.parent, tree.radius2, tree.node_count,
        node, t.x.shape[2], tree.key.shape[2], **going_over(t.x), **wide,
    )  # fmt: skip
    return node


def going_over(x: Tensor) -> dict[str, int]:
    """How many nodes keys like `x` are compared with at a time, and how many loads of these are on their way."""
    tile = tile_of(x)
    nbytes = tile * next_power_of_2(x.shape[-1]) * x.element_size()  # one is of tokens, and one is left for reductions
    stages = max(1, min(STAGES, (shared_bytes(x.device) - 2 * nbytes) // (NODES * nbytes)))
    return {"NODES": NODES * tile, "num_stages": stages}


def fake(k, *_) -> Tensor:
    return k.new_empty(k.shape[:3], dtype=torch.int32)


plant_tree = register(
    "plant_tree", reference, impls=(by_triton(launch),), fake=fake, check=check, capturable=False
)
