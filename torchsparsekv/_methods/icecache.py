"""IceCache: pages of tokens with similar keys, found by descending a tree that grows while decoding (ICLR 2026)."""
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from torchsparsekv.method import Method
from torchsparsekv.ops._machinery.triton import cdiv
from torchsparsekv.ops.icecache._residual import widths
from torchsparsekv.ops.icecache._tree import NO_SPAN, SALTS, SEEDS
from torchsparsekv.ops.icecache.best_pages import best_pages
from torchsparsekv.ops.icecache.insert_page import WIDEST, insert_page
from torchsparsekv.ops.icecache.page_peaks import page_peaks
from torchsparsekv.ops.icecache.plant_tree import plant_tree
from torchsparsekv.ops.icecache.share_prompt import share_prompt
from torchsparsekv.ops.icecache.share_step import share_step
from torchsparsekv.ops.icecache.top_tokens_of_last_queries import top_tokens_of_last_queries
from torchsparsekv.ops.icecache.views import Followed, Leaves, Promotion, Tree, View
from torchsparsekv.ops.icecache.visit_nodes import MILLION, MOST_NODES, visit_nodes
from torchsparsekv.ops.store.views import Attention, Leaving, Scored, Selection
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState

EVERY, SURE_NODES = 16, 64_000  # by default a node of so many tokens; nodes that there is room for, drawn or counted
PAGES, FEWER = 32, 16  # that a budget should hold; the paper's are 256 tokens in 16 pages
LARGEST, SMALLEST = 16, 4  # tokens of a page, by default: smaller ones have no CUDA kernel
# What a query expands by default: a share of the nodes; where that is many, those with so many times the budget as
# children.
VIEWED, MANY_NODES, BUDGETS = 0.1, 640, 8
DRAWS = 1 << 31
PROMOTIONS = ("quota", "random")
RANKS = ("codes", "keys")


