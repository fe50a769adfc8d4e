"""ShadowKV: chunks by the softmax of q.(mean key), and outliers (arXiv 2410.21465), with exact keys."""
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops.select.softmax_scores import softmax_scores
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.ops.shadowkv.keep_landmarks import keep_landmarks
from torchsparsekv.ops.shadowkv.landmark_logits import landmark_logits
from torchsparsekv.ops.shadowkv.mark_outliers import mark_outliers
from torchsparsekv.ops.shadowkv.views import Landmarks
from torchsparsekv.ops.store.views import Attention, Leaving, Selection
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState

SHARE = 24, 1024  # 24 outliers for every 1024 tokens of budget, as in the authors' code


@dataclass(frozen=True, kw_only=True)
class ShadowKV(Method):
    """The selection of ShadowKV, without its low-rank keys: keys are stored and fetched in full.

    Outliers are attended to beside the budget. A prompt chooses them from all chunks of its row that have left the
    ring.
    """

    name = "shadowkv"

    sink: int = 0
    block_size: int = option(8, "Tokens of a chunk; a power of two.")
    outliers: int | None = option(
        None, f"Chunks that every step attends to, beside the budget. None: {SHARE[0]} per {SHARE[1]} tokens of budget."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outliers is not None:
            self.check_int("outliers", 0)

    @property
    def outlier_chunks(self) -> int:
        """`outliers`, or its default."""
        return self.budget * SHARE[0] // SHARE[1] if self.outliers is None else self.outliers

    def effective(self) -> dict[str, object]:
        return super().effective() | {"outliers": self.outlier_chunks}

    # ---- what it declares

    @property
    def dense_threshold(self) -> int:
        return self.sink + self.window + self.budget + self.outlier_chunks * self.block_size

    def chosen(self, blocks: int) -> int:
        """The number of chunks that a step attends to, in a pool of `blocks` chunks."""
        return min(self.budget // self.block_size + self.outlier_chunks, blocks)

    def buffers(self, g: Geometry) -> Buffers:
        blocks = g.rows // self.block_size
        slots = min(self.hot_rows(g) // self.block_size + self.outlier_chunks, blocks)
        return super().buffers(g) | {
            **self.hot_buffers(g, slots, self.chosen(blocks)),
            "landmarks": Landmarks(
                keys=Buffer((*g.lead, blocks, g.head_dim), g.dtype),
                cosines=Buffer((*g.lead, blocks), torch.float32),
                outlier=Buffer((*g.lead, blocks), torch.int32),
            ),
        }

    @cached_property
    def traits(self) -> Traits:
        return Traits(selects_every_step=True, cannot_crop="", no_engine="marks the outliers of a request")

    # ---- the index

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> None:
        self.step(s, q, leaving)
        mark_outliers(s.landmarks, s.lengths, self.block_size, self.outlier_chunks)

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        keep_landmarks(leaving, s.landmarks, s.lengths, self.block_size)

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        heads, blocks = s.landmarks.keys.shape[1:3]
        logits = landmark_logits(q, s.landmarks, s.lengths, self.block_size, a)
        return Selection(top_blocks(softmax_scores(logits, heads, True), self.chosen(blocks)))
