"""A page of tokens leaves the ring while decoding: take it into the tree, and its tokens into the pages of their nodes.

In turn every token gets its level and its parent (ops/icecache/_tree.py; parents are sought among the nodes that there
are and those that this page brought before it), and the next row of its parent's open page. Is that full, or is there
none, then the node gets a new one from those behind the first `region` rows of the pool; the old one stays as it is.
Key and value are written to the pool, the key or its code to the index, and where the page is in the hot buffer to its
copy too: what was fetched before is never stale. Where the head has not as many pages left, the page of the ring stays
whole, at its own place in the pool, where `append` has put it. `tree.placed` says to which rows the tokens went.

c is the largest norm with those of this page. On most steps nothing leaves and the kernel returns at once.

On an H200 a step has 8 heads for 132 SMs, and what takes time is to read the nodes (2 MB a head at 128K tokens and
r = 1/16): each head's nodes are cut into slices, one program each, as many as there are SMs; all look for the
parents of the whole page in their slice, and the last one to be done (`tree.done_count`) takes the best and does the
rest, which is the work of a page of 16 tokens, in parallel over tokens by comparing each with each.
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
from torchsparsekv.ops.icecache.plant_tree import check_pages, going_over
from torchsparsekv.ops.icecache.share_step import put
from torchsparsekv.ops.icecache.views import Leaves, Promotion, Tree
from torchsparsekv.ops.store.rows import in_row, keys_of, ring_row, ring_row_of, row_at, row_width, store_row
from torchsparsekv.ops.store.views import Hot, KVStore, Lengths

WIDEST = 64  # tokens of a page: they are compared with each other in registers
WARPS = 8  # with 4, and half as many nodes at a time, 32K nodes took 81 us instead of 57 on an H200, norms not stored


def check(store, hot, tree, leaves, lengths, promotion, region) -> None:
    _tree.check_promotion(promotion)
    _residual.check_leaves(leaves, store.ring.shape[4], store.ring.dtype)
    check_blocks(store.pool, hot.rows, hot.slot_of)
    page = check_pages(leaves, lengths)
    if page > WIDEST or {page} != {hot.rows.shape[3], lengths.interval, tree.placed.shape[2]}:
        raise ValueError(
            f"one page of up to {WIDEST} tokens leaves at a time: pages of {page}, blocks of {hot.rows.shape[3]}, "
            f"interval {lengths.interval}"
        )
    if region % page or not 0 <= region <= store.pool.shape[2]:
        raise ValueError(f"region must be whole pages of {page}, up to {store.pool.shape[2]} rows, got {region}")


def reference(
    store: Changed[KVStore], hot: Changed[Hot], tree: Changed[Tree], leaves: Changed[Leaves], lengths: Lengths,
    promotion: Promotion, region: int,
) -> None:  # fmt: skip
    (ring, pool), page = store, check_pages(leaves, lengths)
    for b, (_, n, old, new) in enumerate(torch.stack(lengths[:4], 1).tolist()):
        if n <= 0 or new <= old:
            continue
        position = torch.arange(old, old + page, device=ring.device)
        rows = ring[b][:, ring_row(position, lengths.sink, ring.shape[2])]
        for h in range(ring.shape[1]):
            own = Tree(*(t[b, h] for t in tree))
            nodes, itself = _grown(keys_of(rows[h]), position, own, promotion)
            to = _places(nodes, own, leaves.fill[b, h], page, region) or position.tolist()
            own.placed.copy_(torch.tensor(to))
            for of, row, token in zip(itself, to, rows[h]):
                _residual.keep(leaves, (b, h, row), keys_of(token), leaves.node.new_tensor(of), own)
                leaves.fill[b, h, row // page] = row % page + 1
                put(token, row, pool[b, h], Hot(*(t[b, h] for t in hot)))
    leaves.span.copy_(_tree.spans_of(leaves.node, leaves.span.shape[2]))


def _grown(x: Tensor, position: Tensor, tree: Tree, promotion: Promotion) -> tuple[list[int], list[int]]:
    """Of one head: parents in turn, and what Leaves.node has of each; a risen token is a node for those after it."""
    tree.radius2.copy_(torch.maximum(tree.radius2, x.float().square().sum(-1).amax()))
    nodes, itself = [], []
    for token, level in zip(x, _tree.levels_of(position, promotion)):
        at = int(tree.node_count)
        level = level if at < len(tree.level) else torch.ones_like(level)
        found = _tree.nearest(token[None], level[None], tree.key, tree.level, tree.radius2)
        nodes.append(int(found))
        itself.append(_tree.own(at) if level > 1 else nodes[-1])
        if level > 1:
            tree.key[at], tree.level[at], tree.parent[at] = token, level.int(), found[0]
            tree.code[at], tree.scale[at] = _tree.coded(token)
            tree.norm2[at] = token.float().square().sum()
            tree.node_count.add_(1)
    return nodes, itself


def _places(nodes: list[int], tree: Tree, fill: Tensor, page: int, region: int) -> list[int] | None:
    """The row of each token of one head, and the new pages opened; None, and nothing, where they do not suffice."""
    next_row: dict[int, int | None] = {}  # of a node, None where its page is full
    rows, taken = [], int(tree.page_count)
    for node in nodes:
        at = int(tree.open_page[node])
        opened = at * page + int(fill[at]) if at >= 0 and fill[at] < page else None
        row = next_row.get(node, opened)
        if row is None:
            row, taken = region + taken * page, taken + 1
        rows.append(row)
        next_row[node] = row + 1 if (row + 1) % page else None
    if region + taken * page > len(fill) * page:
        return None
    for node, row in zip(nodes, rows):
        tree.open_page[node] = row // page
    tree.page_count.fill_(taken)
    return rows


@triton.jit
def _insert(
    ring, pool, hot, slot_of, key, code, scale, norm2, parent, key_level, open_page, node_count, page_count, radius2,
    done_count, placed, row_key, row_scale, row_node, fill, span, length, old_begin, ring_begin, scores, found, heads,
    ring_rows, slots, nodes, pages, sink, region, chance, salt, EVERY: tl.constexpr, LEVELS: tl.constexpr,
    P: tl.constexpr, T: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROW: tl.constexpr, NODES: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    n, old = tl.load(length + bh // heads), tl.load(old_begin + bh // heads)
    if (n > 0) & (old < tl.load(ring_begin + bh // heads)):
        i, d = tl.arange(0, T), tl.arange(0, DP)
        live = i < P
        from_row = row_at(ring, bh, ring_row_of(old + i, sink, ring_rows - sink), ring_rows, D)
        x = tl.load(from_row[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        wide = x.to(tl.float32)
        c2 = tl.maximum(tl.load(radius2 + bh), tl.max(tl.sum(wide * wide, 1), 0))
        count = tl.load(node_count + bh)
        level = tl.where(live, _tree.level_of(old + i, chance, salt, EVERY, LEVELS), 0)
        place = tl.cumsum((level > 1).to(tl.int32), 0) - 1 + count
        level = tl.where((level > 1) & (place >= nodes), 1, level)
        each = tl.cdiv(count, parts)
        begin = tl.maximum(part * each, 1)
        best, node = _tree.nearest_of(
            x, level, key + bh * nodes * D, norm2 + bh * nodes, key_level + bh * nodes, c2, begin,
            tl.minimum(part * each + each, count), D, DP, NODES,
        )  # fmt: skip
        scratch = (bh * parts + part) * T + i
        tl.store(scores + scratch, best)
        tl.store(found + scratch, node)
        tl.debug_barrier()
        if tl.atomic_add(done_count + bh, 1) == parts - 1:  # the slices of all programs are there
            best = tl.full((T,), float("-inf"), tl.float32)
            node = tl.zeros((T,), tl.int32)
            for p in range(parts):
                scratch = (bh * parts + p) * T + i
                score = tl.load(scores + scratch, cache_modifier=".cg")
                other = tl.load(found + scratch, cache_modifier=".cg")
                node = tl.where(score > best, other, node)
                best = tl.maximum(best, score)
            node = _among_each_other(x, level, place, c2, best, node, T)
            _commit(
                from_row, x, pool, hot, slot_of, key, code, scale, norm2, parent, key_level, open_page, node_count,
                page_count, radius2, done_count, placed, row_key, row_scale, row_node, fill, span, bh, old, count, node,
                level, place, c2, slots, nodes, pages, region, P, T, D, DP, ROW, GROUPS,
            )  # fmt: skip


@triton.jit
def _among_each_other(x, level, place, c2, best, node, T: tl.constexpr):
    """The parent where it is a risen token of the same page: only those before count, and nodes that were there win
    ties."""
    i = tl.arange(0, T)
    far = _tree.lift_of(x, c2)
    score = tl.dot(x, tl.trans(x), input_precision="ieee") + far[:, None] * far[None, :]
    above = (i[None, :] < i[:, None]) & (level[None, :] == level[:, None] + 1) & (level[:, None] > 0)
    score = tl.where(above, score, float("-inf"))
    near, at = tl.max(score, 1, return_indices=True, return_indices_tie_break_left=True)
    its_place = tl.sum(tl.where(i[None, :] == at[:, None], place[None, :], 0), 1)
    return tl.where(near > best, its_place, node)


@triton.jit
def _store_spans(span, page, node, risen, live, fits):
    """The spans of the pages that tokens are in; where they do not fit, of that of the ring."""
    together = (page[:, None] == page[None, :]) & live[None, :]
    has_child = tl.max((together & ~risen[None, :]).to(tl.int32), 1) > 0
    has_own = tl.max((together & risen[None, :]).to(tl.int32), 1) > 0
    after = _tree.span_with(tl.load(span, mask=live, other=0), node, has_child, has_own)
    tl.store(span, tl.where(fits, after, _tree.span_of(node, risen, live)), mask=live)


@triton.jit
def _commit(
    from_row, x, pool, hot, slot_of, key, code, scale, norm2, parent, key_level, open_page, node_count, page_count,
    radius2, done_count, placed, row_key, row_scale, row_node, fill, span, bh, old, count, node, level, place, c2,
    slots, nodes, pages, region, P: tl.constexpr, T: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROW: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Nodes, rows and pages of a head as they are from now on."""
    i, c = tl.arange(0, T), tl.arange(0, ROW)
    live, risen = i < P, level > 1
    at = bh * nodes + place
    _tree.keep_node(x, at, risen, key, code, scale, norm2, D, DP)
    tl.store(parent + at, node, mask=risen)
    tl.store(key_level + at, level, mask=risen)
    # Tokens of one node follow one another in its open page, then in a new one: a page has no fewer rows than tokens.
    same = (node[:, None] == node[None, :]) & live[None, :] & live[:, None]
    page = tl.load(open_page + bh * nodes + node, mask=live & (node < count), other=-1)
    slot = tl.load(fill + bh * pages + page, mask=page >= 0, other=P)
    slot += tl.sum((same & (i[None, :] < i[:, None])).to(tl.int32), 1)
    opens = live & (slot == P)
    taken = tl.load(page_count + bh)
    fresh = region // P + taken + tl.cumsum(opens.to(tl.int32), 0) - 1
    fresh = tl.sum(tl.where(same & opens[None, :], fresh[None, :], 0), 1)
    taken += tl.sum(opens.to(tl.int32), 0)
    fits = tl.full((T,), 0, tl.int32) + taken <= pages - region // P
    page = tl.where(fits, tl.where(slot < P, page, fresh), old // P)
    slot = tl.where(fits, slot % P, i)
    tl.debug_barrier()  # fills and open pages were read, and keys of new nodes are there
    tl.store(open_page + bh * nodes + node, fresh, mask=opens & fits)
    tl.atomic_max(fill + bh * pages + page, slot + 1, mask=live)
    row = page.to(tl.int64) * P + slot
    tl.store(placed + bh * P + i, row.to(tl.int32), mask=live)
    _store_spans(span + bh * pages + page, page, node, risen, live, fits)
    _residual.keep_of(
        x, tl.where(risen, _tree.own_in(place), node), bh * pages * P + row, live, code + bh * nodes * D,
        scale + bh * nodes, row_key, row_scale, row_node, D, DP, T, GROUPS,
    )  # fmt: skip
    m = live[:, None] & in_row(c, D)[None, :]
    values = tl.load(from_row[:, None] + c[None, :], mask=m, other=0.0)
    to = row_at(pool, bh, row[:, None], pages * P, D)
    values = store_row(to, c[None, :], values, live[:, None], in_row(c, D)[None, :], D)
    held = tl.load(slot_of + bh * pages + page, mask=live, other=-1).to(tl.int64)
    copy = row_at(hot, bh, (held * P + slot)[:, None], slots * P, D) + c[None, :]
    tl.store(copy, values, mask=m & (held >= 0)[:, None])
    tl.store(page_count + bh, tl.where(taken <= pages - region // P, taken, tl.load(page_count + bh)))
    tl.store(node_count + bh, count + tl.sum(risen.to(tl.int32), 0))
    tl.store(radius2 + bh, c2)
    tl.store(done_count + bh, 0)


def launch(store, hot, tree, leaves, lengths, promotion, region) -> None:
    ring, pool = store
    batch, heads, ring_rows, _, d = ring.shape
    page, nodes = hot.rows.shape[3], tree.key.shape[2]
    parts = max(1, min(nodes // tile_of(ring), sm_count(ring.device) // (batch * heads)))
    wide = max(16, next_power_of_2(page))  # the least that tensor cores multiply
    shape = (batch * heads * parts, wide)
    scores = torch.empty(shape, dtype=torch.float32, device=ring.device)
    found = torch.empty(shape, dtype=torch.int32, device=ring.device)
    _insert[(batch * heads, parts)](
        ring, pool, hot.rows, hot.slot_of, *tree, *leaves, lengths.length, lengths.previous_ring_begin,
        lengths.ring_begin, scores, found, heads, ring_rows, hot.rows.shape[2], nodes, leaves.fill.shape[2],
        lengths.sink, region, promotion.chance, promotion.seed * _tree.SALTS, EVERY=promotion.every,
        LEVELS=promotion.levels, P=page, T=wide, D=d, DP=next_power_of_2(d), ROW=next_power_of_2(row_width(d)),
        GROUPS=leaves.scale.shape[3], num_warps=WARPS, **going_over(ring), **_residual.UNFUSED,
        **launch_early(ring.device, batch * heads * parts),
    )  # fmt: skip


insert_page = register("insert_page", reference, impls=(by_triton(launch),), check=check)
