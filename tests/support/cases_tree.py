"""What the ops of trees of keys take, from a world (tests/support/cases.py)."""
import torch
from world import World, integers

from torchsparsekv.ops.icecache import _residual
from torchsparsekv.ops.icecache._tree import coded, decoded, own, spans_of
from torchsparsekv.ops.icecache.views import Followed, Leaves, Promotion, Tree, View, Visited
from torchsparsekv.ops.select._top import peaks_of
from torchsparsekv.ops.store.views import KVStore, Scored

I32 = torch.int32


def _promotion(w: World) -> Promotion:
    every, chance = w.pick((3, 0), (2, 0), (0, 1 << 29), (0, 1 << 30))
    return Promotion(every, chance, w.pick(2, 3, 4), w.seed)


def _tree(w: World, levels: int) -> tuple[Tree, Leaves]:
    """Of integer keys, some alike: nodes of all levels, pages of children of theirs, some of them open."""
    lead, nodes, block, rows = (w.batch, w.heads), w.pick(12, 40, 280), w.block, w.blocks * w.block
    node_count = torch.randint(1, w.pick(5, 12, 2) + 1, lead, generator=w.g, dtype=I32)
    drawn = lambda low, high, *shape: torch.randint(low, high, (*lead, *shape), generator=w.g, dtype=I32)  # noqa: E731
    known = torch.arange(nodes) < node_count[..., None]
    known[..., 0] = False
    level = torch.where(known, drawn(2, levels + 1, nodes), 0)
    above = known[..., None, :] & (level[..., None, :] == level[..., None] + 1) & known[..., None]
    parent = torch.where(above, torch.rand(above.shape, generator=w.g), 0).argmax(-1).to(I32)  # the root is number 0
    key = torch.where(known[..., None], integers(torch.randn(*lead, nodes, w.dim, generator=w.g)), 0).to(w.dtype)
    fill = drawn(0, block + 1, rows // block)
    held = (torch.arange(block) < fill[..., None]).flatten(2)
    node = torch.where(held, drawn(0, 12, rows) % node_count[..., None], -1)
    open_page = torch.where(torch.arange(nodes) < node_count[..., None], drawn(-1, rows // block, nodes), -1)
    radius2 = torch.randint(0, 20 * w.dim, lead, generator=w.g).float()
    keys = integers(torch.randn(*lead, rows, w.dim, generator=w.g)).to(w.dtype)
    placed = torch.full((*lead, block), -7, dtype=I32)
    code, scale = coded(key)
    none = torch.zeros_like(node_count)
    norm2 = key.float().square().sum(-1)
    tree = Tree(key, code, scale, norm2, parent, level, open_page, node_count, drawn(0, 2), radius2, none, placed)
    itself = (node > 0) & (drawn(0, 4, rows) == 0)
    at = node.clamp(min=0).long()[..., None].expand(keys.shape)
    keys = torch.where(itself[..., None], key.gather(2, at), keys)
    if w.pick(True, False):
        difference = keys.float() - decoded(code, scale).gather(2, at)
        codes, scale = _residual.coded(difference.masked_fill(itself[..., None], 0))
    else:
        codes, scale = keys.masked_fill(~held[..., None], torch.nan), torch.empty(*lead, rows, 0, dtype=torch.float16)
    assert (codes.shape[-1], scale.shape[-1]) == _residual.widths(w.dim, codes.dtype == torch.uint8)
    node = torch.where(itself, own(node), node).contiguous()
    return tree, Leaves(codes, scale, node, fill, spans_of(node, rows // block))


def plant_tree(w: World):
    ring = integers(w.ring(w.start, w.previous_begin))
    promotion = _promotion(w)
    return (integers(w.k), ring, *_tree(w, promotion.levels), w.lengths_view, promotion, True)


def insert_page(w: World, fetched: tuple):
    """One page leaves at a time; in half of the cases what the store has is not enough pages."""
    store, hot, lengths = _leaving_page(w, fetched)
    region = w.pick(0, w.blocks // 2, w.blocks) * w.block
    promotion = _promotion(w)
    tree, leaves = _tree(w, promotion.levels)
    free = torch.arange(w.blocks) >= region // w.block + tree.page_count[..., None]
    node = leaves.node.masked_fill(free.repeat_interleave(w.block, -1), -1)
    leaves = leaves._replace(node=node, fill=leaves.fill.masked_fill(free, 0), span=spans_of(node, w.blocks))
    return (store, hot, _distinct(tree, free), leaves, lengths, promotion, region)


def _leaving_page(w: World, fetched: tuple) -> tuple:
    _, pool, hot, _ = fetched
    lengths = w.lengths_view._replace(interval=w.block)
    least = torch.maximum(w.begin - w.block, torch.tensor(w.sink))
    lengths = lengths._replace(previous_ring_begin=least.int() if w.pick(True, False) else w.begin)
    return KVStore(integers(w.ring(w.length, lengths.previous_ring_begin)), pool), hot, lengths


def _followed(w: World, chosen: int) -> Followed:
    """Some heads follow one of another number, some that of their own."""
    lead = (w.batch, w.heads)
    heads = torch.randint(-1, w.heads, lead, generator=w.g, dtype=I32)
    fill = torch.randint(0, w.block + 1, (*lead, w.blocks), generator=w.g, dtype=I32)
    return Followed(heads, torch.full((*lead, chosen), -7, dtype=I32), fill)


def share_step(w: World, fetched: tuple):
    store, hot, lengths = _leaving_page(w, fetched)
    rows = torch.rand(w.batch, w.heads, w.blocks * w.block, generator=w.g).argsort(-1)[..., : w.block]
    asked = torch.randint(-1, w.blocks, (w.batch, w.heads, w.pick(1, 5, 300)), generator=w.g, dtype=I32)
    return (store, hot, _followed(w, asked.shape[2]), asked, rows.to(I32).contiguous(), lengths)


def top_tokens_of_last_queries(w: World):
    return (integers(w.q), integers(w.k), w.lengths_view, True)


def share_prompt(w: World):
    tokens = w.k.shape[2]
    order = torch.rand(w.batch, w.heads, tokens, generator=w.g).argsort(-1).to(I32)
    sought = torch.rand(2, w.batch, w.heads, min(4, tokens), w.pick(7, 30), generator=w.g).argsort(-1)[..., :5].to(I32)
    sought[torch.rand(sought.shape, generator=w.g) < 0.2] = -1
    both = w.pick(list(sought), [None, None])
    return (order, *both, _followed(w, 1), w.lengths_view, w.block, True)


def _distinct(tree: Tree, free: torch.Tensor) -> Tree:
    """Two nodes never fill the same page, and none a page that is free."""
    seen = torch.full_like(tree.open_page, -1)
    for at in (tree.open_page >= 0).nonzero().tolist():
        b, h, u = at
        page = tree.open_page[b, h, u]
        seen[b, h, u] = -1 if free[b, h, page] or (seen[b, h] == page).any() else page
    return tree._replace(open_page=seen)


def visit_nodes(w: World):
    least = w.pick(1, 2, 9)
    view = View(w.pick(300_000, 0, 1_000_000), least, least + w.pick(0, 3, 1000), w.pick(2, 3, 4))
    return (integers(w.q[:, :, :1]), _tree(w, view.levels)[0], view)


def page_peaks(w: World):
    tree, leaves = _tree(w, 3)
    shape = (w.batch, w.heads, tree.key.shape[2], w.group)
    products = torch.randint(-9, 10, shape, generator=w.g).float()
    products[torch.rand(shape, generator=w.g) >= 0.7] = -torch.inf
    products[:, :, 0] = 0  # the root
    least = torch.randint(-9, 12, (w.batch, w.heads, w.group), generator=w.g).float()
    return (integers(w.q[:, :, :1]), Visited(products, least), leaves, w.pick(1, 4))


def best_pages(w: World):
    heads, n, k = w.heads * w.group, 1 + w.seed % w.pick(3, 300), w.pick(1, 7, 20)
    scores = torch.randint(0, w.pick(3, 1000), (w.batch, heads, n), generator=w.g).float()
    scores = scores.masked_fill(torch.rand(scores.shape, generator=w.g) < w.pick(0.0, 0.3), -torch.inf)
    return (Scored(scores, peaks_of(scores)), torch.full((w.batch, w.heads, k), -7, dtype=I32))


def union_pages(w: World):
    heads, n = w.heads * w.group, 1 + w.seed % w.pick(3, 40)
    scores = torch.randint(0, w.pick(3, 1000), (w.batch, heads, n + w.pick(0, 3, 200)), generator=w.g).float()
    ids = torch.rand(scores.shape, generator=w.g).argsort(-1)[..., :n].to(I32)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=w.g) < w.pick(0.0, 0.3), -1)
    return (scores, ids.contiguous(), torch.full((w.batch, w.heads, n), -7, dtype=I32))
