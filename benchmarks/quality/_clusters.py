"""The choice of LouisKV and ClusterKV over a prompt, from keys and queries alone."""
import torch
from torch import Tensor

from torchsparsekv.ops.clusters._kmeans import DRAWS, kmeans
from torchsparsekv.ops.clusters.pick_units import scores


def chosen_tokens(
    keys: Tensor, q: Tensor, span: tuple[int, int], budget: int, size: int, cosine: bool, rounds: int = 3,
    draws: int = DRAWS,
) -> Tensor:  # fmt: skip
    """Which tokens each step and kv head chooses of those in `span`, [steps, heads, tokens]: keys [heads, tokens, dim],
    q [steps, heads, group, dim]. Whole clusters, best first, the last one trimmed."""
    begin, end = span
    centres, name = kmeans(keys[:, begin:end], max(1, (end - begin) // size), draws, rounds, 0, cosine)
    out = torch.zeros(*q.shape[:2], keys.shape[1], dtype=torch.bool)
    for h in range(keys.shape[0]):
        for t in range(len(q)):
            out[t, h, begin + in_order(q[t, h], centres[h], name[h])[:budget]] = True
    return out


def in_order(q: Tensor, centres: Tensor, name: Tensor) -> Tensor:
    """Tokens as one kv head takes them: by the rank of the unit that they are of, then by position. q [group, dim],
    centres [units, dim], name [tokens]."""
    rank = scores(q, centres, q.shape[-1] ** -0.5).argsort(descending=True, stable=True).argsort()
    return rank[name].argsort(stable=True)
