"""Over many calls the hot buffer equals a model in plain Python."""
import random
from collections import deque

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
from kernels import clones, on
from world import DEVICE

from torchsparsekv.ops._machinery.chain import tensors, use_kernels
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.store.rows import STATS
from torchsparsekv.ops.store.views import HotBuffer, Selection, Stats
from torchsparsekv.state import Geometry, LayerState, RingPlan, RowLengths, hot_buffer, store_buffers

ENTRIES = load_all()
FETCH = ENTRIES["fetch"]
DIM = 16
I32 = torch.int32
KINDS = ["triton", pytest.param("cuda", marks=pytest.mark.gpu)]


class Head:
    """The buffer of one (row, kv head) as a circular list: slots in the order in which the hand will reach them."""

    def __init__(self, slots: int, width: int):
        self.blocks: list[int | None] = [None] * slots
        self.again = [False] * slots  # selected again since the hand passed
        self.order = deque(range(slots))
        self.selected = self.missed = 0
        self.chosen = [-1] * width

    def fetch(self, ids: list[int]) -> None:
        asked = [x for x in ids if x >= 0]
        missing = [x for x in asked if x not in self.blocks]
        busy = {i for i, x in enumerate(self.blocks) if x in asked and x is not None}
        hits = set(busy)
        for block in missing:
            while self.order[0] in busy or self.again[self.order[0]]:
                if self.order[0] not in busy:
                    self.again[self.order[0]] = False
                self.order.rotate(-1)
            slot = self.order[0]
            self.blocks[slot] = block
            busy.add(slot)
            self.order.rotate(-1)
        for slot in hits:
            self.again[slot] = True
        self.selected, self.missed = self.selected + len(asked), self.missed + len(missing)
        self.chosen = [self.blocks.index(x) if x >= 0 else -1 for x in ids]

    def forget(self, block: int) -> None:
        if block in self.blocks:
            slot = self.blocks.index(block)
            self.blocks[slot], self.again[slot] = None, False

    def keep(self) -> None:
        self.selected += sum(slot >= 0 for slot in self.chosen)


