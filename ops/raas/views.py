"""The pages that RaaS keeps, as the ops of the family take them."""
from typing import Annotated, NamedTuple

from torch import Tensor

from torchsparsekv.ops._machinery.signature import Of
from torchsparsekv.ops._machinery.triton import tl
from torchsparsekv.ops.store.views import I32, PerHead

PROMPT, EVICTED = (1 << 31) - 1, -1  # stamps of a page of the prompt, and of an evicted page
PROMPTS = tl.constexpr(PROMPT)


class PageSet(NamedTuple):
    """The pages that a step attends to beside the ring. Each (row, kv head) has its own.

    ids: the numbers of the kept pages, in no order; -1 after the first `count` places.
    count: how many pages are kept.
    stamps: by page: the length of the row when its bound was last in the better half; PROMPT for pages of a prompt, and
        EVICTED for pages that were evicted before the last prompt.
    prompt_end: the length of the row at the end of its last prompt. Tokens before it are the prompt.
    chosen_at: the length of the row at its last step; NOT_YET (ops/index/observe.py) between a prompt and its first
        step.
    updated: 1 where this step has pages to fetch, else 0.
    updates: how many steps had pages to fetch.
    """

    ids: Annotated[Tensor, Of("batch heads kept", I32)]
    count: PerHead
    stamps: Annotated[Tensor, Of("batch heads blocks", I32)]
    prompt_end: PerHead
    chosen_at: PerHead
    updated: PerHead
    updates: PerHead
