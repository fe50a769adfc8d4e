"""Switch a patch on and off: the hooks, the attention implementation, and the methods of the instance."""
import types
import weakref
from collections.abc import Callable

import torch

from torchsparsekv.patches import all_families
from torchsparsekv.patches._attention import (
    enter_decoder,
    enter_layers,
    enter_model,
    hand_over_layer,
    leave_layers,
    leave_model,
    register_over,
)
from torchsparsekv.patches._captured import Steps
from torchsparsekv.patches._family import decoder_type
from torchsparsekv.patches._generate import forget_compiled, generate, prepare_cache
from torchsparsekv.patches._private import Private

RECOMPILE_LIMIT = 64  # at least; it is per code object, and every cache length or batch size may need a graph


class Owner:
    """Ties caches to their patch. A deep copy of the model copies the owner, and so has an owner of its own."""

    active = False
    first = 0  # the first layer with keys and values
    private: Private | None = None  # the configs of the patched model


def on(model, handle, owner: Owner) -> str:
    """Patch the instance and return its attention implementation. An interrupt leaves the instance unpatched."""
    base = model.config.get_text_config(decoder=True)._attn_implementation
    private = Private(model)
    try:
        owner.private = private
        private.put_on(model)
        _put_on(model, handle, owner, base)
    except BaseException:
        off(model, owner, base)
        raise
    return base


def _put_on(model, handle, owner: Owner, base: str) -> None:
    config = model.config.get_text_config(decoder=True)
    modules = all_families()[decoder_type(model.config)].modules(model, config)
    owner.first = modules[0].layer_idx
    for m in modules:
        m._torchsparsekv_owner = owner
        m.register_forward_pre_hook(hand_over_layer, with_kwargs=True)
    decoder = model.get_decoder()
    decoder.register_forward_pre_hook(enter_decoder, with_kwargs=True)
    decoder.layers[0]._torchsparsekv_owner = decoder.layers[-1]._torchsparsekv_owner = owner
    decoder.layers[0].register_forward_pre_hook(enter_layers, with_kwargs=True)
    decoder.layers[-1].register_forward_hook(leave_layers, with_kwargs=True)
    _set_implementation(model, register_over(base))
    model.register_forward_pre_hook(enter_model, with_kwargs=True)
    model.register_forward_hook(leave_model, with_kwargs=True, always_call=True)
    model._prepare_cache_for_generation = types.MethodType(prepare_cache, model)
    if "generate" not in vars(model):  # a wrapper of the user stays; then no cache is recycled
        model.generate = types.MethodType(generate, model)
    if handle.captures:
        model.get_compiled_call = types.MethodType(Steps, model)
    model._torchsparsekv = handle
    activate(owner)
    forget_compiled(model)


def off(model, owner: Owner, base: str) -> None:
    """Restore the instance as `on` found it, also after an interrupted `on`."""
    for m in model.modules():
        if getattr(m, "_torchsparsekv_owner", None) is owner:
            for hook in (hand_over_layer, enter_layers, leave_layers):
                _remove_hook(m, hook)
            del m._torchsparsekv_owner
    for hook in (enter_model, leave_model):
        _remove_hook(model, hook)
    _remove_hook(model.get_decoder(), enter_decoder)
    _set_implementation(model, base)
    for name, ours in (("generate", generate), ("get_compiled_call", Steps)):
        if getattr(vars(model).get(name), "__func__", None) is ours:
            delattr(model, name)
    for name in ("_prepare_cache_for_generation", "_torchsparsekv"):
        vars(model).pop(name, None)
    if owner.private is not None:
        owner.private.take_off(model)
        owner.private = None
    forget_compiled(model)
    owner.active = False
    _limit.drop(owner)


def _set_implementation(model, name: str) -> None:
    """Set the implementation of the text model. A vision tower keeps its own."""
    text = model.config.get_text_config(decoder=True)
    keys = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    model.set_attn_implementation({keys[0]: name} if keys else name)


def activate(owner: Owner) -> None:
    owner.active = True
    _limit.hold(owner)


def _remove_hook(module, hook: Callable) -> None:
    """Remove a hook by its function. After a deep copy of the model, a RemovableHandle belongs to the original."""
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = getattr(module, name)
        for key in [key for key, fn in hooks.items() if fn is hook]:
            del hooks[key], getattr(module, f"{name}_with_kwargs")[key]
            module._forward_hooks_always_called.pop(key, None)


class _RecompileLimit:
    """torch's limit of recompilations in the process, raised while a model is patched. A value that the user sets
    meanwhile stays."""

    def __init__(self) -> None:
        self.owners: weakref.WeakSet[Owner] = weakref.WeakSet()
        self.found: int | None = None  # the limit before the first patch raised it

    def hold(self, owner: Owner) -> None:
        self.owners.add(owner)
        if torch._dynamo.config.recompile_limit < RECOMPILE_LIMIT:
            self.found = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT

    def drop(self, owner: Owner) -> None:
        self.owners.discard(owner)
        if self.owners or self.found is None:
            return
        if torch._dynamo.config.recompile_limit == RECOMPILE_LIMIT:
            torch._dynamo.config.recompile_limit = self.found
        self.found = None


_limit = _RecompileLimit()
