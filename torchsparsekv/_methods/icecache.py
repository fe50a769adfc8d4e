"""IceCache: pages of tokens with similar keys, found by descending a tree that grows while decoding (ICLR 2026)."""
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import torch
from torch import Tensor

from torchsparsekv._methods._file import read_layers
from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops._machinery.triton import cdiv
from torchsparsekv.ops.icecache._residual import widths
from torchsparsekv.ops.icecache._tree import EMPTY_SPAN, SALTS, SEEDS
from torchsparsekv.ops.icecache.best_pages import best_pages
from torchsparsekv.ops.icecache.insert_page import WIDEST, insert_page
from torchsparsekv.ops.icecache.page_peaks import page_peaks
from torchsparsekv.ops.icecache.plant_tree import plant_tree
from torchsparsekv.ops.icecache.share_prompt import share_prompt
from torchsparsekv.ops.icecache.share_step import head_numbers, share_step
from torchsparsekv.ops.icecache.top_tokens_of_last_queries import top_tokens_of_last_queries
from torchsparsekv.ops.icecache.views import FieldOfView, Leaves, Promotion, SharedSelection, Tree
from torchsparsekv.ops.icecache.visit_nodes import MILLION, MOST_NODES, visit_nodes
from torchsparsekv.ops.store.views import Attention, Leaving, Scored, Selection
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState

# By default there is one node for every EVERY tokens, and at most SURE_NODES nodes on average. So the number of nodes
# stays below MOST_NODES also with promotion="random".
EVERY, SURE_NODES = 16, 64_000
# Pages that a budget should hold: PAGES, or FEWER where pages would have less than SMALLEST tokens. The authors'
# benchmarks have 256 tokens in 16 pages.
PAGES, FEWER = 32, 16
LARGEST, SMALLEST = 16, 4  # tokens of a default page from a budget of 64 on; smaller pages have no CUDA kernel
# By default a query expands the share VIEWED of the nodes, within an upper bound: MANY_NODES, or the number of nodes
# that BUDGETS * budget tokens hang under, if that is larger.
VIEWED, MANY_NODES, BUDGETS = 0.1, 640, 8
DRAWS = 1 << 31
PROMOTIONS = ("quota", "random")
RANKS = ("codes", "keys")


