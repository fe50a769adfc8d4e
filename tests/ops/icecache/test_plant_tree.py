"""Prompts longer than the worlds of test_ops.py: trees that run out of room, keys as near to one node as to another,
nodes of several levels."""
import pytest
import torch
from cases import OPS
from hypothesis import given
from hypothesis import strategies as st
from kernels import clones, close, on
from world import DEVICE, World

from torchsparsekv.ops._machinery.chain import tensors
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.icecache import _tree
from torchsparsekv.ops.select._top import GROUP

ENTRY = load_all()["plant_tree"]


def of_two_norms(x: torch.Tensor) -> torch.Tensor:
    """Keys whose channels all are 1 or all are 2, up to signs. Scores and projections of such keys are equal or far
    apart. Those of other whole numbers may differ by less than two ways to round a square root."""
    sign = torch.where(x >= 0, 1.0, -1.0)
    return torch.where(x.isnan(), x, sign * (1 + (sign[..., :1] > 0)))


def prompt(seed: int, way: int, lengths: list[int], tokens: int):
    """Arguments of plant_tree; `way` picks promotion, levels and room for nodes."""
    w = World(
        lengths=lengths, tokens=tokens, dim=16, block=4, sink=4, window=8, interval=4, rows=256, seed=seed,
        pick=lambda *options: options[way % len(options)],
    )  # fmt: skip
    k, ring, tree, *rest = OPS["plant_tree"](w)
    key = of_two_norms(tree.key)
    code, scale = _tree.encode_nodes(key)
    norm2, max_norm2 = key.float().square().sum(-1), torch.full_like(tree.max_norm2, 400)
    tree = tree._replace(key=key, code=code, scale=scale, norm2=norm2, max_norm2=max_norm2)
    return (of_two_norms(k), of_two_norms(ring), tree, *rest)


SIZES = st.lists(st.integers(20, 240), min_size=1, max_size=2)


@given(seed=st.integers(0, 99), way=st.integers(0, 5), lengths=SIZES, tokens=st.integers(20, 240))
def test_kernel_equals_reference_with_many_tokens(seed, way, lengths, tokens):
    things = prompt(seed, way, lengths, tokens)
    want_things, got_things = clones(things), on(DEVICE, clones(things))
    want, got = ENTRY.reference(*want_things), ENTRY.run("triton", *got_things)
    close(got.cpu(), want, "order")
    for g, x in zip(tensors(got_things), tensors(want_things), strict=True):
        close(g.cpu(), x, "argument")


def gathered(rows: list, page: int) -> list:
    """The rows in the order before `spread_pages`, which deals pages like cards to hands of GROUP: card by card over
    all hands, then the pages that were too few for a card to each hand."""
    pages = [rows[i : i + page] for i in range(0, len(rows), page)]
    hands, dealt = len(pages) // GROUP, len(pages) // GROUP * GROUP
    taken = [pages[hand * GROUP + card] for card in range(GROUP) for hand in range(hands)]
    return [row for one in taken + pages[dealt:] for row in one]


@pytest.mark.parametrize("kind", ["reference", "triton"])
@given(seed=st.integers(0, 99), way=st.integers(0, 5), lengths=SIZES)
def test_children_of_a_node_lie_side_by_side(kind, seed, way, lengths):
    """Before their pages are spread, rows that moved are sorted by node and then by projection; no token is lost."""
    k, _, tree, leaves, lengths, promotion, _ = things = on(DEVICE, prompt(seed, way, lengths, max(lengths)))
    order = ENTRY.run(kind, *things)
    start, length, old, new = (t.tolist() for t in lengths[:4])
    projection = _tree.projections(k, tree.max_norm2[..., None], promotion.seed)
    page = leaves.node.shape[2] // leaves.fill.shape[2]
    for b, h in [(b, h) for b in range(k.shape[0]) for h in range(k.shape[1])]:
        first = -(-max(start[b], old[b]) // page) * page
        if length[b] <= 0 or new[b] <= first:
            continue
        columns = slice(k.shape[2] - length[b] + first, k.shape[2] - length[b] + new[b])
        took, mark = order[b, h, columns].long(), leaves.node[b, h, first : new[b]].long()
        nodes = torch.where(mark < -1, tree.parent[b, h, _tree.self_mark(mark).clamp(min=0)], mark).tolist()
        assert sorted(took.tolist()) == list(range(columns.start, columns.stop))
        rows = gathered(list(zip(nodes, projection[b, h, took].tolist(), took.tolist())), page)
        assert rows == sorted(rows)
