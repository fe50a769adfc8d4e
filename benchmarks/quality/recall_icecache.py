"""IceCache on structured keys: what grouping by the tree gives, and what choosing by it does, apart.

    python benchmarks/quality/recall_icecache.py --contexts 8192 32768 --budgets 64 256

Keys and queries are those of _recall.py, beside this file. Pages of the same size, as many of them as the budget has:
- grouping: pages of the tree and pages in token order, both chosen by the exact q.k of their tokens (round-robin over
  the query heads of a group); `recall` is the share of each query head's --top best tokens that lie on them, `mass` the
  attention weight on them, averaged over the group.
- choice: pages of the tree, chosen by its descent at several fields of view; `agrees` is the share of the exactly
  chosen pages that it chooses too, `visited` the share of tokens that a query head sees.
"""
from typing import Any

import torch
from torch import Tensor

from torchsparsekv.benchmarks.quality._recall import Stream, finish, logits, parser, shares, show
from torchsparsekv.method import make_method
from torchsparsekv.ops.select.page_peaks import page_peaks
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.ops.select.union_pages import union_pages
from torchsparsekv.ops.select.visit_nodes import MILLION, visit_nodes
from torchsparsekv.ops.store.views import Leaves, View
from torchsparsekv.state import Geometry, LayerState, RowLengths


class Planted:
    """The tree of a stream, taken in as one prompt. `token` is the token in every row, for all heads."""

    def __init__(self, stream: Stream, budget: int, o):
        self.method: Any = make_method("icecache", budget=budget, sink=0, window=16, r=o.r, levels=o.levels)
        self.device, self.budget = torch.device(o.device), budget
        self.lengths = RowLengths(self.method.ring_plan, 1, stream.total, self.device)
        g = Geometry(1, stream.heads, stream.d, stream.total, o.dtype, stream.group)
        self.state = LayerState(self.method.buffers(g), self.lengths, self.device, pool_on_host=False)
        k = stream.keys[None].to(self.device, o.dtype)
        self.lengths.advance(stream.total)
        order: Tensor = self.method.prompt(self.state, k, k, join=True)
        self.end = int(self.lengths.view.ring_begin[0])
        self.token = order[0, :, : self.end].long().cpu()

    def in_token_order(self) -> Leaves:
        """The same pages' number and size, without the tree: all tokens as children of the root, where they stand."""
        key, node, fill = self.state.leaves
        back = torch.empty_like(self.token).scatter_(1, self.token, torch.arange(self.end).expand_as(self.token))
        plain = key.clone()
        plain[0, :, : self.end] = key[0, :, : self.end].gather(
            1, back.to(key.device)[..., None].expand(-1, -1, key.shape[-1])
        )
        return Leaves(plain, node.clamp(max=0), fill)

    def visited(self, q: Tensor, share: float) -> Tensor:
        return visit_nodes(q, self.state.tree, View(round(share * MILLION), self.method.least_view, self.method.levels))

    def pages(self, q: Tensor, visited: Tensor, leaves: Leaves) -> Tensor:
        peaks = page_peaks(q, visited, leaves)
        ids = top_blocks(peaks, self.budget // self.method.block_size)
        return union_pages(peaks, ids, leaves.key.shape[1])[0].cpu()

    def seen(self, visited: Tensor) -> float:
        node = self.state.leaves.node[..., : self.end].long()
        group = visited.shape[1] // node.shape[1]
        return float(visited.gather(2, node.repeat_interleave(group, 1)).float().mean())


def tokens_of(pages: Tensor, size: int, token: Tensor) -> Tensor:
    """The tokens on pages [heads, n] of rows that hold `token`."""
    rows = (pages.clamp(min=0).long()[..., None] * size + torch.arange(size)).flatten(1)
    return token.gather(1, rows)


def held(stream: Stream, q: Tensor, end: int, tokens: Tensor, top: int) -> Tensor:
    """(recall of every query head's best tokens, attention weight) on `tokens` [heads, n]."""
    x = logits(stream, q, end)
    best = x.topk(top).indices
    recall = shares(best, tokens[:, None].expand(-1, best.shape[1], -1), end)
    return torch.tensor([recall, float(x.softmax(-1).mean(1).gather(1, tokens).sum(-1).mean())])


def measure(stream: Stream, planted: Planted, o) -> list[dict]:
    size, own = planted.method.block_size, planted.state.leaves
    order = planted.in_token_order()
    plain = torch.arange(planted.end).expand_as(planted.token)
    total: dict[tuple[str, float], Tensor] = {}
    for _ in range(o.queries):
        q = stream.query(stream.total)
        x = q.to(planted.device, own.key.dtype)[None, :, None]
        everything = planted.visited(x, 1.0)
        exact = planted.pages(x, everything, own)
        one = [(("token order", 1.0), planted.pages(x, everything, order), plain, 1.0)]
        for share in (1.0, *o.views):
            visited = planted.visited(x, share)
            one.append((("tree", share), planted.pages(x, visited, own), planted.token, planted.seen(visited)))
        for name, pages, token, seen in one:
            agrees = shares(exact, pages, planted.end) if name[0] == "tree" else float("nan")
            found = held(stream, q, planted.end, tokens_of(pages, size, token), o.top)
            total[name] = total.get(name, 0) + torch.tensor([*found, agrees, seen])
    return [
        {"pages": pages, "field_of_view": share, **dict(zip(("recall", "mass", "agrees", "visited"), mean.tolist()))}
        for (pages, share), mean in ((name, t / o.queries) for name, t in total.items())
    ]


def main() -> None:
    p = parser(__doc__, "float32")
    p.add_argument("--budgets", type=int, nargs="+", default=[64, 256])
    p.add_argument("--views", type=float, nargs="+", default=[0.05, 0.1, 0.25])
    p.add_argument("--top", type=int, default=32)
    p.add_argument("--r", type=float, default=1 / 16)
    p.add_argument("--levels", type=int, default=2)
    o = p.parse_args()
    o.dtype = getattr(torch, o.dtype)
    rows = []
    for n in o.contexts:
        stream = Stream(n, n, heads=o.heads, group=o.group, seed=o.seed)
        for budget in o.budgets:
            for row in measure(stream, Planted(stream, budget, o), o):
                rows.append({"context": n, "budget": budget, **row})
                show(rows[-1])
    finish("icecache", rows, o)


if __name__ == "__main__":
    main()
