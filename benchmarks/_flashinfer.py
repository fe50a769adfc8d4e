"""FlashInfer's paged decode attention, to stand beside ours where it is installed."""
import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import partial

import torch

from torchsparsekv.ops._triton import cdiv

PAGE = 16
WORKSPACE = 128 << 20  # bytes, as its documentation has it


def installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def version() -> str:
    return importlib.metadata.version("flashinfer-python")


def paged_decode(
    q_heads: int, kv_heads: int, head_dim: int, tokens: int, device, tensor_cores: bool, copies: int
) -> list[Callable[[], torch.Tensor]]:
    """Calls of one step at batch 1 over so many tokens, each with a query and a cache of its own; planned beforehand,
    as in a CUDA graph."""
    import flashinfer

    pages, last = cdiv(tokens, PAGE), (tokens - 1) % PAGE + 1
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    table = torch.randperm(pages, device=device).to(torch.int32)
    ends, lasts = ints(0, pages), ints(last)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE, dtype=torch.uint8, device=device), "HND", use_cuda_graph=True,
        use_tensor_cores=tensor_cores, paged_kv_indptr_buffer=ends.clone(), paged_kv_indices_buffer=table.clone(),
        paged_kv_last_page_len_buffer=lasts.clone(),
    )  # fmt: skip
    kinds = dict(q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    wrapper.plan(ends, table, lasts, q_heads, kv_heads, head_dim, PAGE, **kinds)
    new = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device=device)  # noqa: E731
    inputs = [(new(1, q_heads, head_dim), new(pages, 2, kv_heads, PAGE, head_dim)) for _ in range(copies)]
    return [partial(wrapper.run, q, cache, out=torch.empty_like(q)) for q, cache in inputs]
