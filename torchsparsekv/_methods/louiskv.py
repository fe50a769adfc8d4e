"""LouisKV: clusters of the prompt and segments of the output, retrieved only where the query drifts."""
from dataclasses import dataclass
from functools import cached_property

from torchsparsekv._methods._clusters import CLUSTERED, ClusterMethod
from torchsparsekv._methods._file import read_file
from torchsparsekv.method import Traits, option
from torchsparsekv.ops.clusters._kmeans import MAX_STRETCH
from torchsparsekv.ops.clusters.views import Boundaries


@dataclass(frozen=True, kw_only=True)
class LouisKV(ClusterMethod):
    """Of "LouisKV: Efficient KV Cache Retrieval for Long Input-Output Sequences" sections 4.1 and 4.2 and appendix B.

    A step retrieves where the mean cosine of the query heads with an earlier query is below `tau`. The right `tau` is a
    property of the model; `torchsparsekv calibrate` finds it. The paper has 0.85 for long prompts and 0.7 for long
    answers of its models. docs/methods/louiskv.md shows the loss of lower thresholds.

    With memory=0 the earlier query is that of the step before, as in the paper; with memory=1 that of the last
    retrieval. Between the two it is a mean of the queries since then, the newest of which has the weight 1 - memory.
    No boundary cuts a segment shorter than `segment_min`; a segment of `segment_max` tokens ends by itself. In a long
    segment the mean key says little about single tokens. The index has room for segments of `segment_min` tokens.
    """

    name = "louiskv"

    tau: float | str = option(
        0.95, "Retrieve if the cosine of the query with an earlier query is below this. Or a file of `calibrate`."
    )
    per_head: bool = option(False, "Each kv head decides by the query heads of its group and cuts its own segments.")
    memory: float = option(
        0.0, "Weight of older queries in the earlier query. 0: the query of the step before; 1: of the last retrieval."
    )
    segment_min: int = option(4, "Fewest tokens of a segment.")
    segment_max: int = option(32, "Most tokens of a segment.")

    @cached_property
    def traits(self) -> Traits:
        return Traits(couples_heads=not self.per_head, cannot_crop=CLUSTERED, no_engine=CLUSTERED)

    def __post_init__(self) -> None:
        read_file(self, "tau", "calibrate", lambda found: found["tau"])
        if isinstance(self.tau, bool) or not isinstance(self.tau, (int, float)) or not -1 < self.tau <= 1:
            raise ValueError(f"{self.name}: tau must be in (-1, 1], or a file of `calibrate`, got {self.tau!r}")
        if not isinstance(self.per_head, bool):
            raise TypeError(f"{self.name}: per_head must be a bool, got {self.per_head!r}")
        if isinstance(self.memory, bool) or not isinstance(self.memory, (int, float)) or not 0 <= self.memory <= 1:
            raise ValueError(f"{self.name}: memory must be from 0 to 1, got {self.memory!r}")
        for field in ("segment_min", "segment_max"):
            self.check_int(field, most=MAX_STRETCH)
        super().__post_init__()

    @property
    def rule(self) -> Boundaries:
        return Boundaries(float(self.tau), self.per_head, self.segment_min, self.segment_max, float(self.memory))
