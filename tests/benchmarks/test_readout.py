"""The context-intensive task: every answer is in the prompt, and the score counts fields in their places."""
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from paths import ROOT
from recorded import records

from torchsparsekv_benchmarks.recall_model import model
from torchsparsekv_benchmarks.recall_model.journal import LIKELIEST
from torchsparsekv_benchmarks.recall_model.readout import QUESTIONS, TOGETHER, readout
from torchsparsekv_benchmarks.recall_model.vocabulary import ALL, COMMA, END, MANY

LENGTHS = (2048, 5000)


def right(r) -> list[int]:
    """The output that is wanted: the plan, with the answers in it."""
    out = r.plan.tolist()
    for answer, (start, stop) in zip(r.answers, r.spans):
        many = len(answer[0]) == 6
        told = [t for run in answer for t in (run if many else (*run, COMMA))]
        out[start : stop - 1] = told if many else told[:-1]
    return out


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("index", range(3))
def test_every_question_is_about_records_of_the_prompt(length, index):
    r = readout(length, index)
    assert len(r.prompt) + r.new_tokens == length
    found, steps = records(r.prompt), r.plan.tolist()
    assert len(r.spans) == QUESTIONS
    kinds = {MANY: 0, ALL: 0}
    at = 0
    for answer, (start, stop) in zip(r.answers, r.spans):
        kind, question = steps[at], steps[at + 1 : start]
        assert len(answer) == TOGETHER
        if kind == MANY:
            assert question == [t for a in answer for t in a[:2]] + question[-1:]
            assert all(found[a[:2]] == [a[2:]] for a in answer)
        else:
            assert sorted(found[tuple(question)]) == sorted(answer)
        assert set(steps[start : stop - 1]) == {LIKELIEST}, "no token of an answer is given"
        assert steps[stop - 1] == END
        kinds[kind] += 1
        at = stop
    assert at == len(steps)
    assert kinds == {MANY: QUESTIONS // 2, ALL: QUESTIONS // 2}
    asked = QUESTIONS // 2 * (TOGETHER + 1)
    assert len(found) > 1.5 * asked, "there are others than those that are asked for"


def test_score():
    r = readout(2048, 0)
    out = right(r)
    assert -1 not in out and r.score(out) == 1  # noqa: PT018
    assert r.score(r.plan.tolist()) == 0
    one = list(out)
    one[r.spans[3][0]] += 1
    assert r.score(one) == 1 - 1 / (QUESTIONS * TOGETHER)
    many = [i for i, a in enumerate(r.answers) if len(a[0]) == 6]
    (a, b), (c, d) = (r.spans[i] for i in many[:2])
    moved = list(out)
    moved[a:b], moved[c:d] = out[c:d], out[a:b]
    assert r.score(moved) == 1 - 2 / QUESTIONS, "an answer to another question is none"


def test_a_readout_is_the_same_in_another_process():
    program = (
        "import json; from torchsparsekv_benchmarks.recall_model.readout import readout; r = readout(2048, 3)\n"
        "print(json.dumps([r.prompt, r.plan.tolist(), r.spans, r.answers]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    r = readout(2048, 3)
    assert json.loads(done.stdout) == json.loads(json.dumps([r.prompt, r.plan.tolist(), r.spans, r.answers]))
    assert readout(2048, 4).prompt != r.prompt


def test_too_short_a_readout_is_refused():
    with pytest.raises(ValueError, match="length is 2047; a readout needs at least 2048"):
        readout(2047, 0)


def test_the_dense_model_reads_it_out():
    net, _ = model.load(device=torch.device("cpu"), dtype=torch.float32)
    r = readout(2048, 0)
    ids = torch.tensor([r.prompt])
    out = net.eval().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=r.new_tokens, do_sample=True, temperature=None,
        top_p=None, top_k=None, pad_token_id=0, logits_processor=[r.processor("cpu")],
    )  # fmt: skip
    told = out[0, ids.shape[1] :].tolist()
    given = r.plan != LIKELIEST
    assert (np.array(told)[given] == r.plan[given]).all()
    assert r.score(told) == 1
