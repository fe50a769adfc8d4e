"""IceCache's grouping and its choice, apart, on keys of models and on structured ones.

    python benchmarks/quality/recall_icecache.py --keys smollm2 --contexts 4096 --budgets 64 256

--keys: `structured`, those of _recall.py; `recall`, the recall model's on --task; `smollm2`, the real model's on Moby
Dick (`make real-model`). Of the models the layers --layers, averaged, and the queries of the last tokens. Pages of the
same size, as many as the budget has. What is exact is so by raw keys. `recall` is the share of each query head's --top
best tokens that lie on the pages, `mass` the attention weight there, averaged over the group. Rows:
- token order, exact: pages of consecutive tokens, chosen by the exact q.k of their tokens, round-robin over the group.
- tree, exact: pages of the tree, chosen alike: beside the first what grouping gives.
- tree, codes or keys: chosen by our descent, which expands `field_of_view` of the nodes; tree, paper: by the paper's
  query on the same tree (_dci.py), with as many nodes, and as many more as there are first ones, which ours expands
  anyway and which may be among those; paper, paper: its own tree and pages too. `agrees` is the share of the exactly
  chosen pages among those chosen, `visited` the share of tokens that a query head sees. `of_paper` and
  `of_paper_pages` are recall over that of the paper's query on our pages and on its own.
"""
import dataclasses
from typing import Any

import torch
from torch import Tensor

from torchsparsekv.method import make_method
from torchsparsekv.ops.icecache._tree import levels_of
from torchsparsekv.ops.icecache.page_peaks import products_of
from torchsparsekv.ops.icecache.views import Visited
from torchsparsekv.ops.icecache.visit_nodes import visit_nodes
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.state import Geometry, LayerState, RowLengths
from torchsparsekv_benchmarks.quality import pretrained, real_model
from torchsparsekv_benchmarks.quality._dci import DciTrees, page_select
from torchsparsekv_benchmarks.quality._recall import Keys, Stream, finish, logits, parser, show
from torchsparsekv_benchmarks.quality.heads import recorded
from torchsparsekv_benchmarks.quality.options import Options
from torchsparsekv_benchmarks.quality.sources import load

KINDS = ("structured", "recall", "smollm2")
WINDOW = 16


