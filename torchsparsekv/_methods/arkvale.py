"""ArkVale: pages chosen by a volume around their keys, evicted from the device but recallable (NeurIPS 2024)."""
from dataclasses import dataclass

from torchsparsekv._methods._pages import PageMethod

VOLUMES = {"cuboid-mean": "mean-box", "cuboid": "box", "ball": "ball"}  # the paper's names, and those of the op


@dataclass(frozen=True, kw_only=True)
class ArkVale(PageMethod):
    """volume: "cuboid-mean" is the paper's: the middle of the per-channel range and, per channel, the mean distance to
    it. "cuboid" has half the range instead, which is Quest's; "ball" is the mean key and the largest distance to it,
    which the paper rejects.
    """

    name = "arkvale"

    block_size: int = 32
    volume: str = "cuboid-mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_of("volume", VOLUMES)

    @property
    def shape(self) -> str:
        return VOLUMES[self.volume]
