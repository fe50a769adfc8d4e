"""Keep the pages of a prompt and all earlier pages that no step evicted; of too many pages the best ones.

    gone   = pages that steps since the last prompt did not keep, and pages that were evicted before that prompt
    ids    = of the other pages between sinks and ring the pages with the largest scores, as many as there is room for,
             in ascending order; ties go to the lower page
    stamps = PROMPT for all pages that are not gone

The choice holds until the first step, or the next prompt, which may be the next chunk of the same prompt. The paper
assumes that the pages of a prompt fit.
"""
from typing import Annotated

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.chain import torch_kernels
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops.index.observe import NOT_YET
from torchsparsekv.ops.raas.views import EVICTED, PROMPT, PageSet
from torchsparsekv.ops.store.views import Lengths

Scores = Annotated[Tensor, Of("batch heads blocks", torch.float32)]


def check(pages, scores, lengths, block_size) -> None:
    if lengths.sink % block_size or lengths.interval % block_size:
        got = f"{lengths.sink} sinks and an interval of {lengths.interval}"
        raise ValueError(f"{got} are not whole pages of {block_size}")


def reference(pages: Changed[PageSet], scores: Scores, lengths: Lengths, block_size: int) -> None:
    """Keep the pages of a prompt; of too many pages those with the largest scores.

    Args:
        pages: changes for rows with new tokens.
        scores: [batch, heads, blocks], -inf for pages that cannot be selected (bound_scores).
        lengths: `ring_begin` and `previous_ring_begin` of each row, after and before this prompt.

    Launches: torch kernels, without a wait for the device.
    """
    most, blocks, device = pages.ids.shape[2], scores.shape[2], scores.device
    new = (lengths.length > lengths.start)[:, None]
    place, first = torch.arange(blocks, device=device), lengths.sink // block_size
    spare = torch.zeros(*scores.shape[:2], blocks + 1, dtype=torch.bool, device=device)
    kept = spare.scatter(2, torch.where(pages.ids < 0, blocks, pages.ids).long(), True)[..., :-1]
    stepped = (pages.chosen_at != NOT_YET)[..., None]
    before = (place >= first) & (place < lengths.previous_ring_begin[:, None, None] // block_size)
    gone = (pages.stamps == EVICTED) | (stepped & before & ~kept)
    scores = scores.masked_fill(gone, -torch.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :most]
    chosen = torch.where(scores.gather(-1, order) == -torch.inf, blocks, order).sort(-1).values
    chosen = torch.nn.functional.pad(chosen, (0, most - chosen.shape[2]), value=blocks)
    live = before | ((place >= first) & (place < lengths.ring_begin[:, None, None] // block_size))
    stamps = torch.where(gone, EVICTED, torch.where(live, PROMPT, pages.stamps))
    pages.ids.copy_(torch.where(new[..., None], torch.where(chosen == blocks, -1, chosen), pages.ids))
    pages.count.copy_(torch.where(new, (chosen < blocks).sum(-1), pages.count))
    pages.stamps.copy_(torch.where(new[..., None], stamps, pages.stamps))
    pages.prompt_end.copy_(torch.where(new, lengths.length[:, None], pages.prompt_end))
    pages.chosen_at.copy_(torch.where(new, NOT_YET, pages.chosen_at))


keep_prompt_pages = register("keep_prompt_pages", reference, impls=(torch_kernels(reference),), check=check)
