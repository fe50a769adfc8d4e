"""How the descent chooses nodes, where a world is too small: by all that programs can hold."""
import importlib
import itertools
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_bound_scores import NATIVE
from world import DEVICE

from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.icecache.views import Tree, View

VISIT = importlib.import_module("torchsparsekv.ops.icecache.visit_nodes")
ENTRY = load_all()["visit_nodes"]
DIM, MILLION, LOWEST = 64, VISIT.MILLION, torch.finfo(torch.float32).min
HALVES = [torch.float16] + [torch.bfloat16] * (DEVICE.type == "cuda")  # Triton interprets no products of the latter
KINDS = ["reference", "triton", pytest.param("cuda", marks=pytest.mark.gpu)]


def tree_of(products: torch.Tensor, dtype=torch.float16) -> tuple[torch.Tensor, Tree]:
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


def expanded_of(visited: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Which nodes each query head expands [batch, kv_heads, group, nodes]; the root it does anyway."""
    products, least = (x.cpu() for x in visited)
    expanded = products.movedim(2, 3) >= least[..., None]
    expanded[..., 0] = True
    return expanded


@pytest.mark.parametrize("kind", KINDS)
def test_what_differs_little_differs(kind):
    """And what is equal to the last that is expanded is expanded too."""
    q, tree = tree_of(torch.tensor([[[0, 1.0, 1.0000001, 0.5, 1.0]]]))
    for room, best in ((1, ([2], [3])), (2, ([1, 2, 4], [1, 3, 4]))):
        visited = ENTRY.run(kind, q, tree, View(0, room, room, 2))
        assert visited[0][0, 0, 0].tolist() == [0, 0], "the root"
        for head in (0, 1):
            assert expanded_of(visited)[0, 0, head].nonzero()[:, 0].tolist() == [0, *best[head]]


def least_of(x: torch.Tensor, view: View, size: int) -> float:
    """By the definition, of the products of a query head with its nodes."""
    known = len(x) - 1
    room = min(max(-(-known * view.share // MILLION), view.least), view.most)
    apart = max(1, -(-known // size))
    best = sorted((v for v in x[1::apart].tolist() if v == v), reverse=True)
    rank = -(-room // apart)
    return best[rank - 1] if room < known and rank <= len(best) else LOWEST


@pytest.mark.parametrize("kind", KINDS)
@given(
    nodes=st.sampled_from([2, 33, 255, 1025, 2050, 4097, 8194, 16386, VISIT.MOST_NODES]), known=st.floats(0, 1),
    room=st.floats(0, 1), values=st.sampled_from([2, 30, 1 << 20]), broken=st.sampled_from([0, 0.3]),
    share=st.booleans(), most=st.sampled_from([40, VISIT.MOST_NODES]), far=st.booleans(),
    dtype=st.sampled_from([torch.float32, *HALVES]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_best_of_many(kind, nodes, known, room, values, broken, share, most, far, dtype, seed):
    """Products of few values are ties mostly, or a few are far above the others; those of two rows and two kv heads
    differ. NaN is nobody's best."""
    if DEVICE.type == "cpu":
        nodes = min(nodes, 4097)
    g = torch.Generator().manual_seed(seed)
    products = torch.randint(-values, values, (2, 2, nodes), generator=g).float()
    if far:
        products[torch.rand(products.shape, generator=g) < 0.01] *= 1e4
    products[torch.rand(products.shape, generator=g) < broken] = torch.nan
    q, tree = tree_of(products, HALVES[-1] if kind == "cuda" and dtype is torch.float32 else dtype)
    there = 1 + round(known * (nodes - 1))
    tree.node_count[0], tree.node_count[1] = there, nodes
    part = room**4
    view = View(round(part * MILLION), 1, most, 2) if share else View(0, max(1, round(part * nodes)), nodes, 2)
    found, least = (x.cpu() for x in ENTRY.run(kind, q, tree, view))
    for b, h in itertools.product(range(2), range(4)):
        count = int(tree.node_count[b, 0])
        x = products[b, h // 2] * (1 - 2 * (h % 2))
        want = torch.where((torch.arange(nodes) < count) & ~x.isnan(), x, -torch.inf)
        want[0] = 0
        assert torch.equal(found[b, h // 2, :, h % 2], want)
        assert least[b, h // 2, h % 2] == least_of(x[:count], view, VISIT.sample_of(nodes, 2))


def test_the_number_is_met():
    """Exactly where the sample is all nodes, and in the mean where it is not."""
    g = torch.Generator().manual_seed(0)
    for nodes, room in ((VISIT.SAMPLE + 1, 100), (8193, 512), (32769, 512)):
        q, tree = tree_of(torch.randn(4, 8, nodes, generator=g))
        counts = expanded_of(ENTRY.reference(q, tree, View(0, room, room, 2))).sum(-1).float() - 1
        size = VISIT.sample_of(nodes, 2)
        if nodes <= size + 1:
            assert (counts == room).all()
        else:
            deviation = (room * (nodes - 1) / size) ** 0.5  # of the rank, one in its square root
            assert abs(counts.mean() - room) < deviation
            assert counts.std() < 1.5 * deviation


@pytest.mark.parametrize("kind", KINDS)
def test_the_root_takes_nobodys_place(kind):
    """Its product would be the second best."""
    products = -torch.arange(40).float()
    products[1] = 1
    q, tree = tree_of(products.expand(1, 1, 40))
    visited = ENTRY.run(kind, q, tree, View(0, 3, 3, 2))
    assert visited[1][0, 0, 0] == -3
    assert expanded_of(visited)[0, 0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_children_of_what_is_expanded_are_scored(kind):
    """Of nodes of the third level some are, the first always; of the second level the best of their children."""
    nodes, g = 160, torch.Generator().manual_seed(0)
    given = torch.randint(-99, 99, (2, 2, nodes), generator=g).float()
    q, tree = tree_of(given)
    above = torch.tensor([1, 40, 70, 71, 100, 159])
    parent = above[torch.randint(len(above), tree.parent.shape, generator=g)].int()
    parent[..., above], tree.level[..., above.to(DEVICE)] = 0, 3
    products, least = ENTRY.run(kind, q, tree._replace(parent=parent.to(DEVICE)), View(0, 2, 9, 3))
    for b, h, head in itertools.product(range(2), range(2), range(2)):
        x = given[b, h] * (1 - 2 * head)
        best = above[(x[above] >= x[above].sort(descending=True).values[1]) | (above < 2)]
        reached = torch.isin(parent[b, h], best)
        reached[above], reached[0] = True, False
        want = torch.where(reached, x, -torch.inf)
        want[0] = 0
        assert torch.equal(products[b, h, :, head].cpu(), want)
        want[above], want[0] = -torch.inf, -torch.inf
        assert least[b, h, head] == want.sort(descending=True).values[1]


SCORERS = ["triton", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kind", SCORERS)
@given(
    nodes=st.sampled_from([2, 17, 127, 128, 129, 500]), known=st.floats(0, 1), d=st.sampled_from([64, 128, 192, 256]),
    group=st.integers(1, 8), half=st.sampled_from(HALVES), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_are_of_codes(kind, nodes, known, d, group, half, seed):
    """Those of a tree of two levels, for every shape that csrc/visit_nodes.cu takes; codes use all of their range."""
    g = torch.Generator().manual_seed(seed)
    code = torch.randint(-127, 128, (2, 2, nodes, d), generator=g, dtype=torch.int8)
    scale = torch.rand(2, 2, nodes, generator=g)
    q = torch.randn(2, 2 * group, 1, d, generator=g).to(half)
    there = 1 + round(known * (nodes - 1))
    want = (q.double().unflatten(1, (2, group))[..., 0, :] @ code.double().mT) * scale.double()[:, :, None]
    tree = flat_tree(code.to(DEVICE), scale.to(DEVICE), half)
    tree.node_count.fill_(there)
    products, _ = ENTRY.run(kind, q.to(DEVICE), tree, View(0, 1, 1, 2))
    products = products.cpu().movedim(-1, 2).flatten(1, 2)
    assert torch.isneginf(products[..., there:]).all()
    torch.testing.assert_close(products[..., 1:there], want.flatten(1, 2)[..., 1:there].float(), atol=1e-2, rtol=1e-4)


ODD = {
    "levels": "trees of 3 levels", "float32": "queries in torch.float32", "wider": "tensors are not aligned",
    "group": "head_dim 64 and 9 query heads a kv head", "head_dim": "head_dim 80 and 2 query heads a kv head",
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_triton_is_left_what_the_native_kernel_is_not_for(odd):
    dim, group = 80 if odd == "head_dim" else DIM, 9 if odd == "group" else 2
    dtype = torch.float32 if odd == "float32" else torch.float16
    tree = flat_tree(torch.zeros(1, 1, 9, dim, dtype=torch.int8, device=DEVICE), torch.ones(1, 1, 9).to(DEVICE), dtype)
    q = torch.zeros(1, group, 1, dim + (odd == "wider"), dtype=dtype, device=DEVICE)[..., int(odd == "wider") :]
    levels = 3 if odd == "levels" else 2
    assert ENTRY.chain.chosen(q, tree, View(0, 3, 3, levels)) == ("triton", {"cuda": ODD[odd]})


def test_what_the_native_kernel_is_for():
    assert ENTRY.chain.chosen(*tree_of(torch.zeros(1, 1, 9), torch.float16), View(0, 3, 3, 2)) == NATIVE


@pytest.mark.gpu
@pytest.mark.parametrize("were", [1, 500, 9999999])
def test_how_many_nodes_there_were_does_not_matter(were, tmp_path, monkeypatch):
    """A program looks where the sample would be if no node had come; the number is read again later."""
    shutil.copytree(_cuda.SOURCES, tmp_path / "csrc")
    file = tmp_path / "csrc" / "visit_nodes.cu"
    text = file.read_text()
    assert text.count("__ldcg(node_count)") == 1
    file.write_text(text.replace("__ldcg(node_count)", str(were)))
    monkeypatch.setattr(_cuda, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(_cuda, "_loaded", {})
    for nodes in (100, 3000):
        q, tree = tree_of(torch.randn(2, 2, nodes), torch.bfloat16)
        things = (q, tree, View(0, 60, 60, 2))
        for x, y in zip(ENTRY.run("cuda", *things), ENTRY.run("reference", *things), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("view", [View(0, 2, 1, 2), View(-1, 1, 1, 2), View(MILLION + 1, 1, 1, 2), View(0, 0, 1, 2)])
def test_refused(view):
    with pytest.raises(ValueError, match="need share from 0 to 1000000, 1 <= least <= most and levels from 2"):
        VISIT.visit_nodes(*tree_of(torch.zeros(1, 1, 4)), view)


def test_programs_are_as_many_as_can_be_launched_early(monkeypatch):
    """264 of this GPU: of 8 kv heads 33 each, of which as many as there are query heads have the sample."""
    monkeypatch.setattr(VISIT, "sm_count", lambda device: 132)
    for nodes, group, heads, clusters in ((8194, 4, 8, 7), (2050, 4, 8, 3), (32770, 4, 8, 33), (8194, 1, 8, 32)):
        assert VISIT._clusters(nodes, group, heads, DEVICE) == clusters
