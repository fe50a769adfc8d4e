"""Descend the tree of keys from its root: which nodes a query expands.

Level by level, from the highest: the nodes whose parent is expanded are scored by the inner product of the query with
their key, and the best of them are expanded, as many as `view` says of the nodes of that level; ties go to the lower
node. The root is always expanded. Returns the products of those that were scored, fp32 [batch, kv_heads, nodes,
group], that of the root being 0, and -inf for the others: every query head for itself. The second result says by bits
which ones are expanded, [batch, kv_heads, words, group]: bit u % 32 of word u / 32.

Keys of nodes are taken in their codes of 8 bits. Scoring is limited by reading these once for all query heads of a kv
head (8.7 MB at 128K tokens, r = 1/16 and 8 heads of 128), so it is spread over tiles of nodes: csrc/score_nodes.cu for
trees of two levels and queries in 2 bytes, or Triton. The choice is a second launch for each level, where a program
holds all products of one query head in registers and searches for the threshold: csrc/visit_nodes.cu by histograms,
Triton by counts (ops/_top.py). Where few of many nodes are wanted csrc/visit_nodes.cu holds their peaks first, and then
the products of the groups that have the best of these.
"""
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torchsparsekv.ops import _check, _cuda
from torchsparsekv.ops._impl import cuda as by_cuda
from torchsparsekv.ops._impl import triton as by_triton
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._top import GROUP, ordered, take_top
from torchsparsekv.ops._triton import cdiv, chain, chained, next_power_of_2, tl, triton
from torchsparsekv.ops.attend._split import load_query
from torchsparsekv.ops.index._tree import ROOT, SALTS
from torchsparsekv.ops.store.views import Query, Tree, View

MILLION = 1_000_000
MOST_NODES = 1 << 16  # that a program can choose among
TILE = 64  # nodes of a program
WORD = 32
# Of csrc/visit_nodes.cu: up to so many nodes a program has the fewer threads.
NATIVE_FEW, NATIVE_THREADS = 4096, (256, 1024)
# Of a tree of two levels with more nodes it looks at their peaks first, and at so many of the scores that share these.
NATIVE_ALL, NATIVE_SCORES = 16384, 12
NATIVE_TILES = dict(WARPS=8, TILES=2, GROUP=GROUP)  # of csrc/score_nodes.cu


def check(q, tree, view) -> None:
    _check.heads(q, tree.key)
    if not (0 <= view.share <= MILLION and 1 <= view.least <= view.most and 2 <= view.levels < SALTS):
        raise ValueError(
            f"need share from 0 to {MILLION}, 1 <= least <= most and levels from 2 to {SALTS - 1}, got {view}"
        )
    if tree.key.shape[2] > MOST_NODES:
        raise ValueError(f"at most {MOST_NODES} nodes can be chosen among, got {tree.key.shape[2]}")


def marks_of(expanded: Tensor, group: int) -> Tensor:
    """A bit each, of [batch, q_heads, nodes]; `group` query heads share a kv head."""
    bits = torch.nn.functional.pad(expanded, (0, -expanded.shape[-1] % WORD)).unflatten(-1, (-1, WORD))
    words = (bits.long() << torch.arange(WORD, device=expanded.device)).sum(-1).to(torch.int32)
    return words.unflatten(1, (-1, group)).transpose(2, 3).contiguous()


