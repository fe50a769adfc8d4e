"""IceCache's search as its paper has it: algorithm 4 over prioritised DCI, of one head, in plain Python.

Prioritised DCI (Li and Malik, 2017, algorithm 2) retrieves points by random projections. A composite index has `simple`
directions. It visits the points of each direction outwards from the query's own projection, nearest first over all
directions, and a point that all directions have visited is a candidate. So candidates come by the largest of their
projected distances, a lower bound of the distance. Only candidates are compared exactly.
"""
import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

import torch
from dci_tree import ROOT, DciTree, lifted


def directions(composite: int, simple: int, dim: int, g: torch.Generator) -> torch.Tensor:
    """Unit vectors [composite, simple, dim + 1], for the lifted space."""
    u = torch.randn(composite, simple, dim + 1, generator=g, dtype=torch.float64)
    return u / u.norm(dim=-1, keepdim=True)


def outwards(line: list[tuple[float, int]], at: float) -> Iterator[tuple[float, int]]:
    """The points of a sorted line as (distance from `at`, number), nearest first."""
    right = bisect_left(line, (at, -1))
    left = right - 1
    while left >= 0 or right < len(line):
        if right == len(line) or (left >= 0 and at - line[left][0] <= line[right][0] - at):
            yield at - line[left][0], line[left][1]
            left -= 1
        else:
            yield line[right][0] - at, line[right][1]
            right += 1


class PrioritizedDci:
    """An index of points {number: vector}."""

    def __init__(self, points: dict[int, torch.Tensor], u: torch.Tensor):
        self.points, self.u = points, u
        projected = torch.einsum("nd,csd->csn", torch.stack([*points.values()]), u).tolist()
        self.lines = [[sorted(zip(line, points)) for line in composite] for composite in projected]

    def candidates(self, q: torch.Tensor, composite: int, retrieve: int) -> list[int]:
        """The first `retrieve` candidates of one composite index."""
        lines, visits, found = self.lines[composite], Counter[int](), []
        at = (self.u[composite] @ q).tolist()
        for _, t in heapq.merge(*(outwards(line, x) for line, x in zip(lines, at))):
            visits[t] += 1
            if visits[t] == len(lines):
                found.append(t)
                if len(found) == retrieve:
                    break
        return found

    def query(self, q: torch.Tensor, k: int, retrieve: int) -> tuple[list[int], int]:
        """The k nearest of all candidates, nearest first, and how many candidates were compared."""
        found = {t for i in range(len(self.lines)) for t in self.candidates(q, i, retrieve)}
        return sorted(found, key=lambda t: float((self.points[t] - q).norm()))[:k], len(found)


class PaperSearch:
    """Algorithm 4 with Flag = True on the nodes of a tree."""

    def __init__(self, tree: DciTree, u: torch.Tensor):
        self.tree = tree
        points = dict(zip(tree.keys, lifted(torch.stack([*tree.keys.values()]), tree.c)))
        children: dict[int, dict[int, torch.Tensor]] = {}
        for t, p in tree.parent.items():
            children.setdefault(p, {})[t] = points[t]
        self.indices = {p: PrioritizedDci(of, u) for p, of in children.items()}

    def query(self, q: torch.Tensor, k: int, share: float, view: int | None = None) -> tuple[list[int], int]:
        """The k best tokens, and how many tokens were compared. Of the children of a node so large a share is retrieved
        in each composite index, but no fewer than k. `view`: nodes of a level that are expanded; None: all that the
        searches of the level found, as in the paper."""
        at = torch.cat([q / q.norm(), q.new_zeros(1)])
        rank = lambda tokens: sorted(tokens, key=lambda t: -float(q @ self.tree.keys[t]))  # noqa: E731
        frontier, queue, compared = [ROOT], set[int](), 0
        while frontier:
            found = []
            for node in frontier:
                if node in self.indices:
                    size = len(self.indices[node].points)
                    best, n = self.indices[node].query(at, k, max(min(k, size), round(share * size)))
                    found, compared = found + best, compared + n
            queue |= set(found)
            frontier = rank(t for t in found if self.tree.level[t] > 1)[:view]
        return rank(queue)[:k], compared
