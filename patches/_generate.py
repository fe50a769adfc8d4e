"""The functions that replace generate() and its choice of a cache on a patched model."""
import contextlib
import functools
import itertools
from typing import TYPE_CHECKING

from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from torchsparsekv.patches import _use
from torchsparsekv.patches._attention import NO_ATTENTIONS, NOTHING_BUT_PADDING, check_implementation
from torchsparsekv.patches._cache import SparseCache, check_owner
from torchsparsekv.patches._ids import check_continues, ids_in, remember, remember_prompt
from torchsparsekv.patches._names import NAME, cache_in, renamed
from torchsparsekv.patches._warn import warn

if TYPE_CHECKING:
    from torchsparsekv.patches._handle import Handle

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def forget_compiled(model) -> None:
    """Drop what generate() compiled before: torch.compile does not guard hooks and attributes of an instance."""
    for name in ("_compiled_call", "_last_compile_config"):
        model.__dict__.pop(name, None)


@functools.wraps(GenerationMixin.generate)
def generate(self, *args, **kwargs):
    """Call generate() of the class. At the end, also after an error, the caches that the call held are free again."""
    cache, ids, held = cache_in(kwargs), None, 0
    if isinstance(cache, SparseCache):
        check_owner(cache, self._torchsparsekv._owner)
        ids, held = ids_in(args, kwargs), int(cache.get_seq_length())
    with _use.generating():
        if ids is not None:
            check_continues(cache, ids)
        try:
            out = type(self).generate(self, *args, **renamed(kwargs))
        except BaseException:
            if ids is not None:
                with contextlib.suppress(RuntimeError):  # of a device that failed
                    remember_prompt(cache, ids, held)
            raise
        if ids is not None:
            remember(cache, out)
        return out


def prepare_cache(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length):
    """Stands in for GenerationMixin._prepare_cache_for_generation on the patched instance."""
    handle: Handle = self._torchsparsekv
    if handle._copied:  # the copy has the compiled call of the original, which would run the original
        forget_compiled(self)
        handle._copied = False
    given = cache_in(model_kwargs)
    dynamic = given is None and generation_config.cache_implementation == "dynamic"  # as for cache=DynamicCache()
    if dynamic or (given is not None and not isinstance(given, SparseCache)):  # the user wants another cache
        return type(self)._prepare_cache_for_generation(
            self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
    _refuse(self, generation_config, generation_mode)
    if handle.step == "captured" and generation_config.compile_config and not generation_config.disable_compile:
        raise ValueError("compile_config is for the compiler, which a patch with step='captured' does not use")
    batch = max(generation_config.num_return_sequences or 1, 1) * batch_size
    chunked = generation_config.prefill_chunk_size is not None
    mask = model_kwargs.get("attention_mask")
    columns = _columns(generation_config, mask, max_cache_length)
    _fit_chunks(generation_config, mask, columns, given)
    limit = handle.limit if given is None else given.max_length
    if limit == self.config.get_text_config(decoder=True).max_position_embeddings:
        max_cache_length -= _cap(generation_config, max_cache_length - limit, columns, limit)
    if given is None:
        keep = bool(generation_config.return_dict_in_generate)
        made = handle.cache_for_generate(batch, max_cache_length, keep=keep, chunked=chunked)
        model_kwargs[NAME] = made
        return None
    if given.batch != batch:
        raise ValueError(f"the SparseCache was made for batch size {given.batch}, this call has {batch}")
    if given.max_length < max_cache_length:
        raise ValueError(f"the SparseCache has room for {given.max_length} tokens, this call needs {max_cache_length}")
    _check_padding(given, mask)
    handle.hold(given, chunked=chunked)  # before check(), which would advise reset() while another call runs
    given.use.check()
    _check_begun(given, columns)
    return None


def _refuse(model, generation_config, generation_mode) -> None:
    """Refuse what a call with our cache cannot do."""
    if generation_mode not in MODES:
        raise ValueError(
            f"generation mode {generation_mode.value!r} reorders or forks the cache, which torchsparsekv does not "
            f"support; supported: {', '.join(m.value for m in MODES)}"
        )
    if generation_config.is_assistant:  # before the check below: assistants may have a cache_implementation
        raise ValueError(
            "a patched model cannot assist another model, because assisted decoding removes tokens from the cache: "
            "unpatch it"
        )
    if generation_config.use_cache is False:
        raise ValueError("use_cache=False would bypass torchsparsekv: leave it out")
    if generation_config.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation={generation_config.cache_implementation!r} would bypass torchsparsekv: leave it out "
            "for a sparse cache, or pass 'dynamic' for dense attention"
        )
    check_implementation(model.config.get_text_config(decoder=True))
    if generation_config.output_attentions:
        raise ValueError(NO_ATTENTIONS)