def expanded_of(marks: Tensor, nodes: int) -> Tensor:
    """Back from these."""
    bits = marks[..., None] >> torch.arange(WORD, device=marks.device) & 1
    return bits.permute(0, 1, 3, 2, 4).flatten(3)[..., :nodes].flatten(1, 2).bool()


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
        room = ((there.sum(-1, keepdim=True) * view.share + MILLION - 1) // MILLION).clamp(view.least, view.most)
        reached = there & expanded.gather(2, parent) & ~scores.isnan()  # NaN is nobody's best
        rank = scores.masked_fill(~reached, -torch.inf).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        products = torch.where(reached, scores, products)
        expanded |= reached & (rank < room)
    return products.unflatten(1, (-1, group)).movedim(2, -1).contiguous(), marks_of(expanded, group)


@triton.jit
def _scores(
    q, code, scale, parent, level, node_count, marks, products, peaks, q_b, q_h, heads, nodes, AT: tl.constexpr,
    TOP: tl.constexpr, FLAT: tl.constexpr, PEAKS: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of the nodes of level AT; -inf where a query head does not reach one, and with TOP for those of other levels.
    With PEAKS their peaks (ops/_top.py), in which the root has no part."""
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    u, g, d = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, GP), tl.arange(0, DP)
    there = (u < tl.load(node_count + bh)) & (u > 0)
    if not FLAT:
        there = there & (tl.load(level + bh * nodes + u, mask=u < nodes, other=0) == AT)
    m = (g < G)[:, None] & there[None, :]
    if not TOP:
        above = tl.load(parent + bh * nodes + u, mask=there, other=0)
        of = bh * tl.cdiv(nodes, 32) + above // 32
        word = tl.load(marks + of[None, :] * G + g[:, None], mask=m, other=0)
        m = m & ((word >> (above % 32)[None, :] & 1) > 0)
    score = tl.full((GP, TILE), float("-inf"), tl.float32)
    if tl.max(m.to(tl.int32)) > 0:
        x = load_query(q, q_b, q_h, b, h, G, GP, D, DP)
        y = tl.load(code + (bh * nodes + u)[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0)
        score = tl.dot(x, tl.trans(y.to(x.dtype)), input_precision="ieee")
        score *= tl.load(scale + bh * nodes + u, mask=there, other=0.0)[None, :]
        score = tl.where(m & (score == score), score, float("-inf"))
    if PEAKS:
        group, groups = tl.program_id(1) * (TILE // GROUP) + tl.arange(0, TILE // GROUP), tl.cdiv(nodes, GROUP)
        best = tl.max(tl.reshape(score, (GP, TILE // GROUP, GROUP)), 2)
        at = ((bh * G + g) * groups)[:, None] + group[None, :]
        tl.store(peaks + at, best, mask=(g < G)[:, None] & (group < groups)[None, :])
    if TOP:
        there = u < nodes
    out = ((bh * nodes + u) * G)[None, :] + g[:, None]
    tl.store(products + out, tl.where((u == 0)[None, :], 0.0, score), mask=(g < G)[:, None] & there[None, :])


@triton.jit
def _expand(
    level, node_count, products, marks, nodes, share, least, most, AT: tl.constexpr, TOP: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, MILLION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query head marks the best nodes of level AT."""
    chain(PDL)
    row = tl.program_id(0).to(tl.int64)
    bh, u = row // G, tl.arange(0, N)
    known = u < tl.load(node_count + bh)
    there = known & (tl.load(level + bh * nodes + u, mask=known, other=0) == AT)
    room = (tl.sum(there.to(tl.int64), 0) * share + MILLION - 1) // MILLION
    room = tl.minimum(tl.maximum(room, least), most).to(tl.int32)
    product = tl.load(products + (bh * nodes + u) * G + row % G, mask=there, other=float("-inf"))
    take = there & take_top(ordered(product), room)
    word, words = tl.arange(0, N // 32), tl.cdiv(nodes, 32)
    bits = (take | (TOP & (u == 0))).to(tl.int32) << (u % 32)
    bits = tl.sum(tl.reshape(bits, (N // 32, 32)), 1)
    to = marks + (bh * words + word) * G + row % G
    if not TOP:
        bits = bits | tl.load(to, mask=word < words, other=0)
    tl.store(to, bits, mask=word < words)


def room_of(view: View, nodes: int) -> int:
    """How many of so many nodes are expanded."""
    return min(max(cdiv(nodes * view.share, MILLION), view.least), view.most)


def native(nodes: int, view: View) -> dict[str, int]:
    """How csrc/visit_nodes.cu is compiled for so many."""
    threads, room = NATIVE_THREADS[nodes > NATIVE_FEW], room_of(view, nodes)
    flat = view.levels == 2
    shape = dict(THREADS=threads, MILLION=MILLION, GROUP=GROUP, WORDS=MOST_NODES // WORD, SCORES=NATIVE_SCORES)
    shape["FLAT"] = int(flat)
    if nodes > NATIVE_ALL and flat and room * 5 // 4 <= threads * NATIVE_SCORES // GROUP:
        return shape | dict(NODES=1, PEAKS=next_power_of_2(cdiv(cdiv(nodes, GROUP), threads)))
    return shape | dict(NODES=cdiv(cdiv(nodes, threads // 32), 32), PEAKS=0, WORDS=1)


def _fits(q, tree, view) -> tuple[_cuda.Module, _cuda.Module | None, dict[str, int]] | str:
    shape = native(tree.key.shape[2], view)
    choice = _cuda.load("visit_nodes", q.device, G=q.shape[1] // tree.key.shape[1], **shape)
    return choice if isinstance(choice, str) else (choice, _scorer(q, tree, view), shape)


def _scorer(q, tree, view) -> _cuda.Module | None:
    """csrc/score_nodes.cu where it can take these; Triton can in any case."""
    group, d = q.shape[1] // tree.key.shape[1], q.shape[3]
    if view.levels != 2 or q.element_size() != 2 or d % 64 or group > 8:
        return None
    if not _cuda.aligned(q, tree.code) or any(x % 4 for x in q.stride()[:2]):
        return None
    kernels = _cuda.load("score_nodes", q.device, D=d, G=group, BF16=int(q.dtype is torch.bfloat16), **NATIVE_TILES)
    return None if isinstance(kernels, str) else kernels


def _launch_cuda(fitting, q, tree, view) -> tuple[Tensor, Tensor]:
    kernels, scorer, shape = fitting
    rows, nodes = q.shape[0] * q.shape[1], tree.key.shape[2]
    peaks = q.new_empty((rows, cdiv(nodes, GROUP)), dtype=torch.float32) if shape["PEAKS"] else None
    score = partial(_score_cuda, scorer) if scorer else _score
    return _descend(q, tree, view, peaks, score, lambda products, marks, at, top: kernels.launch(
        "expand", (rows, 1, 1), shape["THREADS"], tree.level, tree.node_count, products, peaks, marks, nodes,
        view.share, view.least, view.most, at, int(top),
    ))  # fmt: skip


def _launch_triton(q, tree, view) -> tuple[Tensor, Tensor]:
    rows, nodes = q.shape[0] * q.shape[1], tree.key.shape[2]
    wide = max(WORD, next_power_of_2(nodes))
    return _descend(q, tree, view, None, _score, lambda products, marks, at, top: _expand[(rows,)](
        tree.level, tree.node_count, products, marks, nodes, view.share, view.least, view.most, AT=at, TOP=top,
        G=q.shape[1] // tree.key.shape[1], N=wide, MILLION=MILLION,
        num_warps=4 if wide <= 2048 else 8 if wide <= 8192 else 16, **chained(q.device, rows),
    ))  # fmt: skip


def _descend(q, tree, view, peaks: Tensor | None, score: Callable, expand: Callable) -> tuple[Tensor, Tensor]:
    """Level by level: `score` writes the products of those reached, with their peaks if wanted; `expand` marks the
    best."""
    products, marks = fake(q, tree)
    for at in range(view.levels, 1, -1):
        top = at == view.levels
        score(q, tree, marks, products, peaks, at, top)
        expand(products, marks, at, top)
    return products, marks


def _score(q, tree, marks, products, peaks: Tensor | None, at: int, top: bool) -> None:
    batch, heads, nodes, d = tree.key.shape
    group, tiles = q.shape[1] // heads, cdiv(nodes, TILE)
    _scores[(batch * heads, tiles)](
        q, tree.code, tree.scale, tree.parent, tree.level, tree.node_count, marks, products,
        products if peaks is None else peaks, q.stride(0), q.stride(1), heads, nodes, AT=at, TOP=top,
        FLAT=top and at == 2, PEAKS=peaks is not None, GROUP=GROUP, G=group, GP=max(16, next_power_of_2(group)), D=d,
        DP=next_power_of_2(d), TILE=TILE, **chained(q.device, batch * heads * tiles),
    )  # fmt: skip


def _score_cuda(kernels: _cuda.Module, q, tree, marks, products, peaks: Tensor | None, *_) -> None:
    batch, heads, nodes, _ = tree.key.shape
    warps = NATIVE_TILES["WARPS"]
    kernels.launch(
        "score", (batch * heads, cdiv(nodes, GROUP * warps * NATIVE_TILES["TILES"]), 1), 32 * warps, q, tree.code,
        tree.scale, tree.node_count, products, peaks, q.stride(0), q.stride(1), heads, nodes,
    )  # fmt: skip


def fake(q, tree, *_) -> tuple[Tensor, Tensor]:
    (batch, heads, nodes, _), group = tree.key.shape, q.shape[1] // tree.key.shape[1]
    products = q.new_empty((batch, heads, nodes, group), dtype=torch.float32)
    return products, q.new_empty((batch, heads, cdiv(nodes, WORD), group), dtype=torch.int32)


visit_nodes = register(
    "visit_nodes", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), fake=fake, check=check
)
