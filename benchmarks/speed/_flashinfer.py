"""FlashInfer's paged decode attention, a baseline if it is installed."""
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv

PAGE = 16
WORKSPACE = 128 << 20  # bytes, as its documentation has it


def installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def version() -> str:
    return importlib.metadata.version("flashinfer-python")


def pages_of(tokens: int) -> int:
    return cdiv(tokens, PAGE)


def as_pages(x: Tensor) -> Tensor:
    """Keys or values [batch, heads, tokens, dim] as [pages, heads, PAGE, dim], a page of row b and its page p being
    number b * heads * pages + p. Nothing is copied."""
    batch, heads, tokens, dim = x.shape
    if tokens % PAGE or not x.is_contiguous():
        raise ValueError(f"pages need contiguous tensors of a multiple of {PAGE} tokens, got {tokens}")
    count = (batch - 1) * heads * (tokens // PAGE) + tokens // PAGE
    return x.as_strided((count, heads, PAGE, dim), (PAGE * dim, tokens * dim, dim, 1))


def planned(
    q_heads: int, kv_heads: int, head_dim: int, tokens: int, table: Sequence[int], device, tensor_cores: bool
) -> Any:
    """FlashInfer's wrapper, planned for rows of `tokens` tokens each. `table` lists their pages, one row after the
    other."""
    import flashinfer

    pages = pages_of(tokens)
    rows = len(table) // pages
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    ends, lasts = ints(range(0, len(table) + 1, pages)), ints([(tokens - 1) % PAGE + 1] * rows)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE, dtype=torch.uint8, device=device), "HND", use_cuda_graph=True,
        use_tensor_cores=tensor_cores, paged_kv_indptr_buffer=ends.clone(), paged_kv_indices_buffer=ints(table),
        paged_kv_last_page_len_buffer=lasts.clone(),
    )  # fmt: skip
    kinds = dict(q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    wrapper.plan(ends, ints(table), lasts, q_heads, kv_heads, head_dim, PAGE, **kinds)
    return wrapper


def paged_decode(
    q_heads: int, kv_heads: int, head_dim: int, tokens: int, device, tensor_cores: bool, copies: int
) -> list[Callable[[], Tensor]]:
    """Calls of one step at batch 1 over `tokens` tokens, each with a query and a cache of its own; planned beforehand,
    as in a CUDA graph."""
    pages = pages_of(tokens)
    wrapper = planned(q_heads, kv_heads, head_dim, tokens, torch.randperm(pages).tolist(), device, tensor_cores)
    new = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device=device)  # noqa: E731
    inputs = [(new(1, q_heads, head_dim), new(pages, 2, kv_heads, PAGE, head_dim)) for _ in range(copies)]
    return [partial(wrapper.run, q, cache, out=torch.empty_like(q)) for q, cache in inputs]
