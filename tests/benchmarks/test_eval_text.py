"""Teacher-forced evaluation on text: its numbers against computations of another kind, what it writes and refuses."""
import csv
import json
import math
from pathlib import Path

import pytest
import torch
from byte_tokenizer import bytes_tokenizer
from chain import VOCABULARY, chain_model, chain_prompts
from cli import refused
from evaluating_text import LENGTH, SAID, SINK, STEPS, WINDOW, options
from evaluating_text import folder as of_a_tiny_model
from models import tiny
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as kinds
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from torchsparsekv.method import all_methods
from torchsparsekv_benchmarks.quality import pretrained, real_model, teacher, text, text_summary, texts
from torchsparsekv_benchmarks.quality.options import METHODS
from torchsparsekv_benchmarks.quality.store import read
from torchsparsekv_benchmarks.quality.text_options import Options

folder = of_a_tiny_model  # the fixture
def rows_of(path: Path) -> list[dict]:
    return [r for r in read(path)[0] if "task" in r]


@pytest.fixture(scope="module")
def ran(folder, tmp_path_factory):
    """(the table by method, the rows, the file)."""
    path = tmp_path_factory.mktemp("out") / "text.jsonl"
    table = text.run(options(folder), path)
    return {r["method"]: r for r in table}, rows_of(path), path


# ---------------------------------------------------------------- its numbers


def samples(folder: Path) -> torch.Tensor:
    """The stretches as they follow from the text itself: one byte a token, <bos> before each, the last a target."""
    letters = bytes_tokenizer().get_vocab()
    ids = [letters["\u0120" if c == " " else c] for c in SAID]
    return torch.tensor([[0, *ids[i * LENGTH : (i + 1) * LENGTH]] for i in range(3)])


