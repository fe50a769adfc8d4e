"""Install and uninstall: one attention function, one mask function, one cache, on one model instance."""
import copy
import types
import weakref
from typing import get_args

import torch
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from torchsparsekv import host
from torchsparsekv.method import Method, Offload, check_device, check_skip_layers, make_method
from torchsparsekv.patches import all_families
from torchsparsekv.patches._attention import hand_over_layer, register_over
from torchsparsekv.patches._cache import Plan, SparseCache
from torchsparsekv.patches._family import head_dim_of
from torchsparsekv.report import Report, cache_bytes, layer_report

OFFLOAD = get_args(Offload)
DEVICE_SHARE = 0.5  # offload="auto" keeps the pool on the device if the cache takes at most this share of free memory
SMALLEST_BUCKET = 1024
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class _Owner:
    """Ties caches to the patch that made them. Copied with the model by deepcopy, so a clone is an owner of its own."""

    active = False


class Handle:
    """An active patch. Use it as a context manager, or call `unpatch()`."""

    def __init__(self, model, plan: Plan, max_length: int | None, limit: int, offload: str, skip_layers: int):
        self.model, self.plan, self.max_length, self.limit = model, plan, max_length, limit
        self.offload, self.skip_layers = offload, skip_layers
        self._owner = _Owner()
        self._copied = False
        self._recycled: SparseCache | None = None  # the cache that generate() uses again: same addresses, same graph
        self._latest: weakref.ref | None = None

    # ---- for users

    @property
    def active(self) -> bool:
        return self._owner.active

    def make_cache(self, batch_size: int = 1, max_length: int | None = None) -> SparseCache:
        """A cache for driving the model yourself: `model(ids, past_key_values=cache)`."""
        self._require_active()
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        length = (self.max_length or self.limit) if max_length is None else max_length
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"max_length must be a positive int, got {length!r}")
        if length > self.limit:
            raise ValueError(f"max_length {length} is above the limit of this patch, {self.limit}")
        on_host = self._pool_on_host(batch_size, length)
        check_memory(self.plan, batch_size, length, pool_on_host=on_host)
        cache = SparseCache(self.plan, batch_size, length, self._owner, pool_on_host=on_host)
        self._latest = weakref.ref(cache)
        return cache

    def report(self) -> Report:
        """What the latest cache has seen since it was made or reset (generate() resets it at each call)."""
        cache = self._latest() if self._latest else None
        if cache is None:
            return Report(self.plan.method.name, (), 0, 0)
        states = [layer.state for layer in cache.layers]
        rows = tuple(layer_report(i, layer.method, layer.state) for i, layer in enumerate(cache.layers))
        host_bytes, device_bytes = cache_bytes(states)
        clocks = sum(c.nbytes for c in cache.clocks.values())
        return Report(self.plan.method.name, rows, host_bytes, device_bytes + clocks)

    def unpatch(self) -> None:
        """Leave the model exactly as it was found."""
        if not self.active:
            return
        self._recycled, self._owner.active = None, False
        for m in self._attention_modules():
            _remove_hook(m)
            del m._torchsparsekv_owner
        self.model.set_attn_implementation(self._base)
        del self.model._prepare_cache_for_generation, self.model._torchsparsekv
        _forget_compiled(self.model)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exc) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        state = "active" if self.active else "unpatched"
        length = self.max_length or f"grows to {self.limit}"
        return (
            f"<torchsparsekv {state} on {type(self.model).__name__}: {self.plan.method}, max_length={length}, "
            f"skip_layers={self.skip_layers}, offload={self.offload!r}>"
        )

    # ---- for the seam

    def install(self) -> None:
        self._base = self.model.config.get_text_config(decoder=True)._attn_implementation
        for m in self._attention_modules():
            m._torchsparsekv_owner = self._owner
            m.register_forward_pre_hook(hand_over_layer, with_kwargs=True)
        self.model.set_attn_implementation(register_over(self._base))
        self.model._prepare_cache_for_generation = types.MethodType(_prepare_cache, self.model)
        self.model._torchsparsekv = self
        self._owner.active = True
        _forget_compiled(self.model)

    def cache_for_generate(self, batch: int, needed: int, *, keep: bool) -> SparseCache:
        """`keep`: the user gets the cache, so the next call must not use it again."""
        if needed > (self.max_length or self.limit):
            raise ValueError(
                f"prompt and new tokens need a cache of {needed}, this patch allows max_length="
                f"{self.max_length or self.limit}"
            )
        length = self.max_length or min(self.limit, max(SMALLEST_BUCKET, 1 << (needed - 1).bit_length()))
        c = self._recycled
        if keep or c is None or c.batch != batch or c.max_length != length:
            c = self._recycled = None  # free the old one before the new one is made
            c = self.make_cache(batch, length)
            if not keep:
                self._recycled = c
        else:
            c.reset()
            self._latest = weakref.ref(c)
        return c

    def _pool_on_host(self, batch: int, length: int) -> bool:
        if self.offload != "auto" or self.plan.device.type != "cuda":
            return self.offload == "host"
        needed = self.plan.bytes(batch, length, pool_on_host=False)[1]
        return needed > DEVICE_SHARE * free_device_bytes(self.plan.device)

    def _attention_modules(self) -> list:
        return [m for m in self.model.modules() if hasattr(m, "layer_idx") and hasattr(m, "k_proj")]

    def _require_active(self) -> None:
        if not self.active:
            raise RuntimeError("this handle is unpatched")

    def __deepcopy__(self, memo):
        """A deep copy of the model is patched like the original, with caches of its own. Reached from the model, the
        copy of which is still without modules: nothing here may look at them."""
        twin = Handle(None, self.plan, self.max_length, self.limit, self.offload, self.skip_layers)
        memo[id(self)] = twin
        twin.model, twin._owner = copy.deepcopy(self.model, memo), copy.deepcopy(self._owner, memo)
        twin._base, twin._copied = self._base, True
        return twin


