"""The attention and mask functions that transformers dispatches to on a patched model."""
import sys
import warnings
from functools import partial

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchsparsekv.method import Attention
from torchsparsekv.patches._cache import SENTINEL, SparseCache

PREFIX = "torchsparsekv_over_"


def register_over(base: str) -> str:
    """Register our implementation with `base` as what other caches get; return its name."""
    name = PREFIX + base.replace("flash", "fl4sh")  # transformers treats every name with "flash" in it as that kernel
    AttentionInterface.register(name, partial(attention, base=base))
    AttentionMaskInterface.register(name, partial(mask, base=base))
    return name


class _Stored:
    """What an attention module of a patched model gets as its cache: the attention function does the storing."""

    def update(self, key, value, *args, **kwargs):
        return key, value


_STORED = _Stored()


def hand_over_layer(module, args, kwargs):
    """Forward pre-hook of an attention module: the cache does not reach the attention function, so its layer must."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, SparseCache):
        if cache.owner is not module._torchsparsekv_owner:
            raise ValueError("this SparseCache was made by another patch (another model, or before unpatch)")
        kwargs = {**kwargs, "sparse_layer": cache.layers[module.layer_idx], "past_key_values": _STORED}
        if module.layer_idx == 0:
            cache.check_room(kwargs["hidden_states"].shape[1] if "hidden_states" in kwargs else args[0].shape[1])
    return args, kwargs


def attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, sparse_layer=None, base="sdpa", **kwargs
):
    if sparse_layer is None:  # not our cache: the model's own attention
        if query.shape[2] == 1 and module.layer_idx == 0 and not torch.compiler.is_compiling():
            _warn_dense()
        modeling = sys.modules[type(module).__module__]
        fn = ALL_ATTENTION_FUNCTIONS[base] if base != "eager" else modeling.eager_attention_forward
        return fn(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    _refuse(module, query, key, attention_mask, sparse_layer)
    layer, tokens = sparse_layer, query.shape[2]
    if layer.advances:
        layer.state.clock.advance(tokens, None if attention_mask is None else attention_mask.view(-1))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    a = Attention(scale, kwargs.get("softcap") or 0.0, kwargs.get("s_aux"))
    if tokens == 1:
        out = layer.method.decode(layer.state, query, key, value, a)
    else:
        out = layer.method.prefill(layer.state, query, key, value, a, last=layer.last)
    return out.transpose(1, 2).contiguous(), None


def _warn_dense() -> None:
    """A loop that leaves the cache to the model gets a DynamicCache: right, but nothing is retrieved."""
    warnings.warn(
        "torchsparsekv: this decode step is dense, its cache is not one of this patch: use generate(), or pass "
        "past_key_values=handle.make_cache(...)",
        stacklevel=2,
    )


def _refuse(module, query, key, attention_mask, layer) -> None:
    """All of it is static: nothing is left of these checks in a compiled step."""
    if torch.is_grad_enabled() and query.requires_grad:
        raise RuntimeError("torchsparsekv is for inference: run under torch.no_grad() or torch.inference_mode()")
    if module.training:
        raise RuntimeError("torchsparsekv is for inference: call model.eval()")
    pool = layer.state.pool
    if key.shape[0] != pool.shape[0]:
        raise ValueError(f"this cache was made for batch size {pool.shape[0]}, got {key.shape[0]}")
    counts = attention_mask is None or (attention_mask.dtype == torch.int64 and attention_mask.numel() == key.shape[0])
    if not counts:  # a 4-D mask of the user's never passed through our mask function, and is not of integers
        raise ValueError("torchsparsekv takes a 2-D attention mask (left padding); a 4-D mask cannot be honoured")


def mask(
    *args, base, q_length=None, kv_offset=0, attention_mask=None, allow_is_causal_skip=True, config=None, **kwargs
):
    """For our caches the "mask" is the number of left-padding tokens per row, [batch, 1, 1, 1], and None in decode."""
    if kv_offset != SENTINEL:
        if base not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            return None
        return ALL_MASK_ATTENTION_FUNCTIONS[base](
            *args, q_length=q_length, kv_offset=kv_offset, attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip, config=config, **kwargs,
        )  # fmt: skip
    if q_length == 1 and (attention_mask is None or attention_mask.shape[-1] > 1):
        return None  # the padding is in the clock since the prompt, and a growing mask must not enter the graph
    # At one token transformers says so of every static cache, and before 5.14 of every prompt for one too: there the
    # mask function itself tells.
    plain = allow_is_causal_skip or kwargs.get("mask_function") is causal_mask_function
    if q_length > 1 and not plain:
        raise NotImplementedError("torchsparsekv: only causal masks with left padding; no packed or overlaid sequences")
    if attention_mask is None:
        return None
    pad = (attention_mask.long().cumsum(-1) == 0).sum(-1)
    left_only = attention_mask.long().sum(-1) + pad == attention_mask.shape[-1]
    if torch.compiler.is_compiling():  # cannot raise here: let the row overrun its capacity, which makes it NaN
        pad = torch.where(left_only, pad, -(1 << 30))
    else:
        if not bool(left_only.all()):
            raise ValueError("torchsparsekv: rows may be padded on the left only (tokenizer.padding_side = 'left')")
        if bool((pad == attention_mask.shape[-1]).any()):
            raise ValueError("torchsparsekv: a row of the batch is nothing but padding (or its first chunk is)")
    return pad.view(-1, 1, 1, 1)
