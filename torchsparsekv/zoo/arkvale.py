"""ArkVale: pages chosen by the sphere around their keys, evicted from the device but recallable (NeurIPS 2024)."""
from dataclasses import dataclass
from typing import ClassVar

from torchsparsekv.zoo._pages import PageMethod


@dataclass(frozen=True, kw_only=True)
class ArkVale(PageMethod):
    name = "arkvale"
    box: ClassVar[bool] = False

    block_size: int = 32
