"""The tree of keys: which tokens are promoted, the nearest node of a key, the layout of pages, and the spans of pages.

Distances are Euclidean in the paper's lifted space (appendix B.1, equation 2), with c the largest norm of any key:

    lifted(k) = [k / c, sqrt(1 - |k|^2 / c^2)]

All lifted keys have length 1, so the nearest node k' has the largest k.k' + sqrt(c^2 - |k|^2) sqrt(c^2 - |k'|^2). The
lift is computed from the current c, and nothing that is stored depends on c.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.hash import mix, mixed
from torchsparsekv.ops._machinery.triton import tl, triton
from torchsparsekv.ops.icecache.views import Promotion
from torchsparsekv.ops.select._top import GROUP
from torchsparsekv.ops.store.rows import in_8_bits, packed_number, scale_of, scales_of, size_of

ROOT = 0
SEEDS, SALTS = 1 << 16, 16  # each level is drawn with a salt of its own
EMPTY_SPAN = 0xFFFF  # the span of a page without a token
NODES_ONLY_SPAN = 0x1FFFF  # the span of a page whose tokens all are nodes themselves
_EMPTY_SPAN, _NODES_ONLY_SPAN = tl.constexpr(EMPTY_SPAN), tl.constexpr(NODES_ONLY_SPAN)
CHUNK = 4096  # keys whose distances the reference holds in memory at a time


def check_promotion(p: Promotion) -> None:
    if p.every == 1 or p.every < 0 or not 0 <= p.chance < 1 << 31 or (p.every == 0) == (p.chance == 0):
        raise ValueError(
            "need either every >= 2 and chance 0, or every 0 and chance from 1 to 2^31 - 1, "
            f"got every {p.every}, chance {p.chance}"
        )
    if not 2 <= p.levels < SALTS:
        raise ValueError(f"a tree has from 2 to {SALTS - 1} levels, got {p.levels}")
    if not 0 <= p.seed < SEEDS:
        raise ValueError(f"seed must be from 0 to {SEEDS - 1}, got {p.seed}")


# ---------------------------------------------------------------- torch


def draw(i: Tensor, salt: int) -> Tensor:
    """A pseudo-random number below 2^31 for each number and the salt."""
    return mixed(mixed(i.long()) + salt) >> 1


def levels_of(position: Tensor, p: Promotion) -> Tensor:
    """The level of the token at each position; leaves have level 1."""
    level, i, promoted = torch.ones_like(position), position, torch.ones_like(position, dtype=torch.bool)
    for step in range(p.levels - 1):
        salt = p.seed * SALTS + step
        if p.every:
            promoted = promoted & (i % p.every == draw(i // p.every, salt) % p.every)
            i = i // p.every
        else:
            promoted = promoted & (draw(position, salt) < p.chance)
        level = level + promoted
    return level


def lift(keys: Tensor, max_norm2: Tensor) -> Tensor:
    """c times the last coordinate of the lifted keys."""
    return lift_of_norms(keys.float().square().sum(-1), max_norm2)


def lift_of_norms(norm2: Tensor, max_norm2: Tensor) -> Tensor:
    """`lift` of keys with these squared norms."""
    return (max_norm2 - norm2).clamp(min=0).sqrt()


def nearest_node(x: Tensor, level: Tensor, key: Tensor, key_level: Tensor, max_norm2: Tensor) -> Tensor:
    """For each key of x [n, dim], the nearest node of `key` [nodes, dim] that is one level above. Ties go to the lower
    node number; a key without such a node gets the root.

    The row of the root in `key` never wins, because its level is 0.
    """
    node = torch.full((len(x),), ROOT, dtype=torch.int32, device=x.device)
    y, node_lift = key.float(), lift(key, max_norm2)
    for i in range(0, len(x), CHUNK):
        part = slice(i, i + CHUNK)
        score = x[part].float() @ y.T + lift(x[part], max_norm2)[:, None] * node_lift
        score = score.masked_fill(key_level != level[part, None] + 1, -torch.inf)
        best = score.argmax(-1, keepdim=True)
        node[part] = torch.where(score.gather(1, best) > -torch.inf, best, ROOT)[:, 0].int()
    return node


def signs(dim: int, seed: int, device: torch.device) -> Tensor:
    """A random sign for every channel, and one for the lift."""
    return 1.0 - 2.0 * (draw(torch.arange(dim + 1, device=device), seed * SALTS + SALTS - 1) & 1)


def projections(x: Tensor, max_norm2: Tensor, seed: int) -> Tensor:
    """The lifted keys projected onto one direction of random signs. `max_norm2` broadcasts over keys."""
    sign = signs(x.shape[-1], seed, x.device)
    return x.float() @ sign[:-1] + sign[-1] * lift(x, max_norm2)


def pool_order(node: Tensor, projection: Tensor, moves: Tensor, live: Tensor, page: int) -> Tensor:
    """The index of the token that each row takes.

    Tokens that do not move come first and keep their order. Tokens that move come after them, sorted by (node,
    projection), in pages that `spread_pages` places.
    """
    index = torch.arange(node.shape[-1], device=node.device).expand_as(node)
    sort_key = torch.where(moves, projection, index.float())
    order = sort_key.argsort(dim=-1, stable=True)
    group = torch.where(moves, node + 1, torch.where(live, 0, torch.iinfo(torch.int32).max).int())
    order = order.gather(-1, group.gather(-1, order).argsort(dim=-1, stable=True))
    stay = (live & ~moves).sum(-1, keepdim=True)
    row, pages = index - stay, moves.sum(-1, keepdim=True) // page
    spread = stay + spread_pages(row // page, pages) * page + row % page
    return order.gather(-1, torch.where(row < 0, index, spread))


def spread_pages(place: Tensor, pages: Tensor) -> Tensor:
    """Which of the sorted pages each place of the pool takes, so that similar pages lie in different groups of places.

    The pages that a query looks for are neighbours in the sorted order, and one program ranks a group of GROUP places.
    So of n groups, group g takes the sorted pages g, g + n, g + 2 n, and so on. Pages that do not fill a group keep
    their place.
    """
    groups = pages // GROUP
    return torch.where(place < groups * GROUP, place % GROUP * groups + place // GROUP, place)


def encode_nodes(key: Tensor) -> tuple[Tensor, Tensor]:
    """(code, scale) of keys: 8 bits a channel, the largest channel is 127."""
    scale = scales_of(key.float())
    return in_8_bits(key.float(), scale[..., None]), scale


def decode_nodes(code: Tensor, scale: Tensor) -> Tensor:
    return code.float() * scale[..., None]


def self_mark(node):
    """The mark in Leaves.node of a token that is node number `node` itself. Applied to a mark, it returns the node
    number."""
    return -2 - node


def base_node(mark: Tensor) -> Tensor:
    """For marks of Leaves.node: the node whose product a token's product builds on. This is the parent, or the node
    that the token is itself; -1 for no token."""
    return torch.where(mark < -1, self_mark(mark), mark)


def spans_of(mark: Tensor, pages: int) -> Tensor:
    """The span of each page, from the marks of its tokens (Leaves.node).

    The smallest parent of the tokens, plus 2^16 times the largest parent. The span begins at the root if the page also
    holds tokens that are nodes themselves. Pages without parents have EMPTY_SPAN or NODES_ONLY_SPAN.
    """
    mark = mark.unflatten(-1, (pages, -1))
    has_nodes, has_children = (mark < -1).any(-1), (mark >= 0).any(-1)
    smallest, largest = torch.where(mark < 0, EMPTY_SPAN, mark).amin(-1), mark.clamp(min=0).amax(-1)
    spans = torch.where(has_nodes, 0, smallest) | largest << 16
    return torch.where(has_nodes & ~has_children, NODES_ONLY_SPAN, spans)


# ---------------------------------------------------------------- Triton


@triton.jit
def store_nodes_tl(x, u, live, key, code, scale, norm2, D: tl.constexpr, DP: tl.constexpr):
    """Store keys x [T, DP] as nodes u [T]: the keys, their codes (`encode_nodes`) and their squared norms."""
    d = tl.arange(0, DP)
    m = live[:, None] & (d < D)[None, :]
    wide = tl.where(m, x.to(tl.float32), 0.0)
    new_scale = scale_of(tl.max(size_of(wide), 1))  # [T]
    to = u[:, None] * D + d[None, :]
    tl.store(key + to, x, mask=m)
    tl.store(code + to, packed_number(wide, new_scale[:, None]), mask=m)
    tl.store(scale + u, new_scale, mask=live)
    tl.store(norm2 + u, tl.sum(wide * wide, 1), mask=live)


@triton.jit
def self_mark_tl(node):
    """`self_mark`"""
    return -2 - node


@triton.jit
def base_node_tl(mark):
    """`base_node`"""
    return tl.where(mark < -1, self_mark_tl(mark), mark)


@triton.jit
def extend_span_tl(span, node, has_child, has_node):
    """The span of a page that takes more tokens: children of `node` (has_child), nodes themselves (has_node)."""
    nodes_only = span == _NODES_ONLY_SPAN
    smallest, largest = tl.where(nodes_only, 0, span & 0xFFFF), tl.where(nodes_only, 0, span >> 16 & 0xFFFF)
    span = tl.where(has_child, tl.minimum(smallest, node) | tl.maximum(largest, node) << 16, span)
    smallest, largest = span & 0xFFFF, span >> 16 & 0xFFFF
    return tl.where(has_node, tl.where(smallest > largest, _NODES_ONLY_SPAN, largest << 16), span)


@triton.jit
def span_tl(node, is_node, live):
    """`spans_of` of one page: the parents of its tokens, and which tokens are nodes themselves."""
    child = live & ~is_node
    smallest, largest = tl.min(tl.where(child, node, _EMPTY_SPAN)), tl.max(tl.where(child, node, 0))
    has_node = tl.max((live & is_node).to(tl.int32)) > 0
    spans = tl.where(has_node, 0, smallest) | largest << 16
    return tl.where(has_node & (smallest > largest), _NODES_ONLY_SPAN, spans)


@triton.jit
def draw_tl(i, salt):
    """`draw`"""
    return (mix(mix(i) + tl.full((), salt, tl.uint32)) >> 1).to(tl.int32)


@triton.jit
def levels_tl(position, chance, salt, EVERY: tl.constexpr, LEVELS: tl.constexpr):
    """`levels_of`; `salt` is the salt of the first level."""
    level = tl.full(position.shape, 1, tl.int32)
    i = position
    promoted = position >= 0
    for step in tl.static_range(LEVELS - 1):
        if EVERY > 0:
            promoted = promoted & (i % EVERY == draw_tl(i // EVERY, salt + step) % EVERY)
            i = i // EVERY
        else:
            promoted = promoted & (draw_tl(position, salt + step) < chance)
        level += promoted.to(tl.int32)
    return level


@triton.jit
def lift_of_norms_tl(norm2, max_norm2):
    """`lift_of_norms`"""
    return tl.sqrt(tl.maximum(max_norm2 - norm2, 0.0))


@triton.jit
def lift_tl(x, max_norm2):
    """`lift`"""
    x = x.to(tl.float32)
    return lift_of_norms_tl(tl.sum(x * x, 1), max_norm2)


@triton.jit
def nearest_node_tl(
    x, level, key, norm2, key_level, max_norm2, begin, end, D: tl.constexpr, DP: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """(scores, nodes) of `nearest_node` among the nodes from `begin` to `end` of a kv head; (-inf, root) for none.

    The loop takes NODES nodes at a time. Each of the NODES places keeps the best it has seen; they are compared at the
    end.
    """
    d, place = tl.arange(0, DP), tl.arange(0, NODES)
    own_lift = lift_tl(x, max_norm2)  # [T]
    top = tl.full((level.shape[0], NODES), float("-inf"), tl.float32)
    node = tl.full((level.shape[0], NODES), 0, tl.int32)
    for first in range(begin, end, NODES):
        u = first + place
        m = (u < end)[:, None] & (d < D)[None, :]
        y = tl.load(key + u.to(tl.int64)[:, None] * D + d[None, :], mask=m, other=0.0)  # [NODES, DP]
        node_level = tl.load(key_level + u, mask=u < end, other=-1)
        node_lift = lift_of_norms_tl(tl.load(norm2 + u, mask=u < end, other=0.0), max_norm2)
        score = tl.dot(x, tl.trans(y), input_precision="ieee") + own_lift[:, None] * node_lift[None, :]  # [T, NODES]
        better = (node_level[None, :] == level[:, None] + 1) & (score > top)
        node, top = tl.where(better, u[None, :], node), tl.where(better, score, top)
    best = tl.max(top, 1)
    node = tl.min(tl.where(top == best[:, None], node, 0x7FFFFFFF), 1)
    return best, tl.where(best > float("-inf"), node, 0)
