"""How the descent chooses nodes, where a world is too small: by all that programs can hold."""
import importlib
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from world import DEVICE

from torchsparsekv.ops._registry import load_all
from torchsparsekv.ops._top import GROUP, peaks_of
from torchsparsekv.ops.store.views import Tree, View

VISIT = importlib.import_module("torchsparsekv.ops.select.visit_nodes")
ENTRY = load_all()["visit_nodes"]
DIM, MILLION = 16, VISIT.MILLION
KINDS = ["reference", "triton", pytest.param("cuda", marks=pytest.mark.gpu)]


def tree_of(products: torch.Tensor) -> tuple[torch.Tensor, Tree]:
    """Two queries a kv head, and a tree of two levels whose nodes have these products [batch, kv_heads, nodes] with the
    first, and the opposite with the second; the root's counts nothing."""
    batch, heads, nodes = products.shape
    i32 = dict(dtype=torch.int32, device=DEVICE)
    key = torch.zeros(batch, heads, nodes, DIM, device=DEVICE)
    key[..., 0] = products.to(DEVICE)
    level = torch.full((batch, heads, nodes), 2, **i32)
    level[..., 0] = 0
    one, each = torch.zeros(batch, heads, **i32), torch.zeros(batch, heads, nodes, **i32)
    q = torch.zeros(batch, 2 * heads, 1, DIM, device=DEVICE)
    q[:, 0::2, 0, 0], q[:, 1::2, 0, 0] = 1, -1
    return q, Tree(key, each, level, each, one + nodes, one, one.float(), one, torch.zeros(batch, heads, 4, **i32))


@pytest.mark.parametrize("kind", KINDS)
def test_what_differs_little_differs(kind):
    """And of equal products those of lower nodes are taken."""
    q, tree = tree_of(torch.tensor([[[0, 1.0, 1.0000001, 0.5, 1.0]]]))
    for room, best in ((1, ([2], [3])), (2, ([1, 2], [1, 3]))):
        products, marks = (x.cpu() for x in ENTRY.run(kind, q, tree, View(0, room, room, 2)))
        assert products[0, 0, 0].tolist() == [0, 0], "the root"
        for head in (0, 1):
            assert VISIT.expanded_of(marks, 5)[0, head].nonzero()[:, 0].tolist() == [0, *best[head]]


@pytest.mark.parametrize("kind", KINDS)
@given(
    nodes=st.sampled_from([2, 33, 255, 4096, 4097, 8194, 16386, 32770, VISIT.MOST_NODES]), known=st.floats(0, 1),
    room=st.floats(0, 1), values=st.sampled_from([2, 30, 1 << 20]), broken=st.sampled_from([0, 0.3]),
    share=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_best_of_many(kind, nodes, known, room, values, broken, share, seed):
    """Products of few values are ties mostly; those of two rows and two kv heads differ. NaN is nobody's best."""
    if DEVICE.type == "cpu":
        nodes = min(nodes, 4097)
    g = torch.Generator().manual_seed(seed)
    products = torch.randint(-values, values, (2, 2, nodes), generator=g).float()
    products[torch.rand(products.shape, generator=g) < broken] = torch.nan
    q, tree = tree_of(products)
    there = 1 + round(known * (nodes - 1))
    tree.node_count[0], tree.node_count[1] = there, nodes
    part = room**4  # few mostly: of many nodes these are found by their peaks
    view = View(round(part * MILLION), 1, nodes, 2) if share else View(0, max(1, round(part * nodes)), nodes, 2)
    found, marks = (x.cpu() for x in ENTRY.run(kind, q, tree, view))
    found = found.movedim(-1, 2).flatten(1, 2)
    for b, h in itertools.product(range(2), range(4)):
        count = int(tree.node_count[b, 0])
        x = products[b, h // 2] * (1 - 2 * (h % 2))
        order = torch.where(x.isnan(), -torch.inf, x)[1:count].argsort(descending=True, stable=True) + 1
        order = order[: max(-(-(count - 1) * view.share // MILLION), view.least)]
        order = order[~x[order].isnan()]
        known_nodes = (torch.arange(nodes) < count) & ~x.isnan()
        want = torch.where(known_nodes, x, -torch.inf)
        want[0] = 0
        assert torch.equal(found[b, h], want)
        bits = marks[b, h, torch.arange(nodes) // 32] >> torch.arange(nodes) % 32 & 1
        assert bits.nonzero()[:, 0].tolist() == sorted([0, *order.tolist()])


@given(
    nodes=st.sampled_from([2, 15, 16, 17, 100, 1000]), known=st.floats(0, 1), broken=st.sampled_from([0, 0.5, 1]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_peaks_are_of_all_but_the_root(nodes, known, broken, seed):
    g = torch.Generator().manual_seed(seed)
    products = torch.randint(-9, 10, (2, 2, nodes), generator=g).float()
    products[torch.rand(products.shape, generator=g) < broken] = torch.nan
    q, tree = tree_of(products)
    tree.node_count.fill_(1 + round(known * (nodes - 1)))
    products, marks = VISIT.fake(q, tree)
    scores = torch.empty(2, 4, nodes, device=DEVICE)
    peaks = torch.full((2, 4, -(-nodes // GROUP)), torch.nan, device=DEVICE)
    VISIT._score(q, tree, marks, scores, products, peaks, 2, True)
    assert (scores[..., 0] == -torch.inf).all()
    assert torch.equal(peaks, peaks_of(scores))
    products[..., 0, :] = -torch.inf
    assert torch.equal(products.movedim(-1, 2).flatten(1, 2), scores)


@pytest.mark.parametrize("view", [View(0, 2, 1, 2), View(-1, 1, 1, 2), View(MILLION + 1, 1, 1, 2), View(0, 0, 1, 2)])
def test_refused(view):
    with pytest.raises(ValueError, match="need share from 0 to 1000000, 1 <= least <= most and levels from 2"):
        VISIT.visit_nodes(*tree_of(torch.zeros(1, 1, 4)), view)


def test_how_many_nodes_a_program_can_leave():
    """By peaks it can look into a quarter more groups than it leaves nodes."""
    for nodes in (16386, 32770, VISIT.MOST_NODES):
        few = (View(100_000, 32, 512, 2), View(0, 615, 615, 2))
        for view in (*few, View(0, 616, 616, 2), View(MILLION, 1, nodes, 2), View(0, 9, 9, 3)):
            shape, room = VISIT.native(nodes, view), VISIT.room_of(view, nodes)
            by_peaks = shape["PEAKS"] > 0
            assert by_peaks == (view in few)
            if by_peaks:
                assert shape["THREADS"] * shape["SCORES"] // GROUP >= room * 5 // 4
                assert shape["THREADS"] * shape["PEAKS"] * GROUP >= nodes
