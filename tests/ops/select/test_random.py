"""random_scores draw uniformly, anew at every step, and repeat for the same seed."""
import pytest
import torch
from world import DEVICE

from torchsparsekv.method import make_method
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.state import Geometry, LayerState, RowLengths

ROWS, BLOCK, SINK, WINDOW, BUDGET = 256, 4, 8, 6, 40
LIVE = range(SINK // BLOCK, (SINK + (200 - SINK - WINDOW) // BLOCK * BLOCK) // BLOCK)  # blocks that have left at 200


def draws(steps: int, seed: int = 0, heads: int = 2) -> torch.Tensor:
    """Chosen blocks of single decode steps at 200 tokens and later, [steps, heads, n]."""
    method = make_method("random", sink=SINK, window=WINDOW, block_size=BLOCK, budget=BUDGET, seed=seed)
    lengths = RowLengths(method.ring_plan, 1, 1 << 20, DEVICE)
    buffers = method.buffers(Geometry(1, heads, 16, ROWS, torch.float32))
    state = LayerState(buffers, lengths, DEVICE, pool_on_host=False)
    lengths.advance(200)
    begin, chosen = state.lengths.ring_begin.clone(), []
    q = torch.zeros(1, heads, 1, 16, device=DEVICE)
    for _ in range(steps):
        chosen.append(method.choose(state, q, Attention(0.25)).ids[0].clone())
        lengths.advance(1)
        state.lengths.ring_begin.copy_(begin)  # the same blocks to draw from at every step
    return torch.stack(chosen).cpu()


def test_every_retrievable_block_is_drawn_equally_often():
    steps = 2000
    chosen = draws(steps)
    assert chosen.min() >= LIVE.start
    assert chosen.max() < LIVE.stop
    for h in range(2):
        counts = torch.bincount(chosen[:, h].flatten().long(), minlength=LIVE.stop)[LIVE.start :].double()
        p = BUDGET / BLOCK / len(LIVE)
        z = (counts - steps * p) / (steps * p * (1 - p)) ** 0.5
        assert z.abs().max() < 4.5, "45 counts of a fair draw: one in 3000 seeds would do this"
        assert 0.5 < z.square().mean() < 1.7, "counts too even or too uneven for independent draws"


def test_draws_differ_by_step_head_and_seed_and_repeat_by_seed():
    one, again, other = draws(50), draws(50), draws(50, seed=1)
    assert torch.equal(one, again)
    assert len({tuple(x.tolist()) for x in one.flatten(0, 1)}) == 100
    assert not any(torch.equal(a, b) for a, b in zip(one, other))


def test_overlap_of_two_steps_is_that_of_chance():
    """A draw that moved on by a little at each step would be uniform over time and still no random choice."""
    chosen = draws(1000, heads=1)[:, 0]
    hit = torch.zeros(len(chosen), LIVE.stop).scatter_(1, chosen.long(), 1.0)
    shared = (hit[1:] * hit[:-1]).sum(1).mean()
    n = BUDGET // BLOCK
    assert abs(shared - n * n / len(LIVE)) < 0.2


WRONG = [(-1, ValueError), (1 << 32, ValueError), (True, TypeError), ("0", TypeError)]


@pytest.mark.parametrize(("seed", "error"), WRONG)
def test_a_wrong_seed_is_refused(seed, error):
    with pytest.raises(error, match="random: seed must be"):
        make_method("random", seed=seed)


def test_largest_seed_is_accepted():
    assert not torch.equal(draws(1, seed=(1 << 32) - 1), draws(1))
