"""Add the tokens that leave the ring in a prompt to the tree, and return the order in which the pool stores them.

    level(t)   = 1 + how often t is promoted (_tree.py: levels_of)
    a token of level > 1 becomes a node, as long as there is room for nodes
    parent(t)  = the nearest node of level(t) + 1, old or new (_tree.py: nearest_node)
    order      = tokens sorted by (parent, projection), in whole pages spread over the pool (_tree.py: pool_order)

So siblings share pages, and every page is full. Tokens that were in the ring before this call, and tokens after them up
to the next page boundary, keep their place, in pages of their own.

Launches: they run beside the next layer, unless `join` is set (ops/_machinery/side_stream.py); only the ring is
copied before. Each kernel has a program for every (tile of tokens, row and kv head):
    _ingest    reads every key once: norms, projections, new nodes
    _parents   searches all nodes by tensor cores; no scores are stored
    (torch)    sorts, on the device
    _arrange   writes the leaves in the order of the pool
128K keys against 8K nodes are 0.27 TFLOP a kv head.

Paper: section 4.1, appendix B.1, algorithm 2.
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

NODES, STAGES = 2, 3  # of the search for nodes: tiles of nodes at a time, and loads of these in flight


def check(k, ring, tree, leaves, lengths, promotion, join) -> None:
    _tree.check_promotion(promotion)
    _residual.check_leaves(leaves, k.shape[3], k.dtype)
    check_pages(leaves, lengths)


def check_pages(leaves: Leaves, lengths: Lengths) -> int:
    """The rows of a page."""
    rows, pages = leaves.node.shape[2], leaves.fill.shape[2]
    if rows % pages:
        raise ValueError(f"{rows} rows are not {pages} whole pages")
    return whole_pages(rows // pages, lengths, f"{rows} rows in {pages} pages")


def whole_pages(page: int, lengths: Lengths, description: str) -> int:
    """`page`, if sink and interval are whole pages of that many rows. `description` begins the message if not."""
    if page < 1 or lengths.sink % page or lengths.interval % page:
        raise ValueError(f"{description}: sink {lengths.sink} and interval {lengths.interval} must be whole pages")
    return page


def reference(
    k: NewKeys, ring: Ring, tree: Changed[Tree], leaves: Changed[Leaves], lengths: Lengths, promotion: Promotion,
    join: bool,
) -> Tensor:  # fmt: skip
    """Add the tokens that leave the ring in a prompt to the tree.

    Args:
        k: [batch, kv_heads, tokens, dim], the keys of the prompt.
        ring: the tokens that were in it before the prompt; not written.
        tree, leaves: written.
        promotion: which tokens become nodes.
        join: wait for the result instead of computing it beside the next layer.

    Returns: int32 [batch, kv_heads, tokens], for each column of `k` the column of the token that takes its pool row.
        Columns whose tokens do not move map to themselves.
    """
    batch, heads, tokens, _ = k.shape
    page = check_pages(leaves, lengths)
    order = torch.arange(tokens, dtype=torch.int32, device=k.device).expand(batch, heads, -1).contiguous()
    for b, (n0, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= 0 or new <= old:
            continue
        in_ring, column = torch.arange(old, max(old, min(n0, new)), device=k.device), tokens - n
        ring_keys = keys_of(ring[b])[:, ring_row(in_ring, lengths.sink, ring.shape[2])]
        x = torch.cat([ring_keys, k[b, :, column + old + len(in_ring) : column + new]], 1)  # [heads, new - old, dim]
        position = torch.arange(old, new, device=k.device)
        moves = position >= cdiv(max(n0, old), page) * page
        for h in range(heads):
            head_tree = Tree(*(t[b, h] for t in tree))
            node, node_mark = _add_nodes(x[h], position, head_tree, promotion)
            projection = _tree.projections(x[h], head_tree.max_norm2, promotion.seed)
            takes = _tree.pool_order(node, projection, moves, torch.ones_like(moves), page)
            mark = torch.where(node_mark < 0, node_mark, node)[takes]
            _residual.store_leaves(leaves, (b, h, slice(old, new)), x[h][takes], mark, head_tree)
            order[b, h, column + position[moves]] = (column + old + takes[moves]).int()
        leaves.fill[b, :, old // page : new // page] = page
    leaves.span.copy_(_tree.spans_of(leaves.node, leaves.span.shape[2]))
    return order


def _add_nodes(x: Tensor, position: Tensor, tree: Tree, promotion: Promotion) -> tuple[Tensor, Tensor]:
    """Add the promoted keys of x [n, dim] to the tree of one head. Returns (the parent of every key, the self_mark
    of keys that are nodes now and 0 for the others)."""
    tree.max_norm2.copy_(torch.maximum(tree.max_norm2, x.float().square().sum(-1).amax()))
    level, count = _tree.levels_of(position, promotion), int(tree.node_count)
    promoted = (level > 1).nonzero()[:, 0]
    level[promoted[len(tree.level) - count :]] = 1  # no room
    promoted = promoted[: len(tree.level) - count]
    new = slice(count, count + len(promoted))
    tree.key[new], tree.level[new] = x[promoted], level[promoted].int()
    tree.code[new], tree.scale[new] = _tree.encode_nodes(x[promoted])
    tree.norm2[new] = x[promoted].float().square().sum(-1)
    tree.node_count.add_(len(promoted))
    node = _tree.nearest_node(x, level, tree.key, tree.level, tree.max_norm2)
    tree.parent[new] = node[promoted]
    node_mark = torch.zeros_like(node)
    node_mark[promoted] = _tree.self_mark(torch.arange(count, new.stop, dtype=torch.int32, device=node.device))
    return node, node_mark


@triton.jit
def _ingest(
    k, ring, x, level, number, new_level, node_mark, norm2, projection, sign, key, code, scale, node_norm2, key_level,
    count, start, length, old_begin, ring_begin, k_b, k_h, k_s, heads, tokens, columns, ring_rows, sink, nodes,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the keys of a tile of tokens to x, with their squared norms and their products with `sign`. Store the
    promoted tokens as nodes: the token with promotion number `number` becomes node `count` + `number`.

    `new_level` is 1 for promoted tokens without room, 0 where there is no token."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    n0, n, old, new = tl.load(start + b), tl.load(length + b), tl.load(old_begin + b), tl.load(ring_begin + b)
    i, d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DP)
    position = old + i
    live = (i < tokens) & (position < tl.where(n > 0, new, 0))
    in_prompt = (live & (position >= n0))[:, None] & (d < D)[None, :]
    in_ring = (live & (position < n0))[:, None] & (d < D)[None, :]
    row = ring_row_of(position, sink, ring_rows - sink).to(tl.int64)
    column = (columns - n + position).to(tl.int64)
    of_prompt = tl.load(k + b * k_b + h * k_h + column[:, None] * k_s + d[None, :], mask=in_prompt, other=0.0)
    of_ring = tl.load(ring + (bh * ring_rows + row)[:, None] * D + d[None, :], mask=in_ring, other=0.0)
    values = tl.where(in_prompt, of_prompt, of_ring)  # [TILE, DP]
    tl.store(x + (bh * tokens + i)[:, None] * D + d[None, :], values, mask=in_prompt | in_ring)
    wide = values.to(tl.float32)
    signs = tl.load(sign + d, mask=d < D, other=0.0)
    tl.store(norm2 + bh * tokens + i, tl.sum(wide * wide, 1), mask=i < tokens)
    tl.store(projection + bh * tokens + i, tl.sum(wide * signs[None, :], 1), mask=i < tokens)
    token_level = tl.load(level + b * tokens + i, mask=live, other=0)  # [TILE]
    node = tl.load(count + bh) + tl.load(number + b * tokens + i, mask=live, other=0)
    fits = (token_level > 1) & (node < nodes)
    token_level = tl.where(fits, token_level, tl.minimum(token_level, 1))
    tl.store(new_level + bh * tokens + i, token_level, mask=i < tokens)
    tl.store(node_mark + bh * tokens + i, tl.where(fits, _tree.self_mark_tl(node), 0), mask=i < tokens)
    tl.store(key_level + bh * nodes + node, token_level, mask=fits)
    _tree.store_nodes_tl(values, bh * nodes + node, fits, key, code, scale, node_norm2, D, DP)


@triton.jit
def _parents(
    x, level, node_mark, key, norm2, key_level, parent, max_norm2, node_count, out, tokens, nodes,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Write the parents of all tokens to `out`, and the parents of new nodes into the tree."""
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token_level = tl.load(level + bh * tokens + i, mask=i < tokens, other=0)  # [TILE]
    node = tl.zeros((TILE,), tl.int32)
    if tl.max(token_level, 0) > 0:
        d = tl.arange(0, DP)
        m = (token_level > 0)[:, None] & (d < D)[None, :]
        keys = tl.load(x + (bh * tokens + i)[:, None] * D + d[None, :], mask=m, other=0.0)  # [TILE, DP]
        _, node = _tree.nearest_node_tl(
            keys, token_level, key + bh * nodes * D, norm2 + bh * nodes, key_level + bh * nodes,
            tl.load(max_norm2 + bh), 1, tl.load(node_count + bh), D, DP, NODES,
        )  # fmt: skip
        u = _tree.self_mark_tl(tl.load(node_mark + bh * tokens + i, mask=token_level > 1, other=0))
        tl.store(parent + bh * nodes + u, node, mask=token_level > 1)
    tl.store(out + bh * tokens + i, node, mask=i < tokens)


