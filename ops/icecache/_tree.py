"""A tree of keys (IceCache): which tokens rise in it, and which of the risen ones is nearest to a key.

Distances are Euclidean in a lifted space, where a key k is [k / c, sqrt(1 - |k|^2 / c^2)] and c the largest norm of all
keys so far. There all keys have length 1, so the nearest is the one of largest k.k' + sqrt(c^2 - |k|^2) sqrt(c^2 -
|k'|^2): the lift is made anew with today's c, and nothing that is stored depends on it.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.hash import mix, mixed
from torchsparsekv.ops._machinery.triton import tl, triton
from torchsparsekv.ops.icecache.views import Promotion
from torchsparsekv.ops.select._top import GROUP
from torchsparsekv.ops.store.rows import in_8_bits, packed_number, scale_of, scales_of, size_of

ROOT = 0
SEEDS, SALTS = 1 << 16, 16  # a level is drawn with its own salt
NO_SPAN, OWN_SPAN = 0xFFFF, 0x1FFFF  # of a page without a token, and of one whose tokens all are nodes
_NO_SPAN, _OWN_SPAN = tl.constexpr(NO_SPAN), tl.constexpr(OWN_SPAN)
CHUNK = 4096  # keys whose distances the reference has in memory at a time


def check_promotion(p: Promotion) -> None:
    if p.every == 1 or p.every < 0 or not 0 <= p.chance < 1 << 31 or (p.every == 0) == (p.chance == 0):
        raise ValueError(f"promote one of every >= 2 tokens, or each by a chance below 2^31; got {p.every}, {p.chance}")
    if not 2 <= p.levels < SALTS:
        raise ValueError(f"a tree has from 2 to {SALTS - 1} levels, got {p.levels}")
    if not 0 <= p.seed < SEEDS:
        raise ValueError(f"seed must be from 0 to {SEEDS - 1}, got {p.seed}")


# ---------------------------------------------------------------- torch


def draw(i: Tensor, salt: int) -> Tensor:
    """From 0 up to 2^31."""
    return mixed(mixed(i.long()) + salt) >> 1


def levels_of(position: Tensor, p: Promotion) -> Tensor:
    """The level of each token, from 1 on."""
    level, at, rising = torch.ones_like(position), position, torch.ones_like(position, dtype=torch.bool)
    for step in range(p.levels - 1):
        salt = p.seed * SALTS + step
        if p.every:
            rising = rising & (at % p.every == draw(at // p.every, salt) % p.every)
            at = at // p.every
        else:
            rising = rising & (draw(position, salt) < p.chance)
        level = level + rising
    return level


def lift(x: Tensor, radius2: Tensor) -> Tensor:
    """The last coordinate of keys, times c."""
    return lift_by(x.float().square().sum(-1), radius2)


def lift_by(norm2: Tensor, radius2: Tensor) -> Tensor:
    """Of keys whose squared norms are known."""
    return (radius2 - norm2).clamp(min=0).sqrt()


def nearest(x: Tensor, level: Tensor, key: Tensor, key_level: Tensor, radius2: Tensor) -> Tensor:
    """Of each key of x [n, dim] the nearest of `key` one level above; ties go to the lower, none is the root.

    The place of the root in `key` is never chosen, for it has level 0.
    """
    node = torch.full((len(x),), ROOT, dtype=torch.int32, device=x.device)
    y, far = key.float(), lift(key, radius2)
    for i in range(0, len(x), CHUNK):
        part = slice(i, i + CHUNK)
        score = x[part].float() @ y.T + lift(x[part], radius2)[:, None] * far
        score = score.masked_fill(key_level != level[part, None] + 1, -torch.inf)
        best = score.argmax(-1, keepdim=True)
        node[part] = torch.where(score.gather(1, best) > -torch.inf, best, ROOT)[:, 0].int()
    return node


def signs(dim: int, seed: int, device: torch.device) -> Tensor:
    """Of the channels, and of the lift behind them."""
    return 1.0 - 2.0 * (draw(torch.arange(dim + 1, device=device), seed * SALTS + SALTS - 1) & 1)


def projections(x: Tensor, radius2: Tensor, seed: int) -> Tensor:
    """Of the lifted keys on one direction of random signs; `radius2` fits the leading dimensions of x."""
    sign = signs(x.shape[-1], seed, x.device)
    return x.float() @ sign[:-1] + sign[-1] * lift(x, radius2)


def arrangement(node: Tensor, projection: Tensor, moves: Tensor, live: Tensor, page: int) -> Tensor:
    """Which token each row takes: those that move by (node, projection), behind those that do not, which come first.
    Their pages are dealt out."""
    index = torch.arange(node.shape[-1], device=node.device).expand_as(node)
    along = torch.where(moves, projection, index.float())
    order = along.argsort(dim=-1, stable=True)
    group = torch.where(moves, node + 1, torch.where(live, 0, torch.iinfo(torch.int32).max).int())
    order = order.gather(-1, group.gather(-1, order).argsort(dim=-1, stable=True))
    stay = (live & ~moves).sum(-1, keepdim=True)
    row, pages = index - stay, moves.sum(-1, keepdim=True) // page
    dealt = stay + dealt_out(row // page, pages) * page + row % page
    return order.gather(-1, torch.where(row < 0, index, dealt))


def dealt_out(place: Tensor, pages: Tensor) -> Tensor:
    """Which of so many pages, in the order of a tree, each place of the pool takes. A query looks for pages that are
    near to one another there, and GROUP places that follow one another are ranked by one program: so pages are dealt
    out to as many groups as they fill, one to each at a time. Those left over stay behind, as does what is no page."""
    groups = pages // GROUP
    return torch.where(place < groups * GROUP, place % GROUP * groups + place // GROUP, place)


def coded(key: Tensor) -> tuple[Tensor, Tensor]:
    """(code, scale) of keys: in 8 bits a channel, the largest of which is 127."""
    scale = scales_of(key.float())
    return in_8_bits(key.float(), scale[..., None]), scale


def decoded(code: Tensor, scale: Tensor) -> Tensor:
    return code.float() * scale[..., None]


def own(node):
    """Of Leaves.node: the number of the node that a token is itself, or back from that."""
    return -2 - node


def base_of(node: Tensor) -> Tensor:
    """By Leaves.node: the node whose product tells of a token's, its parent or itself; -1 for no token."""
    return torch.where(node < -1, own(node), node)


