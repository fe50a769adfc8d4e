"""IceCache's exact search of nodes beside the search of its paper, prioritised DCI (support/prioritized_dci.py)."""
import pytest
import torch
from dci_tree import ROOT, DciTree
from prioritized_dci import PaperSearch, PrioritizedDci, directions
from structured_keys import StructuredKeys

from torchsparsekv.ops.icecache._tree import levels_of, nearest_node
from torchsparsekv.ops.icecache.views import Promotion

TOP = 32  # best tokens of a query


def planted(keys: torch.Tensor, every: int) -> DciTree:
    """The tree of two levels of a prompt, whose nodes are one of `every` tokens."""
    level = levels_of(torch.arange(len(keys)), Promotion(every, 0, 2, 0))
    nodes = (level == 2).nonzero()[:, 0]
    parent = nodes[nearest_node(keys, level, keys[nodes], level[nodes], keys.square().sum(-1).max()).long()]
    tree = DciTree()
    for t, key in enumerate(keys):
        tree.add(t, key)
    tree.level.update(enumerate(level.tolist()))
    tree.parent.update((t, int(parent[t]) if level[t] == 1 else ROOT) for t in range(len(keys)))
    return tree


def best_tokens(tree: DciTree, q: torch.Tensor) -> set[int]:
    return set((torch.stack([*tree.keys.values()]) @ q).topk(TOP).indices.tolist())


def searched_exactly(tree: DciTree, q: torch.Tensor, most: int) -> tuple[set[int], int]:
    """All nodes are compared, then the children of the best nodes, as long as no more than `most` tokens are compared.
    Returns the tokens and their number."""
    nodes = sorted((t for t, level in tree.level.items() if level == 2), key=lambda t: -float(q @ tree.keys[t]))
    seen = set(nodes)
    for node in nodes:
        children = {t for t, p in tree.parent.items() if p == node}
        if len(seen) + len(children) > most:
            break
        seen |= children
    return seen, len(seen)


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
    tree = planted(stream.keys[0], 16)
    q = stream.query()[0].double()
    got, compared = PaperSearch(tree, directions(1, 1, 128, stream.g)).query(q, 256, 1.0)
    assert got == sorted(tree.keys, key=lambda t: -float(q @ tree.keys[t]))
    assert compared == 256


@pytest.mark.parametrize(("composite", "simple", "least_lead"), [(1, 1, 0.2), (3, 8, 0.0)])
def test_exact_search_of_nodes_finds_no_less_at_equal_visits(composite, simple, least_lead):
    """The same tree, the same number of keys compared: of the 32 best tokens of a query, how many are among those that
    each search compares. One projection is what the authors' code has."""
    stream = StructuredKeys(2048, heads=1, group=2)
    tree = planted(stream.keys[0], 16)
    search, found = PaperSearch(tree, directions(composite, simple, 128, stream.g)), []
    for _ in range(8):
        for q in stream.query().double():
            want = best_tokens(tree, q)
            paper, compared = search.query(q, TOP, 0.5)
            exact, visited = searched_exactly(tree, q, compared)
            assert visited <= compared < 2048 / 2
            found.append((len(want & set(paper)) / TOP, len(want & exact) / TOP))
    paper, exact = torch.tensor(found).mean(0).tolist()
    assert exact >= paper + least_lead - 0.02, (paper, exact)
    assert paper > 0.1