@triton.jit
def _arrange(
    x, takes, node, node_mark, code, scale, row_key, row_scale, row_node, fill, order, start, length, old_begin,
    ring_begin, heads, tokens, columns, rows, nodes, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Store the leaves of the rows from `old_begin` on: row old_begin + i takes token takes[i]."""
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
        values = tl.load(x + (bh * tokens + take)[:, None] * D + d[None, :], mask=m, other=0.0)  # [TILE, DP]
        mark = tl.load(node_mark + bh * tokens + take, mask=live, other=0)
        mark = tl.where(mark < 0, mark, tl.load(node + bh * tokens + take, mask=live, other=0))
        _residual.store_leaves_tl(
            values, mark, bh * rows + row, live, code + bh * nodes * D, scale + bh * nodes, row_key, row_scale,
            row_node, D, DP, TILE, GROUPS,
        )  # fmt: skip
        tl.store(fill + bh * (rows // P) + row // P, tl.full((TILE,), P, tl.int32), mask=live & (row % P == 0))
        moves = live & (row >= tl.cdiv(tl.maximum(n0, old), P) * P)
        first = columns - n
        tl.store(order + bh * columns + first + row, (first + old + take).to(tl.int32), mask=moves)


def launch(k, ring, tree, leaves, lengths, promotion, join) -> Tensor:
    ring_keys = keys_of(ring).clone()  # store_prompt may write the ring before the side stream reads it
    with on_side_stream(join, k, ring_keys, *tree, *leaves, *lengths[:4]):
        return _launch(k, ring_keys, tree, leaves, lengths, promotion)


def _launch(k, ring_keys, tree, leaves, lengths, promotion) -> Tensor:
    page, columns, nodes = check_pages(leaves, lengths), k.shape[2], tree.key.shape[2]
    tokens = min(columns + ring_keys.shape[2] - lengths.sink, leaves.node.shape[2])
    start, length, old, new = (t[:, None].long() for t in lengths[:4])
    position = old + torch.arange(tokens, device=k.device)
    live = (position < new) & (length > 0)
    level = torch.where(live, _tree.levels_of(position, promotion), 0)
    new_tokens = _launch_ingest(k, ring_keys, level, tree, lengths, promotion)
    node = _launch_parents(new_tokens, tree)
    moves = live & (position >= (torch.maximum(start, old) + page - 1) // page * page)
    moves, live = (t[:, None].expand_as(node) for t in (moves, live))
    takes = _tree.pool_order(node, new_tokens.projection, moves, live, page).int()
    order = torch.arange(columns, dtype=torch.int32, device=k.device).expand(*k.shape[:2], -1).contiguous()
    grid, heads, sizes = _tiles(new_tokens.x)
    _arrange[grid](
        new_tokens.x, takes, node, new_tokens.node_mark, tree.code, tree.scale, *leaves[:4], order, *lengths[:4], heads,
        tokens, columns, leaves.node.shape[2], nodes, P=page, GROUPS=leaves.scale.shape[3], **sizes,
        **_residual.UNFUSED,
    )  # fmt: skip
    leaves.span.copy_(_tree.spans_of(leaves.node, leaves.span.shape[2]))
    return order


class _NewTokens(NamedTuple):
    """The tokens that leave the ring: x [batch, heads, tokens, dim], the others [batch, heads, tokens].

    node_mark: the self_mark of tokens that are nodes now, 0 for the others.
    """

    x: Tensor
    level: Tensor
    projection: Tensor
    node_mark: Tensor


def _tiles(x: Tensor) -> tuple[tuple[int, int], int, dict[str, int]]:
    """(grid, heads, constants) of a kernel over all tokens of x [batch, heads, tokens, dim]."""
    (batch, heads, tokens, d), tile = x.shape, tile_of(x)
    return (cdiv(tokens, tile), batch * heads), heads, dict(D=d, DP=next_power_of_2(d), TILE=tile)


def _launch_ingest(k, ring_keys, level, tree, lengths, promotion) -> _NewTokens:
    """`level` [batch, tokens] are the levels by position, 0 where there is no token."""
    lead, tokens, (rows, d) = k.shape[:2], level.shape[1], ring_keys.shape[2:]
    x = k.new_empty(*lead, tokens, d)
    new_level, node_mark = level.new_empty(2, *lead, tokens, dtype=torch.int32)
    norm2, projection = x.new_empty(2, *lead, tokens, dtype=torch.float32)
    promoted = (level > 1).int()
    number = promoted.cumsum(-1, dtype=torch.int32) - promoted
    count, sign = tree.node_count.clone(), _tree.signs(d, promotion.seed, k.device)
    grid, heads, sizes = _tiles(x)
    _ingest[grid](
        k, ring_keys, x, level.int(), number, new_level, node_mark, norm2, projection, sign, tree.key, tree.code,
        tree.scale, tree.norm2, tree.level, count, *lengths[:4], *k.stride()[:3], heads, tokens, k.shape[2], rows,
        lengths.sink, tree.key.shape[2], **sizes,
    )  # fmt: skip
    tree.node_count.copy_((count + promoted.sum(-1, keepdim=True)).clamp(max=tree.key.shape[2]))
    tree.max_norm2.copy_(torch.maximum(tree.max_norm2, norm2.amax(-1)))
    projection += sign[-1] * _tree.lift_of_norms(norm2, tree.max_norm2[..., None])
    return _NewTokens(x, new_level, projection, node_mark)


def _launch_parents(t: _NewTokens, tree: Tree) -> Tensor:
    node, (grid, _, sizes) = torch.empty_like(t.level), _tiles(t.x)
    _parents[grid](
        t.x, t.level, t.node_mark, tree.key, tree.norm2, tree.level, tree.parent, tree.max_norm2, tree.node_count,
        node, t.x.shape[2], tree.key.shape[2], **search_options(t.x), **sizes,
    )  # fmt: skip
    return node


def search_options(x: Tensor) -> dict[str, int]:
    """Options of a kernel that calls `nearest_node_tl` for keys like `x`: nodes at a time, loads of these in flight."""
    tile = tile_of(x)
    nbytes = tile * next_power_of_2(x.shape[-1]) * x.element_size()  # one tile is of tokens, one is for reductions
    stages = max(1, min(STAGES, (shared_bytes(x.device) - 2 * nbytes) // (NODES * nbytes)))
    return {"NODES": NODES * tile, "num_stages": stages}


def fake(k, *_) -> Tensor:
    return k.new_empty(k.shape[:3], dtype=torch.int32)


plant_tree = register(
    "plant_tree", reference, impls=(by_triton(launch),), fake=fake, check=check, capturable=False
)