def spans_of(node: Tensor, pages: int) -> Tensor:
    """By Leaves.node, of each page: of the nodes whose children it has the least, and the greatest times 2^16. Where it
    has tokens too that are nodes, that begins at the root."""
    node = node.unflatten(-1, (pages, -1))
    has_own, has_children = (node < -1).any(-1), (node >= 0).any(-1)
    least, greatest = torch.where(node < 0, NO_SPAN, node).amin(-1), node.clamp(min=0).amax(-1)
    spans = torch.where(has_own, 0, least) | greatest << 16
    return torch.where(has_own & ~has_children, OWN_SPAN, spans)


# ---------------------------------------------------------------- Triton


@triton.jit
def keep_node(x, at, live, key, code, scale, norm2, D: tl.constexpr, DP: tl.constexpr):
    """Keys x [T, DP] become nodes, at places `at`; with their `coded` and their squared norms."""
    d = tl.arange(0, DP)
    m = live[:, None] & (d < D)[None, :]
    wide = tl.where(m, x.to(tl.float32), 0.0)
    its = scale_of(tl.max(size_of(wide), 1))
    to = at[:, None] * D + d[None, :]
    tl.store(key + to, x, mask=m)
    tl.store(code + to, packed_number(wide, its[:, None]), mask=m)
    tl.store(scale + at, its, mask=live)
    tl.store(norm2 + at, tl.sum(wide * wide, 1), mask=live)