def _remove_hook(module) -> None:
    """By function, not by RemovableHandle: after a deep copy of the model that is still the original's."""
    for key in [key for key, fn in module._forward_pre_hooks.items() if fn is hand_over_layer]:
        del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def _forget_compiled(model) -> None:
    """Hooks and attributes of an instance are not guarded: what generate() compiled before is stale."""
    for name in ("_compiled_call", "_last_compile_config"):
        model.__dict__.pop(name, None)


def _prepare_cache(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length):
    """Stands in for GenerationMixin._prepare_cache_for_generation on the patched instance."""
    handle: Handle = self._torchsparsekv
    if handle._copied:  # what the original compiled came along in the copy, and would run the original
        _forget_compiled(self)
        handle._copied = False
    given = model_kwargs.get("past_key_values")
    if given is not None and not isinstance(given, SparseCache):  # the user asked for another cache, and gets it
        return type(self)._prepare_cache_for_generation(
            self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
    if generation_mode not in MODES:
        raise ValueError(
            f"generation mode {generation_mode.value!r} reorders or forks the cache, which torchsparsekv does not "
            f"support; supported: {', '.join(m.value for m in MODES)}"
        )
    if generation_config.use_cache is False:
        raise ValueError("use_cache=False would bypass torchsparsekv silently; unpatch the model instead")
    if generation_config.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation={generation_config.cache_implementation!r} would bypass torchsparsekv silently; "
            "unpatch the model, or pass past_key_values"
        )
    batch = max(generation_config.num_return_sequences or 1, 1) * batch_size
    _check_chunks(generation_config, model_kwargs.get("attention_mask"), given)
    if given is None:
        keep = bool(generation_config.return_dict_in_generate)
        model_kwargs["past_key_values"] = handle.cache_for_generate(batch, max_cache_length, keep=keep)
        return None
    if given.batch != batch:
        raise ValueError(f"the SparseCache was made for batch size {given.batch}, this call has {batch}")
    if given.max_length < max_cache_length:
        raise ValueError(f"the SparseCache holds {given.max_length} tokens, this call needs {max_cache_length}")
    handle._latest = weakref.ref(given)
    return None


def _check_chunks(generation_config, mask, given: SparseCache | None) -> None:
    """A chunk of one token cannot be told from a decode step, which is not exact as prompts are to be."""
    chunk = getattr(generation_config, "prefill_chunk_size", None)
    if chunk is None:
        return
    if mask is None and generation_config.max_new_tokens is None:
        raise ValueError("prefill_chunk_size needs max_new_tokens or an attention_mask: the prompt's length is unknown")
    end = mask.shape[-1] if mask is not None else generation_config.max_length - generation_config.max_new_tokens
    prompt = end - (int(given.get_seq_length()) if given is not None else 0)
    if chunk == 1 or (prompt > 1 and prompt % chunk == 1):
        raise ValueError(
            f"prefill_chunk_size={chunk} cuts a prompt of {prompt} tokens so that one token is left alone, which would "
            "be taken for a decode step; choose another size"
        )