@dataclass(frozen=True, kw_only=True)
class IceCache(Method):
    """A tree of the keys of each kv head, whose nodes are pages; a query descends it for the pages of its best tokens.

    r: share of the tokens of a level that are promoted to the next one. None: 1/16, or no more than there is room for:
        one of 17 in a cache of a million tokens, one of 33 of two million.
    levels: of the tree, with that of the leaves.
    promotion: "quota", one token of every 1 / r, drawn; or "random", each token with chance r, as the paper's text has
        it (its code has a quota).
    page_size: tokens of a page; a power of two. None: 16 as in the paper, or fewer where the budget would not hold 32
        pages (256 tokens: 8 each, which find more than 16 of 16), but 4 where it holds 16 of these (64 tokens).
    field_of_view: share of the nodes of each level that a query expands, and `least_view` nodes at least; so many of
        the first, the root among them, it expands anyway, since what came when there were few is under them. None: a
        tenth, but no more than 640 or, if these are more, than have eight times the budget as children in the mean.
        Of more than 1024 nodes it is met in the mean, told by a sample (ops/icecache/visit_nodes.py). At 1.0 the choice
        is exact, and so it is where the budget is all of the cache. The paper's k is as many tokens as it takes to fill
        the budget with their pages.
    growth: pages for generated tokens, as a share of the pages that the cache has anyway. They go to the page of their
        node, which need not become full; when there is no page left, pages are as generated. Full or not, a page
        counts as `page_size` tokens of the budget.
    rank_from: what tokens are ranked by: "codes", of 4 bits a channel, or "keys", which take three times the memory and
        find no more (docs/develop/lessons.md).
    reuse_every: of so many layers that follow one another the first has a tree and queries it; the others put their
        tokens where that one puts its own, and attend to the pages that it chose. 3 in the paper's "reuse". Answers are
        lost where it happens to look for other tokens than they do (docs/methods/icecache.md).
    match_heads: a kv head of a layer that reuses follows the head of the other layer which looks for most of the same
        tokens, by the last queries of the prompt. False: that of the same number, as in the paper.
    selecting_layers: the layers that choose, instead of every `reuse_every`th one; each other follows the last of them before
        it. `torchsparsekv selecting_layers` finds those of a model, and the path of the file that it writes is taken too.
    seed: of promotion and projection.

    A prompt that has less than a page beyond window and sinks is attended to as a whole.
    """

    name = "icecache"
    places = True
    regroups = True
    partial_blocks = True

    r: float | None = None
    levels: int = 2
    promotion: str = "quota"
    page_size: int | None = None
    field_of_view: float | None = None
    least_view: int = 32
    growth: float = 0.25
    rank_from: str = "codes"
    reuse_every: int = 1
    match_heads: bool = True
    selecting_layers: tuple[int, ...] | str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.read_file("selecting_layers", "selecting_layers", lambda file: [r["layer"] for r in file["rows"] if r["follows"] is None])
        if self.selecting_layers is not None:
            object.__setattr__(self, "selecting_layers", self._choosers())
        if self.page_size is not None:
            self.check_int("page_size", most=WIDEST, power=True)
        super().__post_init__()
        if self.r is not None and not (isinstance(self.r, float) and 0 < self.r < 1):
            raise ValueError(f"{self.name}: r must be between 0 and 1, both excluded, got {self.r!r}")
        for field in ("field_of_view", "growth"):
            value = getattr(self, field)
            if value is None and field == "field_of_view":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ValueError(f"{self.name}: {field} must be from 0 to 1, got {value!r}")
        self.check_one_of("promotion", PROMOTIONS)
        self.check_one_of("rank_from", RANKS)
        self.check_int("levels", 2, SALTS - 1)
        self.check_int("least_view", 1)
        self.check_int("reuse_every", 1)
        if not isinstance(self.match_heads, bool):
            raise ValueError(f"{self.name}: match_heads must be True or False, got {self.match_heads!r}")
        self.check_int("seed", 0, SEEDS - 1)

    def _choosers(self) -> tuple[int, ...]:
        given = self.selecting_layers
        layers = tuple(given) if isinstance(given, (tuple, list)) else ()
        if not layers or any(type(i) is not int or i < 0 for i in layers) or list(layers) != sorted(set(layers)):
            raise ValueError(
                f"{self.name}: selecting_layers must be layers in ascending order, or a file of `torchsparsekv selecting_layers`, got "
                f"{given!r}"
            )
        if self.reuse_every != 1:
            raise ValueError(f"{self.name}: give selecting_layers or reuse_every, got {given!r} and {self.reuse_every}")
        return layers

    @property
    def block_size(self) -> int:
        """`page_size`, or what it is by default."""
        if self.page_size is not None:
            return self.page_size
        budget = self.budget if isinstance(self.budget, int) else 1
        share = max(budget // PAGES, min(budget // FEWER, SMALLEST), 1)
        return min(LARGEST, 1 << (share.bit_length() - 1))

    def effective(self) -> dict[str, object]:
        return super().effective() | {"page_size": self.block_size, "r": self.share()}

    @property
    def dense_threshold(self) -> int:
        """Pages of generated tokens need not be full, so a budget may hold fewer tokens than it has room for."""
        return self.sink + self.window + self.block_size - 1

    def share(self, rows: int = 0) -> float:
        """`r` in a cache of so many tokens."""
        return 1 / max(EVERY, cdiv(rows, SURE_NODES)) if self.r is None else self.r

    def promoted(self, rows: int) -> Promotion:
        r = self.share(rows)
        if self.promotion == "random":
            return Promotion(0, max(1, int(r * DRAWS)), self.levels, self.seed)
        every = max(2, round(1 / max(r, 1 / (DRAWS - 1))))  # a 32-bit number, and beyond every pool
        return Promotion(every, 0, self.levels, self.seed)

    @property
    def view(self) -> View:
        least = min(self.least_view, MOST_NODES)
        if self.field_of_view is not None:
            return View(round(self.field_of_view * MILLION), least, MOST_NODES, self.levels)
        most = max(MANY_NODES, min(ceil(BUDGETS * self.budget * self.share()), MOST_NODES), least)
        return View(round(VIEWED * MILLION), least, most, self.levels)

    # ---- what it declares

    def nodes(self, rows: int) -> int:
        """Room for nodes: all that a quota promotes of so many tokens; of those that chance does, and is not above."""
        p = self.promoted(rows)
        if p.every:
            return 2 + rows // p.every
        mean = rows * self.share(rows)
        return min(rows, int(mean + 6 * mean**0.5)) + 2

    def buffers(self, g: Geometry) -> Buffers:
        nodes, i32 = self.nodes(g.rows), torch.int32
        if nodes > MOST_NODES:
            raise ValueError(f"{self.name}: at most {MOST_NODES} nodes, got {nodes} of {g.rows} tokens at r={self.r}")
        page = self.block_size
        pages = g.rows // page
        grown = replace(g, rows=(pages + int(pages * self.growth)) * page)
        # A budget of everything that is not attended to anyway is every page, full or not.
        everything = self.budget >= g.rows - self.sink - self.window
        chosen = (grown.rows if everything else self.budget) // page
        slots = min(self.hot_budgets * chosen, grown.rows // page)
        store = super().buffers(grown) | self.hot_buffers(grown, slots, chosen)
        if g.follows:
            own = Followed(
                heads=Buffer(g.lead, i32, fill=-1), asked=Buffer((*g.lead, chosen), i32, fill=-1),
                fill=Buffer((*g.lead, grown.rows // page), i32),
            )  # fmt: skip
            return store | {"followed": own}
        return store | self._index(grown, nodes) | {"asked": Buffer((*g.lead, chosen), i32, fill=-1)}

    def _index(self, g: Geometry, nodes: int) -> Buffers:
        lead, page, i32, codes = g.lead, self.block_size, torch.int32, self.rank_from == "codes"
        width, scales = widths(g.head_dim, codes)
        none, inner, number = Buffer(lead, i32), Buffer((*lead, nodes), i32), Buffer((*lead, nodes), torch.float32)
        return {
            "tree": Tree(
                key=Buffer((*lead, nodes, g.head_dim), g.dtype),
                code=Buffer((*lead, nodes, g.head_dim), torch.int8), scale=number, norm2=number,
                parent=inner, level=inner, open_page=Buffer((*lead, nodes), i32, fill=-1),
                node_count=Buffer(lead, i32, fill=1), page_count=none,
                radius2=Buffer(lead, torch.float32), done_count=none, placed=Buffer((*lead, page), i32),
            ),
            "leaves": Leaves(
                key=Buffer((*lead, g.rows, width), torch.uint8 if codes else g.dtype),
                scale=Buffer((*lead, g.rows, scales), torch.float16),
                node=Buffer((*lead, g.rows), i32, fill=-1), fill=Buffer((*lead, g.rows // page), i32),
                span=Buffer((*lead, g.rows // page), i32, fill=NO_SPAN),
            ),
        }  # fmt: skip

    @property
    def selects_every_step(self) -> bool:
        return True

    # ---- the index

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> Tensor:
        compares = self.match_heads and (s.anchor is not None or s.followers > 0)
        sought = top_tokens_of_last_queries(q, leaving.new, s.lengths, join) if compares else None
        if s.anchor is not None:
            order, its = s.anchor.consume()
            return share_prompt(order, sought, its, s.followed, s.lengths, self.block_size, join)
        order = plant_tree(leaving.new, s.store.ring, s.tree, s.leaves, s.lengths, self.promoted(self._rows(s)), join)
        s.publish((order, sought))
        return order

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        if s.anchor is not None:
            return share_step(s.store, s.hot, s.followed, s.anchor.asked, s.anchor.tree.placed, s.lengths)
        region = self._rows(s)
        insert_page(s.store, s.hot, s.tree, s.leaves, s.lengths, self.promoted(region), region)

    def _rows(self, s: LayerState) -> int:
        """Of the pool, without those for generated tokens."""
        return cdiv(s.row_lengths.capacity, self.block_size) * self.block_size

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        if s.anchor is not None:
            return Selection(s.followed.asked, fill=s.followed.fill)
        whole = s.hot.chosen.shape[2] == s.leaves.fill.shape[2]
        view = View(MILLION, 1, MOST_NODES, self.levels) if whole else self.view
        scores, peaks = page_peaks(q, visit_nodes(q, s.tree, view), s.leaves, view.least)
        best_pages(Scored(scores, peaks), s.asked)
        return Selection(s.asked, fill=s.leaves.fill)
