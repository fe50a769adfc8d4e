"""What `turns.py` and `ablate_pariskv.py` measure on a language model, and the figure of the first."""
import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from test_eval_text import folder  # noqa: F401
from test_methods import Layer

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.ops.pariskv.encode_keys import encode
from torchsparsekv.ops.store.rows import keys_of
from torchsparsekv_benchmarks.quality import ablate_pariskv, recall_pariskv, teacher, text_options, turn_mass, turns
from torchsparsekv_benchmarks.quality._recall import Stream
from torchsparsekv_benchmarks.quality.pretrained import pretrained
from torchsparsekv_benchmarks.report.load import load

STEPS, LENGTH = 16, 160
SMALL = f"--length {LENGTH} --steps {STEPS} --budget 32 --own-prompt 40 --own 24 --own-budget 32 --samples 2"
SMALL += " --device cpu"  # on which its figures are held against others


@pytest.fixture(scope="module")
def said(folder):  # noqa: F811
    """Its texts are what the tiny model's folder has."""
    with pytest.MonkeyPatch.context() as m:
        m.setitem(text_options.real_model.TEXTS, "moby-dick", str(folder / "said.txt"))
        yield


def run(module, words: str) -> dict:
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sys, "argv", [module.__file__, *shlex.split(words)])
        module.main()
    return json.loads(Path(shlex.split(words)[-1]).read_text())


@pytest.fixture(scope="module")
def measured(folder, said, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("turns") / "turns.json"
    words = f'--model {folder} {SMALL} --rules "last step" "every so many steps" --out {out}'
    return run(turns, words), words, out


def test_a_rule_retrieves_as_it_says_and_costs_what_a_run_of_its_own_costs(measured, folder, monkeypatch):  # noqa: F811
    result, words, out = measured
    rows = {(r["text"], r["rule"], r["tau"] or r["stride"]): r for r in result["rows"]}
    assert len(rows) == 2 * 11
    for kind in ("prompt", "own"):
        assert rows[kind, "last step", 1.0]["retrieval_rate"] == 1
        assert [rows[kind, "every so many steps", n]["retrieval_rate"] for n in (2, 4, 8)] == [1 / 2, 1 / 4, 1 / 8]
    tokenizer, model = pretrained(str(folder), torch.device("cpu"), torch.float32)
    ids = turns.texts.read(turns.Options(lengths=(LENGTH,), steps=1, samples=2), tokenizer)[0].rows(LENGTH, range(2))
    dense = teacher.dense_logits(model, ids, STEPS)
    with torchsparsekv.patch(model, "louiskv", max_length=LENGTH, budget=32, sink=32, window=64, tau=1.0) as handle:
        forced = teacher.decoded(model, ids, dense, handle.make_cache(2))
    assert rows["prompt", "last step", 1.0]["kl"] == pytest.approx(float(forced.kl.mean()), rel=1e-5)
    assert forced.kl.mean() > 1e-6, "something is left out"
    # A run that was stopped goes on: what it has is not measured again.
    out.write_text(json.dumps({**result, "rows": result["rows"][:3] + result["rows"][4:]}))
    done = []
    monkeypatch.setattr(turns, "show", done.append)
    run(turns, words)
    assert [(r["rule"], r["tau"]) for r in done] == [("last step", 0.8)]


def row(rule: str, tau: float, rate: float, agrees: float) -> dict:
    told = {"text": "prompt", "rule": rule, "tau": tau, "stride": None}
    return {**told, "retrieval_rate": rate, "agrees": agrees}


def test_the_figure_says_whether_any_rule_does_what_the_method_is_for(measured):
    pytest.importorskip("matplotlib")
    from torchsparsekv_benchmarks.report import style
    from torchsparsekv_benchmarks.report import turns as figure

    with style.styled() as plt:
        drawn = figure.turns(plt, load([measured[2]]))
    assert [d.tag for d in drawn] == ["retrieved from a prompt", "retrieved from its own text"]
    assert "Budget: 32 tokens retrieved per kv head and step, beside 32 sink and 64 latest tokens" in drawn[0].caption
    rows = [r for r in measured[0]["rows"] if r["text"] == "prompt" and r["rule"] == "last step"]
    line = drawn[0].figure.axes[0].lines[0]
    assert sorted(zip(*line.get_data())) == sorted((r["retrieval_rate"], r["kl"]) for r in rows)
    rows = [row("last step", 1.0, 1.0, 0.9), row("last step", 0.7, 0.1, 0.88), row("last step", 0.9, 0.7, 0.895)]
    assert "last step, tau 0.9, at 70% of the steps. So none does at 30% of the steps" in figure.verdict(rows)
    rows += [row("last retrieval", 0.6, 0.25, 0.892)]
    assert figure.verdict(rows).endswith("last retrieval, tau 0.6, at 25% of the steps.")


def test_an_unknown_rule_is_refused():
    with pytest.raises(SystemExit, match="unknown rule never; there are: last step, every so many steps, last retr"):
        turns.chosen(["never"])


def test_the_choice_and_the_turns_of_one_forward_are_those_of_the_method():
    """On queries and keys of a layer, held against louiskv itself, step by step."""
    g = torch.Generator().manual_seed(0)
    k, q = torch.randn(1, 2, 120, 16, generator=g), torch.randn(1, 4, 120, 16, generator=g)
    q += 2 * torch.randn(1, 4, 1, 16, generator=g)
    near = dict(sink=turn_mass.SINK, window=20)
    for told in ({}, {"memory": 1.0}, {"per_head": True}, {"memory": 0.8}):
        method = make_method("louiskv", budget=32, cluster_size=8, tau=0.8, segment_max=8, **near, **told)
        layer = Layer(method, heads=2, group=2, device=torch.device("cpu"))
        layer.feed(q[:, :, :100], k[:, :, :100], k[:, :, :100])
        now, chosen, begin = [], [], int(layer.state.lengths.ring_begin)
        for t in range(100, 110):
            layer.feed(q[:, :, t : t + 1], k[:, :, t : t + 1], k[:, :, t : t + 1])
            now.append(layer.state.trigger.retrieve_now[0].bool())
            hot = layer.state.hot
            rows = hot.block_of[0].gather(1, hot.chosen[0].clamp(min=0).long())
            at = keys_of(layer.state.store.pool)[0].gather(1, rows.long()[..., None].expand(-1, -1, 16))
            chosen.append(torch.cdist(at, k[0]).argmin(-1))  # a pool holds clusters side by side
        steps = q[0, :, 100:110].transpose(0, 1).unflatten(1, (2, 2))
        want = turn_mass.turns(steps, turns.Rule("", 0.8, told))
        assert torch.equal(torch.stack(now), want)
        assert 0 < want[1:].float().mean() < 1
        mine = turn_mass.chosen_tokens(k[0], steps, (turn_mass.SINK, begin), 32, 8, False)
        for t, h in want.nonzero().tolist():
            assert set(mine[t, h].nonzero()[:, 0].tolist()) == set(chosen[t][h].tolist())


def test_what_is_kept_is_the_weight_on_what_was_chosen_last():
    weights = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.4, 0.2, 0.3], [0.1, 0.1, 0.6, 0.2]])[:, None, None]
    near = torch.tensor([[1, 0, 0, 0]] * 3).bool()
    chosen = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).bool()
    now = torch.tensor([[True], [False], [True]])
    assert turn_mass.kept(weights, near, chosen[:, None], now) == pytest.approx((0.7 + 0.5 + 0.3) / 3)


