"""What stands in for generate() and for its own way to a cache, on the patched instance."""
import functools
from typing import TYPE_CHECKING

from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from torchsparsekv.patches import _use
from torchsparsekv.patches._attention import NO_ATTENTIONS, NOTHING_BUT_PADDING, check_implementation
from torchsparsekv.patches._cache import SparseCache
from torchsparsekv.patches._names import NAME, cache_in

if TYPE_CHECKING:
    from torchsparsekv.patches._handle import Handle

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def forget_compiled(model) -> None:
    """Hooks and attributes of an instance are not guarded: what generate() compiled before is stale."""
    for name in ("_compiled_call", "_last_compile_config"):
        model.__dict__.pop(name, None)


@functools.wraps(GenerationMixin.generate)
def generate(self, *args, **kwargs):
    """The class's own; what it holds of our caches is free again when it ends, however it ends."""
    with _use.generating():
        return type(self).generate(self, *args, **kwargs)


def prepare_cache(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length):
    """Stands in for GenerationMixin._prepare_cache_for_generation on the patched instance."""
    handle: Handle = self._torchsparsekv
    if handle._copied:  # what the original compiled came along in the copy, and would run the original
        forget_compiled(self)
        handle._copied = False
    given = cache_in(model_kwargs)
    if given is not None and not isinstance(given, SparseCache):  # the user asked for another cache, and gets it
        return type(self)._prepare_cache_for_generation(
            self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
    _refuse(self, generation_config, generation_mode)
    if handle.step == "captured" and generation_config.compile_config and not generation_config.disable_compile:
        raise ValueError("compile_config is for the compiler, which a patch with step='captured' does not use")
    batch = max(generation_config.num_return_sequences or 1, 1) * batch_size
    chunked = generation_config.prefill_chunk_size is not None
    _check_chunks(generation_config, model_kwargs.get("attention_mask"), given)
    if given is None:
        keep = bool(generation_config.return_dict_in_generate)
        made = handle.cache_for_generate(batch, max_cache_length, keep=keep, chunked=chunked)
        model_kwargs[NAME] = made
        return None
    if given.batch != batch:
        raise ValueError(f"the SparseCache was made for batch size {given.batch}, this call has {batch}")
    if given.max_length < max_cache_length:
        raise ValueError(f"the SparseCache holds {given.max_length} tokens, this call needs {max_cache_length}")
    _check_padding(given, model_kwargs.get("attention_mask"))
    handle.hold(given, chunked=chunked)  # first: where another call runs a forward, check() would tell to reset()
    given.use.check()
    return None


def _refuse(model, generation_config, generation_mode) -> None:
    """What of a call with our cache cannot be."""
    if generation_mode not in MODES:
        raise ValueError(
            f"generation mode {generation_mode.value!r} reorders or forks the cache, which torchsparsekv does not "
            f"support; supported: {', '.join(m.value for m in MODES)}"
        )
    if generation_config.is_assistant:  # first: by some versions of transformers it has a cache_implementation too
        raise ValueError("a patched model cannot assist another: that takes tokens back out of the cache; unpatch it")
    if generation_config.use_cache is False:
        raise ValueError("use_cache=False would bypass torchsparsekv silently; unpatch the model instead")
    if generation_config.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation={generation_config.cache_implementation!r} would bypass torchsparsekv silently; "
            f"unpatch the model, or pass {NAME}"
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


def _check_chunks(generation_config, mask, given: SparseCache | None) -> None:
    """A chunk of one token cannot be told from a decode step, which is not exact as prompts are to be."""
    chunk = getattr(generation_config, "prefill_chunk_size", None)
    if chunk is None:
        return
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"prefill_chunk_size must be a positive int, got {chunk!r}")
    if mask is None and generation_config.max_new_tokens is None:
        raise ValueError("prefill_chunk_size needs max_new_tokens or an attention_mask: the prompt's length is unknown")
    end = mask.shape[-1] if mask is not None else generation_config.max_length - generation_config.max_new_tokens
    prompt = end - (int(given.get_seq_length()) if given is not None else 0)
    if chunk == 1 or (prompt > 1 and prompt % chunk == 1):
        raise ValueError(
            f"prefill_chunk_size={chunk} cuts a prompt of {prompt} tokens so that one token is left alone, which would "
            "be taken for a decode step; choose another size"
        )
    if mask is not None and not bool(mask.any(-1).all()):
        raise ValueError(NOTHING_BUT_PADDING)
