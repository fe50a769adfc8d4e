"""Pages chosen by the product of the mean query of a kv head and the mean key of the page."""
from dataclasses import dataclass

from torchsparsekv._methods._pages import PageMethod


@dataclass(frozen=True, kw_only=True)
class PageMean(PageMethod):
    """The index is half the size of Quest's. There is no paper: a comparison of page summaries found the method."""

    name = "pagemean"
    REST_HELPS = True

    group: str = "mean"

    @property
    def shape(self) -> str:
        return "mean"
