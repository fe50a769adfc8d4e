"""Checks of arguments that ops share, beside the shapes and types that their signatures declare."""
from torch import Tensor


def heads(q: Tensor, kv: Tensor) -> None:
    """Every kv head has the same number of query heads; `kv` is [batch, kv_heads, ...]."""
    if q.shape[1] % kv.shape[1]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit keys and values {tuple(kv.shape)}")
