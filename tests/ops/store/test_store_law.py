"""How a token lies in memory is said in one file per language, and these say the same."""
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchsparsekv.ops._machinery.triton import tl, triton
from torchsparsekv.ops.store import rows

ROOT = Path(__file__).resolve().parents[3]
LAW = {"ops/store/rows.py", "csrc/store.cuh"}
# What only the law may spell: the width of a row, K or V in it, the wrap of the ring, columns of the counters.
SPELLINGS = {
    "the width of a row": r"\b2 \* (?:D|d|head_dim)\b|\b4(?:ll)? \* D\b|\b(?:D|d|head_dim) \* 2\b",
    "keys and values in a row": r"\[\.\.\., [01], :\]|\[:, :, :, [01]\]",
    "the wrap of the ring": r"% (?:turn|span)\b|% \(ring_rows",
    "packed rows": r"\b(?:torch|tl)\.int8\b|\(signed char\)|\b(?:D|d|head_dim|CHANNELS) \+ (?:63|127)\b",
    "columns of the counters": r"\bcounts? \+ \d|\bstats\[|counts\[\.\.\., \d|bh \* 5\b",
}
# Of find_boundary: a cut is an entry of `cuts`, not a row; the reference of close_segments counts entries too.
ENTRIES = {"ops/clusters/find_boundary.py", "ops/clusters/close_segments.py", "ops/clusters/_segments.py"}
SOURCES = sorted(p for f in ("ops", "csrc") for p in (ROOT / f).rglob("*") if p.suffix in (".py", ".cu", ".cuh"))


def spelled(text: str, skip: set[str] = frozenset()) -> set[str]:
    return {what for what, pattern in SPELLINGS.items() if what not in skip and re.search(pattern, text)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nobody_else_spells_it(path):
    name = str(path.relative_to(ROOT))
    skip = {"the wrap of the ring"} if name in ENTRIES else set()
    assert name in LAW or not spelled(path.read_text(), skip)


def test_the_patterns_find_what_they_are_for():
    """As it stood in the op files before there was a law."""
    assert spelled("pool + (bh * pool_rows + pos[:, None]) * 2 * D + c[None, :]") == {"the width of a row"}
    assert spelled("rows + at * (4ll * D) + 2 * D + (g + 8 * i) * 16") == {"the width of a row"}
    assert spelled("at = sink + tl.maximum(pos - sink, 0) % turn") == {"the wrap of the ring"}
    assert spelled("keys = rows[..., 0, :]") == {"keys and values in a row"}
    assert spelled("atomicAdd(counts + 3, held)") == {"columns of the counters"}
    assert spelled("scale = tl.load(row.to(tl.int8) + g)") == {"packed rows"}
    assert spelled("(signed char)(word >> 8 * i)") == spelled("(CHANNELS + 63) / 64") == {"packed rows"}
    for name in LAW:
        assert spelled((ROOT / name).read_text()) >= {"the wrap of the ring", "packed rows"}
    assert "the width of a row" in spelled((ROOT / "ops/store/rows.py").read_text())


def test_the_store_is_below_the_indices():
    """It imports none of the ops that are built on it."""
    for path in (ROOT / "ops/store").glob("*.py"):
        above = re.findall(r"torchsparsekv\.ops\.(index|select|gather|attend)", path.read_text())
        assert not above, path


@triton.jit
def _ring(position, row, back, sink, span, begin, N: tl.constexpr):
    i = tl.arange(0, N)
    pos = tl.load(position + i)
    at = rows.ring_row_of(pos, sink, span)
    tl.store(row + i, at)
    tl.store(back + i, rows.ring_position_of(at, begin, sink, span))


@given(sink=st.integers(0, 9), span=st.integers(1, 20), age=st.integers(0, 50))
def test_torch_and_triton_agree_where_a_token_is(sink, span, age):
    """Of all tokens that a ring holds: where they are, and from there which they are."""
    from world import DEVICE

    begin = sink + age
    held = torch.cat([torch.arange(sink), torch.arange(begin, begin + span)]).to(torch.int32)
    wide = 1 << (len(held) - 1).bit_length()
    position = torch.nn.functional.pad(held, (0, wide - len(held)), value=begin).to(DEVICE)
    row, back = torch.empty_like(position), torch.empty_like(position)
    _ring[(1,)](position, row, back, sink, span, begin, N=wide)
    want = rows.ring_row(held, sink, sink + span)
    assert torch.equal(row.cpu()[: len(held)], want.to(torch.int32))
    assert torch.equal(back.cpu()[: len(held)], held)
    end = torch.tensor([begin + span])
    where = rows.ring_positions(sink + span, end, torch.tensor([begin]), sink)[0]
    assert torch.equal(where[want.long()].to(torch.int32), held)


def test_counters_by_name():
    counts = torch.zeros(2, 3, len(rows.STATS), dtype=torch.int64)
    rows.count(counts[1], steps=1, in_ring=7)
    assert counts[0].sum() == 0
    assert counts[1, 2].tolist() == [1, 0, 7, 0, 0]
    assert rows.counted(counts, "in_ring")[1].tolist() == [7, 7, 7]
    header = (ROOT / "csrc/store.cuh").read_text()
    assert f"enum {{ {', '.join(name.upper() for name in rows.STATS)}, ALL_OF_THEM }};" in header
