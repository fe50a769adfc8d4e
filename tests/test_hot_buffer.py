"""The hot buffer over many calls against a model of it in plain Python: nothing lost or stale, the oldest leave."""
import importlib
import random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from world import DEVICE

from torchsparsekv.ops._registry import load_all
from torchsparsekv.state import STATS, Clock, Geometry, LayerState, Timeline, common_buffers, hot_buffers

ENTRIES = load_all()
ENTRY, FETCH = ENTRIES["fetch"], importlib.import_module("torchsparsekv.ops.gather.fetch")
DIM, SATURATED = 16, (1 << 16) - 3  # places idle for longer are all equally old


class Head:
    """The buffer of one (row, kv head): which block stands in each place and at which call it was last asked for."""

    def __init__(self, places: int):
        self.blocks: list[int | None] = [None] * places
        self.used = [0] * places
        self.asked = self.missed = 0

    def fetch(self, wanted: list[int], now: int) -> list[int]:
        """The place of each block wanted; -1 where none is."""
        asked = [x for x in wanted if x >= 0]
        missing = [x for x in asked if x not in self.blocks]
        idle = [p for p, x in enumerate(self.blocks) if x is None or x not in asked]
        idle.sort(key=lambda p: (self.blocks[p] is not None, -min(now - 1 - self.used[p], SATURATED), p))
        for block, place in zip(missing, sorted(idle[: len(missing)])):
            self.blocks[place] = block
        for x in asked:
            self.used[self.blocks.index(x)] = now
        self.asked, self.missed = self.asked + len(asked), self.missed + len(missing)
        return [self.blocks.index(x) if x >= 0 else -1 for x in wanted]


