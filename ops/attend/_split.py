"""Attention split over the sequence: a program keeps a running softmax over its tiles, a second launch combines them.

Over a tile with logits z and values v, the running softmax (peak m, sum l, weighted values a) becomes

    m' = max(m, max z);   l' = l exp(m - m') + sum exp(z - m');   a' = a exp(m - m') + exp(z - m') v
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import (
    cdiv,
    launch_early,
    next_power_of_2,
    sm_count,
    tl,
    triton,
    wait_for_previous,
)
from torchsparsekv.ops.store.rows import keys_of, load_key, load_value, values_of
from torchsparsekv.ops.store.views import Attention

QUERIES = 256  # queries of a prompt that a reference takes at once: bounds the memory of the logits


@triton.jit
def load_query(q, q_b, q_h, b, h, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The query heads of kv head `h`, [GP, DP], zero where padded."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    m = (g < G)[:, None] & (d < D)[None, :]
    return tl.load(q + b * q_b + (h * G + g[:, None]) * q_h + d[None, :], mask=m, other=0.0)


@triton.jit
def over_nothing(N: tl.constexpr, DP: tl.constexpr):
    """The running softmax of N queries before any token: peaks [N], sums [N] and weighted values [N, DP]."""
    return tl.full((N,), float("-inf"), tl.float32), tl.zeros((N,), tl.float32), tl.zeros((N, DP), tl.float32)


@triton.jit
def begun(q, q_b, q_h, b, h, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The query heads of kv head `h`, and their running softmax before any token."""
    top, total, acc = over_nothing(GP, DP)
    return load_query(q, q_b, q_h, b, h, G, GP, D, DP), top, total, acc


@triton.jit
def capped(z, softcap):
    """softcap * tanh(z / softcap), or z if the model has no soft cap (0)."""
    if softcap > 0:
        z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)  # tanh
    return z


@triton.jit
def step(x, rows, live, top, total, acc, scale, softcap, D: tl.constexpr, DP: tl.constexpr, bias=None):
    """Add the tokens at the row pointers `rows` [n] where `live` [n] to the running softmax of queries x [N, DP].
    `bias`: see `fold`."""
    d = tl.arange(0, DP)[None, :]
    k = load_key(rows[:, None], d, live[:, None], d < D, D).to(x.dtype)
    v = load_value(rows[:, None], d, live[:, None], d < D, D).to(x.dtype)
    return fold(x, k, v, live[None, :], top, total, acc, scale, softcap, bias)


