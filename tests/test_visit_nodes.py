"""How the descent chooses nodes, where a world is too small: by all that programs can hold."""
import importlib

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
DIM = 16
KINDS = ["reference", "triton", pytest.param("cuda", marks=pytest.mark.gpu)]


def tree_of(products: torch.Tensor) -> tuple[torch.Tensor, Tree]:
    """A query, and a tree of two levels whose nodes have these products [kv_heads, nodes] with it; the root's counts
    nothing."""
    heads, nodes = products.shape
    i32 = dict(dtype=torch.int32, device=DEVICE)
    key = torch.zeros(1, heads, nodes, DIM, device=DEVICE)
    key[0, ..., 0] = products.to(DEVICE)
    level = torch.full((1, heads, nodes), 2, **i32)
    level[..., 0] = 0
    one, each = torch.zeros(1, heads, **i32), torch.zeros(1, heads, nodes, **i32)
    q = torch.zeros(1, heads, 1, DIM, device=DEVICE)
    q[..., 0] = 1
    return q, Tree(key, each, level, each, one + nodes, one, one.float(), one, torch.zeros(1, heads, 4, **i32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_differs_little_differs(sign, kind):
    """And of equal products those of lower nodes are taken."""
    q, tree = tree_of(sign * torch.tensor([[0, 1.0, 1.0000001, 0.5, 1.0]]))
    for room, best in ((1, [2] if sign > 0 else [3]), (2, [1, 2] if sign > 0 else [1, 3])):
        found = ENTRY.run(kind, q, tree, View(0, room, room, 2))[0][0, 0].cpu()
        assert found[0] == 0, "the root"
        assert (found > -torch.inf).nonzero()[1:, 0].tolist() == best


@pytest.mark.parametrize("kind", KINDS[1:])
@given(
    nodes=st.sampled_from([2, 33, 255, 4096, 4097, 8194, 32770]), known=st.floats(0, 1), room=st.floats(0, 1),
    values=st.sampled_from([2, 30, 1 << 20]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_best_of_many(kind, nodes, known, room, values, seed):
    """Products of few values are ties mostly; those of two kv heads differ."""
    if kind == "triton" and DEVICE.type == "cpu":
        nodes = min(nodes, 4097)
    g = torch.Generator().manual_seed(seed)
    products = torch.randint(-values, values, (2, nodes), generator=g).float()
    q, tree = tree_of(products)
    there = 1 + round(known * (nodes - 1))
    tree.node_count.fill_(there)
    room = max(1, round(room**4 * there))  # few mostly: of many nodes these are found by their peaks
    found, marks = (x[0].cpu() for x in ENTRY.run(kind, q, tree, View(0, room, room, 2)))
    for h in range(2):
        order = products[h, 1:there].argsort(descending=True, stable=True)[:room] + 1
        want = torch.full((nodes,), -torch.inf)
        want[order], want[0] = products[h, order], 0
        assert torch.equal(found[h], want)
        bits = marks[h, torch.arange(nodes) // 32] >> torch.arange(nodes) % 32 & 1
        assert torch.equal(bits.bool(), want > -torch.inf)


@given(nodes=st.sampled_from([2, 15, 16, 17, 100, 1000]), known=st.floats(0, 1), seed=st.integers(0, 99))
def test_peaks_are_of_all_but_the_root(nodes, known, seed):
    g = torch.Generator().manual_seed(seed)
    q, tree = tree_of(torch.randint(-9, 10, (2, nodes), generator=g).float())
    tree.node_count.fill_(1 + round(known * (nodes - 1)))
    scores, _ = VISIT.fake(q, tree)
    peaks = torch.full((2, -(-nodes // GROUP)), torch.nan, device=DEVICE)
    VISIT._score(q, tree, scores, peaks, 2, True)
    scores[..., 0] = -torch.inf
    assert torch.equal(peaks, peaks_of(scores)[0])


def test_how_many_nodes_a_program_can_leave():
    """By peaks it can look into a fifth more groups than it leaves nodes."""
    for nodes in (16386, 32770, VISIT.MOST_NODES):
        for view in (View(100_000, 32, 512, 2), View(0, 614, 614, 2), View(1_000_000, 1, nodes, 2), View(0, 9, 9, 3)):
            shape, room = VISIT.native(nodes, view), VISIT.room_of(view, nodes)
            by_peaks = shape["PEAKS"] > 0
            assert by_peaks == (room <= 614 and view.levels == 2)
            if by_peaks:
                assert shape["THREADS"] * shape["SCORES"] // GROUP >= room * 5 // 4
                assert shape["THREADS"] * shape["PEAKS"] * GROUP >= nodes
