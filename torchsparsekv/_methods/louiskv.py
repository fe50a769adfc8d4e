"""LouisKV: clusters of the prompt and segments of the output, retrieved only where the query turns."""
from dataclasses import dataclass

from torchsparsekv._methods._clusters import ClusterMethod
from torchsparsekv.ops.clusters._kmeans import WIDEST
from torchsparsekv.ops.clusters.views import Boundaries


@dataclass(frozen=True, kw_only=True)
class LouisKV(ClusterMethod):
    """Of "LouisKV: Efficient KV Cache Retrieval for Long Input-Output Sequences" sections 4.1 and 4.2 and appendix B.

    tau: retrieve where the cosine of the query heads with those of the step before, on average, is below it. It is a
        property of the model; `torchsparsekv calibrate` finds it, and the path of the file that it writes is taken too.
        The paper has 0.85 for long prompts and 0.7 for long answers of its models. The default is the least that costs
        our recall model nothing, right before it is fast: at 0.9 answers from the prompt are as good, but of what the
        model wrote itself 0.88 is recalled instead of 0.97 (at 64 tokens), as its segments are longer. On text it
        hardly saves a step: docs/methods/louiskv.md has what lower ones and other rules lose there.
    per_head: each kv head decides by the query heads of its own group, and cuts its own segments.
    memory: what a query is compared with. 0: the query of the step before, as the paper has it. 1: that of the last
        retrieval. Between: a mean of those since then, the newest of which has the weight 1 - memory.
    segment_min, segment_max: tokens of a segment. A boundary cuts none that is shorter, one as long ends by itself. The
        mean key of a long one hides its tokens. The index is sized for segments of the least length.
    """

    name = "louiskv"

    tau: float | str = 0.95
    per_head: bool = False
    memory: float = 0.0
    segment_min: int = 4
    segment_max: int = 32

    def __post_init__(self) -> None:
        self.read_file("tau", "calibrate", lambda found: found["tau"])
        if isinstance(self.tau, bool) or not isinstance(self.tau, (int, float)) or not -1 < self.tau <= 1:
            raise ValueError(f"{self.name}: tau must be in (-1, 1], or a file of `calibrate`, got {self.tau!r}")
        if not isinstance(self.per_head, bool):
            raise TypeError(f"{self.name}: per_head must be a bool, got {self.per_head!r}")
        if isinstance(self.memory, bool) or not isinstance(self.memory, (int, float)) or not 0 <= self.memory <= 1:
            raise ValueError(f"{self.name}: memory must be from 0 to 1, got {self.memory!r}")
        for field in ("segment_min", "segment_max"):
            self.check_int(field, most=WIDEST)
        super().__post_init__()

    @property
    def couples_heads(self) -> bool:
        return not self.per_head

    @property
    def rule(self) -> Boundaries:
        return Boundaries(float(self.tau), self.per_head, self.segment_min, self.segment_max, float(self.memory))
