"""Argument checks shared by the operators. Kernels trust their inputs, so the ops must not."""
import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def contiguous(**tensors: Tensor) -> None:
    for name, t in tensors.items():
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got shape {tuple(t.shape)} with strides {t.stride()}")


def dense_last(**tensors: Tensor) -> None:
    for name, t in tensors.items():
        if t.stride(-1) != 1:
            raise ValueError(f"{name} must have stride 1 in its last dimension, got strides {t.stride()}")


def dtype(allowed: tuple[torch.dtype, ...], **tensors: Tensor) -> None:
    for name, t in tensors.items():
        if t.dtype not in allowed:
            raise TypeError(f"{name} must be {' or '.join(map(str, allowed))}, got {t.dtype}")


def same_dtype(**tensors: Tensor) -> None:
    dtypes = {name: t.dtype for name, t in tensors.items()}
    if len(set(dtypes.values())) > 1:
        raise TypeError(f"dtypes must agree, got {dtypes}")


def counters(batch: int, **tensors: Tensor) -> None:
    """Per-row lengths and frontiers are contiguous int32 vectors."""
    dtype((torch.int32,), **tensors)
    contiguous(**tensors)
    shape((batch,), **tensors)


def shape(expected: tuple[int, ...], **tensors: Tensor) -> None:
    for name, t in tensors.items():
        if tuple(t.shape) != tuple(expected):
            raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(t.shape)}")


def rows(pool: Tensor, **like: Tensor) -> None:
    """Pool-like tensors are contiguous [batch, kv_heads, rows, 2, head_dim]: K and V of a token side by side."""
    dtype(FLOATS, pool=pool)
    for name, t in {"pool": pool, **like}.items():
        contiguous(**{name: t})
        if t.dim() < 5 or t.shape[-2] != 2 or t.shape[-1] != pool.shape[-1] or t.shape[:2] != pool.shape[:2]:
            expected = f"[{pool.shape[0]}, {pool.shape[1]}, ..., 2, {pool.shape[-1]}]"
            raise ValueError(f"{name} must be {expected}, got {tuple(t.shape)}")
    same_dtype(pool=pool, **like)


def stats(counts: Tensor, pool: Tensor) -> None:
    """The statistics of every (row, kv head): five counters, see state.STATS."""
    dtype((torch.int64,), stats=counts)
    contiguous(stats=counts)
    shape((*pool.shape[:2], 5), stats=counts)


def sinks(logits: Tensor | None, q: Tensor) -> None:
    """One extra logit per query head, or none."""
    if logits is not None:
        dtype(FLOATS, sinks=logits)
        contiguous(sinks=logits)
        shape((q.shape[1],), sinks=logits)


def one_query(q: Tensor, kv: Tensor) -> None:
    """The query of one decode step."""
    heads(q, kv)
    dense_last(q=q)
    if q.shape[2] != 1:
        raise ValueError(f"q must hold one token, got {q.shape[2]}")


def heads(q: Tensor, kv: Tensor) -> None:
    """Queries [batch, q_heads, tokens, head_dim] against rows of [batch, kv_heads, ..., head_dim]."""
    if q.dim() != 4 or q.shape[0] != kv.shape[0] or q.shape[1] % kv.shape[1] or q.shape[3] != kv.shape[-1]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit keys and values {tuple(kv.shape)}")
