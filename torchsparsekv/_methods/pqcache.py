"""PQCache: single tokens by product quantization of their keys (arXiv 2407.12820)."""
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops.clusters._kmeans import SEEDS
from torchsparsekv.ops.pqcache.assign_codes import assign_codes
from torchsparsekv.ops.pqcache.code_logits import code_logits
from torchsparsekv.ops.pqcache.learn_codebook import learn_codebook
from torchsparsekv.ops.pqcache.views import Codebook
from torchsparsekv.ops.select.softmax_scores import softmax_scores
from torchsparsekv.ops.store.views import Attention, Leaving, Selection
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState

MOST_BITS = 8  # of a code, which is one byte


@dataclass(frozen=True, kw_only=True)
class PQCache(Method):
    """Each prompt learns a codebook from all keys of its row, and every key gets a code of `m` times `bits` bits.

    Query heads of a kv head select together, by the sum of the softmaxes of their estimated logits.
    """

    name = "pqcache"

    sink: int = 32
    m: int = option(2, "Parts of a key that are quantized by themselves; a divisor of head_dim.")
    bits: int = option(6, "Bits of a code: a part of a key has 2^bits centroids.")
    rounds: int = option(20, "Rounds of k-means.")
    seed: int = option(0, "Seed of the first centroids.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("m")
        self.check_int("bits", 1, MOST_BITS)
        self.check_int("rounds", 1, 100)
        self.check_int("seed", 0, SEEDS - 1)

    # ---- what it declares

    def buffers(self, g: Geometry) -> Buffers:
        if g.head_dim % self.m:
            raise ValueError(f"{self.name}: m must divide head_dim {g.head_dim}, got {self.m}")
        return super().buffers(g) | {
            "codebook": Codebook(
                centroids=Buffer((*g.lead, self.m, 1 << self.bits, g.head_dim // self.m), g.dtype),
                codes=Buffer((*g.lead, g.rows, self.m), torch.uint8),
                learned=Buffer((g.batch,), torch.int32),
            )
        }

    @cached_property
    def traits(self) -> Traits:
        learns = "learns a codebook from all keys of a request"
        return Traits(selects_every_step=True, cannot_crop="", no_engine=learns)

    # ---- the index

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> None:
        spans = s.row_lengths.spans(leaving.new.shape[2])
        learn_codebook(leaving, s.codebook, s.lengths, self.rounds, self.seed, spans, join)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        assign_codes(leaving, s.codebook, s.lengths)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        logits = code_logits(q, s.codebook, s.lengths, a)
        return self.best(s, *softmax_scores(logits, s.store.pool.shape[1], False))
