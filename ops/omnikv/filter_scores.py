"""Score the tokens that the layers after a filter layer may attend to: one score a token, over all heads of the layer.

    z[h, j]  = scale * q[h] . key[j], soft-capped where the model does that
    score[j] = max over the query heads h of  z[h, j]                                           (weights False)
               max over the query heads h of  log softmax over the retrievable tokens of z[h]   (weights True)

The retrievable tokens of the layers after it are those from `sink` up to `length - window`. Other tokens score -inf.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.triton import cdiv
from torchsparsekv.ops.attend._split import soft_capped
from torchsparsekv.ops.select._products import products, products_by_triton
from torchsparsekv.ops.select._top import GROUP, peaks_of
from torchsparsekv.ops.store.views import Attention, Lengths, Pool, Query


def check(q, pool, lengths, sink, window, attention, weights) -> None:
    _check.heads(q, pool)
    if sink < 0 or window < 0:
        raise ValueError(f"sink and window must be 0 or more, got {sink} and {window}")


def reference(
    q: Query, pool: Pool, lengths: Lengths, sink: int, window: int, attention: Attention, weights: bool
) -> tuple[Tensor, Tensor]:
    """Score the tokens that the layers after a filter layer may attend to.

    Args:
        q: [batch, q_heads, 1, dim].
        pool: [batch, heads, rows, 2, dim] of the filter layer. It has all tokens before `length - window`.
        lengths: of the filter layer. Only `length` is read.
        sink, window: of the layers after it.
        attention: scale and soft cap of the model.
        weights: True: score by softmax weights. False: by logits, as the authors' example.

    Returns: scores [batch, 1, rows] and their peaks [batch, 1, cdiv(rows, GROUP)] (ops/select/_top.py), fp32.

    Launches: one kernel for q.k over the pool (ops/select/_products.py); torch ops do the rest.

    The authors' code: `last` (weights False) and `softmax_before_last` (weights True) of modeling/omnikv.py.
    """
    return _scores(products(q, pool), lengths, sink, window, attention, weights)


def _scores(raw, lengths, sink, window, attention, weights) -> tuple[Tensor, Tensor]:
    """Scores from the products `raw` [batch, heads, group, rows], in torch, without a wait for the device."""
    pos = torch.arange(raw.shape[-1], device=raw.device)
    live = (pos >= sink) & (pos < lengths.length[:, None] - window)
    z = soft_capped(raw * attention.scale, attention.softcap).flatten(1, 2).masked_fill(~live[:, None], -torch.inf)
    if weights:
        z = z - z.logsumexp(-1, keepdim=True)
    best = z.amax(1, keepdim=True).masked_fill(~live[:, None], -torch.inf)  # no token is live: -inf - -inf
    return best, peaks_of(best)


def launch(q, pool, lengths, sink, window, attention, weights) -> tuple[Tensor, Tensor]:
    raw = products_by_triton(q, pool, lengths.length)
    return _scores(raw, lengths, sink, window, attention, weights)


def fake(q, pool, *_) -> tuple[Tensor, Tensor]:
    batch, rows = pool.shape[0], pool.shape[2]
    scores = q.new_empty((batch, 1, rows), dtype=torch.float32)
    return scores, q.new_empty((batch, 1, cdiv(rows, GROUP)), dtype=torch.float32)


filter_scores = register("filter_scores", reference, impls=(by_triton(launch),), fake=fake, check=check)
