"""How the descent compares nodes."""
import pytest
import torch
from world import DEVICE

from torchsparsekv.ops._registry import load_all
from torchsparsekv.ops.select.visit_nodes import upper
from torchsparsekv.ops.store.views import Tree, View

ENTRY = load_all()["visit_nodes"]
DIM = 16


def expanded(products: list[float], room: int, kind: str) -> list[int]:
    """Which of the nodes with these products are expanded, if `room` of them may be."""
    nodes = len(products) + 1
    i32 = dict(dtype=torch.int32, device=DEVICE)
    key = torch.zeros(1, 1, nodes, DIM, device=DEVICE)
    key[0, 0, 1:, 0] = torch.tensor(products)
    level = torch.full((1, 1, nodes), 2, **i32)
    level[..., 0] = 0
    one, each = torch.zeros(1, 1, **i32), torch.zeros(1, 1, nodes, **i32)
    tree = Tree(key, each, level, each, one + nodes, one, one.float(), one, torch.zeros(1, 1, 4, **i32))
    q = torch.zeros(1, 1, 1, DIM, device=DEVICE)
    q[..., 0] = 1
    found = ENTRY.run(kind, q, tree, View(0, room, 2))[0, 0]
    assert found[0] == 0, "the root"
    return [i - 1 for i in (found > -torch.inf).nonzero()[:, 0].tolist() if i]


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_differs_in_the_lower_half_of_its_bits_is_equal(sign, kind):
    close, apart = [1.0, 1.0001, 0.5], [1.0, 1.02, 0.5]
    assert expanded([sign * x for x in close], 1, kind) == ([0] if sign > 0 else [2])
    assert expanded([sign * x for x in apart], 1, kind) == ([1] if sign > 0 else [2])
    assert expanded([sign * x for x in close], 2, kind) == ([0, 1] if sign > 0 else [0, 2])


def test_numbers_keep_their_order():
    x = torch.tensor([-torch.inf, -3e38, -2.0, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 2.0, 3e38, torch.inf])
    found = upper(x).tolist()
    assert found == sorted(found)
    assert found[5] == found[6]
    assert len(set(found)) == len(found) - 1
