"""Pages chosen by the product of the mean query of a kv head and the mean key of the page."""
from dataclasses import dataclass

from torchsparsekv._methods._pages import PageMethod


@dataclass(frozen=True, kw_only=True)
class PageMean(PageMethod):
    """Its index is half of Quest's. No paper: found by comparing summaries of pages on a real model."""

    name = "pagemean"

    group: str = "mean"

    @property
    def shape(self) -> str:
        return "mean"
