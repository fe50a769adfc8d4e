"""How the descent chooses nodes, where a world is too small: by all that programs can hold."""
import importlib
import itertools
from functools import partial

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
DIM, MILLION = 64, VISIT.MILLION
HALVES = [torch.float16] + [torch.bfloat16] * (DEVICE.type == "cuda")  # Triton interprets no products of the latter
KINDS = ["reference", "triton", pytest.param("cuda", marks=pytest.mark.gpu)]


def tree_of(products: torch.Tensor, dtype=torch.float32) -> tuple[torch.Tensor, Tree]:
    """Two queries a kv head, and a tree of two levels whose nodes have these products [batch, kv_heads, nodes] with the
    first, and the opposite with the second; the root's counts nothing."""
    batch, heads, nodes = products.shape
    code = torch.zeros(batch, heads, nodes, DIM, dtype=torch.int8, device=DEVICE)
    code[..., 0] = 1
    q = torch.zeros(batch, 2 * heads, 1, DIM, dtype=dtype, device=DEVICE)
    q[:, 0::2, 0, 0], q[:, 1::2, 0, 0] = 1, -1
    return q, flat_tree(code, products.to(DEVICE), dtype)


def flat_tree(code: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Tree:
    """Of two levels; only codes are to be read."""
    (batch, heads, nodes), i32 = scale.shape, dict(dtype=torch.int32, device=DEVICE)
    key = torch.full(code.shape, torch.nan, dtype=dtype, device=DEVICE)
    level = torch.full((batch, heads, nodes), 2, **i32)
    level[..., 0] = 0
    one, each = torch.zeros(batch, heads, **i32), torch.zeros(batch, heads, nodes, **i32)
    rest = (one + nodes, one, one.float(), one, torch.zeros(batch, heads, 4, **i32))
    return Tree(key, code, scale, torch.full_like(scale, torch.nan), each, level, each, *rest)


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
    share=st.booleans(), dtype=st.sampled_from([torch.float32, *HALVES]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_best_of_many(kind, nodes, known, room, values, broken, share, dtype, seed):
    """Products of few values are ties mostly; those of two rows and two kv heads differ. NaN is nobody's best."""
    if DEVICE.type == "cpu":
        nodes = min(nodes, 4097)
    g = torch.Generator().manual_seed(seed)
    products = torch.randint(-values, values, (2, 2, nodes), generator=g).float()
    products[torch.rand(products.shape, generator=g) < broken] = torch.nan
    q, tree = tree_of(products, dtype)
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
        bits = marks[b, h // 2, torch.arange(nodes) // 32, h % 2] >> torch.arange(nodes) % 32 & 1
        assert bits.nonzero()[:, 0].tolist() == sorted([0, *order.tolist()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [40, pytest.param(VISIT.NATIVE_ALL + 50, marks=pytest.mark.gpu)])
def test_the_root_takes_nobodys_place(kind, nodes):
    """Its product would be the second best; the larger tree is searched by its peaks."""
    products = -torch.arange(nodes).float()
    products[1] = 1
    q, tree = tree_of(products.expand(1, 1, nodes))
    _, marks = ENTRY.run(kind, q, tree, View(0, 3, 3, 2))
    assert VISIT.expanded_of(marks.cpu(), nodes)[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_parents_of_any_number_are_known(kind):
    """Nodes of the third level have marks in several words, which those below are told by."""
    nodes, g = 160, torch.Generator().manual_seed(0)
    q, tree = tree_of(torch.randint(-99, 99, (2, 2, nodes), generator=g).float())
    above = torch.tensor([7, 40, 70, 71, 100, 159], device=DEVICE)
    parent = above[torch.randint(len(above), tree.parent.shape, generator=g).to(DEVICE)].int()
    parent[..., above], tree.level[..., above] = 0, 3
    tree, view = tree._replace(parent=parent), View(0, 2, 9, 3)
    want = ENTRY.reference(q, tree, view)
    for got, x in zip(ENTRY.run(kind, q, tree, view), want, strict=True):
        assert torch.equal(got, x)
    expanded = above[VISIT.expanded_of(want[1], nodes)[..., above].nonzero()[:, -1]]
    assert len(set((expanded // 32).tolist())) > 2


SCORERS = ["triton", pytest.param("cuda", marks=pytest.mark.gpu)]


def scores_of(kind: str, q: torch.Tensor, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    """The products [batch, heads, nodes] and peaks that are there when the nodes of a tree of two levels are chosen."""
    products, marks = VISIT.fake(q, tree)
    peaks = torch.full((*q.shape[:2], -(-products.shape[2] // GROUP)), torch.nan, device=DEVICE)
    scorer = VISIT._scorer(q, tree, View(0, 1, 1, 2)) if kind == "cuda" else None
    assert (kind == "cuda") == (scorer is not None)
    score = partial(VISIT._score_cuda, scorer) if scorer else VISIT._score
    score(q, tree, marks, products, peaks, 2, True)
    return products.movedim(-1, 2).flatten(1, 2).cpu(), peaks.cpu()


@pytest.mark.parametrize("kind", SCORERS)
@given(
    nodes=st.sampled_from([2, 15, 16, 17, 100, 1000]), known=st.floats(0, 1), broken=st.sampled_from([0, 0.5, 1]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_peaks_are_of_all_but_the_root(kind, nodes, known, broken, seed):
    g = torch.Generator().manual_seed(seed)
    given = torch.randint(-9, 10, (2, 2, nodes), generator=g).float()
    given[torch.rand(given.shape, generator=g) < broken] = torch.nan
    q, tree = tree_of(given, HALVES[-1])
    tree.node_count.fill_(1 + round(known * (nodes - 1)))
    products, peaks = scores_of(kind, q, tree)
    assert (products[..., 0] == 0).all()
    products[..., 0] = -torch.inf
    assert torch.equal(peaks, peaks_of(products))


@pytest.mark.parametrize("kind", SCORERS)
@given(
    nodes=st.sampled_from([2, 17, 127, 128, 129, 500]), known=st.floats(0, 1), d=st.sampled_from([64, 128, 192, 256]),
    group=st.integers(1, 8), half=st.sampled_from(HALVES), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_are_of_codes(kind, nodes, known, d, group, half, seed):
    """Those of a tree of two levels, for every shape that csrc/score_nodes.cu takes; codes use all of their range."""
    g = torch.Generator().manual_seed(seed)
    code = torch.randint(-127, 128, (2, 2, nodes, d), generator=g, dtype=torch.int8)
    scale = torch.rand(2, 2, nodes, generator=g)
    q = torch.randn(2, 2 * group, 1, d, generator=g).to(half)
    there = 1 + round(known * (nodes - 1))
    want = (q.double().unflatten(1, (2, group))[..., 0, :] @ code.double().mT) * scale.double()[:, :, None]
    tree = flat_tree(code.to(DEVICE), scale.to(DEVICE), half)
    tree.node_count.fill_(there)
    products, _ = scores_of(kind, q.to(DEVICE), tree)
    assert torch.isneginf(products[..., there:]).all()
    torch.testing.assert_close(products[..., 1:there], want.flatten(1, 2)[..., 1:there].float(), atol=1e-2, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("wider", "fits"), [(0, True), (4, False), (1, False)])
def test_queries_that_are_not_aligned_are_left_to_triton(wider, fits):
    _, tree = tree_of(torch.arange(70.0).expand(1, 1, 70), torch.bfloat16)
    rows = torch.randn(1, 2, 1, DIM + wider, device=DEVICE).bfloat16()
    q, view = rows[..., wider:], View(0, 3, 3, 2)
    assert (VISIT._scorer(q, tree, view) is not None) == fits
    for x, y in zip(ENTRY.run("cuda", q, tree, view), ENTRY.run("reference", q, tree, view)):
        assert torch.equal(x, y)


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
