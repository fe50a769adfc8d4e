"""Sums of a method that chooses the pool rows of the tokens that leave the ring."""
import pytest
import torch
from kernels import on
from world import DEVICE, World

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.rest.views import Rest
from torchsparsekv.ops.store.views import Leaving

ENTRY = load_all()["group_sums"]


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize(("interval", "group", "dim"), [(16, 8, 64), (8, 64, 40), (3, 4, 128), (24, 1, 16)])
def test_sums_of_chosen_rows_equal_means_of_raw_keys_and_values(kind, interval, group, dim):
    """Tokens leave in the first row of the batch alone. Some rows share a group."""
    w = World(lengths=[4 + 6 + 2 * interval, 4 + 6], interval=interval, rows=192, dim=dim)
    assert (w.begin - w.previous_begin).tolist() == [interval, 0]
    rows = torch.rand(w.batch, w.heads, 2 * interval, generator=w.g).argsort(-1)[..., :interval].int().contiguous()
    assert group == 1 or len((rows[0, 0] // group).unique()) < interval
    began = torch.randn(w.batch, w.heads, -(-w.rows // group), 2, w.dim, generator=w.g)
    expected = began.clone()
    for h in range(w.heads):
        for row in rows[0, h].tolist():
            expected[0, h, row // group] += w.truth[0, h, row] / group
    things = on(DEVICE, (Leaving(w.k, w.truth), w.v, Rest(began, group), w.lengths_view, None, True, rows))
    ENTRY.run(kind, *things)
    torch.testing.assert_close(things[2].sums.cpu(), expected, rtol=0, atol=1e-5)