def _check_padding(given: SparseCache, mask) -> None:
    """Refuse a call whose mask does not hide the padding of the cache. transformers counts positions by the mask and
    drops a mask that hides nothing, so no later check could see it."""
    lengths = next(iter(given.row_lengths.values()))
    padded = bool(((lengths.view.length > 0) & (lengths.left_pad > 0)).any())
    if padded and (mask is None or bool(mask.all())):
        raise ValueError(
            "the SparseCache holds a prompt with padding on the left, which this call's attention_mask does not hide: "
            "pass the mask of all tokens so far"
        )


def _columns(generation_config, mask, max_cache_length: int) -> int | None:
    """The tokens of the longest row at the begin of the call, those in the cache included. None: unknown."""
    if mask is not None:
        return mask.shape[-1]
    new = generation_config.max_new_tokens
    return None if new is None else max_cache_length + 1 - new  # transformers counts all tokens but the last


def _check_begun(given: SparseCache, columns: int | None) -> None:
    """Refuse a call with no more tokens than the cache holds."""
    if columns is None:
        return
    held = int(given.get_seq_length())
    if held and columns <= held:
        raise ValueError(
            f"this call has {columns} tokens and the SparseCache holds {held}: pass the token ids of the whole "
            "conversation, those in the cache first (torch.cat([ids, new], 1)); cache.reset() begins another "
            "conversation, and cache.crop(length) goes back in this one"
        )


def _cap(generation_config, over: int, columns: int | None, limit: int) -> int:
    """Shorten an answer that exceeds the positions of the model by `over` tokens. Returns the tokens that were cut."""
    if over <= 0:
        return 0
    if columns is not None and columns > limit:
        raise ValueError(
            f"the prompt has {columns} tokens, which leaves no room for an answer: max_position_embeddings of the "
            f"model is {limit}"
        )
    generation_config.max_length -= over
    name, why = "max_length", ""
    if generation_config.max_new_tokens is not None:
        generation_config.max_new_tokens -= over
        name, why = "max_new_tokens", f"the prompt has {columns} tokens and "
    now = getattr(generation_config, name)
    warn(f"{name} is {now} instead of {now + over}, because {why}max_position_embeddings of the model is {limit}")
    return over


def _fit_chunks(generation_config, mask, columns: int | None, given: SparseCache | None) -> None:
    """Lower prefill_chunk_size until no chunk has one token; if no size down to 2 does that, raise it. A chunk of one
    token would count as a decode step, which is not exact."""
    chunk = getattr(generation_config, "prefill_chunk_size", None)
    if chunk is None:
        return
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"prefill_chunk_size must be a positive int, got {chunk!r}")
    if columns is None:
        raise ValueError("prefill_chunk_size needs max_new_tokens or an attention_mask: the prompt's length is unknown")
    prompt = columns - (int(given.get_seq_length()) if given is not None else 0)
    if prompt > 1:
        sizes = itertools.chain(range(chunk, 1, -1), itertools.count(max(chunk + 1, 2)))
        generation_config.prefill_chunk_size = next(size for size in sizes if prompt % size != 1)
    if mask is not None and not bool(mask.any(-1).all()):
        raise ValueError(NOTHING_BUT_PADDING)
