"""Add a page of generated tokens that leaves the ring to the tree, and its tokens to the pages of their nodes.

In the order of their positions, every token t of the page:

    level(t), parent(t)   as in plant_tree; the nodes include promoted tokens of this page that precede t
    row(t)                = the next row of the parent's open page; if that page is full or missing, the node opens a
                            new page after the first `region` rows of the pool
    pool[row(t)]          = key and value. If the page has a slot (slot_of >= 0; slot 0 counts), its copy there is
                            written too
    leaves[row(t)]        = the code of the key

If the pool has too few pages left for the tokens of a head, then all tokens of this head keep the pool rows of their
positions, into which `append` wrote them. tree.inserted_rows has the rows of the tokens (share_step.py). c is the
largest norm of all keys, those of this page included.

Launches: 1, of (batch * kv_heads, parts) programs. When nothing leaves the ring it returns at once. Most time goes into
reading the nodes: 2 MB a kv head at 128K tokens, of which one in 16 is a node. So the nodes of a head are cut into
parts, one for each multiprocessor that would be idle. A program searches its part for the parents of the whole page;
the last program to finish (tree.search_done_count) takes the best and does the rest, in parallel over the tokens.

Paper: section 4.1, appendix B.1 (last paragraph), algorithm 1 lines 26 to 37.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import launch_early, next_power_of_2, sm_count, tl, triton, wait_for_previous
from torchsparsekv.ops.attend._split import tile_of
from torchsparsekv.ops.gather._hot_buffer import check_blocks
from torchsparsekv.ops.icecache import _residual, _tree
from torchsparsekv.ops.icecache.plant_tree import check_pages, search_options
from torchsparsekv.ops.icecache.share_step import store_in_pool_and_hot
from torchsparsekv.ops.icecache.views import Leaves, Promotion, Tree
from torchsparsekv.ops.store.rows import in_row, keys_of, ring_row, ring_row_of, row_at, row_width, store_row
from torchsparsekv.ops.store.views import HotBuffer, KVStore, Lengths

WIDEST = 64  # tokens of a page at most: they are compared with each other in registers
WARPS = 8  # on an H200, 32K nodes take 57 us with 8 warps and 81 us with 4


def check(store, hot, tree, leaves, lengths, promotion, region) -> None:
    _tree.check_promotion(promotion)
    _residual.check_leaves(leaves, store.ring.shape[4], store.ring.dtype)
    check_blocks(store.pool, hot.rows, hot.slot_of)
    page = check_pages(leaves, lengths)
    if page > WIDEST or {page} != {hot.rows.shape[3], lengths.interval, tree.inserted_rows.shape[2]}:
        raise ValueError(
            f"pages, blocks, interval and inserted_rows must be equal, at most {WIDEST}, got {page}, "
            f"{hot.rows.shape[3]}, {lengths.interval} and {tree.inserted_rows.shape[2]}"
        )
    if region % page or not 0 <= region <= store.pool.shape[2]:
        raise ValueError(f"region must be whole pages of {page}, up to {store.pool.shape[2]} rows, got {region}")


def reference(
    store: Changed[KVStore], hot: Changed[HotBuffer], tree: Changed[Tree], leaves: Changed[Leaves], lengths: Lengths,
    promotion: Promotion, region: int,
) -> None:  # fmt: skip
    """Add the page of tokens that leaves the ring.

    Args:
        store, hot: pool and hot rows are written.
        tree, leaves: written.
        promotion: which tokens become nodes.
        region: the number of pool rows that belong to positions. The pages that nodes open come after them.
    """
    (ring, pool), page = store, check_pages(leaves, lengths)
    for b, (_, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= 0 or new <= old:
            continue
        position = torch.arange(old, old + page, device=ring.device)
        tokens = ring[b][:, ring_row(position, lengths.sink, ring.shape[2])]  # [heads, page, 2, dim]
        for h in range(ring.shape[1]):
            head_tree = Tree(*(t[b, h] for t in tree))
            parents, marks = _add_nodes(keys_of(tokens[h]), position, head_tree, promotion)
            rows = _assign_rows(parents, head_tree, leaves.fill[b, h], page, region) or position.tolist()
            head_tree.inserted_rows.copy_(torch.tensor(rows))
            for mark, row, token in zip(marks, rows, tokens[h]):
                index = (b, h, row)
                _residual.store_leaves(leaves, index, keys_of(token), leaves.node.new_tensor(mark), head_tree)
                leaves.fill[b, h, row // page] = row % page + 1
                store_in_pool_and_hot(token, row, pool[b, h], HotBuffer(*(t[b, h] for t in hot)))
    leaves.span.copy_(_tree.spans_of(leaves.node, leaves.span.shape[2]))


def _add_nodes(x: Tensor, position: Tensor, tree: Tree, promotion: Promotion) -> tuple[list[int], list[int]]:
    """Add keys x [page, dim] to the tree of one head, one by one. Returns (parents, marks in Leaves.node)."""
    tree.max_norm2.copy_(torch.maximum(tree.max_norm2, x.float().square().sum(-1).amax()))
    parents, marks = [], []
    for key, level in zip(x, _tree.levels_of(position, promotion)):
        u = int(tree.node_count)
        level = level if u < len(tree.level) else torch.ones_like(level)
        parent = _tree.nearest_node(key[None], level[None], tree.key, tree.level, tree.max_norm2)
        parents.append(int(parent))
        marks.append(_tree.self_mark(u) if level > 1 else parents[-1])
        if level > 1:
            tree.key[u], tree.level[u], tree.parent[u] = key, level.int(), parent[0]
            tree.code[u], tree.scale[u] = _tree.encode_nodes(key)
            tree.norm2[u] = key.float().square().sum()
            tree.node_count.add_(1)
    return parents, marks


def _assign_rows(parents: list[int], tree: Tree, fill: Tensor, page: int, region: int) -> list[int] | None:
    """The row of each token of one head; opens new pages. None, without a change, if too few pages are left."""
    next_row: dict[int, int | None] = {}  # of a node; None where its page is full
    rows, taken = [], int(tree.page_count)
    for node in parents:
        open_page = int(tree.open_page[node])
        has_room = open_page >= 0 and fill[open_page] < page
        row = next_row.get(node, open_page * page + int(fill[open_page]) if has_room else None)
        if row is None:
            row, taken = region + taken * page, taken + 1
        rows.append(row)
        next_row[node] = row + 1 if (row + 1) % page else None
    if region + taken * page > len(fill) * page:
        return None
    for node, row in zip(parents, rows):
        tree.open_page[node] = row // page
    tree.page_count.fill_(taken)
    return rows


@triton.jit
def _insert(
    ring, pool, hot, slot_of, key, code, scale, norm2, parent, key_level, open_page, node_count, page_count, max_norm2,
    search_done_count, inserted_rows, row_key, row_scale, row_node, fill, span, length, old_begin, ring_begin,
    part_scores, part_nodes, heads, ring_rows, slots, nodes, pages, sink, region, chance, salt, EVERY: tl.constexpr,
    LEVELS: tl.constexpr, P: tl.constexpr, T: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROW: tl.constexpr,
    NODES: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Search a part of the nodes; the last program of a head inserts the page. `part_scores` and `part_nodes` are
    scratch, [parts, T] for each head."""
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    n, old = tl.load(length + bh // heads), tl.load(old_begin + bh // heads)
    if (n > 0) & (old < tl.load(ring_begin + bh // heads)):
        i, d = tl.arange(0, T), tl.arange(0, DP)
        live = i < P
        from_row = row_at(ring, bh, ring_row_of(old + i, sink, ring_rows - sink), ring_rows, D)
        x = tl.load(from_row[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)  # [T, DP]
        wide = x.to(tl.float32)
        c2 = tl.maximum(tl.load(max_norm2 + bh), tl.max(tl.sum(wide * wide, 1), 0))
        count = tl.load(node_count + bh)
        level = tl.where(live, _tree.levels_tl(old + i, chance, salt, EVERY, LEVELS), 0)
        new_node = tl.cumsum((level > 1).to(tl.int32), 0) - 1 + count  # the node number of promoted tokens
        level = tl.where((level > 1) & (new_node >= nodes), 1, level)
        part_size = tl.cdiv(count, parts)
        begin = tl.maximum(part * part_size, 1)
        best, node = _tree.nearest_node_tl(
            x, level, key + bh * nodes * D, norm2 + bh * nodes, key_level + bh * nodes, c2, begin,
            tl.minimum(part * part_size + part_size, count), D, DP, NODES,
        )  # fmt: skip
        scratch = (bh * parts + part) * T + i
        tl.store(part_scores + scratch, best)
        tl.store(part_nodes + scratch, node)
        tl.debug_barrier()
        if tl.atomic_add(search_done_count + bh, 1) == parts - 1:  # all parts are searched
            best = tl.full((T,), float("-inf"), tl.float32)
            node = tl.zeros((T,), tl.int32)
            for p in range(parts):
                scratch = (bh * parts + p) * T + i
                score = tl.load(part_scores + scratch, cache_modifier=".cg")
                other = tl.load(part_nodes + scratch, cache_modifier=".cg")
                node = tl.where(score > best, other, node)
                best = tl.maximum(best, score)
            node = _nearest_in_page(x, level, new_node, c2, best, node, T)
            _commit(
                from_row, x, pool, hot, slot_of, key, code, scale, norm2, parent, key_level, open_page, node_count,
                page_count, max_norm2, search_done_count, inserted_rows, row_key, row_scale, row_node, fill, span, bh,
                old, count, node, level, new_node, c2, slots, nodes, pages, region, P, T, D, DP, ROW, GROUPS,
            )  # fmt: skip


@triton.jit
def _nearest_in_page(x, level, new_node, c2, best, node, T: tl.constexpr):
    """The parents [T], with the promoted tokens of the same page as candidates: only tokens that precede a token count,
    and older nodes win ties."""
    i = tl.arange(0, T)
    lift = _tree.lift_tl(x, c2)
    score = tl.dot(x, tl.trans(x), input_precision="ieee") + lift[:, None] * lift[None, :]  # [T, T]
    above = (i[None, :] < i[:, None]) & (level[None, :] == level[:, None] + 1) & (level[:, None] > 0)
    score = tl.where(above, score, float("-inf"))
    best_in_page, token = tl.max(score, 1, return_indices=True, return_indices_tie_break_left=True)
    token_node = tl.sum(tl.where(i[None, :] == token[:, None], new_node[None, :], 0), 1)
    return tl.where(best_in_page > best, token_node, node)


@triton.jit
def _store_spans(span, page, node, promoted, live, fits):
    """Store the spans of the pages that tokens went to, or of the page of their positions where they do not fit."""
    together = (page[:, None] == page[None, :]) & live[None, :]
    has_child = tl.max((together & ~promoted[None, :]).to(tl.int32), 1) > 0
    has_node = tl.max((together & promoted[None, :]).to(tl.int32), 1) > 0
    extended = _tree.extend_span_tl(tl.load(span, mask=live, other=0), node, has_child, has_node)
    tl.store(span, tl.where(fits, extended, _tree.span_tl(node, promoted, live)), mask=live)


@triton.jit
def _commit(
    from_row, x, pool, hot, slot_of, key, code, scale, norm2, parent, key_level, open_page, node_count, page_count,
    max_norm2, search_done_count, inserted_rows, row_key, row_scale, row_node, fill, span, bh, old, count, node, level,
    new_node, c2, slots, nodes, pages, region, P: tl.constexpr, T: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ROW: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write the new nodes, rows and pages of one head."""
    i, c = tl.arange(0, T), tl.arange(0, ROW)
    live, promoted = i < P, level > 1
    u = bh * nodes + new_node
    _tree.store_nodes_tl(x, u, promoted, key, code, scale, norm2, D, DP)
    tl.store(parent + u, node, mask=promoted)
    tl.store(key_level + u, level, mask=promoted)
    # Tokens of one node follow each other in its open page, then in one new page: they are at most a page of tokens.
    same = (node[:, None] == node[None, :]) & live[None, :] & live[:, None]  # [T, T]
    page = tl.load(open_page + bh * nodes + node, mask=live & (node < count), other=-1)
    # offset: the row in the page; P and more: in a new page.
    offset = tl.load(fill + bh * pages + page, mask=page >= 0, other=P)
    offset += tl.sum((same & (i[None, :] < i[:, None])).to(tl.int32), 1)
    opens = live & (offset == P)
    taken = tl.load(page_count + bh)
    new_page = region // P + taken + tl.cumsum(opens.to(tl.int32), 0) - 1
    new_page = tl.sum(tl.where(same & opens[None, :], new_page[None, :], 0), 1)
    taken += tl.sum(opens.to(tl.int32), 0)
    fits = tl.full((T,), 0, tl.int32) + taken <= pages - region // P
    page = tl.where(fits, tl.where(offset < P, page, new_page), old // P)
    offset = tl.where(fits, offset % P, i)
    tl.debug_barrier()  # all threads have read fill and open_page, and the keys of new nodes are stored
    tl.store(open_page + bh * nodes + node, new_page, mask=opens & fits)
    tl.atomic_max(fill + bh * pages + page, offset + 1, mask=live)
    row = page.to(tl.int64) * P + offset
    tl.store(inserted_rows + bh * P + i, row.to(tl.int32), mask=live)
    _store_spans(span + bh * pages + page, page, node, promoted, live, fits)
    _residual.store_leaves_tl(
        x, tl.where(promoted, _tree.self_mark_tl(new_node), node), bh * pages * P + row, live, code + bh * nodes * D,
        scale + bh * nodes, row_key, row_scale, row_node, D, DP, T, GROUPS,
    )  # fmt: skip
    m = live[:, None] & in_row(c, D)[None, :]
    values = tl.load(from_row[:, None] + c[None, :], mask=m, other=0.0)  # [T, ROW], key and value
    to = row_at(pool, bh, row[:, None], pages * P, D)
    values = store_row(to, c[None, :], values, live[:, None], in_row(c, D)[None, :], D)
    hot_slot = tl.load(slot_of + bh * pages + page, mask=live, other=-1).to(tl.int64)
    copy = row_at(hot, bh, (hot_slot * P + offset)[:, None], slots * P, D) + c[None, :]
    tl.store(copy, values, mask=m & (hot_slot >= 0)[:, None])
    tl.store(page_count + bh, tl.where(taken <= pages - region // P, taken, tl.load(page_count + bh)))
    tl.store(node_count + bh, count + tl.sum(promoted.to(tl.int32), 0))
    tl.store(max_norm2 + bh, c2)
    tl.store(search_done_count + bh, 0)


def launch(store, hot, tree, leaves, lengths, promotion, region) -> None:
    ring, pool = store
    batch, heads, ring_rows, _, d = ring.shape
    page, nodes = hot.rows.shape[3], tree.key.shape[2]
    parts = max(1, min(nodes // tile_of(ring), sm_count(ring.device) // (batch * heads)))
    wide = max(16, next_power_of_2(page))  # the smallest tile of tensor cores
    shape = (batch * heads * parts, wide)
    part_scores = torch.empty(shape, dtype=torch.float32, device=ring.device)
    part_nodes = torch.empty(shape, dtype=torch.int32, device=ring.device)
    _insert[(batch * heads, parts)](
        ring, pool, hot.rows, hot.slot_of, *tree, *leaves, lengths.length, lengths.previous_ring_begin,
        lengths.ring_begin, part_scores, part_nodes, heads, ring_rows, hot.rows.shape[2], nodes, leaves.fill.shape[2],
        lengths.sink, region, promotion.chance, promotion.seed * _tree.SALTS, EVERY=promotion.every,
        LEVELS=promotion.levels, P=page, T=wide, D=d, DP=next_power_of_2(d), ROW=next_power_of_2(row_width(d)),
        GROUPS=leaves.scale.shape[3], num_warps=WARPS, **search_options(ring), **_residual.UNFUSED,
        **launch_early(ring.device, batch * heads * parts),
    )  # fmt: skip


insert_page = register("insert_page", reference, impls=(by_triton(launch),), check=check)
