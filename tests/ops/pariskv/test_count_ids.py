"""Counts of ids stay right while requests come, go, share blocks, change places and take blocks of others."""
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from world import DEVICE

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.engine.tables import lengths_of
from torchsparsekv.ops.pariskv.views import Codes, Counted
from torchsparsekv.ops.store.views import BlockTable

HEADS, DIM, M, PAGE, BLOCKS, ROWS, PLACES, SINK = 2, 16, 8, 4, 24, 3, 8, 2
SPACES = DIM // M
OPS = load_all()
COUNT = importlib.import_module("torchsparsekv.ops.pariskv.count_ids")


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


class Engine:
    """Requests of which only the blocks and the length are known; their keys are random."""

    def __init__(self, kind: str, seed: int):
        self.run = {name: OPS[name].run for name in ("encode_tokens", "count_ids")}
        self.kind, self.g = kind, torch.Generator().manual_seed(seed)
        rows, of = BLOCKS * PAGE, (ROWS, HEADS, SPACES)
        u8 = torch.uint8
        self.codes = Codes(
            zeros(1, HEADS, rows, SPACES, dtype=u8), zeros(1, HEADS, rows, DIM // 2, dtype=u8),
            zeros(1, HEADS, rows, SPACES, dtype=torch.float16), zeros(1, HEADS, SPACES, 1 << M),
        )  # fmt: skip
        self.counted = Counted(zeros(*of, 1 << M), zeros(*of), zeros(*of), zeros(*of), zeros(1, BLOCKS))
        self.free = torch.randperm(BLOCKS, generator=self.g).tolist()
        self.requests: list[tuple[list[int], int]] = []
        self.table = torch.zeros(ROWS, PLACES, dtype=torch.int32)  # behind its blocks a row keeps those of others

    def grow(self, request: int, tokens: int) -> None:
        ids, length = self.requests[request]
        tokens = min(tokens, PLACES * PAGE - length)
        while len(ids) * PAGE < length + tokens:
            ids.append(self.free.pop(0))
        to = [ids[p // PAGE] * PAGE + p % PAGE for p in range(length, length + tokens)] + [-1]
        k = torch.randn(len(to), HEADS, DIM, generator=self.g).to(DEVICE)
        self.run["encode_tokens"](
            self.kind, k, torch.tensor(to, device=DEVICE), self.codes, self.counted.uses, M, 0
        )
        self.requests[request] = ids, length + tokens

    def begin(self, shared: int) -> None:
        """`shared`: blocks in common with the first request."""
        if len(self.requests) < ROWS:
            full = self.requests[0][1] // PAGE if self.requests else 0
            ids = self.requests[0][0][: min(shared, full)] if full else []
            self.requests.append((list(ids), len(ids) * PAGE))

    def end(self, request: int) -> None:
        """Its blocks are given out next, first the last ones; the last request takes its row."""
        ids, _ = self.requests[request]
        self.requests[request] = self.requests[-1]
        self.requests.pop()
        held = {x for others, _ in self.requests for x in others}
        self.free = [x for x in ids if x not in held] + self.free

    def check(self) -> None:
        table = self.table
        for row, (ids, _) in zip(table, self.requests):
            row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        n = torch.tensor([n for _, n in self.requests] + [0] * (ROWS - len(self.requests)), dtype=torch.int32)
        lengths = lengths_of(n.to(DEVICE), SINK, 3, 2)
        self.run["count_ids"](self.kind, self.codes.ids, lengths, BlockTable(table.to(DEVICE), PAGE), self.counted)
        ids = self.codes.ids.cpu()
        for b, end in enumerate(lengths.ring_begin.tolist()):
            rows = [int(table[b, p // PAGE]) * PAGE + p % PAGE for p in range(SINK, end)]
            for h in range(HEADS):
                for s in range(SPACES):
                    want = ids[0, h, rows, s].long().bincount(minlength=1 << M)
                    assert torch.equal(self.counted.counts[b, h, s].cpu().long(), want), (b, h, s)


KINDS = pytest.mark.parametrize("kind", ["reference", "triton"])


@KINDS
@given(data=st.data(), seed=st.integers(0, 99))
def test_counts_stay_right_while_requests_come_and_go(kind, data, seed):
    e = Engine(kind, seed)
    for _ in range(12):
        what = data.draw(st.sampled_from(["begin", "end", "grow", "grow", "step"]))
        if what == "begin" or not e.requests:
            e.begin(data.draw(st.integers(0, 4)))
            e.grow(len(e.requests) - 1, data.draw(st.integers(1, 20)))
        elif what == "end":
            e.end(data.draw(st.integers(0, len(e.requests) - 1)))
        else:
            e.grow(data.draw(st.integers(0, len(e.requests) - 1)), 1 if what == "step" else 7)
        e.check()


@KINDS
def test_a_block_given_to_another_request_is_counted_anew(kind):
    """It has the same number, the same place and the same row, but other keys."""
    e = Engine(kind, 1)
    for _ in range(2):
        e.begin(0)
        e.grow(0, 20)
        e.check()
        e.end(0)


@KINDS
def test_a_row_given_to_another_request_is_counted_anew(kind):
    e = Engine(kind, 2)
    for row, tokens in enumerate((20, 20, 12)):
        e.begin(0)
        e.grow(row, tokens)
    for swapped in ((1, 0, 2), (2, 1, 0), (0, 2, 1)):
        e.check()
        e.requests = [e.requests[i] for i in swapped]
    e.check()


@KINDS
def test_a_shorter_request_with_the_same_blocks_is_counted_anew(kind):
    """The second request has the first blocks of the first one, and in its row more of them are left from that one."""
    e = Engine(kind, 3)
    e.begin(0)
    e.grow(0, 24)
    e.check()
    e.begin(3)
    e.requests = e.requests[::-1]
    e.check()


def test_keys_of_several_chunks_are_all_counted(monkeypatch):
    monkeypatch.setattr(COUNT, "CHUNK", 4)
    e = Engine("triton", 4)
    e.begin(0)
    for tokens in (23, 1, 8):
        e.grow(0, tokens)
        e.check()


def test_only_new_keys_are_counted():
    """Counts that were changed by hand stay changed, so nothing was counted again."""
    e = Engine("triton", 0)
    e.begin(0)
    e.grow(0, 20)
    e.check()
    e.counted.counts.add_(5)
    before = e.counted.counts.clone()
    e.grow(0, 1)
    with pytest.raises(AssertionError):
        e.check()
    assert int((e.counted.counts - before)[0].sum()) <= 2 * HEADS * SPACES


def test_blocks_and_rows_have_to_fit():
    e = Engine("reference", 0)
    lengths, table = lengths_of(zeros(ROWS + 1), SINK, 3, 2), BlockTable(zeros(ROWS + 1, PLACES), PAGE)
    with pytest.raises(ValueError, match="4 rows are more than the 3 requests whose counts are kept"):
        torch.ops.torchsparsekv.count_ids(e.codes.ids, *lengths, *table, *e.counted)
    lengths, table = lengths_of(zeros(ROWS), SINK, 3, 2), BlockTable(zeros(ROWS, PLACES), PAGE)
    with pytest.raises(ValueError, match="96 rows of the pool are not 23 blocks of 4 tokens"):
        torch.ops.torchsparsekv.count_ids(e.codes.ids, *lengths, *table, *e.counted[:4], e.counted.uses[:, 1:].clone())
    k, to = torch.randn(1, HEADS, DIM, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="96 rows of the pool are not 23 blocks of one size"):
        torch.ops.torchsparsekv.encode_tokens(k, to, *e.codes, e.counted.uses[:, 1:].clone(), M, 0)