def test_every_rule_and_other_clusters_of_one_forward(folder, said, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setattr(turn_mass, "DENSE", 1)
    words = f"--model {folder} --length 300 --steps 16 --budget 96 --samples 1 --out {tmp_path / 'mass.json'}"
    rows = {(r["rule"], r["tau"] or r["stride"]): r for r in run(turn_mass, words)["rows"]}
    assert len(rows) == len(turns.RULES) + len(turn_mass.MORE) + len(turn_mass.OTHERS)
    assert rows["last step", 1.0]["mass"] == rows["clusters of 16 by distance", None]["mass"]
    assert [rows["every so many steps", n]["retrieval_rate"] for n in (2, 4, 8)] == [1 / 2, 1 / 4, 1 / 8]
    assert all(0 < r["mass"] < 1 for r in rows.values())


def test_what_the_ideas_of_pariskv_give(folder, said, monkeypatch, tmp_path):  # noqa: F811
    words = f"--model {folder} --length 512 --prefill 300 --queries 2 --k 20 --out {tmp_path / 'ablate.json'}"
    monkeypatch.setattr(ablate_pariskv, "DENSE", 1)
    monkeypatch.setattr(ablate_pariskv, "TABLE", ((32, 64), (32, 16)))
    every = run(ablate_pariskv, words)["rows"]
    rows = {r["method"]: r for r in every if "coarse" in r}
    far, close = (r for r in every if "near" in r)
    assert 32 <= close["near"] < 48, "from the window to an interval more"
    assert close["near"] < far["near"] < 96
    assert close["mass"] <= far["mass"] + 0.02
    assert list(rows) == list(ablate_pariskv.VARIANTS)
    assert all(0 < r["coarse"] <= r["exact"] <= 1 for r in rows.values())
    assert [n for n, r in rows.items() if r["estimate"]] == ["N+R+T (ParisKV)"]


def test_the_fixed_directions_name_keys_as_pariskv_does():
    stream = Stream(300, 300, heads=2, group=2, d=64)
    fixed = recall_pariskv.Prompted(stream, 256, rounds=0, normalise=True, rotate=True)
    assert torch.equal(fixed.names.transpose(1, 2), encode(stream.keys, 8, 0)[0].long())
