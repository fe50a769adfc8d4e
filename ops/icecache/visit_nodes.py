"""Descend the tree of keys from its root: which nodes a query expands.

Level by level, from the highest: the nodes whose parent is expanded are scored by the inner product of the query with
their key, and the best of them are expanded, as many as `view` says of the nodes of that level, and those that are
equal to the last of these. The root is always expanded, and so are nodes below number `view.least`: under them are
tokens that came when there were few nodes, and got the nearest of those, which may be far (decoding after a short
prompt). Returns the products of those that were scored, fp32 [batch, kv_heads, nodes, group], that of the root being 0,
and -inf for the others: every query head for itself. The second result are the least products of nodes of level 2 that
are expanded, [batch, kv_heads, group].

In a tree of two levels with many nodes a sample tells that: nodes that are equally far apart, of whose best as large a
share is expanded. So as many nodes as wanted are expanded in the mean only, with a deviation of about one part in the
square root of how many of the sample are (by default 80 at 128K tokens); but nobody has to wait until one program has
looked at all nodes. Of up to SAMPLE nodes, and of deeper trees, all are the sample.

Keys of nodes are taken in their codes of 8 bits. Scoring is limited by reading these once for all query heads of a kv
head (8.7 MB at 128K tokens, r = 1/16 and 8 heads of 128), so it is spread over tiles of nodes. csrc/visit_nodes.cu, for
trees of two levels and queries in 2 bytes, scores the sample beside them and searches it, all in one launch. In Triton
the search is a second launch for each level, where a program holds all that it looks at in registers (ops/select/_top.py).
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
from torchsparsekv.ops.icecache.views import Tree, View
from torchsparsekv.ops.select._top import least_of_top, ordered
from torchsparsekv.ops.store.views import Query

MILLION = 1_000_000
MOST_NODES = 1 << 16  # that a program can choose among
SAMPLE, LARGE_SAMPLE, LARGE_TREE = 1024, 2048, 9216  # nodes of a sample, and of that of a tree with room for more
TILE = 64  # nodes of a program
NATIVE_TILE = 16  # nodes that csrc/visit_nodes.cu multiplies at a time
NATIVE = dict(THREADS=256, TILES=2, MILLION=MILLION)


def check(q, tree, view) -> None:
    _check.heads(q, tree.key)
    if not (0 <= view.share <= MILLION and 1 <= view.least <= view.most and 2 <= view.levels < SALTS):
        raise ValueError(
            f"need share from 0 to {MILLION}, 1 <= least <= most and levels from 2 to {SALTS - 1}, got {view}"
        )
    if tree.key.shape[2] > MOST_NODES:
        raise ValueError(f"at most {MOST_NODES} nodes can be chosen among, got {tree.key.shape[2]}")


def sample_of(nodes: int, levels: int) -> int:
    """Nodes of a sample at most, of a tree that has room for so many."""
    return MOST_NODES if levels > 2 else LARGE_SAMPLE if nodes > LARGE_TREE else SAMPLE


def reference(q: Query, tree: Tree, view: View) -> tuple[Tensor, Tensor]:
    group, nodes = q.shape[1] // tree.key.shape[1], tree.key.shape[2]
    each = lambda t: t.repeat_interleave(group, 1)  # noqa: E731
    scores = (each(tree.code).float() @ q.float().transpose(-1, -2))[..., 0] * each(tree.scale)
    known = torch.arange(nodes, device=q.device) < tree.node_count[..., None]
    level, parent = each(torch.where(known, tree.level, 0)), each(torch.where(known, tree.parent, ROOT)).long()
    products, expanded = torch.full_like(scores, -torch.inf), torch.zeros_like(scores, dtype=torch.bool)
    products[..., ROOT], expanded[..., ROOT] = 0, True
    for at in range(view.levels, 1, -1):
        there = level == at
        reached = there & expanded.gather(2, parent) & ~scores.isnan()  # NaN is nobody's best
        products = torch.where(reached, scores, products)
        least = _least_of(products.masked_fill(~reached, -torch.inf), there.sum(-1, keepdim=True), view)
        expanded |= reached & ((products >= least) | (torch.arange(nodes, device=q.device) < view.least))
    return products.unflatten(1, (-1, group)).movedim(2, -1).contiguous(), least.view(*tree.key.shape[:2], group)


def _least_of(products: Tensor, count: Tensor, view: View) -> Tensor:
    """The least product of those that are expanded, of so many nodes of a level; -inf are those not reached."""
    size, last, lowest = sample_of(products.shape[-1], view.levels), products.shape[-1], torch.finfo(torch.float32).min
    room = ((count * view.share + MILLION - 1) // MILLION).clamp(view.least, view.most)
    apart = ((count + size - 1) // size).clamp(min=1)
    sampled = (torch.arange(last, device=products.device) - ROOT - 1) % apart == 0
    best = products.masked_fill(~sampled, -torch.inf).sort(dim=-1, descending=True).values
    rank = torch.where(room < count, (room + apart - 1) // apart, last)
    return best.gather(-1, rank.clamp(max=last) - 1).clamp(min=lowest)


@triton.jit
def _scores(
    q, code, scale, parent, level, node_count, least, products, q_b, q_h, heads, nodes, always, AT: tl.constexpr,
    TOP: tl.constexpr, FLAT: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of the nodes of level AT; -inf where a query head does not reach one, and with TOP for those of other levels."""
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    u, g, d = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, GP), tl.arange(0, DP)
    there = (u < tl.load(node_count + bh)) & (u > 0)
    if not FLAT:
        there = there & (tl.load(level + bh * nodes + u, mask=u < nodes, other=0) == AT)
    m = (g < G)[:, None] & there[None, :]
    if not TOP:
        above = tl.load(parent + bh * nodes + u, mask=there, other=0)
        of = tl.load(products + ((bh * nodes + above) * G)[None, :] + g[:, None], mask=m, other=0.0)
        m = m & ((of >= tl.load(least + bh * G + g, mask=g < G, other=0.0)[:, None]) | (above < always)[None, :])
    score = tl.full((GP, TILE), float("-inf"), tl.float32)
    if tl.max(m.to(tl.int32)) > 0:
        x = load_query(q, q_b, q_h, b, h, G, GP, D, DP)
        y = tl.load(code + (bh * nodes + u)[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0)
        score = tl.dot(x, tl.trans(y.to(x.dtype)), input_precision="ieee")
        score *= tl.load(scale + bh * nodes + u, mask=there, other=0.0)[None, :]
        score = tl.where(m & (score == score), score, float("-inf"))
    if TOP:
        there = u < nodes
    out = ((bh * nodes + u) * G)[None, :] + g[:, None]
    tl.store(products + out, tl.where((u == 0)[None, :], 0.0, score), mask=(g < G)[:, None] & there[None, :])


@triton.jit
def _least(
    level, node_count, products, out, nodes, share, least, most, sample, AT: tl.constexpr, FLAT: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, MILLION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of the nodes of level AT that one query head expands; of a sample, N nodes at most."""
    wait_for_previous(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    bh, known = row // G, tl.load(node_count + row // G)
    if FLAT:
        count = known - 1
        apart = tl.maximum(1, tl.cdiv(count, sample))
        u = 1 + i * apart
        there = u < known
    else:
        u, apart = i, 1
        there = (u < known) & (tl.load(level + bh * nodes + u, mask=u < known, other=0) == AT)
        count = tl.sum(there.to(tl.int32), 0)
    room = (count.to(tl.int64) * share + MILLION - 1) // MILLION
    room = tl.minimum(tl.maximum(room, least), most).to(tl.int32)
    key = ordered(tl.load(products + (bh * nodes + u) * G + row % G, mask=there, other=float("-inf")))
    tl.store(out + row, least_of_top(key, tl.where(room < count, tl.cdiv(room, apart), N + 1)))


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
    """How csrc/visit_nodes.cu is compiled."""
    return NATIVE | dict(D=d, G=group, BF16=int(bf16), SAMPLE=sample_of(nodes, 2))


def _clusters(nodes: int, group: int, heads: int, device: torch.device) -> int:
    """Of programs that compute products, so many clusters. Where there is work for more than can be launched early, but
    not for twice as many, those have it all."""
    wanted = cdiv(nodes, group * NATIVE["THREADS"] // 32 * NATIVE["TILES"] * NATIVE_TILE)
    early = 2 * sm_count(device) // (heads * group) - 1
    return early if early < wanted <= 2 * early else wanted


def _launch_cuda(kernels, q, tree, view) -> tuple[Tensor, Tensor]:
    products, least = fake(q, tree)
    batch, heads, nodes, group = products.shape
    programs = group * (1 + _clusters(nodes, group, batch * heads, q.device))
    kernels.launch(
        "score", (batch * heads, programs, 1), NATIVE["THREADS"], q, tree.code, tree.scale, tree.node_count, products,
        least, q.stride(0), q.stride(1), heads, nodes, *view[:3],
    )  # fmt: skip
    return products, least


def _launch_triton(q, tree, view) -> tuple[Tensor, Tensor]:
    products, least = fake(q, tree)
    batch, heads, nodes, group = products.shape
    d, tiles, rows, sample = q.shape[3], cdiv(nodes, TILE), batch * heads * group, sample_of(nodes, view.levels)
    flat = view.levels == 2
    wide = max(32, next_power_of_2(min(sample, nodes)))
    for at in range(view.levels, 1, -1):
        _scores[(batch * heads, tiles)](
            q, tree.code, tree.scale, tree.parent, tree.level, tree.node_count, least, products, q.stride(0),
            q.stride(1), heads, nodes, view.least, AT=at, TOP=at == view.levels, FLAT=flat, G=group,
            GP=max(16, next_power_of_2(group)), D=d, DP=next_power_of_2(d), TILE=TILE,
            **launch_early(q.device, batch * heads * tiles),
        )  # fmt: skip
        _least[(rows,)](
            tree.level, tree.node_count, products, least, nodes, *view[:3], sample, AT=at, FLAT=flat, G=group, N=wide,
            MILLION=MILLION, num_warps=4 if wide <= 2048 else 8 if wide <= 8192 else 16, **launch_early(q.device, rows),
        )  # fmt: skip
    return products, least


def fake(q, tree, *_) -> tuple[Tensor, Tensor]:
    (batch, heads, nodes, _), group = tree.key.shape, q.shape[1] // tree.key.shape[1]
    new = lambda *shape: q.new_empty(shape, dtype=torch.float32)  # noqa: E731
    return new(batch, heads, nodes, group), new(batch, heads, group)


visit_nodes = register(
    "visit_nodes", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake, check=check
)
