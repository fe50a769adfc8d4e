"""The products q.k of one query token with the keys of the pool, for ops that need all products."""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.attend._split import load_query
from torchsparsekv.ops.store.rows import keys_of, load_key, row_at

TILE = 64


def grouped(q: Tensor, heads: int) -> Tensor:
    """The query of the one token in fp32, [batch, kv_heads, group, head_dim]."""
    return q[:, :, 0].unflatten(1, (heads, -1)).float()


def products(q: Tensor, pool: Tensor) -> Tensor:
    """q.k over all rows of the pool, fp32 [batch, kv_heads, group, rows]."""
    return grouped(q, pool.shape[1]) @ keys_of(pool).to(q.dtype).float().transpose(-1, -2)


@triton.jit
def _products(
    q, pool, out, end, q_b, q_h, heads, rows,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    pos = tl.program_id(1) * TILE + tl.arange(0, TILE)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    x = load_query(q, q_b, q_h, b, h, G, GP, D, DP)
    live = pos < tl.load(end + b)
    k = load_key(row_at(pool, bh, pos[None, :], rows, D), d[:, None], live[None, :], (d < D)[:, None], D)
    s = tl.dot(x, k.to(x.dtype), input_precision="ieee")
    tl.store(out + (bh * G + g[:, None]) * rows + pos[None, :], s, mask=(g < G)[:, None] & (pos < rows)[None, :])


def products_by_triton(q: Tensor, pool: Tensor, end: Tensor) -> Tensor:
    """`products` in one launch of batch * kv_heads * cdiv(rows, TILE) programs. Pool rows from `end` [batch] on are not
    read; their products are 0."""
    (batch, heads, rows), d = pool.shape[:3], q.shape[3]
    group = q.shape[1] // heads
    raw = torch.empty((batch, heads, group, rows), dtype=torch.float32, device=q.device)
    _products[(batch * heads, cdiv(rows, TILE))](
        q, pool, raw, end, q.stride(0), q.stride(1), heads, rows, G=group,
        GP=max(16, next_power_of_2(group)), D=d, DP=next_power_of_2(d), TILE=TILE,
        **launch_early(q.device, batch * heads * cdiv(rows, TILE)),
    )  # fmt: skip
    return raw
