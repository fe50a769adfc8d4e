"""The demo asks questions with one right answer each, and prints what the model answered."""
import re
import subprocess

import numpy as np
import pytest
import torch
from cli import cli, refused

from torchsparsekv_benchmarks.quality.options import METHODS
from torchsparsekv_benchmarks.recall_model.passkeys import passkeys
from torchsparsekv_benchmarks.recall_model.vocabulary import ASK, END, VALUES, names
from torchsparsekv_benchmarks.report.load import load

TOKENS, QUESTIONS, ASKED = 1024, 4, 2  # the last in the run of the whole demo
SMALL = ("--tokens", str(TOKENS), "--questions", str(ASKED))


@pytest.mark.parametrize("tokens", [1024, 4096, 32768])
def test_every_key_occurs_once_and_the_passkey_is_unique(tokens):
    p = passkeys(tokens, QUESTIONS)
    text = np.array(p.prompt)
    assert len(text) == tokens
    starts = np.flatnonzero(text == END) - 6
    found = np.stack([text[starts], text[starts + 1]], 1)
    assert len(np.unique(found, axis=0)) == len(found) == p.crowd + 1
    for key, value, at in zip(p.keys, p.values, p.starts):
        assert text[at : at + 7].tolist() == [*key, *value, END]
    assert (found == p.keys[0]).sum() == 2, "its words are in no other key, at their place"
    others = found[(found != p.keys[0]).any(1)]
    shared = [((others == key).sum(1) == 1).any() for key in p.keys[1:]]
    assert all(shared), "of the others, each has some that share a word with it"


def test_model_answers_every_question():
    p = passkeys(TOKENS, QUESTIONS)
    write, told = p.processor("cpu"), list(p.prompt)
    liked = torch.zeros(1, 1024)
    liked[0, VALUES.start + 3] = 1
    for _ in range(p.new_tokens):
        told.append(int(write(torch.tensor([told]), liked.clone()).argmax()))
    output = told[TOKENS:]
    want = [[ASK, *key.tolist(), *4 * [VALUES.start + 3], END] for key in p.keys]
    assert output == np.array(want).ravel().tolist()
    assert (p.told(output) == VALUES.start + 3).all()
    assert p.right(output) == QUESTIONS * [False]
    answered = np.array(want)
    answered[:, 3:7] = p.values
    assert p.score(answered.ravel().tolist()) == 1
    answered[1, 5] = VALUES.start + (answered[1, 5] == VALUES.start)
    assert p.right(answered.ravel().tolist()) == [True, False, True, True]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """(what it printed, its folder), without matplotlib, in a folder with the answers of an older run."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "answers.jsonl").write_text('{"benchmark": "eval", "of": "before"}\n')
    done = cli("demo", *SMALL, "-o", str(folder / "page.html"), before="import sys; sys.modules['matplotlib'] = None; ")
    return done, folder


def row(done: subprocess.CompletedProcess, method: str) -> list[str]:
    (line,) = [x for x in done.stdout.splitlines() if re.match(rf"{method} +\w+ \w+ \w+ \w+ ", x)]
    return line.split()


def test_dense_and_pariskv_answer_right_and_streaming_wrong(shown):
    done, _ = shown
    assert done.returncode == 0, done.stderr
    p = passkeys(TOKENS, ASKED)
    passkey = [names()[i] for i in p.values[0]]
    for method in ("dense", "pariskv"):
        assert row(done, method)[1:7] == [*passkey, "right", f"{ASKED - 1}/{ASKED - 1}"]
    assert row(done, "streaming")[5:7] == ["wrong", f"0/{ASKED - 1}"]
    assert "streaming" in done.stdout.split("Not the passkey: ")[1].splitlines()[0]
    assert " ".join(passkey) in done.stdout.split("method")[0], "the text around it is shown"


def test_output_names_attended_tokens_and_memory(shown):
    done, _ = shown
    _, *dense = map(float, row(done, "dense")[7:])
    for method in METHODS:
        attended, context, device, host = map(float, row(done, method)[7:])
        if method == "retroinfer":  # up to 1024 tokens wait for their clusters: all of this text
            assert attended == context
            continue
        # clusterkv attends to up to 320 tokens that wait for their clusters, too.
        assert attended < context / (2 if method == "clusterkv" else 4)
        assert context == pytest.approx(dense[0], abs=1)
        assert device < dense[1]
        layers = 1 if method == "omnikv" else 4  # of six; of omnikv, three more are dense
        pool = dense[1] * layers / 6 * (1.25 if method == "icecache" else 1)  # which has a region for generated tokens
        assert host == pytest.approx(pool, rel=0.01, abs=0.1), f"{method}: the pool of the layers that are not dense"


def test_missing_matplotlib_is_reported_and_answers_stay(shown):
    done, folder = shown
    assert "No page: the report needs matplotlib: pip install 'torchsparsekv[report]'" in done.stdout
    assert [p.name for p in folder.iterdir()] == ["answers.jsonl"]
    (result,) = load([folder / "answers.jsonl"])
    assert {r["method"] for r in result.rows} == {"dense", *METHODS}
    assert len(result.rows) == (1 + len(METHODS)) * ASKED
    assert result.commands[0].startswith("torchsparsekv demo --tokens 1024")
    p = passkeys(TOKENS, ASKED)
    for r in result.rows:
        assert r["score"] == (r["output"] == p.values[r["index"]].tolist())
        assert (r["mass"] is None) == (r["index"] > 0 or r["method"] == "dense")


def test_page_shows_the_answers(shown, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from torchsparsekv.commands.demo import draw

    draw(shown[1] / "answers.jsonl", tmp_path / "page.html")
    assert capsys.readouterr().out.startswith(f"The page: {tmp_path / 'page.html'}, with 2 figures beside it")
    text = (tmp_path / "page.html").read_text()
    for said in ("Accuracy against budget", "Where needles are found", "Attention weight kept", "2 samples per task"):
        assert said in text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--budget", "33"], "demo: arkvale: budget must be a multiple of block_size 32, got 33"),
        (["--out", "page.pdf"], "demo: the report is an HTML page: its name must end in .html, got page.pdf"),
        (["--out", f"{__file__}/page.html"], "demo: "),
    ],
)
def test_wrong_options_are_refused_before_the_run(args, says):
    said = refused("demo", *args)
    assert says in said
    assert "A text of" not in said
