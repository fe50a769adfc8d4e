"""Descend the tree from its root: score the nodes that each query head reaches, and decide which of them it expands.

Level by level, from the highest to level 2; the root is expanded:

    reached      = nodes of the level whose parent is expanded
    product(u)   = q . decode(code of u)
    room         = clamp(ceil(share * nodes of the level), min_nodes, max_nodes)
    threshold    = the product of rank `room` among those reached; the lowest finite number if all have room
    expanded     = reached nodes with product >= threshold or with a number below min_nodes

The first nodes are always expanded, because tokens that came early hang under them: they took the nearest of few nodes,
which may be far.

A tree of two levels finds the threshold in a sample: every a-th node, and rank ceil(room / a). For a search through all
nodes, all other programs would wait for one. The number of expanded nodes is then `room` in the mean, with a relative
deviation of about 1 / sqrt(expanded nodes of the sample): 1 / sqrt(80) at 128K tokens and default options. Up to SAMPLE
nodes, and in deeper trees, the sample is all nodes.

Launches: csrc/visit_nodes.cu, for two levels and 2-byte queries, is 1 launch: a cluster for each kv head scores and
searches the sample while the other programs score tiles of nodes. Triton takes 2 launches a level: `_score_nodes`, of
(batch * kv_heads, cdiv(nodes, TILE)) programs, and `_find_threshold`, a program for each query head, which holds the
sample in registers.

Most time goes into reading the codes, once for all query heads of a kv head: 8.7 MB at 128K tokens, of which one in 16
is a node, and 8 heads of 128 channels.

Paper: section 3.3 and algorithm 4; its prioritized DCI query is replaced by scoring all children of expanded nodes.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import (
    cdiv,
    launch_early,
    next_power_of_2,
    sm_count,
    tl,
    triton,
    wait_for_previous,
)
from torchsparsekv.ops.attend._split import load_query
from torchsparsekv.ops.icecache._tree import ROOT, SALTS
from torchsparsekv.ops.icecache.views import FieldOfView, Tree
from torchsparsekv.ops.select._top import least_of_top, ordered
from torchsparsekv.ops.store.views import Query

MILLION = 1_000_000
MOST_NODES = 1 << 16  # nodes that a program can search
SAMPLE, LARGE_SAMPLE = 1024, 2048  # nodes of a sample, in a tree with room for up to LARGE_TREE nodes or for more
LARGE_TREE = 9216
TILE = 64  # nodes of a program
NATIVE_TILE = 16  # nodes that csrc/visit_nodes.cu multiplies at a time
NATIVE = dict(THREADS=256, TILES=2, MILLION=MILLION)


def check(q, tree, view) -> None:
    _check.heads(q, tree.key)
    if not (0 <= view.share <= MILLION and 1 <= view.min_nodes <= view.max_nodes and 2 <= view.levels < SALTS):
        raise ValueError(
            f"need share from 0 to {MILLION}, 1 <= min_nodes <= max_nodes and levels from 2 to {SALTS - 1}, got {view}"
        )
    if tree.key.shape[2] > MOST_NODES:
        raise ValueError(f"a tree has at most {MOST_NODES} nodes, got {tree.key.shape[2]}")


def sample_of(nodes: int, levels: int) -> int:
    """The largest sample in a tree with room for `nodes` nodes."""
    return MOST_NODES if levels > 2 else LARGE_SAMPLE if nodes > LARGE_TREE else SAMPLE


def reference(q: Query, tree: Tree, view: FieldOfView) -> tuple[Tensor, Tensor]:
    """Score the nodes that each query head reaches.

    Args:
        q: [batch, q_heads, 1, dim].
        tree: code [batch, kv_heads, nodes, dim] and scale, parent, level, node_count.
        view: how many nodes of a level a query expands.

    Returns: the fields of `Visited`.
        products: fp32 [batch, kv_heads, nodes, group].
        threshold: fp32 [batch, kv_heads, group], of the nodes of level 2.
    """
    group, nodes = q.shape[1] // tree.key.shape[1], tree.key.shape[2]
    each = lambda t: t.repeat_interleave(group, 1)  # noqa: E731
    # [batch, q_heads, nodes], like all tensors below
    scores = (each(tree.code).float() @ q.float().transpose(-1, -2))[..., 0] * each(tree.scale)
    known = torch.arange(nodes, device=q.device) < tree.node_count[..., None]
    level, parent = each(torch.where(known, tree.level, 0)), each(torch.where(known, tree.parent, ROOT)).long()
    products, expanded = torch.full_like(scores, -torch.inf), torch.zeros_like(scores, dtype=torch.bool)
    products[..., ROOT], expanded[..., ROOT] = 0, True
    always = torch.arange(nodes, device=q.device) < view.min_nodes
    for current in range(view.levels, 1, -1):
        in_level = level == current
        reached = in_level & expanded.gather(2, parent) & ~scores.isnan()  # NaN is never the best
        products = torch.where(reached, scores, products)
        reached_products = products.masked_fill(~reached, -torch.inf)
        threshold = _threshold(reached_products, in_level.sum(-1, keepdim=True), view)
        expanded |= reached & ((products >= threshold) | always)
    return products.unflatten(1, (-1, group)).movedim(2, -1).contiguous(), threshold.view(*tree.key.shape[:2], group)


def _threshold(products: Tensor, count: Tensor, view: FieldOfView) -> Tensor:
    """The threshold of a level with `count` nodes. `products` are -inf for nodes that are not reached."""
    size, nodes, lowest = sample_of(products.shape[-1], view.levels), products.shape[-1], torch.finfo(torch.float32).min
    room = ((count * view.share + MILLION - 1) // MILLION).clamp(view.min_nodes, view.max_nodes)
    apart = ((count + size - 1) // size).clamp(min=1)
    sampled = (torch.arange(nodes, device=products.device) - ROOT - 1) % apart == 0
    best = products.masked_fill(~sampled, -torch.inf).sort(dim=-1, descending=True).values
    rank = torch.where(room < count, (room + apart - 1) // apart, nodes)
    return best.gather(-1, rank.clamp(max=nodes) - 1).clamp(min=lowest)


@triton.jit
def _score_nodes(
    q, code, scale, parent, level, node_count, threshold, products, q_b, q_h, heads, nodes, min_nodes,
    LEVEL: tl.constexpr, TOP: tl.constexpr, FLAT: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The products of the nodes of level LEVEL; -inf for nodes that a query head does not reach. The TOP level also
    writes -inf for the nodes of other levels. FLAT: the tree has two levels."""
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    u, g, d = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, GP), tl.arange(0, DP)
    in_level = (u < tl.load(node_count + bh)) & (u > 0)  # [TILE]
    if not FLAT:
        in_level = in_level & (tl.load(level + bh * nodes + u, mask=u < nodes, other=0) == LEVEL)
    reached = (g < G)[:, None] & in_level[None, :]  # [GP, TILE]
    if not TOP:
        above = tl.load(parent + bh * nodes + u, mask=in_level, other=0)
        product = tl.load(products + ((bh * nodes + above) * G)[None, :] + g[:, None], mask=reached, other=0.0)
        bound = tl.load(threshold + bh * G + g, mask=g < G, other=0.0)[:, None]
        reached = reached & ((product >= bound) | (above < min_nodes)[None, :])
    score = tl.full((GP, TILE), float("-inf"), tl.float32)
    if tl.max(reached.to(tl.int32)) > 0:
        x = load_query(q, q_b, q_h, b, h, G, GP, D, DP)  # [GP, DP]
        m = in_level[:, None] & (d < D)[None, :]
        y = tl.load(code + (bh * nodes + u)[:, None] * D + d[None, :], mask=m, other=0)  # [TILE, DP]
        score = tl.dot(x, tl.trans(y.to(x.dtype)), input_precision="ieee")
        score *= tl.load(scale + bh * nodes + u, mask=in_level, other=0.0)[None, :]
        score = tl.where(reached & (score == score), score, float("-inf"))
    if TOP:
        in_level = u < nodes
    to = ((bh * nodes + u) * G)[None, :] + g[:, None]
    tl.store(products + to, tl.where((u == 0)[None, :], 0.0, score), mask=(g < G)[:, None] & in_level[None, :])


