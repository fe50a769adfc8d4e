"""What is measured of static sets: on the queries and keys that a model has, kept weights as brute force finds them."""
import argparse
import json
import sys

import pytest
import torch
from models import tiny
from test_cli import ROOT
from world import DEVICE

from torchsparsekv.method import make_method
from torchsparsekv_benchmarks.quality import heads as model_heads
from torchsparsekv_benchmarks.quality import static_codes, static_mass
from torchsparsekv_benchmarks.quality.heads import Heads, heads_of, written
from torchsparsekv_benchmarks.recall_model import journal

PROMPT, STEPS, SINK, WINDOW = 90, 12, 8, 6


def some(tokens: int = 120, seed: int = 0) -> Heads:
    g = torch.Generator().manual_seed(seed)
    draw = lambda heads: torch.randn(2, heads, tokens, 16, generator=g)  # noqa: E731
    return Heads(3 * draw(4), draw(2), 0.25, (0, 1))


def test_queries_and_keys_are_those_that_a_model_attends_with():
    """Their weights give the attention that the model itself reports."""
    model = tiny().eval()
    ids = torch.randint(0, model.config.vocab_size, (40,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    before = model.config._attn_implementation
    heads = heads_of(model, ids, [0, 1])
    assert model.config._attn_implementation == before
    model.set_attn_implementation("eager")
    with torch.no_grad():
        told = model(ids[None], output_attentions=True).attentions
    for layer in (0, 1):
        torch.testing.assert_close(heads.weights(30)[layer], told[layer][0, :, 30, :31].cpu(), atol=1e-5, rtol=1e-4)


def test_a_journal_as_it_is_written_answers_its_own_questions():
    ids = written(512, 3).tolist()
    start = len(journal.journal(512, 3).prompt)
    page = journal.journal(512 - start, 3)
    assert min(ids) >= 0
    assert page.score(ids[start:]) == 1.0
    assert written(512, 3).tolist() == ids != written(512, 4).tolist()


@pytest.mark.parametrize("kernel", [1, 5])
def test_the_weight_that_snapkv_keeps_by_brute_force(kernel):
    """Of the prompt what it chose and its observation window, not what else is in the window."""
    heads, observe = some(), 4
    method = make_method("snapkv", budget=10, sink=SINK, window=observe + STEPS, observe=observe, kernel_size=kernel)
    row, want = static_mass.measured(method, heads, PROMPT, STEPS, 1), []
    end = PROMPT - observe
    for layer, head in ((layer, head) for layer in range(2) for head in range(2)):
        mine, votes = slice(2 * head, 2 * head + 2), torch.zeros(end)
        for at in range(end, PROMPT):
            z = heads.queries[layer, mine, at] @ heads.keys[layer, head, : at + 1].T * heads.scale
            votes += z.softmax(-1)[:, :end].sum(0)
        padded = torch.nn.functional.pad(votes, (kernel // 2, kernel // 2))
        best = padded.unfold(0, kernel, 1).sum(1)[SINK:].argsort(descending=True)[:10] + SINK
        for at in range(PROMPT, PROMPT + STEPS):
            kept = [*range(SINK), *best.tolist(), *range(end, at + 1)]
            want += heads.weights(at)[layer, mine][:, kept].sum(1).tolist()
    assert row["mass"] == pytest.approx(sum(want) / len(want), abs=1e-4)


def test_the_table_of_snapkv_is_that_of_its_file():
    said = (ROOT / "docs/methods/snapkv.md").read_text()
    rows = json.loads((ROOT / "benchmarks/results/quality/snapkv/mass_recall.json").read_text())["rows"]
    for budget in (512, 1024, 2048):
        mass = {r["setting"]: r["mass"] for r in rows if r["budget"] == budget}
        columns = ("quest", "prkv_static", "snapkv", "snapkv maxpool", "oracle")
        assert f"| {budget} | {' | '.join(f'{100 * mass[c]:.1f}' for c in columns)} |" in said


@pytest.mark.parametrize("name", ["oracle", "prkv_static"])
def test_the_weight_kept_by_brute_force(name):
    heads = some()
    method = make_method(name, budget=10, sink=SINK, window=WINDOW)
    row = static_mass.measured(method, heads, PROMPT, STEPS, 1)
    want = []
    for layer in range(2):
        for head in range(4):
            for at in range(PROMPT, PROMPT + STEPS):
                weight = torch.stack([(heads.queries[layer, g, at] @ heads.keys[layer, head // 2, : at + 1].T * 0.25)
                                      .softmax(-1) for g in range(4)])  # fmt: skip
                first = PROMPT if name == "prkv_static" else at
                end = first + 1 - WINDOW
                mine = slice(head // 2 * 2, head // 2 * 2 + 2)
                score = weight[mine].mean(0)
                if name == "prkv_static":
                    seen = [(heads.queries[layer, mine, t] @ heads.keys[layer, head // 2, :end].T * 0.25).softmax(-1)
                            for t in range(first + 1 - WINDOW, first + 1)]  # fmt: skip
                    score = torch.stack(seen).mean((0, 1))
                best = (score[SINK:end].argsort(descending=True)[:10] + SINK).tolist()
                kept = {*range(SINK), *best, *range(at + 1 - WINDOW, at + 1)}
                want.append(float(weight[head][sorted(kept)].sum()))
    assert row["mass"] == pytest.approx(sum(want) / len(want), abs=1e-4)


def test_moved_rows_are_counted_as_they_are():
    """Against the positions in the pool, looked at after every step."""
    heads = some(200)
    method = make_method("prkv", budget=24, block_size=4, sink=SINK, window=WINDOW, static_ratio=0.5, update_every=10)
    row = static_mass.measured(method, heads, 100, 60, 7)
    fed = static_mass.Fed(method, heads)
    fed.take(100)
    fed.take(1)
    moved, before = [], fed.positions()
    for _ in range(59):
        fed.take(1)
        joined, end = (int(t[0]) for t in fed.state.lengths[2:4])
        before[:, :, joined:end] = torch.arange(joined, end)  # a token may move as soon as it has left the ring
        now = fed.positions()
        new = (fed.state.static.updated != 0) & (fed.state.static.updates > 1)
        moved += (now != before)[:, :, :end].sum(-1)[new].tolist()
        before = now
    assert row["moved"] == pytest.approx(sum(moved) / len(moved), abs=0.1)
    assert row["most_moved"] == max(moved) <= 3 * 12
    assert row["shares"] == [0.5, 0.5]


def test_the_papers_order_and_the_one_from_the_texts_own():
    """Both have the set in front; tokens that have left it are side by side in the first, and at home in the other."""
    heads, hyper = some(200), dict(budget=24, block_size=4, sink=SINK, window=WINDOW, static_ratio=0.5, update_every=10)
    found = {}
    for cls in (static_mass.Literal, static_mass.Anew):
        fed = static_mass.Fed(cls(**hyper), heads)
        fed.take(100)
        fed.take(1)
        first = fed.positions()[0, 0, SINK : SINK + 12].tolist()
        for _ in range(10):
            fed.take(1)
        end = int(fed.state.lengths.ring_begin[0])
        now = fed.positions()[0, 0, SINK:end].tolist()
        assert sorted(now) == list(range(SINK, end))
        found[cls] = first, now[:12], now[12:]
    (first, front, rest), (_, other, behind) = found[static_mass.Literal], found[static_mass.Anew]
    gone = [x for x in first if x not in front]
    assert gone
    assert sorted(front) == sorted(other)
    assert rest[: len(gone)] == gone
    assert rest[len(gone) :] == sorted(rest[len(gone) :])
    assert behind == sorted(behind)


def test_codes_are_held_against_the_exact_set():
    heads, o = some(), argparse.Namespace(sink=SINK, window=WINDOW)
    row = static_codes.compared(heads, 100, o, 20)
    assert 0.8 < row["least_overlap"] <= row["overlap"] <= 1
    assert 0.98 < row["least_held"] <= row["held"] <= 1
    with pytest.raises(ValueError, match="have no 200 behind 8 sinks"):
        static_codes.compared(heads, 100, o, 200)
    with pytest.raises(ValueError, match="queries and keys of 120 tokens, 121 were asked for"):
        static_mass.Fed(make_method("oracle", sink=SINK, window=WINDOW), heads).take(121)


def test_the_commands_write_what_they_measure(monkeypatch, tmp_path):
    monkeypatch.setattr(model_heads, "read", lambda o: some())
    near = ["--sink", "8", "--window", "6", "--out", str(tmp_path / "x.json")]
    words = ["--parts", "90:12", "--budgets", "16", "--block-size", "4", "--literal", "0.5", *near]
    monkeypatch.setattr(sys, "argv", [static_mass.__file__, *words])
    static_mass.main()
    result = json.loads((tmp_path / "x.json").read_text())
    labels = [r["setting"] for r in result["rows"]]
    assert labels == [*(f"prkv {s}" for s in static_mass.SHARES), "prkv 0.5 literal", "quest", "prkv_static", "oracle"]
    assert result["command"].startswith("python benchmarks/quality/static_mass.py --parts 90:12")
    assert all(0 < r["mass"] <= 1 and r["layers"] == [0, 1] for r in result["rows"])
    monkeypatch.setattr(sys, "argv", [static_codes.__file__, "--at", "100", "--sizes", "16", *near])
    static_codes.main()
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert (row["at"], row["size"], row["heads"]) == (100, 16, 4)
