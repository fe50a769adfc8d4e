"""ArkVale: pages chosen by a volume around their keys, evicted from the device but recallable (NeurIPS 2024)."""
from dataclasses import dataclass

from torchsparsekv._methods._pages import PageMethod
from torchsparsekv.method import option

VOLUMES = {"cuboid-mean": "mean-box", "cuboid": "box", "ball": "ball"}  # the paper's names, and those of the op


@dataclass(frozen=True, kw_only=True)
class ArkVale(PageMethod):
    """The paper's volume is "cuboid-mean": the middle of the per-channel range, and the mean distance to it.

    "cuboid" has half the range instead of the mean distance, as Quest. "ball" is the mean key and the largest distance
    to it, which the paper rejects.
    """

    name = "arkvale"

    block_size: int = 32
    group: str = "mean"
    volume: str = option("cuboid-mean", "Volume around the keys of a page: cuboid-mean (the paper's), cuboid or ball.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_of("volume", VOLUMES)

    @property
    def shape(self) -> str:
        return VOLUMES[self.volume]
