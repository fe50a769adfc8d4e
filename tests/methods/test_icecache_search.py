"""IceCache's exact search of nodes beside the search of its paper, prioritised DCI (support/prioritized_dci.py)."""
import functools

import pytest
import torch
from dci_tree import ROOT, DciTree
from prioritized_dci import PaperSearch, PrioritizedDci, directions
from structured_keys import StructuredKeys

from torchsparsekv.ops.icecache._tree import levels_of, nearest_node
from torchsparsekv.ops.icecache.views import Promotion

TOP = 32  # best tokens of a query


def quota(tokens: int, every: int = 16) -> torch.Tensor:
    """The level of each token in a tree of two levels."""
    return levels_of(torch.arange(tokens), Promotion(every, 0, 2, 0))


def authors_quota(tokens: int) -> torch.Tensor:
    """The ratios of the authors' code: one of 100 tokens, and one of 5 of these."""
    t = torch.arange(tokens)
    return 1 + (t % 100 == 50).long() + (t % 500 == 250).long()


def planted(keys: torch.Tensor, level: torch.Tensor) -> DciTree:
    """The tree of a prompt whose tokens have these levels."""
    nodes = (level > 1).nonzero()[:, 0]
    parent = nodes[nearest_node(keys, level, keys[nodes], level[nodes], keys.square().sum(-1).max()).long()]
    tree, top = DciTree(), level.max()
    for t, key in enumerate(keys):
        tree.add(t, key)
    tree.level.update(enumerate(level.tolist()))
    tree.parent.update((t, ROOT if level[t] == top else int(parent[t])) for t in range(len(keys)))
    return tree


class ExactSearch:
    """Compares all nodes, then the children of the best nodes."""

    def __init__(self, tree: DciTree):
        self.keys, children = torch.stack([*tree.keys.values()]), dict[int, set[int]]()
        for t, p in tree.parent.items():
            children.setdefault(p, set()).add(t)
        self.nodes, self.children = children.pop(ROOT), children

    def best(self, q: torch.Tensor) -> set[int]:
        return set((self.keys @ q).topk(TOP).indices.tolist())

    def query(self, q: torch.Tensor, most: int) -> set[int]:
        """The tokens that are compared, up to `most`."""
        scores, seen = (self.keys @ q).tolist(), set(self.nodes)
        for node in sorted(self.nodes, key=lambda t: -scores[t]):
            more = self.children.get(node, set())
            if len(seen) + len(more) > most:
                break
            seen |= more
        return seen


def recalls(stream: StructuredKeys, search: PaperSearch, exact: ExactSearch, queries: int, *how) -> torch.Tensor:
    """Of the best tokens of a query, the share that the search of the paper finds, and the share that an exact search
    finds which compares no more tokens; then the share of tokens that the paper's compares. `how`: of PaperSearch."""
    found = []
    for _ in range(queries):
        for q in stream.query().double():
            want = exact.best(q)
            paper, compared = search.query(q, *how)
            seen = exact.query(q, compared)
            assert len(seen) <= compared
            found.append((len(want & set(paper)) / TOP, len(want & seen) / TOP, compared / stream.total))
    return torch.tensor(found).mean(0)


def random_points(n: int = 60, dim: int = 12) -> tuple[dict[int, torch.Tensor], torch.Tensor, torch.Generator]:
    g = torch.Generator().manual_seed(0)
    points, q = torch.randn(n + 1, dim + 1, generator=g, dtype=torch.float64).split([n, 1])
    return {3 * i: x for i, x in enumerate(points)}, q[0], g


@pytest.mark.parametrize("simple", [1, 4])
def test_candidates_come_by_their_lower_bound_of_the_distance(simple):
    """The bound is the largest projected distance over the directions of a composite index."""
    points, q, g = random_points()
    index = PrioritizedDci(points, directions(2, simple, 12, g))
    for i in range(2):
        bound = {t: float((index.u[i] @ (x - q)).abs().max()) for t, x in points.items()}
        assert index.candidates(q, i, 20) == sorted(points, key=bound.__getitem__)[:20]
        assert all(bound[t] <= float((x - q).norm()) for t, x in points.items())


def test_retrieving_all_points_finds_the_nearest():
    points, q, g = random_points()
    got, compared = PrioritizedDci(points, directions(1, 3, 12, g)).query(q, 7, len(points))
    assert got == sorted(points, key=lambda t: float((points[t] - q).norm()))[:7]
    assert compared == len(points)


def test_search_of_the_paper_over_all_nodes_and_children_is_brute_force():
    stream = StructuredKeys(256, heads=1, group=1)
    tree = planted(stream.keys[0], quota(256))
    q = stream.query()[0].double()
    got, compared = PaperSearch(tree, directions(1, 1, 128, stream.g)).query(q, 256, 1.0)
    assert got == sorted(tree.keys, key=lambda t: -float(q @ tree.keys[t]))
    assert compared == 256


@pytest.mark.parametrize(("composite", "simple", "least_lead"), [(1, 1, 0.2), (3, 8, 0.0)])
def test_exact_search_of_nodes_finds_no_less_at_equal_visits(composite, simple, least_lead):
    """The same tree, the same number of keys compared. One projection is what the authors' code has."""
    stream = StructuredKeys(2048, heads=1, group=2)
    tree = planted(stream.keys[0], quota(2048))
    search = PaperSearch(tree, directions(composite, simple, 128, stream.g))
    paper, exact, compared = recalls(stream, search, ExactSearch(tree), 8, TOP, 0.5).tolist()
    assert compared < 0.5
    assert paper > 0.1
    assert exact >= paper + least_lead - 0.02


LONG = 1 << 14
AUTHORS = dict(composite=1, simple=1, level=authors_quota(LONG))
ROWS = [  # the index of the paper's search; k, share, view; the recalls in docs/reference/papers.md
    (dict(composite=1, simple=1), (64, 0.8), (0.71, 0.68)),
    (dict(composite=1, simple=1), (256, 0.5), (0.62, 0.92)),
    (dict(composite=1, simple=1), (256, 0.8), (0.88, 0.92)),
    (dict(composite=3, simple=8), (256, 0.5), (0.86, 0.92)),
    (dict(composite=3, simple=8), (256, 0.8), (0.93, 0.92)),
    (AUTHORS, (256, 0.8, 30), (0.70, 0.88)),
]


@functools.cache
def tree_of(seed: int) -> DciTree:
    return planted(StructuredKeys(LONG, heads=1, group=4, seed=seed).keys[0], quota(LONG))


@pytest.mark.parametrize(("index", "how", "want"), ROWS[::2])
def test_recalls_at_equal_visits_are_those_of_the_docs(index, how, want):
    """Over two streams of keys."""
    found = []
    for seed in (0, 1):
        stream = StructuredKeys(LONG, heads=1, group=4, seed=seed)
        exact, own = tree_of(seed), index.get("level")
        tree = exact if own is None else planted(stream.keys[0], own)
        u = directions(index["composite"], index["simple"], 128, torch.Generator().manual_seed(seed))
        found.append(recalls(stream, PaperSearch(tree, u), ExactSearch(exact), 4, *how))
    paper, ours, compared = torch.stack(found).mean(0).tolist()
    print(f"{how} of {compared:.3f} of the keys: paper {paper:.3f}, exact {ours:.3f}")
    assert (paper, ours) == pytest.approx(want, abs=0.02)
