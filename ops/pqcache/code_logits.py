"""Estimate the logit of every retrievable token for every query head, from the codes of its key.

    table[h, s, c]  = <q_h,s, centroid_s,c>                     once per query head, space and centroid
    logit[h, i]     = scale * sum over s of table[h, s, code_i,s],  soft-capped where the model does that

Tokens that cannot be retrieved (the sinks, and tokens that have not left the ring) have -inf.

Launches: `_tables`, (space, row * kv head); `_logits`, (tiles of tokens, row * kv head), which reads `spaces` bytes a
token and looks the products up in the L1 cache.

PQCache (arXiv 2407.12820), and its authors' code: asymmetric distance computation, for inner products.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.attend._split import capped, load_query, soft_capped
from torchsparsekv.ops.pqcache.views import Codebook, check_codebook
from torchsparsekv.ops.store.views import Attention, Lengths, Query

TILE = 128  # tokens per program


def check(q, codebook, lengths, attention) -> None:
    _check.heads(q, codebook.codes)
    check_codebook(codebook, q.shape[3])


def reference(q: Query, codebook: Codebook, lengths: Lengths, attention: Attention) -> Tensor:
    """Estimate the logit of every retrievable token for every query head, from the codes of its key.

    Args:
        q: [batch, q_heads, 1, dim].
        codebook: the index.
        lengths: positions per row.
        attention: scale and soft cap of the model.

    Returns:
        [batch, q_heads, rows], fp32.
    """
    centroids, codes, _ = codebook
    heads, spaces = centroids.shape[1:3]
    x = q[:, :, 0].unflatten(1, (heads, -1)).unflatten(-1, (spaces, -1)).float()
    tables = torch.einsum("bhgsw,bhscw->bhgsc", x, centroids.float())
    found = codes.transpose(2, 3).long()[:, :, None].expand(-1, -1, tables.shape[2], -1, -1)
    logits = soft_capped(tables.gather(-1, found).sum(3) * attention.scale, attention.softcap).flatten(1, 2)
    pos = torch.arange(codes.shape[2], device=q.device)
    live = (pos >= lengths.sink) & (pos < lengths.ring_begin[:, None])
    return logits.masked_fill(~live[:, None], -torch.inf)


@triton.jit
def _tables(
    q, centroids, tables, q_b, q_h, heads, SPACES: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, s = tl.program_id(1).to(tl.int64), tl.program_id(0)
    b, h = bh // heads, bh % heads
    g, c, w = tl.arange(0, GP), tl.arange(0, CP), tl.arange(0, WP)
    x = load_query(q + s * W, q_b, q_h, b, h, G, GP, W, WP)  # [GP, WP]
    at = centroids + (bh * SPACES + s) * C * W + c[:, None] * W + w[None, :]
    centroid = tl.load(at, mask=(c < C)[:, None] & (w < W)[None, :], other=0.0)  # [CP, WP]
    table = tl.dot(centroid.to(x.dtype), tl.trans(x), input_precision="ieee")  # [CP, GP]
    to = tables + (bh * SPACES + s) * C * G + c[:, None] * G + g[None, :]
    tl.store(to, table, mask=(c < C)[:, None] & (g < G)[None, :])


@triton.jit
def _logits(
    tables, codes, out, ring_begin, heads, rows, sink, scale, softcap, SPACES: tl.constexpr, C: tl.constexpr,
    G: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    pos = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = (pos >= sink) & (pos < tl.load(ring_begin + bh // heads))
    for g in range(G):
        z = tl.zeros((TILE,), tl.float32)
        for s in tl.static_range(SPACES):
            code = tl.load(codes + (bh * rows + pos) * SPACES + s, mask=live, other=0).to(tl.int32)
            z += tl.load(tables + (bh * SPACES + s) * C * G + code * G + g, mask=live, other=0.0)
        z = tl.where(live, capped(z * scale, softcap), float("-inf"))
        tl.store(out + (bh * G + g) * rows + pos, z, mask=pos < rows)


def launch(q, codebook, lengths, attention) -> Tensor:
    centroids, codes, _ = codebook
    batch, heads, spaces, c, w = centroids.shape
    out, group = fake(q, codebook), q.shape[1] // heads
    tables = torch.empty((batch, heads, spaces, c, group), dtype=torch.float32, device=q.device)
    sizes = dict(SPACES=spaces, C=c, G=group)
    _tables[(spaces, batch * heads)](
        q, centroids, tables, q.stride(0), q.stride(1), heads, CP=max(16, next_power_of_2(c)), W=w,
        WP=max(16, next_power_of_2(w)), GP=max(16, next_power_of_2(group)), **sizes,
        **launch_early(q.device, spaces * batch * heads),
    )  # fmt: skip
    tiles = cdiv(codes.shape[2], TILE)
    _logits[(tiles, batch * heads)](
        tables, codes, out, lengths.ring_begin, heads, codes.shape[2], lengths.sink, attention.scale,
        attention.softcap, TILE=TILE, **sizes, **launch_early(q.device, tiles * batch * heads),
    )  # fmt: skip
    return out


def fake(q, codebook, *_) -> Tensor:
    return q.new_empty((*q.shape[:2], codebook.codes.shape[2]), dtype=torch.float32)


code_logits = register("code_logits", reference, impls=(by_triton(launch),), fake=fake, check=check)
