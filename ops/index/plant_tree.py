"""Many tokens came: take those that leave the ring into the tree, and say in which order the pool should hold them.

Which of them rise is drawn (ops/index/_tree.py); every risen one becomes a node, as long as there is room for nodes,
and every token is a child of the nearest node one level above its own, of those that were there and those that came
with it. Whole pages of new tokens are laid out by (parent, projection): so the children of a node stand side by side,
siblings share pages, and all pages are full. The tokens that were in the ring before, and those up to the next page
behind them, stay where they are, in pages of their own.

Returns that order as columns of `k`, int32 [batch, kv_heads, tokens]; other columns stay where they are. Runs beside
the next layer unless told to `join` (ops/_side.py); only the ring is read before, as the new tokens go there at once.

Sort and gather are torch's, on the device and without waiting for it; the kernels are the search for parents, a
program per (row, head, tile of tokens) that goes over all nodes by tensor cores (128K keys against 8K nodes are 0.27
TFLOP a kv head and no score is stored), and the copy into the index by page.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._impl import triton as by_triton
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._side import beside
from torchsparsekv.ops._signature import Changed
from torchsparsekv.ops._triton import cdiv, next_power_of_2, tl, triton
from torchsparsekv.ops.attend._split import tile_of
from torchsparsekv.ops.index import _residual, _tree
from torchsparsekv.ops.store.rows import keys_of, ring_row
from torchsparsekv.ops.store.views import Leaves, Lengths, Near, NewKeys, Promotion, Tree


def check(k, near, tree, leaves, lengths, promotion, join) -> None:
    _tree.check_promotion(promotion)
    _residual.check_leaves(leaves, k.shape[3], k.dtype)
    check_pages(leaves, lengths)


def check_pages(leaves: Leaves, lengths: Lengths) -> int:
    """How many rows a page has."""
    rows, pages = leaves.node.shape[2], leaves.fill.shape[2]
    if rows % pages or lengths.sink % (rows // pages) or lengths.interval % (rows // pages):
        raise ValueError(
            f"{rows} rows in {pages} pages: sink {lengths.sink} and interval {lengths.interval} must be whole pages"
        )
    return rows // pages


def reference(
    k: NewKeys, near: Near, tree: Changed[Tree], leaves: Changed[Leaves], lengths: Lengths, promotion: Promotion,
    join: bool,
) -> Tensor:  # fmt: skip
    batch, heads, tokens, _ = k.shape
    page = check_pages(leaves, lengths)
    order = torch.arange(tokens, dtype=torch.int32, device=k.device).expand(batch, heads, -1).contiguous()
    for b, (n0, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= 0 or new <= old:
            continue
        before, column = torch.arange(old, max(old, min(n0, new)), device=k.device), tokens - n
        held = keys_of(near.ring[b])[:, ring_row(before, lengths.sink, near.ring.shape[2])]
        x = torch.cat([held, k[b, :, column + old + len(before) : column + new]], 1)
        position = torch.arange(old, new, device=k.device)
        moves = position >= cdiv(max(n0, old), page) * page
        for h in range(heads):
            own = Tree(*(t[b, h] for t in tree))
            node = _planted(x[h], position, own, promotion)
            along = _tree.projections(x[h], own.radius2, promotion.seed)
            takes = _tree.arrangement(node, along, moves, torch.ones_like(moves))
            at = (b, h, slice(old, new))
            leaves.node[at] = node[takes]
            _residual.keep(leaves, at, x[h][takes], own.key[node[takes].long()])
            order[b, h, column + position[moves]] = (column + old + takes[moves]).int()
        leaves.fill[b, :, old // page : new // page] = page
    return order


def _planted(x: Tensor, position: Tensor, tree: Tree, promotion: Promotion) -> Tensor:
    """New children of one head: the risen ones become nodes; returns the parents of all."""
    tree.radius2.copy_(torch.maximum(tree.radius2, x.float().square().sum(-1).amax()))
    level, count = _tree.levels_of(position, promotion), int(tree.node_count)
    risen = (level > 1).nonzero()[:, 0]
    level[risen[len(tree.level) - count :]] = 1  # no room
    risen = risen[: len(tree.level) - count]
    new = slice(count, count + len(risen))
    tree.key[new], tree.level[new] = x[risen], level[risen].int()
    tree.node_count.add_(len(risen))
    node = _tree.nearest(x, level, tree.key, tree.level, tree.radius2)
    tree.parent[new] = node[risen]
    return node


@triton.jit
def _parents(
    x, level, key, key_level, radius2, node_count, out, tokens, nodes, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    own = tl.load(level + bh * tokens + i, mask=i < tokens, other=0)
    node = tl.zeros((TILE,), tl.int32)
    if tl.max(own, 0) > 0:
        d = tl.arange(0, DP)
        m = (own > 0)[:, None] & (d < D)[None, :]
        rows = tl.load(x + (bh * tokens + i)[:, None] * D + d[None, :], mask=m, other=0.0)
        _, node = _tree.nearest_of(
            rows, own, key + bh * nodes * D, key_level + bh * nodes, tl.load(radius2 + bh), 1,
            tl.load(node_count + bh), D, DP, NODES,
        )  # fmt: skip
    tl.store(out + bh * tokens + i, node, mask=i < tokens)


@triton.jit
def _arrange(
    x, takes, node, key, row_key, row_scale, row_node, fill, order, start, length, old_begin, ring_begin, heads, tokens,
    columns, rows, nodes, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
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
        parent = tl.load(node + bh * tokens + take, mask=live, other=0)
        _residual.keep_of(
            values, parent, bh * rows + row, live, key + bh * nodes * D, row_key, row_scale, D, DP, TILE, GROUPS
        )
        tl.store(row_node + bh * rows + row, parent, mask=live)
        tl.store(fill + bh * (rows // P) + row // P, tl.full((TILE,), P, tl.int32), mask=live & (row % P == 0))
        moves = live & (row >= tl.cdiv(tl.maximum(n0, old), P) * P)
        first = columns - n
        tl.store(order + bh * columns + first + row, (first + old + take).to(tl.int32), mask=moves)


def launch(k, near, tree, leaves, lengths, promotion, join) -> Tensor:
    held = keys_of(near.ring).clone()
    with beside(join, k, held, *tree, *leaves, *lengths[:4]):
        return _launch(k, held, tree, leaves, lengths, promotion)


def _launch(k, held, tree, leaves, lengths, promotion) -> Tensor:
    batch, heads, columns, d = k.shape
    page, nodes = check_pages(leaves, lengths), tree.key.shape[2]
    start, length, old, new = (t[:, None].long() for t in lengths[:4])
    tokens = min(columns + held.shape[2] - lengths.sink, leaves.node.shape[2])
    position = old + torch.arange(tokens, device=k.device)
    live = (position < new) & (length > 0)
    x = _keys(k, held, position, start, length, live, lengths.sink)
    norms = x.float().square().sum(-1)
    tree.radius2.copy_(torch.maximum(tree.radius2, norms.amax(-1)))
    level = _add_nodes(x, torch.where(live, _tree.levels_of(position, promotion), 0), tree)
    tile = tile_of(k)  # keys of a program, and nodes it compares them with at a time
    grid, wide = (cdiv(tokens, tile), batch * heads), dict(D=d, DP=next_power_of_2(d), TILE=tile)
    node = torch.empty_like(level)
    _parents[grid](
        x, level, tree.key, tree.level, tree.radius2, tree.node_count, node, tokens, nodes, NODES=tile, **wide
    )
    _add_parents(level, node, tree)
    moves = live & (position >= (torch.maximum(start, old) + page - 1) // page * page)
    along = _tree.projections(x, tree.radius2[..., None], promotion.seed)
    moves, live = (t[:, None].expand_as(node) for t in (moves, live))
    takes = _tree.arrangement(node, along, moves, live).int()
    order = torch.arange(columns, dtype=torch.int32, device=k.device).expand(batch, heads, -1).contiguous()
    _arrange[grid](
        x, takes, node, tree.key, *leaves, order, *lengths[:4], heads, tokens, columns, leaves.node.shape[2], nodes,
        P=page, GROUPS=leaves.scale.shape[3], **wide,
    )  # fmt: skip
    return order


def _keys(k, ring, position, start, length, live, sink) -> Tensor:
    """Of the tokens at these positions [batch, n]: new ones are in `k`, the others in the ring; 0 where none is."""
    wide = (*k.shape[:2], position.shape[1], k.shape[3])
    column = (k.shape[2] - length + position).clamp(0, k.shape[2] - 1)
    row = ring_row(position, sink, ring.shape[2])
    of = lambda t, at: t.gather(2, at[:, None, :, None].expand(wide))  # noqa: E731
    x = torch.where((position >= start)[:, None, :, None], of(k, column), of(ring, row))
    return torch.where(live[:, None, :, None], x, 0)


def _places(level: Tensor, first: Tensor) -> Tensor:
    """The node that each token becomes, the root for none."""
    risen = level > 1
    return torch.where(risen, first[..., None] + risen.cumsum(-1) - 1, _tree.ROOT)


def _add_nodes(x: Tensor, level: Tensor, tree: Tree) -> Tensor:
    """The risen tokens into the tree, as far as there is room; levels [batch, heads, tokens] as they are then."""
    level = level[:, None].expand(x.shape[:3]).int()
    node = _places(level, tree.node_count)
    fits = node < tree.key.shape[2]
    level, node = torch.where(fits, level, 1), torch.where(fits, node, _tree.ROOT)
    tree.key.scatter_(2, node[..., None].expand_as(x), x)
    tree.level.scatter_(2, node, level)
    tree.key[:, :, _tree.ROOT], tree.level[:, :, _tree.ROOT] = 0, 0  # where those went that are no nodes
    tree.node_count.add_((level > 1).sum(-1).int())
    return level


def _add_parents(level: Tensor, node: Tensor, tree: Tree) -> None:
    first = tree.node_count - (level > 1).sum(-1).int()
    tree.parent.scatter_(2, _places(level, first), node)
    tree.parent[:, :, _tree.ROOT] = _tree.ROOT


def fake(k, *_) -> Tensor:
    return k.new_empty(k.shape[:3], dtype=torch.int32)


plant_tree = register(
    "plant_tree", reference, impls=(by_triton(launch),), fake=fake, check=check, capturable=False
)
