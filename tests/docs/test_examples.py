"""Every example runs at a tiny size."""
import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import pytest
import torch
from byte_tokenizer import bytes_tokenizer
from evaluating_text import SAID
from models import tiny

from torchsparsekv.method import _METHODS
from torchsparsekv_benchmarks.recall_model import model as recall

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CALLS = {
    "chat.py": (
        ["--words", "300", "--new-tokens", "4"], ["tokens read in", "> w001 w002", "> w003 w004", "cache memory"],
    ),
    "conversation.py": (
        ["--words", "300"],
        ["0 tokens of 0 stay, 302 are new", "309 tokens of 309 stay", "the same answer again: True"],
    ),
    "batch_scoring.py": ([], ["'w001 w002 w003 w004 w005' -> 'w006 w007'", "'w008 w009' -> 'w010'", "nats a token"]),
    "own_loop.py": (
        ["--words", "257", "--chunk", "128", "--new-tokens", "6", "--compiled", "0"], ["pariskv", "cache memory"],
    ),
    "compare_methods.py": (
        ["--words", "200", "--new-tokens", "3", "--methods", "streaming,quest,oracle"],
        ["200 tokens, budget 64", "streaming", "quest", "oracle"],
    ),
    "adapter.py": (["--words", "200", "--new-tokens", "4"], ["with the adapter, unpatched", "without it, pariskv"]),
    "score_with_lm_eval.py": (
        ["--samples", "2", "--methods", "pariskv,streaming"],
        ["unpatched    1.000", "pariskv      1.000   density 0.2", "streaming    0.000   density 0.1"],
    ),
}  # fmt: skip
NEEDS = {"adapter.py": "peft", "score_with_lm_eval.py": "lm_eval"}  # packages of an extra
NOTEBOOK = EXAMPLES / "three_methods.ipynb"


def test_recipes_are_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path.name


def test_adapter_and_full_budget_give_the_answers_of_the_unpatched_model(run):
    pytest.importorskip("peft")
    said = run("adapter.py", "--words", "100", "--budget", "128", "--new-tokens", "6")
    unpatched, patched = (
        dict(re.findall(rf"^(with.*?), {who} +(.*)$", said, re.M)) for who in ("unpatched", "pariskv")
    )
    assert patched == unpatched
    assert len(set(unpatched.values())) == 2, "the adapter changes nothing"


def test_server_answers_as_generate_does_and_refuses_in_one_line():
    def post(body: bytes) -> dict:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as e:
            return {"code": e.code} | json.loads(e.read())

    with start("server.py", "--port", "0", "--requests", "3") as served, contextlib.ExitStack() as stack:
        stack.callback(served.kill)  # a failure must not wait for requests
        port = int(served.stdout.readline().split()[-1])
        text = " ".join(f"w{i % 480:03d}" for i in range(300))
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 5}
        said = [post(json.dumps(asked).encode()) for _ in range(2)]
        assert said[0] == said[1]
        assert said[0]["usage"] == {"prompt_tokens": 300, "completion_tokens": 5}
        assert post(b"{}") == {"code": 400, "error": {"message": "KeyError: 'messages'"}}
        rest, _ = served.communicate(timeout=60)
        assert served.returncode == 0
    assert "torchsparsekv: pariskv" in rest
    model, tokenizer = recall.load(dtype=torch.float32)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    out = model.generate(ids, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids))
    want = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert said[0]["choices"][0]["message"] == {"role": "assistant", "content": want}


def test_every_example_is_run():
    there = {p.name for p in EXAMPLES.glob("*.py")} - {"common.py"}
    assert {*CALLS, "server.py", "ask_server.py"} == there


def called(name: str, *args: str) -> dict:
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return dict(args=[sys.executable, str(EXAMPLES / name), *args], text=True, env=environment)


def start(name: str, *args: str) -> subprocess.Popen:
    return subprocess.Popen(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **called(name, *args))


@pytest.fixture
def run(monkeypatch, capsys):
    """An example in this process, which has imported all of it; what it printed."""

    def run(name: str, *args: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.syspath_prepend(str(EXAMPLES))
    return run


def test_named_method_is_compared(run):
    said = run("compare_methods.py", "--words", "200", "--new-tokens", "3", "--method", "quest")
    assert [line.split()[0] for line in said.splitlines()[2:]] == ["quest"]


def test_a_method_of_an_own_file_is_compared(run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from torchsparsekv._methods.quest import Quest\n\n\nclass Mine(Quest):\n    name = 'mine'\n")
    try:
        how = ("--methods", "mine", "--words", "200", "--new-tokens", "3")
        said = run("compare_methods.py", "--define", str(file), *how)
    finally:
        _METHODS.pop("mine", None)
    assert [line.split()[0] for line in said.splitlines()[2:]] == ["mine"]


@pytest.mark.parametrize("given", ["--chunk must be at least 2, got 1: one", "--words must be at least 1, got 0:"])
def test_one_token_chunks_and_empty_texts_are_refused(given, run):
    with pytest.raises(SystemExit, match=given):
        run("own_loop.py", given.split()[0], given.split("got ")[1].split(":")[0])


@pytest.mark.parametrize("name", CALLS)
def test_example_runs(name, run):
    args, says = CALLS[name]
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    said = run(name, *args)
    for part in says:
        assert part in said
    assert "!!" not in said, "a report warns"


def cells() -> list[str]:
    """The code of the notebook."""
    return ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]


def test_notebook_runs_from_top_to_bottom(tmp_path, capsys):
    """With a tiny model and a text of its own, in the place of what `make real-model` fetches."""
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    tokenizer = bytes_tokenizer()
    tiny(vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "said.txt").write_text(SAID)
    options, *rest = cells()
    here: dict = {}
    exec(options, here)
    assert set(here) - {"__builtins__"} == {"MODEL", "TEXT", "PROMPT", "STEPS", "METHODS", "PATCH"}
    here |= dict(MODEL=str(tmp_path), TEXT=str(tmp_path / "said.txt"), PROMPT=300, STEPS=4)
    here["PATCH"] = dict(budget=32, sink=16, window=16)
    with warnings.catch_warnings():  # the notebook hides some
        for cell in rest:
            exec(cell, here)
    said = capsys.readouterr().out
    for method in here["METHODS"]:
        assert f"{method}: the first" in said
        assert re.search(rf"{method} +KL -?0\.\d+, attention weight kept [01]\.\d+", said)
    left, right = plt.gcf().axes
    assert len(left.lines) == len(right.lines) == len(here["METHODS"])
    plt.close("all")


def test_notebook_has_its_outputs_and_no_path_of_a_machine():
    text = NOTEBOOK.read_text()
    outputs = [c["outputs"] for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    assert all(outputs[1:]), "run it anew from top to bottom"
    assert "image/png" in outputs[-1][-1]["data"]
    assert not re.search(r"/(work|home|tmp|root|Users)/", text)
