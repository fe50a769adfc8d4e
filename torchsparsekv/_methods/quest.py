"""Quest: pages chosen by the per-channel minimum and maximum of their keys (arXiv 2406.10774)."""
from dataclasses import dataclass

from torchsparsekv._methods._pages import PageMethod


@dataclass(frozen=True, kw_only=True)
class Quest(PageMethod):
    name = "quest"

    @property
    def shape(self) -> str:
        return "box"
