"""Sums that `append` keeps at steps, where more tokens leave together than one program copies."""
import pytest
import torch
from cases import OPS
from kernels import on
from world import DEVICE, World

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.rest.views import Rest
from torchsparsekv.ops.store.rows import rows_of

ENTRY = load_all()["append"]


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize(
    ("interval", "group", "leaves", "window", "sink"),
    [(1, 8, 3, 5, 3), (16, 64, 2, 0, 0), (33, 32, 2, 5, 3), (40, 8, 3, 0, 3), (40, 64, 1, 5, 0), (40, 1, 2, 5, 3)],
)
def test_sums_equal_means_of_raw_keys_and_values(kind, interval, group, leaves, window, sink):
    length = sink + window + leaves * interval
    w = World(lengths=[length, length - 1], window=window, sink=sink, interval=interval, rows=192)
    token, store, stats, lengths, *_ = OPS["append"](w)
    sums = lambda upto: torch.stack([_sums(w, b, int(n), group) for b, n in enumerate(upto)])  # noqa: E731
    rest = Rest(sums(w.previous_begin), group)
    things = on(DEVICE, (token, store, stats, lengths, None, rest))
    ENTRY.run(kind, *things)
    assert w.begin[0] - w.previous_begin[0] == interval
    torch.testing.assert_close(things[-1].sums.cpu(), sums(w.begin), rtol=0, atol=1e-5)


def _sums(w: World, b: int, end: int, group: int) -> torch.Tensor:
    """Of one row of the batch, from the keys and values of its positions from the sinks up to `end`."""
    rows = torch.zeros(w.heads, w.rows, 2, w.dim)
    for position in range(w.sink, end):
        new = position == int(w.length[b]) - 1
        rows[:, position] = rows_of(w.k[b, :, 0], w.v[b, :, 0]) if new else w.truth[b, :, position]
    return rows.unflatten(1, (-1, group)).sum(2) / group