def check_memory(plan: Plan, batch: int, length: int, *, pool_on_host: bool) -> None:
    """Refuse, with numbers, before anything is allocated."""
    need_host, need_device = plan.bytes(batch, length, pool_on_host=pool_on_host)
    if plan.device.type == "cuda":
        have_device = free_device_bytes(plan.device)
    else:
        need_host, need_device, have_device = need_host + need_device, 0, 0
    for what, need, have in (("host", need_host, host.available()), ("device", need_device, have_device)):
        if need > have:
            raise MemoryError(
                f"a cache of {length} tokens x batch {batch} needs {need_host / 2**30:.2f} GiB host and "
                f"{need_device / 2**30:.2f} GiB device memory, but only {have / 2**30:.2f} GiB {what} memory is free"
            )
    if plan.device.type == "cuda" and (limit := host.pinnable(need_host, plan.device)) < need_host:
        raise MemoryError(
            f"a cache of {length} tokens x batch {batch} needs {need_host / 2**30:.2f} GiB of pinned host memory, but "
            f"{host.memlock_said(limit)} and this driver heeds it; raise it, or keep the pool with offload='device'"
        )


def free_device_bytes(device: torch.device) -> int:
    """What the driver has, and what torch's allocator holds but does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def install(model, method: Method, max_length: int | None, offload: str, skip_layers: int) -> Handle:
    """Check everything, then patch. Nothing is touched before the last check has passed."""
    config = check_model(model)
    limit = config.max_position_embeddings
    check_arguments(config, method, max_length, limit, offload, skip_layers)
    check_device(model.device, method)
    dense = make_method("full")
    plan = Plan(
        config, method, dense, skip_layers, model.dtype, model.device, shards=getattr(model, "_tp_size", None) or 1
    )
    handle = Handle(model, plan, max_length, limit if max_length is None else max_length, offload, skip_layers)
    if max_length is None:
        plan.bytes(1, limit, pool_on_host=False)  # a method checks its sizes where it declares them
    else:
        check_memory(plan, 1, max_length, pool_on_host=handle._pool_on_host(1, max_length))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)  # it is per code object
    handle.install()
    return handle


def check_model(model):
    """The text config of a model we can patch, or an error that says why not."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"patch takes a transformers PreTrainedModel, got {type(model).__name__}")
    if hasattr(model, "_torchsparsekv"):
        raise RuntimeError(f"this model is patched already: {model._torchsparsekv!r}; call unpatch() on it first")
    if any(hasattr(m, "_torchsparsekv_owner") for m in model.modules()):
        raise RuntimeError("this model is patched already, through a model that it is part of or that is part of it")
    if model.config.is_encoder_decoder:
        raise NotImplementedError("encoder-decoder models are not supported")
    families = all_families()
    if model.config.model_type not in families:
        raise NotImplementedError(
            f"no family for model_type {model.config.model_type!r}; available: {', '.join(families)}"
        )
    if model.training:
        raise RuntimeError("torchsparsekv is for inference: call model.eval() first")
    if not model._can_set_attn_implementation():
        raise NotImplementedError(f"{type(model).__name__} bypasses transformers' attention dispatch")
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"the model must compute in float32, float16 or bfloat16, got {model.dtype}")
    devices = {str(d) for d in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise NotImplementedError(f"the model is spread over several devices ({', '.join(sorted(devices))})")
    return model.config.get_text_config(decoder=True)


def check_arguments(config, method: Method, max_length, limit: int, offload: str, skip_layers: int) -> None:
    if offload not in OFFLOAD:
        raise ValueError(f"offload must be one of {', '.join(OFFLOAD)}, got {offload!r}")
    check_skip_layers(skip_layers, config.num_hidden_layers)
    head_dim = head_dim_of(config)
    if head_dim % 16 or not 16 <= head_dim <= 256:
        raise ValueError(f"head_dim must be a multiple of 16 up to 256, this model has {head_dim}")
    if max_length is not None:
        if type(max_length) is not int or max_length < 1:
            raise ValueError(f"max_length must be a positive int, got {max_length!r}")
        if max_length > limit:
            raise ValueError(f"max_length {max_length} is above the model's max_position_embeddings, {limit}")
        if not method.dense and method.budget > max_length:
            raise ValueError(f"budget {method.budget} is above max_length {max_length}")
    window = all_families()[config.model_type].window
    for layer in range(config.num_hidden_layers):
        w = window(config, layer)
        if w is not None and w < (max_length or limit):
            raise NotImplementedError(
                f"layer {layer} attends to a sliding window of {w}; supported up to max_length={w}, or full attention"
            )