class HotBufferMachine(RuleBasedStateMachine):
    fetch, device = None, None  # what is driven, and where

    @initialize(
        batch=st.integers(1, 2), heads=st.integers(1, 2), slots=st.integers(1, 9), block=st.sampled_from([1, 2, 4]),
        total=st.integers(1, 24).map(lambda n: n + 4), share=st.floats(0, 1),
    )  # fmt: skip
    def build(self, batch, heads, slots, block, total, share):
        self.slots, self.block, self.total, self.calls, self.version = slots, block, total, 0, 0
        self.width = max(1, round(share * slots))
        self.g = Geometry(batch, heads, DIM, total * block, torch.float32)
        self.s = self.state()
        self.lead = [(b, h) for b in range(batch) for h in range(heads)]
        self.s.store.pool.fill_(torch.nan)  # what was never written must not be seen
        self.s.hot.rows.fill_(torch.nan)
        self.begin()

    def state(self) -> LayerState:
        g, plan = self.g, RingPlan(0, 1, self.block)
        buffers = store_buffers(g, plan) | {"hot": hot_buffer(g, self.block, self.slots, self.width)}
        return LayerState(buffers, RowLengths(plan, g.batch, g.rows, self.device), self.device, pool_on_host=False)

    def begin(self):
        self.heads = {at: Head(self.slots, self.width) for at in self.lead}
        self.written = 0
        self.truth = torch.full_like(self.s.store.pool, torch.nan, device="cpu")

    def pages(self):
        return self.truth.unflatten(2, (self.total, self.block))

    def new(self, shape):
        """Numbers that were nowhere before."""
        self.version += 1
        return torch.arange(torch.Size(shape).numel()).view(shape) + 1e5 * self.version

    def store(self, rows):
        self.s.store.pool[:, :, rows] = self.truth[:, :, rows].to(self.device)

    def ids(self, of):
        lead = self.s.store.pool.shape[:2]
        return torch.tensor([of[at] for at in self.lead], dtype=I32).view(*lead, -1).to(self.device)

    # ---- what can happen

    @precondition(lambda self: self.written < self.total)
    @rule(pages=st.integers(1, 9))
    def append_pages(self, pages):
        rows = slice(self.written * self.block, min(self.written + pages, self.total) * self.block)
        self.truth[:, :, rows] = self.new(self.truth[:, :, rows].shape)
        self.store(rows)
        self.written = rows.stop // self.block

    @precondition(lambda self: self.written)
    @rule(
        seed=st.integers(0, 1 << 20), share=st.floats(0.1, 1), empty=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
        gated=st.booleans(),
    )  # fmt: skip
    def choose(self, seed, share, empty, gated):
        """Any distinct blocks in any order, empty places anywhere between. Drawn from a seed: lists that hypothesis
        draws itself are too short to replace anything."""
        r = random.Random(seed)
        asked = {}
        for at in self.lead:
            some = r.sample(range(self.written), min(max(1, round(share * self.width)), self.written))
            some = [-1 if r.random() < empty else x for x in some] + [-1] * (self.width - len(some))
            asked[at] = r.sample(some, self.width)
        now = {at: int(not gated or r.random() < 0.5) for at in self.lead}
        self.calls += 1
        gate = self.ids(now).flatten(1) if gated else None
        self.fetch(Selection(self.ids(asked), gate), self.s.store.pool, self.s.hot, self.s.stats)
        for at, head in self.heads.items():
            if now[at]:
                head.fetch(asked[at])
            else:
                head.keep()

    @precondition(lambda self: self.calls % 5 == 4)
    @rule(block=st.integers(0, 30))
    def forget(self, block):
        """A block changes in the pool, and leaves its slot, as in ops/prkv/relocate.py. Nothing attends to it."""
        self.calls += 1
        hot, block = self.s.hot, block % self.total
        for at, head in self.heads.items():
            slot = int(hot.slot_of[at][block])
            if slot >= 0:
                hot.slot_of[at][block], hot.block_of[at][slot], hot.used[at][slot] = -1, -1, 0
            head.forget(block)
            hot.chosen[at], head.chosen = -1, [-1] * self.width

    @precondition(lambda self: self.calls % 7 == 6)
    @rule()
    def fork(self):
        """Go on with a copy."""
        self.calls += 1
        twin = self.state()
        twin.copy_from(self.s, None)
        twin.stats.counts.copy_(self.s.stats.counts)
        self.s.reset()
        self.s = twin

    @precondition(lambda self: self.calls % 9 == 8)  # rare, or nothing ever fills up
    @rule()
    def reset(self):
        """Another prompt: the same pages of the pool will hold other tokens."""
        self.calls += 1
        self.s.reset()
        self.begin()

    # ---- what must hold whatever happened

    @invariant()
    def tables_agree(self):
        hot = on("cpu", self.s.hot)
        for at, head in self.heads.items():
            assert hot.block_of[at].tolist() == [-1 if x is None else x for x in head.blocks]
            where = {x: i for i, x in enumerate(head.blocks) if x is not None}
            assert hot.slot_of[at].tolist() == [where.get(x, -1) for x in range(self.total)]
            assert hot.chosen[at].tolist() == head.chosen
            assert (int(hot.hand[at]), hot.used[at].tolist()) == (head.order[0], [int(x) for x in head.again])
        assert not hot.done_count.any()

    @invariant()
    def nothing_is_lost_or_stale(self):
        hot, pool, pages = on("cpu", self.s.hot), self.s.store.pool.cpu(), self.pages()
        for at, head in self.heads.items():
            for slot, x in enumerate(head.blocks):
                assert x is None or torch.equal(hot.rows[at][slot], pages[at][x]), "not what the pool has"
            read = hot.chosen[at][hot.chosen[at] >= 0].long()
            assert (hot.block_of[at][read] >= 0).all(), "attention reads a slot that is empty"
        rows = self.written * self.block
        assert torch.equal(pool[:, :, :rows], self.truth[:, :, :rows]), "the pool is read only"

    @invariant()
    def hits_and_misses_are_counted(self):
        counts = self.s.stats.counts.cpu()
        for at, head in self.heads.items():
            counted = dict(zip(STATS, counts[at].tolist()))
            assert (counted["selected"], counted["missed"]) == (head.selected, head.missed)
            assert counted["steps"] == counted["context"] == counted["in_ring"] == 0, "another op's counters"


def drive(fetch, device, **options):
    driven = {"fetch": staticmethod(fetch), "device": torch.device(device)}
    machine = type("Driven", (HotBufferMachine,), driven)
    run_state_machine_as_test(machine, settings=settings(deadline=None, **options))


def test_reference_equals_the_model():
    """With all checks."""
    with use_kernels("reference"):
        drive(FETCH.call, "cpu", max_examples=150, stateful_step_count=30)


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_equals_the_model(kind):
    """On a GPU as it runs there; elsewhere in the interpreter, where a call takes tens of milliseconds."""
    many = DEVICE.type == "cuda"
    steps, examples = (30, 60) if many else (14, 10)
    drive(lambda *x: FETCH.run(kind, *x), DEVICE, max_examples=examples, stateful_step_count=steps)


# ---------------------------------------------------------------- larger buffers: several warps, several programs


