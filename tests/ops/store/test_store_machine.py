"""Any sequence of prompts, steps, turns, forks and resets is dense attention at full budget.

The expected answer comes from raw keys and values that this file keeps. A fork answers as its original does. Packed
pools are tested with numbers that they hold exactly.
"""
import pytest
import torch
from cases import METHODS, hyper_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from world import DEVICE

from torchsparsekv.method import make_method
from torchsparsekv.ops.store.spread_channels import spread_channels
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.state import Geometry, LayerState, RowLengths

ROWS, HEADS, GROUP, DIM = 64, 2, 2, 16
CAPACITY = 60  # no whole number of blocks, and below the rows
SCALE = DIM**-0.5


class Life(RuleBasedStateMachine):
    method, pool_dtype = "quest", None

    def __init__(self):
        super().__init__()
        window = {"window": ROWS} if self.method == "streaming" else {}
        self.m = make_method(
            self.method, **{**hyper_of(self.method, budget=ROWS, sink=8, window=6, block_size=4), **window}
        )
        self.g = torch.Generator().manual_seed(7)
        self.state = self.fresh(2)
        self.keys, self.values = self.nothing(), self.nothing()
        self.pad = [0, 0]

    def nothing(self):
        return torch.empty(2, HEADS, 0, DIM)

    def fresh(self, batch):
        lengths = RowLengths(self.m.ring_plan, batch, CAPACITY, DEVICE)
        geometry = Geometry(batch, HEADS, DIM, ROWS, torch.float32, GROUP, pool_dtype=self.pool_dtype)
        buffers = self.m.buffers(geometry)
        return LayerState(buffers, lengths, DEVICE, pool_on_host=False)

    @property
    def tokens(self):
        return self.keys.shape[2]

    def new(self, n):
        """Queries, keys and values of n tokens, with the strides that transformers gives."""
        drawn = [torch.randn(2, n, h, DIM, generator=self.g) for h in (HEADS * GROUP, HEADS, HEADS)]
        if self.pool_dtype is not None:
            for x in drawn[1:]:
                x.mul_(32).round_().clamp_(-126, 126)
                x[..., n % DIM] = 127
                x.div_(32)
            if self.m.traits.attends == "everything":  # its pool holds rotated keys: turn these back
                drawn[1] = spread_channels(drawn[1], drawn[1])[0]
        return [x.transpose(1, 2).to(DEVICE) for x in drawn]

    def run(self, state, q, k, v, pad=None):
        state.row_lengths.advance(q.shape[2], pad)
        if q.shape[2] == 1:
            return self.m.decode(state, q, k, v, Attention(SCALE))
        return self.m.prefill(state, q, k, v, Attention(SCALE), last=True)

    def take(self, n, pad=None):
        """The store and the raw tokens take in n more; the answers have to be the same."""
        q, k, v = self.new(n)
        self.keys, self.values = torch.cat([self.keys, k.cpu()], 2), torch.cat([self.values, v.cpu()], 2)
        got = self.run(self.state, q, k, v, pad).cpu()
        for b in range(2):
            first, at = self.pad[b], self.tokens - n
            for i in range(max(0, first - at), n):
                x, y = (t[b, :, first : at + i + 1].repeat_interleave(GROUP, 0) for t in (self.keys, self.values))
                weights = (x @ q[b, :, i, :, None].cpu()).squeeze(-1).mul(SCALE).softmax(-1)
                want = (weights[:, None] @ y).squeeze(1)
                torch.testing.assert_close(got[b, :, i], want, atol=2e-5, rtol=1e-4)

    @precondition(lambda self: self.tokens == 0)
    @rule(n=st.integers(2, 30), pad=st.integers(0, 29))
    def prompt(self, n, pad):
        self.pad = [min(pad, n - 1), 0]
        self.take(n, torch.tensor(self.pad, device=DEVICE))

    @precondition(lambda self: 0 < self.tokens < CAPACITY)
    @rule(n=st.integers(1, 9))
    def steps(self, n):
        for _ in range(min(n, CAPACITY - self.tokens)):
            self.take(1)

    @precondition(lambda self: 0 < self.tokens < CAPACITY - 1)
    @rule(n=st.integers(2, 20))
    def turn(self, n):
        self.take(min(n, CAPACITY - self.tokens))

    @precondition(lambda self: self.tokens > 0)
    @rule()
    def fork(self):
        """The original goes on for a step, which the fork must not see; then it is the fork that lives on."""
        twin = self.fresh(2)
        twin.row_lengths.copy_from(self.state.row_lengths)
        twin.copy_from(self.state, None if self.m.traits.reorders_pool else int(self.state.lengths.length.max()))
        if self.tokens < CAPACITY:
            self.run(self.state, *self.new(1))
        self.state = twin

    @rule()
    def reset(self):
        self.state.reset()
        self.state.row_lengths.reset()
        self.keys, self.values = self.nothing(), self.nothing()


@pytest.mark.parametrize("pool_dtype", [None, torch.int8], ids=["plain", "packed"])
@pytest.mark.parametrize("method", METHODS)
def test_any_sequence_of_calls_is_dense_at_full_budget(method, pool_dtype):
    machine = type(f"Life_{method}", (Life,), {"method": method, "pool_dtype": pool_dtype})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=12))
