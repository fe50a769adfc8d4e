"""What ops check of their arguments beside shapes and types, which their signatures say (ops/_machinery/signature.py)."""
from torch import Tensor


def heads(q: Tensor, kv: Tensor) -> None:
    """Every kv head has as many query heads; `kv` is [batch, kv_heads, ...]."""
    if q.shape[1] % kv.shape[1]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit keys and values {tuple(kv.shape)}")
