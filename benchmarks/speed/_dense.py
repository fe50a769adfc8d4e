"""Dense attention kernels of other projects in a compiled decode step: baselines beside our dense attention.

They run over all slots of Hugging Face's static cache, because a captured graph cannot take fewer. There is no mask,
which is the best case for a kernel.
"""
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchsparsekv.patches._family import head_dim_of
from torchsparsekv_benchmarks._options import repeats
from torchsparsekv_benchmarks.speed import _flashinfer

SDPA = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}
FLASHINFER = "flashinfer"
KERNELS = (*SDPA, FLASHINFER)
NAME = "torchsparsekv_benchmark"  # transformers takes every name with "flash" in it for that kernel


def check(names: Sequence[str], contexts: Sequence[int]) -> None:
    if set(names) - set(KERNELS) or repeats(names):
        raise ValueError(f"dense must be different ones of {', '.join(KERNELS)}, got {','.join(names)}")
    if FLASHINFER in names and not _flashinfer.installed():
        raise ValueError("dense names flashinfer, which is not installed: leave it out, or install it")
    odd = [n for n in contexts if n % _flashinfer.PAGE]
    if FLASHINFER in names and odd:
        raise ValueError(f"flashinfer needs contexts that are multiples of {_flashinfer.PAGE}, got {odd[0]}")


def told(name: str) -> dict[str, str]:
    """Its version, where the environment of a file of results has none of it."""
    return {"version": _flashinfer.version()} if name == FLASHINFER else {}


def try_out(names: Sequence[str], device: torch.device) -> None:
    """Raise if torch lacks one of the kernels `names`, before a model is built for it."""
    q, k = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in ((1, 32, 1, 128), (1, 8, 256, 128)))
    for name in (n for n in names if n in SDPA):
        try:
            with sdpa_kernel(SDPA[name]):
                F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        except RuntimeError as e:
            raise RuntimeError(f"{name} cannot run here, leave it out of --dense: {e}") from e


@contextlib.contextmanager
def attending_by(name: str, model, batch: int, length: int) -> Iterator[None]:
    """Within this context the model attends by the kernel `name`: one query to a static cache of [batch, length]."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _paged(model, batch, length) if name == FLASHINFER else _sdpa)
    AttentionMaskInterface.register(NAME, _no_mask)
    own = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        with sdpa_kernel(SDPA[name]) if name in SDPA else contextlib.nullcontext():
            yield
    finally:
        model.set_attn_implementation(own)
        _planned.clear()


def _no_mask(*args, **kwargs) -> None:
    return None


def _sdpa(module, query, key, value, attention_mask, scaling=None, **kwargs) -> tuple[Tensor, None]:
    out = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _paged(model, batch: int, length: int) -> Callable[..., tuple[Tensor, None]]:
    """By FlashInfer, planned here for all layers; its pages are runs of slots, where they are in the cache."""
    config = model.config
    heads, q_heads, dim = config.num_key_value_heads, config.num_attention_heads, head_dim_of(config)
    pages = _flashinfer.pages_of(length)
    table = [row * heads * pages + page for row in range(batch) for page in range(pages)]
    _planned["latest"] = _flashinfer.planned(q_heads, heads, dim, length, table, model.device, tensor_cores=True)
    attend = _operator()
    new = lambda *shape: torch.empty(batch, *shape, dtype=torch.bfloat16, device=model.device)  # noqa: E731
    attend(new(q_heads, dim), *[new(heads, length, dim)] * 2)  # what it keeps from its first run must not be of a graph

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return attend(query.squeeze(2), key, value).unsqueeze(1), None

    return attention


_planned: dict[str, Any] = {}  # the latest plan: an op takes tensors and numbers only


@functools.cache
def _operator():
    """As an op, which the compiler does not look into."""

    @torch.library.custom_op("torchsparsekv_benchmarks::flashinfer", mutates_args=())
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = tuple(_flashinfer.as_pages(x) for x in (key, value))
        return _planned["latest"].run(query.contiguous(), cache)

    attend.register_fake(lambda query, key, value: torch.empty_like(query, memory_format=torch.contiguous_format))
    return attend