def logits(folder: Path, *, near: int | None = None) -> torch.Tensor:
    """What the model says in one forward; with `near` the scored tokens see only the sinks and so many latest ones."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    at = torch.arange(LENGTH)
    seen = at[:, None] >= at
    if near is not None:
        away = (at[:, None] - at >= near) & (at >= SINK)
        seen &= ~(away & (at[:, None] >= LENGTH - STEPS))
    with torch.no_grad():
        mask = seen.expand(3, 1, -1, -1)
        return model(samples(folder)[:, :-1], attention_mask=mask).logits[:, -STEPS:].double()


def test_perplexity_is_that_of_a_forward_over_the_whole_text(folder, ran):
    said, ids = logits(folder), samples(folder)
    nats = torch.nn.functional.cross_entropy(said.flatten(0, 1), ids[:, -STEPS:].flatten())
    assert ran[0]["dense"]["perplexity"] == pytest.approx(float(nats.exp()), rel=1e-5)
    assert ran[0]["dense"]["perplexity"] > 20, "weights are random"


def test_full_is_the_dense_model(ran):
    row = ran[0]["full"]
    assert 0 <= row["kl"] < 1e-8
    assert row["agrees"] == 1
    assert row["loss"] == pytest.approx(0, abs=1e-5)
    assert row["mass"] == pytest.approx(1)
    assert row["density"] == 1


def test_kl_of_streaming_is_that_of_a_masked_forward(folder, ran):
    """Streaming with blocks of one token is a mask: with it the dense model says the same, position by position."""
    dense, masked = logits(folder), logits(folder, near=WINDOW + 16)  # its window has the budget too
    p, q = dense.softmax(-1), masked.softmax(-1)
    want = (p * (p.log() - q.log())).sum(-1)
    assert want.mean() > 0.01
    found = [r for r in ran[1] if r["method"] == "streaming"]
    assert [r["index"] for r in found] == [0, 1, 2]
    told = torch.tensor([r["kl"] for r in found], dtype=torch.float64)
    torch.testing.assert_close(told, want, rtol=1e-3, atol=1e-6)
    row = ran[0]["streaming"]
    assert row["kl"] == pytest.approx(float(want.mean()), rel=1e-3)
    highest = want.flatten().sort().values[math.ceil(0.95 * 3 * STEPS) - 1]
    assert row["kl_p95"] == pytest.approx(float(highest), rel=1e-3)
    agrees = (dense.argmax(-1) == masked.argmax(-1)).double().mean()
    assert row["agrees"] == pytest.approx(float(agrees))
    target = samples(folder)[:, -STEPS:].flatten()
    nats = [torch.nn.functional.cross_entropy(x.flatten(0, 1), target) for x in (masked, dense)]
    assert row["loss"] == pytest.approx(float(nats[0] - nats[1]), abs=1e-4)


def test_kl_is_not_turned_around():
    """Of two tokens with 0.9 and 0.1 against 0.5 and 0.5."""
    p, q = (torch.tensor([[x, 1 - x]]).log() for x in (0.9, 0.5))
    kl, nats, agrees = teacher.against(p, q, torch.tensor([1]))
    assert float(kl) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-5)
    assert float(nats) == pytest.approx(math.log(2))
    assert float(agrees) == 1
    assert float(teacher.against(p, p.flip(-1), torch.tensor([0]))[2]) == 0


def test_a_batch_measures_as_its_samples_do_alone(folder, ran, tmp_path):
    path = tmp_path / "alone.jsonl"
    text.run(options(folder, batch=1), path)
    at = lambda rows: {(r["method"], r["index"]): r for r in rows}  # noqa: E731
    alone, batched = at(rows_of(path)), at(ran[1])
    assert alone.keys() == batched.keys()
    for cell, row in alone.items():
        assert row["nats"] == pytest.approx(batched[cell]["nats"], abs=1e-5)
        if row["mass"]:
            assert row["mass"]["mean"] == pytest.approx(batched[cell]["mass"]["mean"], abs=1e-5), "of its own row"
    quest = [r for (m, _), r in alone.items() if m == "quest"]
    assert len({r["mass"]["mean"] for r in quest}) == 3


# ---------------------------------------------------------------- it tells methods apart


def words_tokenizer() -> PreTrainedTokenizerFast:
    t = Tokenizer(kinds.WordLevel({**{f"t{i}": i for i in range(VOCABULARY)}, "<unk>": VOCABULARY}, unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=t, unk_token="<unk>")


def test_where_every_word_has_to_be_retrieved_streaming_is_worse_than_the_oracle(tmp_path):
    length, names = 200, 7
    chain_model(256).save_pretrained(tmp_path)
    words_tokenizer().save_pretrained(tmp_path)
    prompts, _, answers = chain_prompts(4 * [length + 1 - names], names)
    said = torch.cat([prompts, answers], 1)
    (tmp_path / "chains.txt").write_text(" ".join(f"t{i}" for i in said.flatten().tolist()))
    o = options(
        tmp_path, texts=(str(tmp_path / "chains.txt"),), lengths=(length,), steps=names - 1, samples=4, probe=4,
        skip_layers=1, methods=("oracle", "quest", "streaming", "random"),
        hyper=("quest.block_size=4", "random.block_size=4", "streaming.block_size=1"),
    )  # fmt: skip
    table = {r["method"]: r for r in text.run(o, tmp_path / "out.jsonl")}
    oracle, quest = table["oracle"], table["quest"]
    for name in ("streaming", "random"):
        row = table[name]
        assert row["kl_low"] > 20 * max(oracle["kl_high"], quest["kl_high"])
        assert row["loss_low"] > 0
        assert row["agrees"] < 0.8 < oracle["agrees"] == quest["agrees"] == 1
        assert row["mass"] < 0.6 < oracle["mass"]
    assert oracle["perplexity"] == pytest.approx(table["dense"]["perplexity"], rel=0.01)
    assert oracle["density"] < 0.4


# ---------------------------------------------------------------- what it writes


def test_rows_and_table_are_written(ran):
    table, rows, path = ran
    head = json.loads(path.read_text().splitlines()[0])
    assert head["benchmark"] == "eval-text"
    assert head["model"]["steps"] == STEPS
    assert list(head["model"]["texts"]) == ["said"]
    assert len(rows) == 4 * 3
    assert all(len(r["kl"]) == STEPS for r in rows if r["method"] != "dense")
    with path.with_suffix(".csv").open() as f:
        told = {r["method"]: r for r in csv.DictReader(f)}
    assert list(told) == ["dense", "full", "streaming", "quest"]
    assert float(told["quest"]["kl"]) == pytest.approx(table["quest"]["kl"])
    assert 0 < float(told["quest"]["hit_rate"]) < 1
    assert float(told["quest"]["bytes_per_token"]) > 0 == float(told["streaming"]["bytes_per_token"])
    assert text_summary.shown(table["dense"])["KL"] == "-"


def test_a_run_goes_on_where_it_stopped(folder, ran, tmp_path, monkeypatch):
    path = tmp_path / "text.jsonl"
    lines = ran[2].read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8]) + lines[8][:50])  # killed while it wrote the last of the first chunk's
    calls = []
    steps = teacher.steps_through
    monkeypatch.setattr(teacher, "steps_through", lambda *a, **how: calls.append(len(a[1])) or steps(*a, **how))
    again = {r["method"]: r for r in text.run(options(folder), path)}
    assert calls == [2, 1, 1, 1], "quest of the first two samples, and the third of all three"
    for method, row in ran[0].items():
        assert {**again[method], "seconds": 0} == pytest.approx({**row, "seconds": 0})
    text.run(options(folder), path)
    assert len(calls) == 4
    text.run(options(folder, samples=4, probe=4, batch=1), path)
    assert calls[4:] == [1, 1, 1], "the fourth"
    text.run(options(folder, window=24, samples=1, methods=("quest",)), path)
    assert len(calls) == 8, "another window is another setting"


@pytest.mark.parametrize("given", [dict(steps=STEPS - 1), dict(texts=("other.txt",))])
def test_other_steps_or_texts_are_not_mixed_in(folder, ran, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other.txt").write_text(SAID[::-1])
    before = ran[2].read_text()
    with pytest.raises(ValueError, match=r"was made with .* choose another file"):
        text.run(options(folder, **given), ran[2])
    assert ran[2].read_text() == before


def test_only_the_scored_positions_are_kept_of_the_dense_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    kept = teacher.dense_logits(model, samples(folder), STEPS)
    assert kept.shape == (3, STEPS, model.config.vocab_size)
    assert kept.untyped_storage().nbytes() == kept.nbytes, "and no view of more"


def test_all_methods_by_default():
    assert set(Options().methods) == set(all_methods())
    assert set(METHODS) == set(all_methods()) - {"full"}


# ---------------------------------------------------------------- what it refuses

WRONG = {
    "a text too short": (dict(samples=99), "said has .* tokens, 99 samples of 96 and a target each need 9603: name a"),
    "beyond the positions": (dict(lengths=(513,), samples=1), "the positions of .*, got 513"),
    "no prompt": (dict(lengths=(13,)), "lengths must leave 2 tokens for the prompt beside 12 steps, got 13"),
    "no text": (dict(texts=("nowhere.txt",)), "there is no text nowhere.txt: name a file of text"),
    "one text twice": (dict(texts=("a/x.txt", "b/x.txt")), "texts are told apart by their file names"),
    "the recall model": (dict(model="recall"), "the recall model reads no texts: name a language model"),
    "no such method": (dict(methods=("qeust",)), "unknown method qeust; available"),
    "no such folder": (dict(model="./nowhere"), r"there is no model at \./nowhere"),
    "no such deep folder": (dict(model="no/where/else"), "there is no model at no/where/else"),
    "no such file": (dict(model="nowhere.gguf"), "there is no file nowhere.gguf"),
    "a budget of half a block": (dict(budgets=(18,)), "quest: budget must be a multiple of block_size 4, got 18"),
    "no such place": (dict(offload="moon"), "offload must be one of auto, host, device, got 'moon'"),
    "too many dense layers": (dict(skip_layers=3), "skip_layers must be from 0 to 2, got 3"),
}


@pytest.mark.parametrize("what", WRONG)
def test_it_refuses_before_weights_are_loaded(folder, tmp_path, monkeypatch, what):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    given, says = WRONG[what]
    with pytest.raises(ValueError, match=says) as told:
        text.run(options(folder, **given), tmp_path / "out.jsonl")
    assert "\n" not in str(told.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_without_a_tokenizer_is_refused(folder, tmp_path, family):
    """transformers refuses the first with many lines, and makes an empty tokenizer for the second."""
    tiny(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer for text: put the tokenizer of the model") as told:
        text.run(options(folder, model=str(tmp_path)), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    assert "\n" not in str(told.value)


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_text("")
    with pytest.raises(ValueError, match=r"without a config.json.*; name the file in it: .*x\.gguf"):
        pretrained.check_name(str(tmp_path))


def test_what_is_not_prepared_says_how_to(tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "FOLDER", tmp_path)
    assert "there is no text" in (said := refused("eval-text"))
    assert "run `make real-model`" in said
    (tmp_path / "moby-dick.txt").write_text("Call me")
    assert "smollm2 is not in" in (said := refused("eval-text", "--steps", "2", "--lengths", "8"))
    assert "run `make real-model`" in said


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / real_model.MODELS["smollm2"]).write_bytes(b"GGUF")
    (tmp_path / "moby-dick.txt").write_text("Call me")
    monkeypatch.setattr(real_model, "FOLDER", tmp_path)
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    said = refused("eval-text", "--steps", "2", "--lengths", "8")
    assert "smollm2 is a .gguf file, which needs a package: pip install gguf" in said


def test_a_text_that_is_none_is_refused(folder, tmp_path):
    (tmp_path / "image.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a text in UTF-8"):
        texts.read(options(folder, texts=(str(tmp_path / "image.txt"),)), bytes_tokenizer())
