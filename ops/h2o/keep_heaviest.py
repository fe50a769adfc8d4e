"""Choose the tokens of a prompt that stay: those that received the most attention.

    ids = the tokens from `sink` up to `ring_begin` with the largest `received`, as many as there is room for, in
          ascending order; ties go to the lower position, and evicted tokens (-inf) never come back

The choice holds until the first step, or the next prompt, which may be the next chunk of the same prompt.
"""
import torch

from torchsparsekv.ops._machinery.chain import torch_kernels
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops.h2o.views import HeavySet
from torchsparsekv.ops.store.views import Lengths


def reference(heavy: Changed[HeavySet], lengths: Lengths) -> None:
    """Choose the tokens of a prompt that stay: those that received the most attention.

    Args:
        heavy: `received` is read; `ids` and `count` change for rows with new tokens.
        lengths: `ring_begin` of each row.

    Launches: torch kernels, without a wait for the device.
    """
    most, place = heavy.ids.shape[2], torch.arange(heavy.received.shape[2], device=heavy.ids.device)
    live = (place >= lengths.sink) & (place < lengths.ring_begin[:, None])
    received = heavy.received.masked_fill(~live[:, None], -torch.inf)
    order = received.argsort(dim=-1, descending=True, stable=True)[..., :most]
    chosen = torch.where(received.gather(-1, order) == -torch.inf, len(place), order).sort(-1).values
    new = (lengths.length > lengths.start)[:, None]
    heavy.ids.copy_(torch.where(new[..., None], torch.where(chosen == len(place), -1, chosen), heavy.ids))
    heavy.count.copy_(torch.where(new, (chosen < len(place)).sum(-1), heavy.count))


keep_heaviest = register("keep_heaviest", reference, impls=(torch_kernels(reference),))