@triton.jit
def _find_threshold(
    level, node_count, products, threshold, nodes, share, min_nodes, max_nodes, sample, LEVEL: tl.constexpr,
    FLAT: tl.constexpr, G: tl.constexpr, N: tl.constexpr, MILLION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The threshold of one query head among the nodes of level LEVEL, from a sample of at most N nodes."""
    wait_for_previous(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    bh, known = row // G, tl.load(node_count + row // G)
    if FLAT:
        count = known - 1
        apart = tl.maximum(1, tl.cdiv(count, sample))
        u = 1 + i * apart
        in_level = u < known
    else:
        u, apart = i, 1
        in_level = (u < known) & (tl.load(level + bh * nodes + u, mask=u < known, other=0) == LEVEL)
        count = tl.sum(in_level.to(tl.int32), 0)
    room = (count.to(tl.int64) * share + MILLION - 1) // MILLION
    room = tl.minimum(tl.maximum(room, min_nodes), max_nodes).to(tl.int32)
    key = ordered(tl.load(products + (bh * nodes + u) * G + row % G, mask=in_level, other=float("-inf")))  # [N]
    tl.store(threshold + row, least_of_top(key, tl.where(room < count, tl.cdiv(room, apart), N + 1)))


def _fits(q, tree, view) -> _cuda.Module | str:
    group, d, nodes = q.shape[1] // tree.key.shape[1], q.shape[3], tree.key.shape[2]
    if view.levels != 2:
        return f"trees of {view.levels} levels"
    if q.element_size() != 2:
        return f"queries in {q.dtype}"
    if d % 64 or group > 8:
        return f"head_dim {d} and {group} query heads a kv head"
    if not _cuda.aligned(q, tree.code) or any(x % 4 for x in q.stride()[:2]):
        return "tensors are not aligned"
    return _cuda.load("visit_nodes", q.device, **native(d, group, nodes, q.dtype is torch.bfloat16))


def native(d: int, group: int, nodes: int, bf16: bool) -> dict[str, int]:
    """The defines of csrc/visit_nodes.cu."""
    return NATIVE | dict(D=d, G=group, BF16=int(bf16), SAMPLE=sample_of(nodes, 2))


def _clusters(nodes: int, group: int, heads: int, device: torch.device) -> int:
    """The number of clusters that compute products, for each kv head.

    Enough for all nodes in one pass. If this is more than can be launched early, but at most twice as many, then as
    many as can be launched early.
    """
    wanted = cdiv(nodes, group * NATIVE["THREADS"] // 32 * NATIVE["TILES"] * NATIVE_TILE)
    early = 2 * sm_count(device) // (heads * group) - 1
    return early if early < wanted <= 2 * early else wanted


def _launch_cuda(kernels, q, tree, view) -> tuple[Tensor, Tensor]:
    """csrc/visit_nodes.cu"""
    products, threshold = fake(q, tree)
    batch, heads, nodes, group = products.shape
    programs = group * (1 + _clusters(nodes, group, batch * heads, q.device))
    kernels.launch(
        "score", (batch * heads, programs, 1), NATIVE["THREADS"], q, tree.code, tree.scale, tree.node_count, products,
        threshold, q.stride(0), q.stride(1), heads, nodes, *view[:3],
    )  # fmt: skip
    return products, threshold


def _launch_triton(q, tree, view) -> tuple[Tensor, Tensor]:
    products, threshold = fake(q, tree)
    batch, heads, nodes, group = products.shape
    d, tiles, rows, sample = q.shape[3], cdiv(nodes, TILE), batch * heads * group, sample_of(nodes, view.levels)
    flat = view.levels == 2
    wide = max(32, next_power_of_2(min(sample, nodes)))
    for level in range(view.levels, 1, -1):
        _score_nodes[(batch * heads, tiles)](
            q, tree.code, tree.scale, tree.parent, tree.level, tree.node_count, threshold, products, q.stride(0),
            q.stride(1), heads, nodes, view.min_nodes, LEVEL=level, TOP=level == view.levels, FLAT=flat, G=group,
            GP=max(16, next_power_of_2(group)), D=d, DP=next_power_of_2(d), TILE=TILE,
            **launch_early(q.device, batch * heads * tiles),
        )  # fmt: skip
        _find_threshold[(rows,)](
            tree.level, tree.node_count, products, threshold, nodes, *view[:3], sample, LEVEL=level, FLAT=flat, G=group,
            N=wide, MILLION=MILLION, num_warps=4 if wide <= 2048 else 8 if wide <= 8192 else 16,
            **launch_early(q.device, rows),
        )  # fmt: skip
    return products, threshold


def fake(q, tree, *_) -> tuple[Tensor, Tensor]:
    (batch, heads, nodes, _), group = tree.key.shape, q.shape[1] // tree.key.shape[1]
    new = lambda *shape: q.new_empty(shape, dtype=torch.float32)  # noqa: E731
    return new(batch, heads, nodes, group), new(batch, heads, group)


visit_nodes = register(
    "visit_nodes", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake, check=check
)
