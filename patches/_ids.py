"""Remember the token ids of a cache, to refuse a prompt that does not continue them."""
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchsparsekv.patches._cache import SparseCache


def ids_in(args: tuple, kwargs: dict) -> Tensor | None:
    """The token ids among the arguments of generate(). None if there are none."""
    found = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    return found if isinstance(found, Tensor) and found.dim() == 2 else None


def check_continues(cache: "SparseCache", ids: Tensor) -> None:
    """Refuse ids that differ from those of the cache. A prompt without new tokens has a message of its own, later."""
    if cache.cut_off and cache.ids is not None:
        held, known = int(cache.get_seq_length()), cache.ids.shape[1]
        raise ValueError(
            f"an error or an interrupt ended an earlier generate() on this SparseCache. The cache holds {held} tokens, "
            f"and the ids of the last {held - known}, which are of the answer, are unknown. cache.crop({known}) takes "
            "them back, cache.reset() begins another conversation"
        )
    if cache.ids is None or not len(ids) or ids.shape[1] <= cache.ids.shape[1] or len(cache.ids) % len(ids):
        return
    known, pads = cache.ids.to(ids.device), next(iter(cache.row_lengths.values())).left_pad.to(ids.device)
    given = ids[:, : known.shape[1]].repeat_interleave(len(known) // len(ids), 0)
    shown = torch.arange(known.shape[1], device=ids.device) >= pads[:, None]
    differs = ((given != known) & shown).T.nonzero()  # the earliest token first
    if not len(differs):
        return
    at, row = differs[0].tolist()
    raise ValueError(
        f"this call does not continue the tokens of the SparseCache: token {at} of row {row} has id "
        f"{int(given[row, at])} here and {int(known[row, at])} in the cache. cache.crop({at}) keeps the tokens before "
        "it, cache.reset() begins another conversation"
    )


def remember_prompt(cache: "SparseCache", ids: Tensor, held: int) -> None:
    """Keep the ids of the prompt, because an error ended generate(). If the cache also has tokens of the answer, the
    answer is cut off: generate() did not return them. held: tokens of the cache before the call."""
    if cache.use.open:  # a forward did not finish, which `Use.check` says
        return
    now = int(cache.get_seq_length())
    if now > held:
        cache.ids = ids.repeat_interleave(cache.batch // len(ids), 0)[:, :now].clone()
        cache.cut_off = now > ids.shape[1]


def remember(cache: "SparseCache", out) -> None:
    """Keep the ids of all tokens in the cache, from what generate() returned. A loop of a user's own may return
    something else; then the ids that are known stay."""
    sequences, held = getattr(out, "sequences", out), int(cache.get_seq_length())
    if isinstance(sequences, Tensor) and sequences.dim() == 2 and sequences.shape[1] >= held:
        cache.ids = sequences[:, :held].clone()
