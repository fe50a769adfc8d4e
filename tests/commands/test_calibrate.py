"""`torchsparsekv calibrate` finds the threshold that retrieves least within a stated loss."""
import json

import pytest
import torch
from cli import answered, refused
from models import tiny
from world import DEVICE

import torchsparsekv
from torchsparsekv.method import make_method

pytest.importorskip("typer")

from torchsparsekv.commands import calibrate as module

calibrate = module.calibrate

HYPER = dict(budget=16, sink=4, window=4, skip_layers=1, cluster_size=4, stretch=64, segment_min=2, segment_max=4)
SHORT = (
    "calibrate: prompt and steps have 80 tokens, and a step attends to all of up to 384 tokens, "
    "whatever tau is: take more tokens, or a smaller budget"
)
TAUS = (0.9, 0.3, 0.0, -0.5)


@pytest.fixture(scope="module")
def texts():
    return torch.randint(3, 97, (2, 100), generator=torch.Generator().manual_seed(3)).to(DEVICE)


@pytest.mark.parametrize("loss", [1e-3, 10.0])
def test_least_retrieval_within_the_loss_is_chosen(texts, loss):
    found = calibrate(tiny(), texts, 60, loss, TAUS, **HYPER)
    rows = found["rows"]
    assert [r["tau"] for r in rows] == [1.0, *TAUS]
    rates = [r["retrieval_rate"] for r in rows]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1
    assert rates[-1] < 0.5
    assert rows[0]["loss"] == 0
    fit = [r for r in rows if r["loss"] <= loss]
    assert found["retrieval_rate"] == min(r["retrieval_rate"] for r in fit)
    assert found["loss"] <= loss
    if loss == 10.0:
        assert found["retrieval_rate"] == rates[-1], "everything is allowed"


def test_a_threshold_that_costs_too_much_is_not_chosen(texts, monkeypatch):
    costs = iter([2.0, 2.004, 2.03, 2.009, 2.5])
    real = module.surprise
    monkeypatch.setattr(module, "surprise", lambda *args: 0 * real(*args) + next(costs))
    assert module.calibrate(tiny(), texts, 60, 0.01, TAUS, **HYPER)["tau"] == 0.0


def test_patch_takes_the_written_file(texts, tmp_path):
    found = calibrate(tiny(), texts, 60, 10.0, TAUS, **HYPER)
    path = tmp_path / "tau.json"
    path.write_text(json.dumps(found))
    assert make_method("louiskv", tau=str(path)).tau == found["tau"]
    assert make_method("louiskv", tau=path).tau == found["tau"]


def test_command_writes_a_threshold_found_on_a_text(tmp_path):
    """On a model and tokenizer of its own, from text to file."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"?": 0, **{f"w{i}": i for i in range(1, 97)}}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "model")
    tiny(max_position_embeddings=512).save_pretrained(tmp_path / "model")
    text, out = tmp_path / "text", tmp_path / "tau.json"
    text.write_text(" ".join(f"w{i * i % 96 + 1}" for i in range(500)))
    args = ["calibrate", str(tmp_path / "model"), str(text), "--texts", "1", "--loss", "10", "--taus", "0.5"]
    assert SHORT in refused(*args, "--prompt", "60", "--steps", "20", "--budget", "64").splitlines()
    for taus, says in (("a,b", "taus takes float values with commas between them, got 'a,b'"), (",", "got none"),
                       ("0.9,-1", "tau must be in (-1, 1], or a file of `calibrate`, got -1.0")):  # fmt: skip
        said = refused(*args[:-1], taus, "--prompt", "60", "--steps", "20")
        assert says in said
        assert "thresholds on" not in said, "it had begun"
    assert f"{tmp_path} is a folder: name a file for the result" in refused(*args, "--out", str(tmp_path))
    (tmp_path / "bytes").write_bytes(b"\xfa\x00")
    assert f"{tmp_path / 'bytes'} is not a text in UTF-8" in refused("calibrate", args[1], str(tmp_path / "bytes"))
    nowhere = tmp_path / "no"
    assert f"there is no folder {nowhere} for tau.json" in refused(*args, "--out", str(nowhere / "tau.json"))
    assert "tokens, 1 texts of 2060 need 2060" in refused(*args, "--prompt", "60", "--steps", "2000")
    tiny(max_position_embeddings=512).save_pretrained(tmp_path / "mute")
    said = refused("calibrate", str(tmp_path / "mute"), str(text))
    assert len(said.splitlines()) == 1, said
    assert f"{tmp_path / 'mute'} has no tokenizer for text: put the tokenizer of the model beside it" in said
    told = answered(*args, "--prompt", "380", "--steps", "20", "--budget", "64", "--out", str(out))
    saved = json.loads(out.read_text())
    assert "retrieval rate" in told
    assert f"tau = {saved['tau']}" in told
    model = tiny()
    torchsparsekv.patch(model, "louiskv", tau=str(out), budget=64, max_length=128).unpatch()
