"""patch(): check everything, then switch the patch on. The model is not touched before the last check has passed."""
from collections.abc import Mapping
from typing import get_args

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from torchsparsekv.method import Method, Offload, PoolType, Step, as_int, check_device
from torchsparsekv.patches import all_families
from torchsparsekv.patches._assignment import choose
from torchsparsekv.patches._attention import PREFIX
from torchsparsekv.patches._family import MULTIMODAL, Layer, decoder_type
from torchsparsekv.patches._handle import SMALLEST_BUCKET, Handle
from torchsparsekv.patches._memory import check_hot_gib, check_memory, placed
from torchsparsekv.patches._plan import Plan
from torchsparsekv.patches._refused import REFUSED
from torchsparsekv.patches._unwrapped import unwrapped
from torchsparsekv.patches._warn import warn

OFFLOAD = get_args(Offload)
STEPS = get_args(Step)
POOL_TYPES = {name: getattr(torch, name) for name in get_args(PoolType)}


def install(
    model, method: Method, given: dict, *, max_length: int | None, offload: str = "auto",
    skip_layers: int | None = None, layers: Mapping | None = None, pool_dtype: str | None = None, step: str = "auto",
    hot_gib: float | None = None,
) -> Handle:  # fmt: skip
    """Patch a model. `given`: the hyper-parameters of `method` that the user named."""
    model = unwrapped(model)
    check_model(model)
    captures = captures_steps(model, step)
    hot_gib = check_hot_gib(hot_gib, method, model.device)
    plan, max_length, limit = planned(
        model, method, given, model.device, max_length=max_length, offload=offload, skip_layers=skip_layers,
        layers=layers, pool_dtype=pool_dtype,
    )  # fmt: skip
    if max_length is None:
        plan.bytes(1, limit, pool_on_host=False)  # a method checks its sizes when it declares its buffers
        if hot_gib is not None:
            placed(plan, offload, 1, min(limit, SMALLEST_BUCKET), hot_gib)  # the smallest cache has room for a budget
    else:
        check_memory(plan, 1, max_length, placed(plan, offload, 1, max_length, hot_gib))
    handle = Handle(model, plan, max_length, limit, offload, step, captures, hot_gib)
    for note in plan.warned:  # before the model is touched, as a filter may turn a warning into an error
        warn(note)
    handle.install()
    return handle


def planned(
    model, method: Method, given: dict, device: torch.device, *, max_length: int | None, offload: str,
    skip_layers: int | None, layers: Mapping | None, pool_dtype: str | None = None,
) -> tuple[Plan, int | None, int]:  # fmt: skip
    """(plan, max_length, the most tokens of a cache) for a model on `device`. The model may lack its weights."""
    config = check_model(model)
    family = all_families()[decoder_type(model.config)]
    if offload not in OFFLOAD:
        raise ValueError(f"offload must be one of {', '.join(OFFLOAD)}, got {offload!r}")
    pool = check_pool_dtype(pool_dtype)
    max_length = check_length(max_length, config.max_position_embeddings)
    limit = max_length or config.max_position_embeddings
    shapes = family.layers(config)
    check_layers(shapes)
    assignment = choose(method, given, shapes, layers, skip_layers, max_length, limit)
    family.modules(model, config)
    for m in dict.fromkeys(reversed(assignment.methods)):  # so errors name the method of the call, not `full`
        if m is not None:
            check_device(device, m)
    ranks, kept = getattr(model, "_tp_size", None) or 1, family.kept(config)
    plan = Plan(shapes, assignment, model.dtype, device, ranks, config, pool, kept)
    return plan, max_length, limit


