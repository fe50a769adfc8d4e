"""IceCache's tree and its exact search, of one head, in plain Python over raw keys and tokens by number.

The tree is that of the paper's algorithms 1 and 2. Which tokens rise is given, because a draw is no definition. The
search is ours: it compares all children of an expanded node, where algorithm 4 searches them by prioritised DCI
(prioritized_dci.py), and it expands a given number of nodes of a level, where algorithm 4 expands all that it found.
"""
import torch

ROOT = -1


def lifted(keys: torch.Tensor, c: float) -> torch.Tensor:
    """Equation 2 of keys [n, dim], with c at least the largest norm: [n, dim + 1], of length 1."""
    x = keys / c
    return torch.cat([x, (1 - x.square().sum(-1, keepdim=True)).clamp(min=0).sqrt()], -1)


class DciTree:
    def __init__(self):
        self.keys: dict[int, torch.Tensor] = {}
        self.level: dict[int, int] = {}
        self.parent: dict[int, int] = {}
        self.c = 0.0

    def add(self, token: int, key: torch.Tensor) -> None:
        self.keys[token] = key.double()
        self.c = max(self.c, float(self.keys[token].norm()))

    def distances(self, token: int) -> dict[int, float]:
        """To all tokens that can be its parent, those one level above: Euclidean, by equation 2 with the largest norm
        so far."""
        above = [t for t, level in self.level.items() if level == self.level[token] + 1]
        if not above:
            return {}
        x = lifted(torch.stack([self.keys[t] for t in [token, *above]]), self.c)
        return dict(zip(above, (x[1:] - x[0]).norm(dim=-1).tolist()))

    # ---- queries

    def exact_search(
        self, q: torch.Tensor, expanded: dict[int, int] | None, shown: dict[int, torch.Tensor] | None = None,
        nodes_by: dict[int, torch.Tensor] | None = None, always: int = 1,
    ) -> list[int]:  # fmt: skip
        """All tokens under expanded nodes, best first. `expanded`: nodes of each level, the best by q.k, None: all.
        `shown`: what tokens are ranked by, and `nodes_by`: what nodes are, None: their keys. `always`: so many are
        expanded anyway, the root and the first that rose."""
        by = self.keys | (nodes_by or {})
        first = [t for t, level in self.level.items() if level > 1][: always - 1]
        seen: list[int] = []
        frontier = {ROOT}
        for level in range(max(self.level.values(), default=1), 0, -1):
            children = [t for t, p in self.parent.items() if p in frontier]
            seen += [t for t in children if t not in seen]
            nodes = sorted((t for t in children if self.level[t] == level), key=lambda t: -float(q @ by[t]))
            best = nodes if expanded is None else nodes[: expanded.get(level, 0)]
            frontier = frontier | set(best) | set(nodes).intersection(first)
        return sorted(set(seen), key=lambda t: -float(q @ (shown or self.keys)[t]))

    def nodes_in_eight_bits(self) -> dict[int, torch.Tensor]:
        """Of each key whole numbers up to 127 times the same step; of nodes alone."""
        steps = {t: max(float(key.abs().max()) / 127, 1e-30) for t, key in self.keys.items() if self.level[t] > 1}
        return {t: (self.keys[t] / step).round() * step for t, step in steps.items()}

    def in_four_bits(self) -> dict[int, torch.Tensor]:
        """The keys as codes have them: of each 16 channels of the difference to the parent in 8 bits, the nearest of 16
        levels that lie evenly between its largest value and the negative of that. Nodes are known in 8 bits."""
        found = self.nodes_in_eight_bits()
        for t, key in self.keys.items():
            if self.level[t] > 1:
                continue
            of = found[self.parent[t]] if self.parent[t] != ROOT else torch.zeros_like(key)
            parts = []
            for x in (key - of).split(16):
                step = float((x.abs().max() / 7.5).half())
                levels = (torch.arange(16) - 7.5).double() * step
                parts.append(levels[(x[:, None] - levels).abs().argmin(1)])
            found[t] = of + torch.cat(parts)
        return found


def page_select(ranked: list[list[int]], page_of: dict[int, int], most: int) -> set[int]:
    """Algorithm 3 for the query heads of a group: the pages of each one's tokens in turn, up to `most` different."""
    turns = []
    for tokens in ranked:
        pages: list[int] = []
        for t in tokens:
            if page_of[t] not in pages:
                pages.append(page_of[t])
        turns.append(pages)
    chosen: list[int] = []
    for rank in range(max(map(len, turns), default=0)):
        for pages in turns:
            if rank < len(pages) and pages[rank] not in chosen and len(chosen) < most:
                chosen.append(pages[rank])
    return set(chosen)
