"""IceCache's algorithms 1 to 4 as its paper has them, over raw keys: what ours is held against.

Tokens are inserted one after the other, each under the nearest of the nodes that there are by then; every node has
pages of its own; a query takes the best tokens it sees by their keys. Candidates are compared exactly where the paper
searches by projections, and a query expands as many nodes of a level as it is told. Which tokens rise is given.
"""
import math

import torch
from torch import Tensor

ROOT = -1


class DciTrees:
    """One tree a head, of keys [heads, tokens, d]; levels [tokens] from 1 on."""

    def __init__(self, keys: Tensor, levels: Tensor):
        self.keys, self.levels = keys, levels
        self.parent = torch.stack([self._parents(k) for k in keys])

    def _parents(self, keys: Tensor) -> Tensor:
        """Nearest by equation 2, with the c of all keys."""
        c = keys.norm(dim=-1).max()
        x = torch.cat([keys / c, (1 - keys.square().sum(-1, keepdim=True) / c**2).clamp(min=0).sqrt()], -1)
        parent = torch.full((len(keys),), ROOT)
        for level in range(1, int(self.levels.max())):
            own, above = ((self.levels == at).nonzero()[:, 0] for at in (level, level + 1))
            for part in own.split(1024):
                far = torch.cdist(x[part], x[above]).masked_fill(above > part[:, None], torch.inf)
                best = far.min(-1)
                parent[part] = torch.where(best.values.isfinite(), above[best.indices], ROOT)
        return parent

    def sees(self, scores: Tensor, share: float, least: int, more: int) -> Tensor:
        """Algorithm 4 with Flag = True, of the query with these scores [heads, queries, tokens]: which tokens it adds
        to its queue, if it visits so large a share of the nodes of a level, but `least` at least, and so many more."""
        wide = self.parent[:, None].expand(scores.shape)
        expanded = torch.zeros_like(scores, dtype=torch.bool)
        seen = wide == ROOT
        for level in range(int(self.levels.max()), 1, -1):
            there = self.levels == level
            room = max(least, math.ceil(int(there.sum()) * share)) + more
            best = scores.masked_fill(~(seen & there), -torch.inf).topk(min(room, scores.shape[2]))
            expanded.scatter_(2, best.indices, best.values > -torch.inf)
            seen |= expanded.gather(2, wide.clamp(min=0)) & (wide != ROOT)
        return seen

    def pages(self, size: int) -> Tensor:
        """The page of every token [heads, tokens]: those of one node in order, in pages that no other node has."""
        found = []
        for parent in self.parent:
            order = parent.argsort(stable=True)
            name, count = parent[order].unique_consecutive(return_inverse=True, return_counts=True)[1:]
            within = torch.arange(len(order)) - (count.cumsum(0) - count)[name]
            needed = (count + size - 1) // size
            page = (needed.cumsum(0) - needed)[name] + within // size
            found.append(torch.empty_like(page).scatter_(0, order, page))
        return torch.stack(found)


def page_select(scores: Tensor, page: Tensor, most: int) -> Tensor:
    """Algorithm 3 for the query heads of a group: of scores [heads, queries, tokens], -inf for what is not seen, and
    the page of each token [heads, tokens], the pages [heads, most] of each query's best tokens in turn; -1 behind
    them."""
    peaks = torch.full((*scores.shape[:2], int(page.max()) + 1), -torch.inf)
    peaks.scatter_reduce_(2, page[:, None].expand(scores.shape), scores, "amax")
    best = peaks.topk(min(most, peaks.shape[2]))
    turns = torch.where(best.values > -torch.inf, best.indices, -1).transpose(1, 2).flatten(1)
    rows = [[x for x in dict.fromkeys(row) if x >= 0][:most] for row in turns.tolist()]
    return torch.tensor([row + [-1] * (most - len(row)) for row in rows])