class Planted:
    """The tree of a stream, taken in as one prompt. `token` [heads, end] is the token in every row."""

    def __init__(self, stream: Keys, budget: int, rank_from: str, o):
        sizes = dict(sink=0, window=WINDOW, r=o.r, levels=o.levels, rank_from=rank_from)
        self.method: Any = make_method("icecache", budget=budget, **sizes)
        self.lengths = RowLengths(self.method.ring_plan, 1, stream.total, torch.device(o.device))
        g = Geometry(1, stream.heads, stream.d, stream.total, o.dtype, stream.group)
        self.state = LayerState(self.method.buffers(g), self.lengths, self.lengths.seq_len.device, pool_on_host=False)
        k = stream.keys[None].to(self.lengths.seq_len.device, o.dtype)
        self.lengths.advance(stream.total)
        order: Tensor = self.method.prompt(self.state, k, k, join=True)
        self.end = int(self.lengths.view.ring_begin[0])
        self.token = order[0, :, : self.end].long().cpu()

    @property
    def page(self) -> Tensor:
        """The page of every token [heads, end]."""
        row = torch.arange(self.end).expand_as(self.token)
        return torch.empty_like(self.token).scatter_(1, self.token, row // self.method.block_size)

    def _query(self, q: Tensor) -> Tensor:
        return q.to(self.lengths.seq_len.device, self.state.store.pool.dtype)[None, :, None]

    def seeing(self, share: float) -> Any:
        """The method with this field of view."""
        return dataclasses.replace(self.method, field_of_view=share)

    def choose(self, q: Tensor, share: float) -> Tensor:
        return self.seeing(share).choose(self.state, self._query(q), Attention(1.0)).ids[0].long().cpu()

    def visited(self, q: Tensor, share: float) -> float:
        view = self.seeing(share).view
        visited = Visited(*visit_nodes(self._query(q), self.state.tree, view))
        seen = products_of(visited, self.state.leaves.node[..., : self.end], view.least) > -torch.inf
        return float(seen.float().mean())


def held(scores: Tensor, page: Tensor, chosen: Tensor, top: int) -> list[float]:
    """(recall of every query head's best tokens, attention weight) on the chosen pages [heads, n]."""
    on = torch.stack([torch.isin(p, c) for p, c in zip(page, chosen)])[:, None].expand(scores.shape)
    best = scores.topk(top).indices
    return [float(on.gather(2, best).float().mean()), float((scores.softmax(-1) * on).sum(-1).mean())]


def agreement(exact: Tensor, chosen: Tensor) -> float:
    return sum(float(torch.isin(e[e >= 0], c).float().mean()) for e, c in zip(exact, chosen)) / len(exact)


def measure(stream: Keys, budget: int, o) -> dict[tuple[str, str, float], Tensor]:
    """By (pages, choice, field of view) the means of recall, mass, agrees and visited over queries."""
    ours = {rank: Planted(stream, budget, rank, o) for rank in ("codes", "keys")}
    method, end, tree = ours["keys"].method, ours["keys"].end, ours["keys"].page
    size, most, least = method.block_size, budget // method.block_size, method.least_view
    paper = DciTrees(stream.keys[:, :end], levels_of(torch.arange(end), method.promoted(end)))
    paper_pages, plain = paper.pages(size), (torch.arange(end) // size).expand(stream.heads, -1)
    total: dict[tuple[str, str, float], list[list[float]]] = {}
    for _ in range(o.queries):
        q = stream.query(stream.total)
        x = logits(stream, q, end)
        exact = page_select(x, tree, most)
        rows = [("tree", "exact", 1.0, tree, exact, 1.0)]
        rows.append(("token order", "exact", 1.0, plain, page_select(x, plain, most), 1.0))
        for share in o.views:
            sees = paper.sees(x, share, least, least - 1)
            asked, visited = x.masked_fill(~sees, -torch.inf), float(sees.float().mean())
            rows += [("tree", rank, share, tree, p.choose(q, share), p.visited(q, share)) for rank, p in ours.items()]
            rows.append(("tree", "paper", share, tree, page_select(asked, tree, most), visited))
            rows.append(("paper", "paper", share, paper_pages, page_select(asked, paper_pages, most), visited))
        for pages, choice, share, page, chosen, seen in rows:
            agrees = agreement(exact, chosen) if pages == "tree" else float("nan")
            total.setdefault((pages, choice, share), []).append([*held(x, page, chosen, o.top), agrees, seen])
    return {name: torch.tensor(each).mean(0) for name, each in total.items()}


def means(streams: list[Keys], budget: int, o) -> list[dict]:
    """Over streams; a ratio is one of means."""
    each = [measure(s, budget, o) for s in streams]
    mean = {name: torch.stack([m[name] for m in each]).mean(0).tolist() for name in each[0]}
    rows = []
    for (pages, choice, share), values in mean.items():
        row = {"pages": pages, "choice": choice, "field_of_view": share}
        row |= {k: v for k, v in zip(("recall", "mass", "agrees", "visited"), values) if v == v}
        if choice in ("codes", "keys"):
            row["of_paper"] = values[0] / mean["tree", "paper", share][0]
            row["of_paper_pages"] = values[0] / mean["paper", "paper", share][0]
        rows.append(row)
    return rows


def streams_of(context: int, o) -> list[Keys]:
    if o.keys == "structured":
        return [Stream(context, context, heads=o.heads, group=o.group, seed=o.seed)]
    if o.keys == "recall":
        source = load(Options(device=o.device))
        model, ids = source.model, torch.tensor(source.sample(o.task, context, o.seed).prompt)
    else:
        tokenizer, model = pretrained.pretrained(o.keys, torch.device(o.device), o.dtype)
        said = (real_model.FOLDER / real_model.TEXTS["moby-dick"]).read_text(encoding="utf-8")
        told = tokenizer(said[: 8 * context], add_special_tokens=False, verbose=False)["input_ids"]
        ids = torch.tensor(told[:context])
    found = recorded(model, ids, o.queries)
    return [found[i] for i in (o.layers or range(2, len(found)))]


def icecache(o) -> list[dict]:
    rows = []
    for n in o.contexts:
        streams = streams_of(n, o)
        for budget in o.budgets:
            for row in means(streams, budget, o):
                rows.append({"keys": o.keys, "context": n, "budget": budget, **row})
                show(rows[-1])
    return rows


def main() -> None:
    p = parser(__doc__, "float32")
    p.set_defaults(contexts=[4096])
    p.add_argument("--keys", choices=KINDS, default="structured")
    p.add_argument("--task", default="multivalue")
    p.add_argument("--layers", type=int, nargs="+", help="of a model; default: all but the first two")
    p.add_argument("--budgets", type=int, nargs="+", default=[64, 256])
    p.add_argument("--views", type=float, nargs="+", default=[0.05, 0.1, 0.15, 0.25, 0.5, 1.0])
    p.add_argument("--top", type=int, default=32)
    p.add_argument("--r", type=float, default=1 / 16)
    p.add_argument("--levels", type=int, default=2)
    o = p.parse_args()
    o.dtype = getattr(torch, o.dtype)
    finish("icecache", icecache(o), o)


if __name__ == "__main__":
    main()