@triton.jit
def own_in(node):
    """`own`"""
    return -2 - node


@triton.jit
def base_in(node):
    """`base_of`"""
    return tl.where(node < -1, own_in(node), node)


@triton.jit
def span_with(span, node, has_child, has_own):
    """That of a page with more tokens, children of `node` or nodes themselves."""
    only_own = span == _OWN_SPAN
    least, greatest = tl.where(only_own, 0, span & 0xFFFF), tl.where(only_own, 0, span >> 16 & 0xFFFF)
    span = tl.where(has_child, tl.minimum(least, node) | tl.maximum(greatest, node) << 16, span)
    least, greatest = span & 0xFFFF, span >> 16 & 0xFFFF
    return tl.where(has_own, tl.where(least > greatest, _OWN_SPAN, greatest << 16), span)


@triton.jit
def span_of(node, is_own, live):
    """`spans_of` for one page of tokens, children of `node` or nodes themselves."""
    child = live & ~is_own
    least, greatest = tl.min(tl.where(child, node, _NO_SPAN)), tl.max(tl.where(child, node, 0))
    has_own = tl.max((live & is_own).to(tl.int32)) > 0
    spans = tl.where(has_own, 0, least) | greatest << 16
    return tl.where(has_own & (least > greatest), _OWN_SPAN, spans)


@triton.jit
def draw_of(i, salt):
    return (mix(mix(i) + tl.full((), salt, tl.uint32)) >> 1).to(tl.int32)


@triton.jit
def level_of(position, chance, salt, EVERY: tl.constexpr, LEVELS: tl.constexpr):
    """`levels_of`; `salt` is that of the first level."""
    level = tl.full(position.shape, 1, tl.int32)
    at = position
    rising = position >= 0
    for step in tl.static_range(LEVELS - 1):
        if EVERY > 0:
            rising = rising & (at % EVERY == draw_of(at // EVERY, salt + step) % EVERY)
            at = at // EVERY
        else:
            rising = rising & (draw_of(position, salt + step) < chance)
        level += rising.to(tl.int32)
    return level


@triton.jit
def lift_in(norm2, radius2):
    """`lift_by`"""
    return tl.sqrt(tl.maximum(radius2 - norm2, 0.0))


@triton.jit
def lift_of(x, radius2):
    x = x.to(tl.float32)
    return lift_in(tl.sum(x * x, 1), radius2)


@triton.jit
def nearest_of(
    x, level, key, norm2, key_level, radius2, begin, end, D: tl.constexpr, DP: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """`nearest` among the nodes from `begin` to `end` of a head, with its score: -inf and the root for none.

    Of NODES at a time every place keeps its own best; these are compared at the end.
    """
    d, place = tl.arange(0, DP), tl.arange(0, NODES)
    far = lift_of(x, radius2)
    top = tl.full((level.shape[0], NODES), float("-inf"), tl.float32)
    node = tl.full((level.shape[0], NODES), 0, tl.int32)
    for first in range(begin, end, NODES):
        u = first + place
        m = (u < end)[:, None] & (d < D)[None, :]
        y = tl.load(key + u.to(tl.int64)[:, None] * D + d[None, :], mask=m, other=0.0)
        above = tl.load(key_level + u, mask=u < end, other=-1)
        lift = lift_in(tl.load(norm2 + u, mask=u < end, other=0.0), radius2)
        score = tl.dot(x, tl.trans(y), input_precision="ieee") + far[:, None] * lift[None, :]
        better = (above[None, :] == level[:, None] + 1) & (score > top)
        node, top = tl.where(better, u[None, :], node), tl.where(better, score, top)
    best = tl.max(top, 1)
    node = tl.min(tl.where(top == best[:, None], node, 0x7FFFFFFF), 1)
    return best, tl.where(best > float("-inf"), node, 0)