@dataclass(frozen=True, kw_only=True)
class IceCache(Method):
    """A tree of the keys of each kv head. Tokens under the same node share pages. A query descends the tree to the
    pages of its best tokens.

    Without `field_of_view` a query expands a tenth of the nodes, but at most 640 nodes, or the number of nodes that
    eight budgets of tokens hang under, if that is larger. A query expands the first `least_view` nodes in any case,
    because early tokens hang under them. Above 1024 nodes the share is met in the mean (ops/icecache/visit_nodes.py).
    With field_of_view=1.0 and `rank_from="keys"` the selection is exact, and also if the budget holds the whole cache.
    The paper selects the pages of the k best tokens. Here, as in the authors' code, k is so large that these pages fill
    the budget.

    A generated token goes to the page of its node, which need not become full. When no new page is left, tokens lie
    in pool rows by position. A page counts as `page_size` tokens of the budget, full or not.

    Layers may share a selection (`reuse_every` or `selecting_layers`). A selecting layer has a tree and queries it. The
    sharing layers after it store their tokens in the same order and attend to the pages that it selected. The paper's
    "reuse" is `reuse_every=3`. Answers get worse if the selecting layer attends to other tokens than the sharing layers
    (docs/methods/icecache.md).

    If a prompt has less than a page of tokens beside sinks and window, steps attend to the whole prompt.
    """

    name = "icecache"

    r: float | None = option(
        None, "Share of a level's tokens that are promoted to the next. None: 1/16, or less above a million tokens."
    )
    levels: int = option(2, "Levels of the tree, including the leaves.")
    promotion: str = option(
        "quota", "How tokens are promoted. quota: one random token of every 1 / r; random: each token with chance r."
    )
    page_size: int | None = option(
        None, "Tokens of a page, a power of two. None: 16, or fewer where the budget would hold few pages."
    )
    field_of_view: float | None = option(
        None, "Share of the nodes of each level that a query expands. None: a tenth, but at most 640, or more if the "
        "budget needs it."
    )
    least_view: int = option(
        32, "Number of first nodes, the root included, that every query expands, however small field_of_view is."
    )
    growth: float = option(0.25, "Extra pages for generated tokens, as a share of the pages of a full cache.")
    rank_from: str = option(
        "codes", "Rank tokens by codes (4 bits a channel) or by keys, which take three times the memory of the codes."
    )
    reuse_every: int = option(1, "Consecutive layers that share one selection; the first is the selecting layer.")
    match_heads: bool = option(
        True, "A head of a sharing layer takes the pages of the most similar head. False: of the head with its number."
    )
    selecting_layers: tuple[int, ...] | str | None = option(
        None, "The selecting layers, each for the layers after it; or a file of `torchsparsekv selecting-layers`."
    )
    seed: int = option(
        0, "Seed of promotion, and of the random projection by which the children of a node are sorted into pages."
    )

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            reorders_pool=True, moves_leaving=True, partial_blocks=True, selects_every_step=True,
            no_rest=self._no_rest(), cannot_crop="stores tokens in the order of its tree",
            no_engine="stores the tokens of a request in the order of its tree",
        )  # fmt: skip

    def _no_rest(self) -> str:
        if type(self.estimate_rest) is int and self.estimate_rest < self.block_size:
            return f"has pages of {self.block_size} tokens, and a group must hold whole pages"
        return "" if self.prefetch_async is None else "cannot estimate the rest with prefetch_async"

    def __post_init__(self) -> None:
        read_layers(self, "selecting_layers")
        if self.selecting_layers is not None and self.reuse_every != 1:
            given = f"not both: got {self.selecting_layers} and {self.reuse_every}"
            raise ValueError(f"{self.name}: give selecting_layers or reuse_every, {given}")
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

    @property
    def block_size(self) -> int:
        """`page_size`, or its default."""
        if self.page_size is not None:
            return self.page_size
        budget = self.budget if isinstance(self.budget, int) else 1
        share = max(budget // PAGES, min(budget // FEWER, SMALLEST), 1)
        return min(LARGEST, 1 << (share.bit_length() - 1))

    def effective(self) -> dict[str, object]:
        return super().effective() | {"page_size": self.block_size, "r": self.share()}

    @property
    def dense_threshold(self) -> int:
        """Pages of generated tokens may be partly empty, so a budget may hold fewer tokens than it has room for."""
        return self.sink + self.window + self.block_size - 1

    def share(self, rows: int = 0) -> float:
        """The value of `r` for a cache of this many tokens."""
        return 1 / max(EVERY, cdiv(rows, SURE_NODES)) if self.r is None else self.r

    def promoted(self, rows: int) -> Promotion:
        r = self.share(rows)
        if self.promotion == "random":
            return Promotion(0, max(1, int(r * DRAWS)), self.levels, self.seed)
        every = max(2, round(1 / max(r, 1 / (DRAWS - 1))))  # the bound fits 32 bits, and is above every pool
        return Promotion(every, 0, self.levels, self.seed)

    @property
    def view(self) -> FieldOfView:
        least = min(self.least_view, MOST_NODES)
        if self.field_of_view is not None:
            return FieldOfView(round(self.field_of_view * MILLION), least, MOST_NODES, self.levels)
        most = max(MANY_NODES, min(ceil(BUDGETS * self.budget * self.share()), MOST_NODES), least)
        return FieldOfView(round(VIEWED * MILLION), least, most, self.levels)

    # ---- what it declares

    def nodes(self, rows: int) -> int:
        """The most nodes for this many tokens: exact with promotion="quota", a safe bound with "random"."""
        p = self.promoted(rows)
        if p.every:
            return 2 + rows // p.every
        mean = rows * self.share(rows)
        return min(rows, int(mean + 6 * mean**0.5)) + 2

    def buffers(self, g: Geometry) -> Buffers:
        nodes, i32 = self.nodes(g.rows), torch.int32
        if nodes > MOST_NODES:
            raise ValueError(f"{self.name}: {g.rows} tokens at r={self.r} need {nodes} nodes, at most {MOST_NODES} fit")
        page = self.block_size
        pages = g.rows // page
        grown = replace(g, rows=(pages + int(pages * self.growth)) * page)
        # If the budget holds all tokens beside sinks and window, a step selects every page, full or not.
        everything = self.budget >= g.rows - self.sink - self.window
        chosen = (grown.rows if everything else self.budget) // page
        slots = min(self.budgets_held(g) * chosen, grown.rows // page)
        store = super().buffers(grown) | self.hot_buffers(grown, slots, chosen)
        if g.follows:
            shared = SharedSelection(
                source_heads=Buffer(g.lead, i32, fill=-1), pages=Buffer((*g.lead, chosen), i32, fill=-1),
                fill=Buffer((*g.lead, grown.rows // page), i32),
            )  # fmt: skip
            return store | {"shared": shared}
        return store | self._index(grown, nodes) | {"selected_pages": Buffer((*g.lead, chosen), i32, fill=-1)}

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
                max_norm2=Buffer(lead, torch.float32), search_done_count=none,
                inserted_rows=Buffer((*lead, page), i32),
            ),
            "leaves": Leaves(
                key=Buffer((*lead, g.rows, width), torch.uint8 if codes else g.dtype),
                scale=Buffer((*lead, g.rows, scales), torch.float16),
                node=Buffer((*lead, g.rows), i32, fill=-1), fill=Buffer((*lead, g.rows // page), i32),
                span=Buffer((*lead, g.rows // page), i32, fill=EMPTY_SPAN),
            ),
        }  # fmt: skip

    @classmethod
    def shares_selection(cls, layers: Mapping[int, tuple[Method, int, int]]) -> dict[int, int]:
        found: dict[int, int] = {}
        latest: dict[tuple[Method, int, int], tuple[int, int]] = {}  # (its selecting layer, layers with this selection)
        selecting: dict[tuple[int, ...], list[int]] = {}  # the layers that select, by `selecting_layers`
        for i, kind in layers.items():
            method = kind[0]
            assert isinstance(method, cls)
            anchor, count = latest.get(kind, (i, 0))
            if count and not method._selects(i, count):
                found[i] = anchor
            else:
                anchor, count = i, 0
                if isinstance(method.selecting_layers, tuple):
                    selecting.setdefault(method.selecting_layers, []).append(i)
            latest[kind] = anchor, count + 1
        for wanted, which in selecting.items():
            if list(wanted) != which:
                raise ValueError(
                    f"selecting_layers must be {tuple(which)} here, got {wanted}: the first layer that retrieves must "
                    "select, and each layer whose heads or hyper-parameters differ from all layers before it"
                )
        return found

    def _selects(self, layer: int, behind: int) -> bool:
        """True if this layer selects. `behind` counts the layers from the last selecting layer on, itself included."""
        if self.selecting_layers is not None:
            return layer in self.selecting_layers
        return behind >= self.reuse_every

    # ---- the index

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> Tensor:
        compares = self.match_heads and (s.anchor is not None or s.followers > 0)
        top_tokens = top_tokens_of_last_queries(q, leaving.new, s.lengths, join) if compares else None
        if s.anchor is not None:
            order, source_top_tokens = s.anchor.consume()
            return share_prompt(order, top_tokens, source_top_tokens, s.shared, s.lengths, self.block_size, join)
        order = plant_tree(leaving.new, s.store.ring, s.tree, s.leaves, s.lengths, self.promoted(self._rows(s)), join)
        s.publish((order, top_tokens))
        return order

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        if s.anchor is not None:
            anchor = s.anchor
            return share_step(s.store, s.hot, s.shared, anchor.selected_pages, anchor.tree.inserted_rows, s.lengths)
        region = self._rows(s)
        insert_page(s.store, s.hot, s.tree, s.leaves, s.lengths, self.promoted(region), region)

    def leaving_rows(self, s: LayerState) -> Tensor:
        if s.anchor is None:
            return s.tree.inserted_rows
        rows = s.anchor.tree.inserted_rows
        return rows.gather(1, head_numbers(s.shared.source_heads).unsqueeze(-1).expand_as(rows))

    def _rows(self, s: LayerState) -> int:
        """Number of pool rows, without the extra rows for generated tokens (`growth`)."""
        return cdiv(s.row_lengths.capacity, self.block_size) * self.block_size

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        if s.anchor is not None:
            return Selection(s.shared.pages, fill=s.shared.fill)
        whole = s.hot.chosen.shape[2] == s.leaves.fill.shape[2]
        view = FieldOfView(MILLION, 1, MOST_NODES, self.levels) if whole else self.view
        scores, peaks = page_peaks(q, visit_nodes(q, s.tree, view), s.leaves, view.min_nodes)
        best_pages(Scored(scores, peaks), s.selected_pages)
        return Selection(s.selected_pages, fill=s.leaves.fill)
