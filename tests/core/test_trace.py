"""torchsparsekv.trace: the ops of a real step, in order, with the tensors that they change."""
from pathlib import Path

import pytest

from torchsparsekv import trace
from torchsparsekv.api import methods

PAGE = Path(__file__).resolve().parents[2] / "docs/concepts/decode-step.md"
LIFE = PAGE.with_name("life-of-a-key.md")


@pytest.mark.parametrize("name", ["pariskv", "icecache", "quest", "louiskv", "snapkv", "streaming", "full"])
def test_a_step_appends_first_and_attends_last(name):
    calls, state = trace.trace(name)
    own = [c for c in calls if c.layer == 1]
    ops = [c.op for c in own if c.op != "advance"]
    assert ops[0] == "append"
    assert ops[-1] == ("dense_attention" if name == "full" else "sparse_attention")
    assert [c.op for c in calls if c.layer == 0] == ["advance", "append", "dense_attention"]
    assert int(state.lengths.ring_begin) > trace.PROMPT, "a generated token left the ring"
    (append,) = (c for c in own if c.op == "append")
    assert {"store.ring", "store.pool"} <= append.changed


def test_a_tensor_is_marked_as_changed_only_if_it_changed():
    calls, _ = trace.trace("icecache")
    (inserted,) = (c for c in calls if c.op == "insert_page")
    declared = {name for name, _ in inserted.written}
    assert "leaves.fill" in inserted.changed
    assert "hot.used" in declared - inserted.changed, "no node's open page was in the hot buffer"
    assert not any(c.changed for c in calls if c.op == "visit_nodes")


def test_the_text_names_every_op_with_shapes():
    calls, _ = trace.trace("quest")
    said = trace.text("quest")
    assert [line.strip() for line in said.splitlines() if line[:3].strip() and line.startswith("  ")] == [
        c.op for c in calls
    ]
    assert "reads   token.k, token.v [1 2 1 16], lengths" in said
    assert max(map(len, said.splitlines())) <= trace.WIDTH


def test_the_marks_are_those_of_the_state():
    _, state = trace.trace("quest")
    lines = trace.marks("quest").splitlines()
    held = {line[: trace.LABEL].strip(): line[trace.LABEL :] for line in lines if line.endswith(("#", "."))}
    begin, length = int(state.lengths.ring_begin), int(state.lengths.length)
    assert held["in the pool"].count("#") == begin
    assert held["in the ring"] == "####" + "." * (begin - 4) + "#" * (length - begin)
    assert set(held["read by the step"][begin:]) == {"#"}
    assert f"ring_begin {begin}".ljust(trace.LABEL) + " " * begin + "^" in lines
    with pytest.raises(ValueError, match="'full' has no hot buffer"):
        trace.marks("full")


@pytest.mark.parametrize("page", [PAGE, LIFE], ids=lambda p: p.name)
def test_the_page_is_current(page):
    """`python -m torchsparsekv.trace --write PAGE` renews it."""
    said = page.read_text()
    assert trace.MARKED.search(said)
    assert trace.renewed(said) == said


def test_write_renews_what_stands_between_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- trace: streaming -->\n```\nold\n```\n<!-- end -->\nafter\n")
    trace.main(["--write", str(page)])
    said = page.read_text()
    assert said.startswith("before\n<!-- trace: streaming -->\n```\nstreaming: one decode step")
    assert said.endswith("```\n<!-- end -->\nafter\n")
    assert "old" not in said
    page.write_text("<!-- sparse: quest -->\n```\n```\n<!-- end -->\n")
    trace.main(["--write", str(page)])
    assert "layer 1: quest" in page.read_text()
    assert "layer 0" not in page.read_text()
    page.write_text("no marker\n")
    markers = " or ".join(f"`<!-- {kind}: NAME -->`" for kind in ("trace", "sparse", "marks"))
    with pytest.raises(SystemExit, match=f"has no marker {markers}$"):
        trace.main(["--write", str(page)])


def test_an_unknown_method_is_refused():
    assert "quests" not in methods()
    with pytest.raises(ValueError, match="unknown method 'quests'"):
        trace.trace("quests")
