"""The attention and mask functions that transformers dispatches to on a patched model."""
import sys
from functools import partial

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchsparsekv.ops.store.views import Attention
from torchsparsekv.patches._cache import SENTINEL, SparseCache, check_owner
from torchsparsekv.patches._family import Layer
from torchsparsekv.patches._names import NAME, cache_in, name_in, renamed
from torchsparsekv.patches._warn import warn

PREFIX = "torchsparsekv_over_"
NOTHING_BUT_PADDING = "torchsparsekv: a row of the batch is nothing but padding"
NO_ATTENTIONS = "output_attentions=True: a sparse step has no attention weights to return; leave it out, or unpatch"


def register_over(base: str) -> str:
    """Register our attention and mask functions under a new name, and return the name. `base` serves all other caches.
    """
    name = PREFIX + base.replace("flash", "fl4sh")  # transformers runs the flash kernel for names with "flash"
    AttentionInterface.register(name, partial(attention, base=base))
    AttentionMaskInterface.register(name, partial(mask, base=base))
    return name


def check_implementation(config) -> None:
    """Refuse another attention implementation: the model would store nothing in our cache."""
    name = config._attn_implementation
    if not name.startswith(PREFIX):
        raise RuntimeError(
            f"the attention implementation was set to {name!r} after patch: unpatch, set it, and patch again"
        )


class _Stored:
    """The cache that an attention module of a patched model gets. It stores nothing: the attention function stores the
    keys and values."""

    def update(self, key, value, *args, **kwargs):
        return key, value


_STORED = _Stored()


def hand_over_layer(module, args, kwargs):
    """Forward pre-hook of an attention module. It passes the cache layer to the attention function, which does not get
    the cache."""
    name = name_in(kwargs)
    if name and isinstance(cache := kwargs[name], SparseCache):
        kwargs = {**kwargs, "sparse_layer": cache.layers[module.layer_idx], name: _STORED}
    return args, kwargs


def enter_layers(layer, args, kwargs):
    """Forward pre-hook of the first layer. It checks the cache before anything changes it.

    If the first layer keeps no keys and values, only this hook sees the begin of a forward.
    """
    cache = cache_in(kwargs)
    if isinstance(cache, SparseCache):
        owner = layer._torchsparsekv_owner
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        check_owner(cache, owner)
        _refuse_training(layer, hidden)
        cache.use.check()
        cache.check_room(hidden.shape[1])
        if hidden.shape[0] != cache.batch:
            raise ValueError(f"this cache was made for batch size {cache.batch}, got {hidden.shape[0]}")
        if owner.first > 0:
            cache.use.begin()


def leave_layers(layer, args, kwargs, output):
    """Forward hook of the last layer, with or without keys and values."""
    cache = cache_in(kwargs)
    if isinstance(cache, SparseCache):
        cache.use.end_of_layers()


def enter_model(model, args, kwargs):
    """Forward pre-hook of the whole model. `leave_model` sees the end of the forward."""
    if isinstance(cache := cache_in(kwargs), SparseCache):
        if not torch.compiler.is_compiling():
            cache.use.called = True
        kwargs = renamed(kwargs)
    return args, kwargs


def enter_decoder(model, args, kwargs):
    """Forward pre-hook of the decoder, which may run without its head. It makes the checks that need the config."""
    if isinstance(cache_in(kwargs), SparseCache):
        config, wanted = model.config.get_text_config(decoder=True), kwargs.get("output_attentions")
        check_implementation(config)
        if config.output_attentions if wanted is None else wanted:
            raise ValueError(NO_ATTENTIONS)
        kwargs = renamed(kwargs)
    return args, kwargs


def leave_model(model, args, kwargs, output):
    """Forward hook of the whole model. A missing output means that the forward failed."""
    cache = cache_in(kwargs)
    if isinstance(cache, SparseCache):
        cache.use.end_of_model(whole=output is not None)


def attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, sparse_layer=None, base="sdpa", **kwargs
):
    if sparse_layer is None:  # another cache: the model's own attention
        if query.shape[2] == 1 and not torch.compiler.is_compiling():
            _warn_dense(module)
        modeling = sys.modules[type(module).__module__]
        fn = ALL_ATTENTION_FUNCTIONS[base] if base != "eager" else modeling.eager_attention_forward
        return fn(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    a = Attention(scale, kwargs.get("softcap") or 0.0, kwargs.get("s_aux"))
    _refuse(module, query, key, value, attention_mask, sparse_layer)
    _refuse_shape(module, query, key, a, sparse_layer.shape)
    layer, tokens = sparse_layer, query.shape[2]
    if layer.first and not layer.use.open:  # otherwise `enter_layers` has begun the forward
        layer.use.begin()
    if layer.advances:
        layer.state.row_lengths.advance(tokens, None if attention_mask is None else attention_mask.view(-1))
    if tokens == 1:
        out = layer.method.decode(layer.state, query, key, value, a)
    else:
        out = layer.method.prefill(layer.state, query, key, value, a, last=layer.last)
    return out.transpose(1, 2).contiguous(), None


def _warn_dense(module) -> None:
    """Warn of a decode step on a DynamicCache. Its result is right, but nothing is retrieved."""
    owner = getattr(module, "_torchsparsekv_owner", None)
    if owner is None or module.layer_idx != owner.first:
        return
    warn(
        "this decode step is dense, because its cache is not from this patch: call generate(), or pass "
        f"{NAME}=handle.make_cache(...). With guidance_scale expect this warning: the second forward is always dense"
    )


def _refuse_training(module, x) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("torchsparsekv is for inference: run under torch.no_grad() or torch.inference_mode()")
    if module.training:
        raise RuntimeError("torchsparsekv is for inference: call model.eval()")


def _refuse(module, query, key, value, attention_mask, layer) -> None:
    """Refuse tensors and masks that do not fit the cache. A compiled step contains none of these checks, because they
    read static properties only."""
    _refuse_training(module, query)  # an adapter may need gradients although the embedding does not
    ring, given = layer.state.store.ring, (query, key, value)
    other = [x for x in given if (x.dtype, x.device) != (ring.dtype, ring.device)]
    if other:
        raise TypeError(
            f"this cache is in {ring.dtype} on {ring.device}, the model computes in {other[0].dtype} on "
            f"{other[0].device} (model.to() after patch, or autocast?): unpatch, move the model to its final type and "
            "device, and patch again"
        )
    counts = attention_mask is None or (attention_mask.dtype == torch.int32 and attention_mask.numel() == key.shape[0])
    if not counts:  # a 4-D mask of the user does not come from our mask function, and has no integers
        raise ValueError("torchsparsekv takes a 2-D attention mask (left padding); a 4-D mask cannot be honoured")


def _refuse_shape(module, query, key, a: Attention, shape: Layer) -> None:
    """Refuse a layer that differs from the plan. This check is static too."""
    got = (query.shape[1], key.shape[1], key.shape[3], a.softcap, a.sink_logits is not None)
    said = (shape.heads, shape.kv_heads, shape.head_dim, shape.softcap, shape.sink_logits)
    if got != said:
        names = ("heads", "kv_heads", "head_dim", "softcap", "sink_logits")
        wrong = ", ".join(f"{n} is {x}, not {y}" for n, x, y in zip(names, got, said) if x != y)
        raise ValueError(f"layer {module.layer_idx} of this model is not as its Family describes it: {wrong}")


WINDOWED: tuple[str, ...] = ("sliding_window_overlay.<locals>.inner_mask",)
# With these masks the tokens of an image see one another in both directions. The second is the name up to 5.12.
BOTH_WAYS: tuple[str, ...] = (
    "blockwise_overlay.<locals>.inner_mask", "token_type_ids_mask_function.<locals>.inner_mask",
)  # fmt: skip


def _causal(mask_function) -> bool:
    """True for a causal mask, with or without a sliding window (the layer knows its window), without other conditions.

    A mask for tokens of images is allowed if the prompt is text alone, where the mask changes nothing.
    """
    if mask_function is causal_mask_function:
        return True
    name = getattr(mask_function, "__qualname__", "")
    if name == "and_masks.<locals>.and_mask":
        beside = WINDOWED
    elif name == "or_masks.<locals>.or_mask":
        beside = BOTH_WAYS
    else:
        return False
    parts = mask_function.__closure__[0].cell_contents
    rest = [f for f in parts if f.__qualname__ not in beside]
    return len(rest) == len(parts) - 1 == 1 and not any(map(_joins, parts)) and _causal(rest[0])


def _joins(mask_function) -> bool:
    """True if the mask lets tokens of this prompt see later tokens. For prompts of models with images the call waits
    for the device."""
    if mask_function.__qualname__ not in BOTH_WAYS:
        return False
    (ids,) = (x for x in (c.cell_contents for c in mask_function.__closure__) if isinstance(x, torch.Tensor))
    return torch.compiler.is_compiling() or bool((ids >= 0).any())


def _check_mask(attention_mask, tokens: int, layer) -> None:
    """Refuse a mask that contradicts the tokens in the cache. A decode step on CUDA skips the check, because it would
    wait for the device."""
    if tokens == 1 and attention_mask.is_cuda:
        return
    lengths = layer.state.row_lengths
    past, (rows, width) = int(lengths.seq_len), attention_mask.shape
    if rows != layer.batch_size:
        raise ValueError(f"this cache was made for batch size {layer.batch_size}, the attention mask has {rows} rows")
    if width not in (tokens, past + tokens):
        raise ValueError(
            f"an attention mask of {width} columns does not fit: the cache holds {past} tokens and {tokens} are new, "
            f"so it needs {past + tokens} columns, or {tokens} for the new ones alone"
        )
    if past == 0:
        return
    begun = lengths.view.length > 0  # other rows have had only padding
    first = past if width == tokens else 0
    live = torch.arange(first, first + width, device=attention_mask.device) >= lengths.left_pad[:, None]
    if bool((attention_mask.bool() != live)[begun].any()):
        raise ValueError(
            "this attention mask contradicts the cache: it hides tokens that are stored or new, or shows padding; "
            "only the padding that the first prompt had can be hidden"
        )


def mask(
    *args, base, q_length=None, kv_offset=0, attention_mask=None, allow_is_causal_skip=True, config=None, **kwargs
):
    """The mask of our caches: the number of left-padding tokens of each row, [batch, 1, 1, 1]. In decode it is None."""
    if kv_offset != SENTINEL:
        if base not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            return None
        return ALL_MASK_ATTENTION_FUNCTIONS[base](
            *args, q_length=q_length, kv_offset=kv_offset, attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip, config=config, **kwargs,
        )  # fmt: skip
    layer = getattr(kv_offset, "layer", None)  # None in a graph
    if layer is not None and attention_mask is not None:
        _check_mask(attention_mask, q_length, layer)
    if q_length == 1 and (attention_mask is None or attention_mask.shape[-1] > 1):
        return None  # the row lengths hold the padding, and a growing mask must not enter the graph
    # transformers clears this flag for every static cache at one token, and before 5.14 also at prompts. Then the mask
    # function decides.
    plain = allow_is_causal_skip or _causal(kwargs.get("mask_function"))
    if q_length > 1 and not plain:
        raise NotImplementedError(
            "torchsparsekv takes only causal masks with left padding: no packed sequences, no other mask functions, "
            "and no images whose tokens attend to each other in both directions (gemma3)"
        )
    if attention_mask is None:
        return None
    pad = (attention_mask.long().cumsum(-1) == 0).sum(-1, dtype=torch.int32)
    left_only = attention_mask.long().sum(-1) + pad == attention_mask.shape[-1]
    if torch.compiler.is_compiling():  # a graph cannot raise: the row overruns its capacity and becomes NaN
        pad = torch.where(left_only, pad, -(1 << 30))
    else:
        if not bool(left_only.all()):
            raise ValueError("torchsparsekv: rows may be padded on the left only (tokenizer.padding_side = 'left')")
        chunked = layer is not None and layer.use.chunked
        if not chunked and bool((pad == attention_mask.shape[-1]).any()):
            raise ValueError(f"{NOTHING_BUT_PADDING}, or its first chunk is, which only generate() can handle")
    return pad.view(-1, 1, 1, 1)