@triton.jit
def fold(x, k, v, live, top, total, acc, scale, softcap, bias=None):
    """Add tokens with keys k and values v [n, DP] where `live` [N or 1, n] to the running softmax. `bias` [N or 1,
    n] is added to their logits."""
    z = capped(tl.dot(x, tl.trans(k), input_precision="ieee") * scale, softcap)
    if bias is not None:
        z += bias
    z = tl.where(live, z, float("-inf"))
    peak = tl.maximum(top, tl.max(z, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    p = tl.exp(z - safe[:, None])
    shrink = tl.exp(top - safe)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return peak, total, acc


@triton.jit
def fold_means(x, key, value, count, top, total, acc, scale, softcap):
    """Add means of `count` [n] tokens each, with keys and values [n, DP], to the running softmax."""
    bias = tl.log(tl.maximum(count, 1).to(tl.float32))[None, :]
    if x.dtype != tl.float32:  # a mean in bf16 is too far off where keys have a large mean
        x, key, value = x.to(tl.float16), key.to(tl.float16), value.to(tl.float16)
    return fold(x, key, value, (count > 0)[None, :], top, total, acc, scale, softcap, bias)


@triton.jit
def store_part(parts, tops, totals, at, acc, top, total, GP: tl.constexpr, DP: tl.constexpr):
    """Store the running softmax of one program as part number `at`."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    tl.store(parts + (at * GP + g[:, None]) * DP + d[None, :], acc)
    tl.store(tops + at * GP + g, top)
    tl.store(totals + at * GP + g, total)


@triton.jit
def _combine(
    parts, tops, totals, sink_logits, out, length, o_b, heads, splits,
    SINKS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    s, d = tl.arange(0, SP), tl.arange(0, DP)
    at = (bh * splits + s) * GP + g
    top = tl.load(tops + at, mask=s < splits, other=float("-inf"))
    peak = tl.max(top, 0)
    if SINKS:
        logit = tl.load(sink_logits + h * G + g).to(tl.float32)
        peak = tl.maximum(peak, logit)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp(top - safe)
    total = tl.sum(weight * tl.load(totals + at, mask=s < splits, other=0.0), 0)
    if SINKS:
        total += tl.exp(logit - safe)
    part = tl.load(parts + at[:, None] * DP + d[None, :], mask=(s < splits)[:, None] & (d < D)[None, :], other=0.0)
    acc = tl.sum(weight[:, None] * part, 0) / tl.where(total > 0, total, 1.0)
    # A row without tokens gets 0, a row that has overrun its capacity NaN.
    acc = tl.where(tl.load(length + b) < 0, float("nan"), acc)
    tl.store(out + b * o_b + (h * G + g) * D + d, acc.to(out.dtype.element_ty), mask=d < D)


def tile_of(q: Tensor) -> int:
    """Tokens per tile: 64 is the fastest if three stages of K and V fit in the shared memory of small GPUs."""
    row = next_power_of_2(q.shape[-1]) * q.element_size()
    return 64 if row <= 256 else 32 if q.element_size() < 4 else 16


class Parts:
    """Scratch for `splits` partial results per (row, kv head), and the launch that combines them.

    splits: of a kv head, at most `tiles`. 0: so many that all heads together have about two per multiprocessor.
    """

    def __init__(self, q: Tensor, heads: int, tiles: int, splits: int = 0):
        batch, q_heads, _, d = q.shape
        splits = max(1, min(tiles, splits or cdiv(2 * sm_count(q.device), batch * heads)))
        self.group = q_heads // heads
        self.gp, self.dp = max(16, next_power_of_2(self.group)), next_power_of_2(d)
        self.splits, self.heads = splits, heads
        n = batch * heads * splits * self.gp
        self.acc = torch.empty((n, self.dp), dtype=torch.float32, device=q.device)
        self.top, self.total = torch.empty((2, n), dtype=torch.float32, device=q.device)

    def shape(self) -> dict[str, int]:
        return {"G": self.group, "GP": self.gp, "DP": self.dp}

    def combine(self, q: Tensor, length: Tensor, sink_logits: Tensor | None, out: Tensor | None = None) -> Tensor:
        """The result, in `out` if there is one."""
        out = result_like(q) if out is None else out
        batch, _, _, d = q.shape
        _combine[(batch * self.heads, self.group)](
            self.acc, self.top, self.total, out if sink_logits is None else sink_logits, out, length, out.stride(0),
            self.heads, self.splits, SINKS=sink_logits is not None, D=d, SP=next_power_of_2(self.splits),
            **self.shape(), **launch_early(q.device, batch * self.heads * self.group),
        )  # fmt: skip
        return out


def result_like(q: Tensor, *_: object) -> Tensor:
    """An empty output like `q` [batch, q_heads, 1, dim], contiguous. Ops that return such an output have it as fake."""
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def empty_result(q: Tensor, *_: object) -> Tensor:
    """An empty output of many queries, [batch, q_heads, tokens, dim], with tokens before heads in memory."""
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3])).transpose(1, 2)


def soft_capped(z: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(z / softcap), or z if the model has no soft cap (0)."""
    return torch.tanh(z / softcap) * softcap if softcap else z


def softmax_attention(
    q: Tensor, rows: Tensor, live: Tensor, attention: Attention, bias: Tensor | None = None
) -> Tensor:
    """Attention by definition, in fp32. q [B, Hq, S, D], rows [B, Hkv, N, 2, D]; live broadcasts to [B, Hq, S, N], and
    so does `bias`, which is added to the logits."""
    group = q.shape[1] // rows.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (keys_of(rows), values_of(rows)))
    z = soft_capped(q.float() @ k.transpose(-1, -2) * attention.scale, attention.softcap)
    z = (z if bias is None else z + bias).masked_fill(~live, -torch.inf)
    top = z.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    total = 0.0
    if attention.sink_logits is not None:
        logit = attention.sink_logits.float().view(1, -1, 1, 1)
        top = torch.maximum(top, logit)
        total = (logit - top).exp()
    p = (z - top).exp()
    total = total + p.sum(-1, keepdim=True)
    return ((p @ v) / torch.where(total > 0, total, 1.0)).to(q.dtype)


def causal_attention(q: Tensor, rows: Tensor, attention: Attention) -> Tensor:
    """Causal attention by its definition. The queries are those of the last tokens of `rows`."""
    out, past = empty_result(q), rows.shape[2] - q.shape[2]
    for first in range(0, q.shape[2], QUERIES):
        some = slice(first, min(first + QUERIES, q.shape[2]))
        position = past + torch.arange(some.start, some.stop, device=q.device)
        end = past + some.stop
        live = torch.arange(end, device=q.device) <= position[:, None]
        out[:, :, some] = softmax_attention(q[:, :, some], rows[:, :, :end], live, attention)
    return out