def half_full(
    n: int, slots: int, block: int, used: float, filled: float, g
) -> tuple[torch.Tensor, HotBuffer, Stats]:
    """The state of two heads."""
    total, lead = slots + n, (1, 2)
    pool = torch.randn(*lead, total * block, 2, DIM, generator=g)
    slot_of, block_of = (torch.full((*lead, size), -1, dtype=I32) for size in (total, slots))
    for h in range(2):
        some = torch.randperm(total, generator=g)[:slots]
        block_of[0, h] = torch.where(torch.rand(slots, generator=g) < filled, some, -1)
        there = block_of[0, h] >= 0
        slot_of[0, h, some[there]] = there.nonzero().flatten().to(I32)
    rows = pool.unflatten(2, (total, block))[:, torch.arange(2)[:, None], block_of[0].clamp(min=0).long()]
    again = (torch.rand(block_of.shape, generator=g) < used).to(I32)
    hand = torch.randint(0, slots, lead, generator=g, dtype=I32)
    chosen = torch.randint(-1, slots, (*lead, n), generator=g, dtype=I32)
    hot = HotBuffer(rows.contiguous(), slot_of, block_of, again, hand, torch.zeros(lead, dtype=I32), chosen)
    return pool, hot, Stats(torch.zeros(*lead, 5).long())


def asked(slot_of: torch.Tensor, n: int, r: random.Random) -> torch.Tensor:
    """`n` blocks of each head, or fewer: all there, a few new, all new or anything; -1 behind or between them."""
    out = torch.full((*slot_of.shape[:2], n), -1, dtype=I32)
    for h in range(2):
        there, new = (x.nonzero().flatten().tolist() for x in (slot_of[0, h] >= 0, slot_of[0, h] < 0))
        ids = r.sample(new, min(r.choice([0, 0, 3, n // 2, n]), len(new))) + r.sample(there, len(there))
        ids = (ids + [-1] * n)[: r.choice([n, n, n // 2, 0])]
        ids += [-1] * (n - len(ids))
        out[0, h] = torch.tensor(r.sample(ids, n) if r.random() < 0.5 else ids)
    return out


@pytest.mark.parametrize("kind", KINDS)
@given(
    shape=st.sampled_from([(33, 33, 4), (64, 128, 16), (130, 700, 2), (704, 704, 1), (1100, 2100, 1)]),
    used=st.sampled_from([0.0, 0.1, 0.6, 0.95, 0.995, 1.0]),
    filled=st.sampled_from([0.0, 0.7, 1.0, 1.0]), gated=st.booleans(), seed=st.integers(0, 999),
)  # fmt: skip
def test_kernel_equals_reference_over_many_calls(kind, shape, used, filled, gated, seed):
    """Of csrc/fetch.cu or of Triton's kernels: after each call all that there is equals the reference's."""
    _equals_reference(kind, shape, used, filled, gated, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("used", [0.6, 1.0])
def test_cuda_kernel_equals_reference_with_half_a_million_slots(used):
    """As many as a head has at 512K tokens if all of them fit. Their bits take 61 of the 80 KiB of a plan."""
    _equals_reference("cuda", (256, 500_000, 1), used, 1.0, False, 3)


def _equals_reference(kind, shape, used, filled, gated, seed):
    (n, slots, block), r, g = shape, random.Random(seed), torch.Generator().manual_seed(seed)
    state = half_full(n, slots, block, used, filled, g)
    there = on(DEVICE, clones(state))
    for _ in range(4):
        ids = asked(state[1].slot_of, n, r)
        now = torch.tensor([[r.choice([0, 1]) for _ in range(2)]], dtype=I32) if gated else None
        FETCH.reference(Selection(ids, now), *state)
        FETCH.run(kind, *on(DEVICE, (Selection(ids, now),)), *there)
        for got, want in zip(tensors(there), tensors(state), strict=True):
            assert torch.equal(got.cpu(), want)


# ---------------------------------------------------------------- the machine itself can fail


def why_it_fails(*, fetched=lambda hot, stats: None) -> str:
    """The failure that the machine finds where `fetched` follows the reference of fetch."""

    def fetch(selection, pool, hot, stats):
        FETCH.reference(selection, pool, hot, stats)
        fetched(hot, stats)

    options = dict(derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    try:
        drive(fetch, "cpu", max_examples=150, stateful_step_count=30, **options)
    except AssertionError as e:
        return str(e)
    return ""


def test_correct_fetch_passes_the_check():
    assert why_it_fails() == ""


def test_stale_page_fails_the_check():
    """The last row of keys or values of every slot."""
    assert "not what the pool has" in why_it_fails(fetched=lambda hot, stats: hot.rows[..., -1, :].zero_())


def test_forgotten_second_chance_fails_the_check():
    """Replacing whatever slot comes next is not sparing those in use."""
    assert why_it_fails(fetched=lambda hot, stats: hot.used.zero_())


def test_slot_that_is_spared_for_ever_fails_the_check():
    assert why_it_fails(fetched=lambda hot, stats: hot.used.fill_(1))


def test_hand_that_stays_fails_the_check():
    assert why_it_fails(fetched=lambda hot, stats: hot.hand.zero_())


def test_leftover_table_entry_fails_the_check():
    assert why_it_fails(fetched=lambda hot, stats: hot.slot_of.masked_fill_(hot.slot_of < 0, 0))


def test_uncounted_miss_fails_the_check():
    assert why_it_fails(fetched=lambda hot, stats: stats.counts[..., 4].zero_())
