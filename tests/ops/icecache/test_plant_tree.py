"""Prompts of more tokens than the worlds of test_ops.py have: trees that run out of room, keys that are as near to one
node as to another, nodes of several levels."""
import pytest
import torch
from cases import OPS
from hypothesis import given
from hypothesis import strategies as st
from test_ops import clones, close, on
from world import DEVICE, World

from torchsparsekv.ops._machinery.chain import tensors
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.icecache import _tree
from torchsparsekv.ops.select._top import GROUP

ENTRY = load_all()["plant_tree"]


def of_two_norms(x: torch.Tensor) -> torch.Tensor:
    """1 or 2 in all channels, up to their signs. Scores and projections of such keys are equal or far from it: of whole
    numbers at large, many differ by less than two ways to round a square root."""
    sign = torch.where(x >= 0, 1.0, -1.0)
    return torch.where(x.isnan(), x, sign * (1 + (sign[..., :1] > 0)))


def prompt(seed: int, way: int, lengths: list[int], tokens: int):
    """`way` picks promotion, levels and room for nodes."""
    w = World(
        lengths=lengths, tokens=tokens, dim=16, block=4, sink=4, window=8, interval=4, rows=256, seed=seed,
        pick=lambda *options: options[way % len(options)],
    )  # fmt: skip
    k, ring, tree, *rest = OPS["plant_tree"](w)
    key = of_two_norms(tree.key)
    code, scale = _tree.coded(key)
    norm2, radius2 = key.float().square().sum(-1), torch.full_like(tree.radius2, 400)
    tree = tree._replace(key=key, code=code, scale=scale, norm2=norm2, radius2=radius2)
    return (of_two_norms(k), of_two_norms(ring), tree, *rest)


SIZES = st.lists(st.integers(20, 240), min_size=1, max_size=2)


@given(seed=st.integers(0, 99), way=st.integers(0, 5), lengths=SIZES, tokens=st.integers(20, 240))
def test_many_tokens(seed, way, lengths, tokens):
    things = prompt(seed, way, lengths, tokens)
    want_things, got_things = clones(things), on(DEVICE, clones(things))
    want, got = ENTRY.reference(*want_things), ENTRY.run("triton", *got_things)
    close(got.cpu(), want, "order")
    for g, x in zip(tensors(got_things), tensors(want_things), strict=True):
        close(g.cpu(), x, "argument")


def gathered(rows: list, page: int) -> list:
    """The rows of pages as they were before the pages were dealt out, like cards, to hands of GROUP; hand behind hand,
    and then what was not enough for another card to each."""
    pages = [rows[i : i + page] for i in range(0, len(rows), page)]
    hands, dealt = len(pages) // GROUP, len(pages) // GROUP * GROUP
    taken = [pages[hand * GROUP + turn] for turn in range(GROUP) for hand in range(hands)]
    return [row for one in taken + pages[dealt:] for row in one]


@pytest.mark.parametrize("kind", ["reference", "triton"])
@given(seed=st.integers(0, 99), way=st.integers(0, 5), lengths=SIZES)
def test_children_of_a_node_stand_side_by_side(kind, seed, way, lengths):
    """Rows that moved are in order of nodes, and of a node in order of the projections, before their pages are dealt
    out; none is lost."""
    k, _, tree, leaves, lengths, promotion, _ = things = on(DEVICE, prompt(seed, way, lengths, max(lengths)))
    order = ENTRY.run(kind, *things)
    start, length, old, new = (t.tolist() for t in lengths[:4])
    along = _tree.projections(k, tree.radius2[..., None], promotion.seed)
    page = leaves.node.shape[2] // leaves.fill.shape[2]
    for b, h in [(b, h) for b in range(k.shape[0]) for h in range(k.shape[1])]:
        first = -(-max(start[b], old[b]) // page) * page
        if length[b] <= 0 or new[b] <= first:
            continue
        columns = slice(k.shape[2] - length[b] + first, k.shape[2] - length[b] + new[b])
        took, own = order[b, h, columns].long(), leaves.node[b, h, first : new[b]].long()
        nodes = torch.where(own < -1, tree.parent[b, h, _tree.own(own).clamp(min=0)], own).tolist()
        assert sorted(took.tolist()) == list(range(columns.start, columns.stop))
        at = gathered(list(zip(nodes, along[b, h, took].tolist(), took.tolist())), page)
        assert at == sorted(at)
