"""ParisKV: single tokens by votes of fixed centroids, then by a 4-bit estimate of q.k. Nothing is learned."""
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops._machinery.triton import next_power_of_2
from torchsparsekv.ops.pariskv._code import WORDS
from torchsparsekv.ops.pariskv._srht import SEEDS
from torchsparsekv.ops.pariskv.centroid_votes import MILLION, centroid_votes
from torchsparsekv.ops.pariskv.count_ids import count_ids
from torchsparsekv.ops.pariskv.encode_keys import encode_keys
from torchsparsekv.ops.pariskv.encode_tokens import encode_tokens
from torchsparsekv.ops.pariskv.rank_by_votes import MOST_SPACES, candidate_capacity, candidates_of, rank_by_votes
from torchsparsekv.ops.pariskv.rerank import rerank
from torchsparsekv.ops.pariskv.views import Codes, Counted
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.ops.store.views import Attention, Leaving, Selection
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState, RingPlan

# (below this many retrievable tokens, beta, rho). All entries but the last are those of the authors' implementation,
# whose last entry is 0.1 and 0.2. The paper has the trend (a fixed k needs a larger beta where n is small) and
# beta = 5-10 % for long contexts. Our last entry has more voters and half the candidates. On structured keys they hold
# as much of the exact top 100 (32K: 0.626 against 0.624, 128K: 0.762 against 0.752), and reranking takes less time.
BY_LENGTH = ((5_000, 0.5, 0.5), (10_000, 0.25, 0.3), (30_000, 0.2, 0.25), (None, 0.05, 0.7))


