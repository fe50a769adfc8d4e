"""ClusterKV: clusters of the prompt's keys, retrieved at every step (arXiv 2412.03213)."""
from dataclasses import dataclass

from torchsparsekv.zoo._clusters import ClusterMethod


@dataclass(frozen=True, kw_only=True)
class ClusterKV(ClusterMethod):
    """Here clusters are Euclidean, of one stretch of the prompt each; the paper clusters all of it by cosine.

    run: generated tokens form a unit this many at a time; the paper clusters them too, 320 at a time.
    """

    name = "clusterkv"

    run: int = 16

    def __post_init__(self) -> None:
        if isinstance(self.run, bool) or not isinstance(self.run, int):
            raise TypeError(f"{self.name}: run must be an int, got {self.run!r}")
        super().__post_init__()

    @property
    def segment(self) -> tuple[int, int]:
        return self.run, self.run