def check_model(model):
    """The text config of a model that can be patched, or an error with the reason."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"patch takes a transformers PreTrainedModel, got {type(model).__name__}")
    check_unpatched(model)
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise RuntimeError("this model is compiled already, so a patch has no effect: patch first, then compile()")
    if model.config.is_encoder_decoder:
        raise NotImplementedError("encoder-decoder models are not supported")
    if not model.can_generate():
        raise NotImplementedError(f"{type(model).__name__} has no generate(): patch the whole model, not a part of it")
    model_type, families = decoder_type(model.config), all_families()
    if model_type in REFUSED:
        raise NotImplementedError(f"model_type {model_type!r} is not supported: {REFUSED[model_type]}")
    if model_type not in families:
        raise NotImplementedError(
            f"model_type {model_type!r} is not supported; available: {', '.join(families)}; with images: "
            f"{', '.join(MULTIMODAL)}; docs/develop/family.md says how to add a family of models"
        )
    since = families[model_type].since
    if since and Version(transformers.__version__) < Version(since):
        raise NotImplementedError(
            f"{model_type} works with transformers >= {since}, this is {transformers.__version__}"
        )
    if model.training:
        raise RuntimeError("torchsparsekv is for inference: call model.eval() first")
    if not model._can_set_attn_implementation():
        raise NotImplementedError(f"{type(model).__name__} does not use transformers' attention dispatch")
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"the model must compute in float32, float16 or bfloat16, got {model.dtype}")
    devices = {str(d) for d in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise NotImplementedError(
            f"the model is spread over several devices ({', '.join(sorted(devices))}): load it onto one "
            "(device_map={'': 0}), or run one rank per device with torchrun (tp_plan='auto')"
        )
    return model.config.get_text_config(decoder=True)


def check_unpatched(model) -> None:
    """Refuse a model that is patched, or that shares modules or its config with a patched model."""
    if hasattr(model, "_torchsparsekv"):
        raise RuntimeError(f"this model is patched already: {model._torchsparsekv!r}; call unpatch() on it first")
    if any(hasattr(m, "_torchsparsekv_owner") for m in model.modules()):
        raise RuntimeError("a model that has this model as a part, or is a part of it, is patched already: unpatch it")
    if (name := model.config.get_text_config(decoder=True)._attn_implementation or "").startswith(PREFIX):
        raise RuntimeError(
            f"the config of this model is from a patched model, or is a copy of its config (attention implementation "
            f"{name!r}): make the model again, from a config of its own, with another attn_implementation"
        )


def check_length(max_length, limit: int) -> int | None:
    if max_length is None:
        return None
    length = as_int(max_length)
    if type(length) is not int or length < 1:
        raise ValueError(f"max_length must be a positive int, got {max_length!r}")
    if length > limit:
        raise ValueError(f"max_length {length} is above the model's max_position_embeddings, {limit}")
    return length


def check_pool_dtype(name) -> torch.dtype | None:
    """The type of the pool. None means the type of the model."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in POOL_TYPES:
        allowed = ", ".join(map(repr, POOL_TYPES))
        raise ValueError(f"pool_dtype must be {allowed}, or None for the type of the model, got {name!r}")
    return POOL_TYPES[name]


def captures_steps(model, step: str) -> bool:
    """Whether generate() captures its steps. With "auto" it captures if it can, and compiles otherwise."""
    if step not in STEPS:
        raise ValueError(f"step must be one of {', '.join(STEPS)}, got {step!r}")
    if step == "compiled":
        return False
    why_not = why_not_captured(model)
    if step == "captured" and why_not is not None:
        raise why_not
    return why_not is None


def why_not_captured(model) -> Exception | None:
    """The reason why generate() cannot capture steps, or None. Without this check generate() would run all steps
    eagerly and not say so."""
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) != 1 or not devices[0].startswith("cuda"):
        return ValueError(f"step='captured' needs a model on one CUDA device, this one is on {', '.join(devices)}")
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return NotImplementedError("step='captured' is for a model on one device, this one is split over several ranks")
    if "get_compiled_call" in vars(model):
        return RuntimeError("step='captured' replaces get_compiled_call, and this model has one of its own")
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return NotImplementedError(
            f"step='captured': generate() always runs a model quantised by {type(quantizer).__name__} eagerly"
        )
    return None


def check_layers(layers: tuple[Layer | None, ...]) -> None:
    if all(layer is None for layer in layers):
        raise NotImplementedError("no layer of this model has keys and values")
    for layer in layers:
        if layer is not None and (layer.head_dim % 16 or not 16 <= layer.head_dim <= 256):
            raise ValueError(f"head_dim must be a multiple of 16 up to 256, this model has {layer.head_dim}")