@dataclass(frozen=True, kw_only=True)
class ParisKV(Method):
    """Of "ParisKV: Fast and Drift-Robust KV-Cache Retrieval for Long-Context LLMs", appendix B.

    Tokens leave the ring and are encoded `update_interval` at a time. Until then they wait in the ring, where every
    step attends to them: the ring holds `window` to `window + update_interval - 1` tokens. The paper has intervals of
    256 and 512 with windows of 128 and 256 (table 1).

    A step attends to all tokens of a row of up to `full_threshold` tokens. The hot buffer and the selection have room
    for the retrievable tokens of such a row (`dense_up_to`), also while the row is longer.

    The query heads of a kv head select together. With group="mean" they vote by their mean query, as in the authors'
    code. With "max" the head that wants a key most decides, in votes and in reranking.
    """

    name = "pariskv"

    update_interval: int | None = option(
        None, "Tokens that leave the ring, and are encoded, together. None: as `window`, at most 256."
    )
    rho: float | None = option(
        None, "Share of the keys that can get votes in a subspace. None: 0.25 to 0.7, by the length of the sequence."
    )
    beta: float | None = option(
        None, "Share of the keys that are reranked, at least `budget` keys. None: 0.05 to 0.5, by the length of the "
        "sequence, at least twice `budget`."
    )
    full_threshold: int = option(512, "Sequences of up to this many tokens are dense, even if the budget is smaller.")
    group: str = option("max", "How the query heads of a kv head vote together: mean or max.")
    m: int = option(8, "Dimensions of a subspace.")
    seed: int = option(0, "Seed of the rotation.")

    GROUPS: ClassVar = ("mean", "max")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update_interval is not None:
            self.check_int("update_interval")
        self.check_int("full_threshold", 0)
        self.check_int("seed", 0, SEEDS - 1)
        if type(self.m) is not int or self.m not in WORDS:
            raise ValueError(
                f"{self.name}: m must be one of {', '.join(map(str, sorted(WORDS)))}, got {self.m!r}: m has to "
                "divide the next power of two from head_dim on, and an id of 2^m patterns is one byte"
            )
        self.check_one_of("group", self.GROUPS)
        self._check_shares()

    def _check_shares(self) -> None:
        for field in ("rho", "beta"):
            value = getattr(self, field)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value <= 1):
                raise ValueError(f"{self.name}: {field} must be None or in (0, 1], got {value!r}")
        for below, beta, rho in self._by_length():
            if rho < beta:
                where = "" if below is None or None not in (self.rho, self.beta) else f" in contexts below {below}"
                raise ValueError(
                    f"{self.name}: rho {rho} is below beta {beta}{where}: too few keys would get votes to tell the "
                    "candidates apart"
                )

    def _by_length(self):
        for below, beta, rho in BY_LENGTH:
            yield below, beta if self.beta is None else self.beta, rho if self.rho is None else self.rho

    @property
    def ratios(self) -> list[int]:
        """The numbers of `_by_length` as one list, in millionths: the argument `ratios` of the ops."""
        flat = [(below, round(beta * MILLION), round(rho * MILLION)) for below, beta, rho in self._by_length()]
        return [x for row in flat for x in row if x is not None]

    def effective(self) -> dict[str, object]:
        return super().effective() | {"update_interval": self.interval, "ratios": self.ratios}

    # ---- what it declares

    @property
    def interval(self) -> int:
        return min(256, self.window) if self.update_interval is None else self.update_interval

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(self.sink, self.window, self.interval)

    @property
    def dense_up_to(self) -> int:
        """Rows with at most this many retrievable tokens attend to all of them."""
        return max(self.budget, self.full_threshold - self.sink - self.window)

    @property
    def dense_threshold(self) -> int:
        return self.sink + self.window + self.dense_up_to

    @property
    def min_candidates(self) -> int:
        """The least number of candidates that are reranked."""
        return self.budget * (2 if self.beta is None else 1)

    def sizes(self, rows: int) -> tuple[int, int]:
        """The most candidates and the most selected tokens, for a pool of `rows` rows."""
        take_all_up_to = min(self.dense_up_to, rows)
        return candidate_capacity(rows, self.ratios, self.min_candidates, take_all_up_to), take_all_up_to

    def buffers(self, g: Geometry) -> Buffers:
        self._check_size(g)
        spaces, u8 = next_power_of_2(g.head_dim) // self.m, torch.uint8
        slots, chosen = self.hot_rows(g), self.sizes(g.rows)[1]
        return super().buffers(g) | {
            # Room for all retrievable tokens of a row of `full_threshold` tokens.
            **self.hot_buffers(g, max(slots, chosen), chosen),
            "codes": Codes(
                ids=Buffer((*g.lead, g.rows, spaces), u8),
                codes=Buffer((*g.lead, g.rows, spaces * self.m // 2), u8),
                weights=Buffer((*g.lead, g.rows, spaces), torch.float16),
                counts=Buffer((*g.lead, spaces, 1 << self.m), torch.int32),
            ),
        }

    def engine_buffers(self, g: Geometry, blocks: int) -> Buffers:
        spaces = next_power_of_2(g.head_dim) // self.m
        of_request = Buffer((*g.lead, spaces), torch.int32)
        counts = Buffer((*g.lead, spaces, 1 << self.m), torch.int32)
        return {"counted": Counted(counts, of_request, of_request, of_request, Buffer((1, blocks), torch.int32))}

    def _check_size(self, g: Geometry) -> None:
        size = next_power_of_2(g.head_dim)
        if size % self.m:
            raise ValueError(f"{self.name}: m {self.m} does not divide {size}, head_dim rounded up to a power of two")
        if size // self.m > MOST_SPACES:
            raise ValueError(
                f"{self.name}: m {self.m} makes {size // self.m} subspaces of head_dim {g.head_dim}, more than the "
                f"{MOST_SPACES} whose points fit one byte"
            )
        most = g.rows - self.sink - self.window  # tokens that can be retrieved
        share = candidates_of(most, self.ratios, 0, 0)
        if self.beta is not None and most > self.dense_up_to and self.budget > share:
            raise ValueError(
                f"{self.name}: budget {self.budget} is above the {share} candidates that beta {self.beta} leaves of "
                f"{most} tokens: set a larger beta, or a smaller budget"
            )

    @cached_property
    def traits(self) -> Traits:
        return Traits(selects_every_step=True, rest_helps=True, cannot_crop="", no_engine="")

    # ---- the index

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> None:
        encode_keys(leaving, s.codes, s.lengths, self.m, self.seed)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        self.prompt(s, q, leaving, join=True)

    def written(self, s: LayerState, k: Tensor, to: Tensor) -> None:
        encode_tokens(k, to, s.codes, s.counted.uses, self.m, self.seed)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        rows, codes, table = s.row_capacity, s.codes, s.block_table
        if table.ids is not None:
            count_ids(codes.ids, s.lengths, table, s.counted)
            codes = codes._replace(counts=s.counted.counts[: q.shape[0]])
        max_candidates, take_all_up_to = self.sizes(rows)
        ratios, min_candidates = self.ratios, min(self.min_candidates, rows)
        budget = min(self.budget, max_candidates)
        rotated, votes = centroid_votes(q, codes, s.lengths, ratios, self.group == "mean", self.seed)
        candidates = rank_by_votes(
            votes, codes, s.lengths, ratios, min_candidates, take_all_up_to, max_candidates, table
        )  # fmt: skip
        scored = rerank(rotated, codes, candidates, table)
        if take_all_up_to <= budget:
            return Selection(top_blocks(scored, budget, candidates))
        # In a row of at most `take_all_up_to` retrievable tokens, every such token is a candidate and is selected.
        ends = s.lengths.ring_begin
        return Selection(top_blocks(scored, budget, candidates, ends, self.sink + take_all_up_to, take_all_up_to))