class HotBuffer(RuleBasedStateMachine):
    fetch, device = None, None  # what is driven, and where

    @initialize(
        batch=st.integers(1, 2), heads=st.integers(1, 2), places=st.integers(1, 9), block=st.sampled_from([1, 2, 4]),
        total=st.integers(1, 24).map(lambda n: n + 4),
    )  # fmt: skip
    def build(self, batch, heads, places, block, total):
        self.places, self.block, self.total, self.now, self.version = places, block, total, 0, 0
        g, t = Geometry(batch, heads, DIM, total * block, torch.float32), Timeline(0, 1, block)
        buffers = common_buffers(g, t) | hot_buffers(g, block, places)
        self.s = LayerState(buffers, Clock(t, batch, g.rows, self.device), self.device, pool_on_host=False)
        self.lead = [(b, h) for b in range(batch) for h in range(heads)]
        self.s.pool.fill_(torch.nan)  # what was never written must not be seen
        self.s.hot.fill_(torch.nan)
        self.forget()

    def forget(self):
        self.heads = {at: Head(self.places) for at in self.lead}
        self.written = 0
        self.truth = torch.full_like(self.s.pool, torch.nan, device="cpu")

    # ---- what can happen

    @precondition(lambda self: self.written < self.total)
    @rule(pages=st.integers(1, 9))
    def append_pages(self, pages):
        rows = slice(self.written * self.block, min(self.written + pages, self.total) * self.block)
        self.version += 1
        new = self.truth[:, :, rows]
        new.copy_(torch.arange(new.numel()).view(new.shape) + 1e5 * self.version)
        self.s.pool[:, :, rows] = new.to(self.device)
        self.written = rows.stop // self.block

    @precondition(lambda self: self.written)
    @rule(seed=st.integers(0, 1 << 20), share=st.floats(0.1, 1), empty=st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    def select(self, seed, share, empty):
        """Any distinct blocks in any order, empty places anywhere between. Drawn from a seed: lists that hypothesis
        draws itself are too short to replace anything."""
        r = random.Random(seed)
        width = max(1, round(share * self.places))
        wanted = {}
        for at in self.lead:
            some = r.sample(range(self.written), min(width, self.written))
            some = [-1 if r.random() < empty else x for x in some] + [-1] * (width - len(some))
            wanted[at] = r.sample(some, width)
        self.call(wanted, width)

    @precondition(lambda self: self.now % 5 == 4)
    @rule(calls=st.sampled_from([1, 1000, 65530, 70000]))
    def stay_idle(self, calls):
        """As many calls that ask for nothing, in one go."""
        self.now += calls
        self.s.age.add_(calls).clamp_(max=(1 << 16) - 1)

    @precondition(lambda self: self.now % 9 == 8)  # rare, or nothing ever fills up
    @rule()
    def reset(self):
        """Another prompt: the same pages of the pool will hold other tokens."""
        self.s.reset()
        self.forget()

    def call(self, wanted, width):
        self.now += 1
        lead = self.s.pool.shape[:2]
        blocks = torch.tensor([wanted[at] for at in self.lead], dtype=torch.int32).view(*lead, width)
        s = self.s
        out = self.fetch(blocks.to(self.device), s.pool, s.hot, s.table, s.resident, s.age, s.arrivals, s.stats).cpu()
        for b, h in self.lead:
            assert out[b, h].tolist() == self.heads[b, h].fetch(wanted[b, h], self.now)

    # ---- what must hold whatever happened

    @invariant()
    def tables_agree(self):
        table, resident = self.s.table.cpu(), self.s.resident.cpu()
        for at, head in self.heads.items():
            assert resident[at].tolist() == [-1 if x is None else x for x in head.blocks]
            where = {x: p for p, x in enumerate(head.blocks) if x is not None}
            assert table[at].tolist() == [where.get(x, -1) for x in range(self.total)]
        assert not self.s.arrivals.any()

    @invariant()
    def nothing_is_lost_or_stale(self):
        hot, pool, pages = self.s.hot.cpu(), self.s.pool.cpu(), self.truth.unflatten(2, (self.total, self.block))
        for (b, h), head in self.heads.items():
            for place, x in enumerate(head.blocks):
                assert x is None or torch.equal(hot[b, h, place], pages[b, h, x])
        rows = self.written * self.block
        assert torch.equal(pool[:, :, :rows], self.truth[:, :, :rows]), "the pool is read only"

    @invariant()
    def hits_and_misses_are_counted(self):
        stats = self.s.stats.cpu()
        for at, head in self.heads.items():
            counted = dict(zip(STATS, stats[at].tolist()))
            assert (counted["selected"], counted["missed"]) == (head.asked, head.missed)
            assert counted["steps"] == counted["context"] == counted["near"] == 0, "another op's counters"


def drive(fetch, device, **options):
    machine = type("Driven", (HotBuffer,), {"fetch": staticmethod(fetch), "device": torch.device(device)})
    run_state_machine_as_test(machine, settings=settings(deadline=None, **options))


def test_reference():
    drive(ENTRY.reference, "cpu", max_examples=40, stateful_step_count=30)


def test_kernel():
    """On a GPU as it runs there; elsewhere in the interpreter, where a call takes tens of milliseconds."""
    if DEVICE.type == "cuda":
        return drive(ENTRY.cuda, DEVICE, max_examples=60, stateful_step_count=30)
    drive(ENTRY.cuda, DEVICE, max_examples=10, stateful_step_count=12)


# ---------------------------------------------------------------- larger buffers: several warps, several programs


def half_full(n: int, places: int, block: int, ages: tuple[int, int], filled: float, g) -> list[torch.Tensor]:
    """The state of two heads, in the order of the arguments."""
    total, lead, i32 = places + n, (1, 2), torch.int32
    pool = torch.randn(*lead, total * block, 2, DIM, generator=g)
    table, resident = (torch.full((*lead, size), -1, dtype=i32) for size in (total, places))
    for h in range(2):
        some = torch.randperm(total, generator=g)[:places]
        resident[0, h] = torch.where(torch.rand(places, generator=g) < filled, some, -1)
        there = resident[0, h] >= 0
        table[0, h, some[there]] = there.nonzero().flatten().to(i32)
    hot = pool.unflatten(2, (total, block))[:, torch.arange(2)[:, None], resident[0].clamp(min=0).long()]
    age = torch.randint(ages[0], ages[1] + 1, resident.shape, generator=g, dtype=i32)
    return [pool, hot.contiguous(), table, resident, age, torch.zeros(lead, dtype=i32), torch.zeros(*lead, 5).long()]


def asked(table: torch.Tensor, n: int, r: random.Random) -> torch.Tensor:
    """`n` blocks of each head, or fewer: all there, a few new, all new or anything; -1 behind or between them."""
    out = torch.full((*table.shape[:2], n), -1, dtype=torch.int32)
    for h in range(2):
        there, new = (x.nonzero().flatten().tolist() for x in (table[0, h] >= 0, table[0, h] < 0))
        ids = r.sample(new, min(r.choice([0, 0, 3, n // 2, n]), len(new))) + r.sample(there, len(there))
        ids = (ids + [-1] * n)[: r.choice([n, n, n // 2, 0])]
        ids += [-1] * (n - len(ids))
        out[0, h] = torch.tensor(r.sample(ids, n) if r.random() < 0.5 else ids)
    return out


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.gpu)])
@given(
    shape=st.sampled_from([(33, 33, 4), (64, 128, 16), (130, 700, 2), (704, 704, 1), (1100, 2100, 1)]),
    ages=st.sampled_from([(0, 0), (0, 5), (0, 254), (0, 255), (0, 256), (250, 3000), (0, 65_535), (65_530, 65_535)]),
    filled=st.sampled_from([0.0, 0.7, 1.0, 1.0]), gated=st.booleans(), seed=st.integers(0, 999),
)  # fmt: skip
def test_calls_in_a_row(native, shape, ages, filled, gated, seed):
    """Of csrc/fetch.cu or of Triton's kernels: after each call all that there is equals the reference's."""
    (n, places, block), r, g = shape, random.Random(seed), torch.Generator().manual_seed(seed)
    state = half_full(n, places, block, ages, filled, g)
    there = [t.to(DEVICE, copy=True) for t in state]
    chosen = torch.randint(-1, places, (1, 2, n), generator=g, dtype=torch.int32)
    kept = chosen.to(DEVICE, copy=True)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(FETCH, *(("_by_triton", None) if native else ("_native", lambda *_: None)))
        for _ in range(4):
            blocks = asked(state[2], n, r)
            if gated:
                wanted = torch.tensor([[r.choice([0, 1]) for _ in range(2)]], dtype=torch.int32)
                ENTRIES["refetch"].reference(wanted, blocks, *state, chosen)
                ENTRIES["refetch"].cuda(wanted.to(DEVICE), blocks.to(DEVICE), *there, kept)
            else:
                chosen, kept = ENTRY.reference(blocks, *state), ENTRY.cuda(blocks.to(DEVICE), *there)
            for got, want in zip((kept, *there), (chosen, *state), strict=True):
                assert torch.equal(got.cpu(), want)


# ---------------------------------------------------------------- the machine itself can fail


def broken(change):
    """The reference, followed by `change(arguments, result)`."""

    def fetch(*args):
        out = ENTRY.reference(*args)
        change(args, out)
        return out

    return fetch


def fails(change) -> bool:
    try:
        drive(broken(change), "cpu", max_examples=40, stateful_step_count=30, derandomize=True, phases=[Phase.generate])
    except AssertionError:
        return True
    return False


def test_a_stale_page_is_noticed():
    def lag(args, out):
        args[2][..., -1, :] = 0  # the last row of keys or values of every place

    assert fails(lag)


def test_forgetting_the_age_is_noticed():
    """Replacing whatever place comes first is not replacing the least recently used."""
    assert fails(lambda args, out: args[5].zero_())


def test_ages_that_never_grow_are_noticed():
    assert fails(lambda args, out: args[5].clamp_(max=1))


def test_a_table_entry_left_behind_is_noticed():
    def leave(args, out):
        args[3].masked_fill_(args[3] < 0, 0)

    assert fails(leave)


def test_a_miss_not_counted_is_noticed():
    assert fails(lambda args, out: args[7][..., 4].zero_())
