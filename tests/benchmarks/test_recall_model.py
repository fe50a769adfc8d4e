"""The recall model: its tasks ask what they say, its documents mark what they answer, and its training learns."""
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded import records

from torchsparsekv_benchmarks.recall_model import documents, flat, journal, model, pages, tasks, vocabulary
from torchsparsekv_benchmarks.recall_model.vocabulary import ALL, ASK, END, KEYS, LINK, MANY, TEXT, TOP, TRACE, VALUES

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (128, 300, 2048)


def samples(task: str):
    return [(n, tasks.sample(task, n, i)) for n in LENGTHS for i in range(8)]


def spots(ids: list[int], run: list[int]) -> list[int]:
    return [i for i in range(len(ids) - len(run) + 1) if ids[i : i + len(run)] == run]


def links(ids: list[int]) -> dict[tuple[int, int], tuple[int, int]]:
    return {tuple(ids[i + 1 : i + 3]): tuple(ids[i + 3 : i + 5]) for i, t in enumerate(ids) if t == LINK}


def test_vocabulary():
    words = vocabulary.names()
    assert len(set(words)) == len(words) == vocabulary.SIZE
    assert (words[KEYS[0]], words[VALUES[17]], words[TEXT[-1]]) == ("k000", "v017", "w495")


@pytest.mark.parametrize("task", tasks.TASKS)
def test_samples_fit_and_begin_once(task):
    for length, s in samples(task):
        assert length - 1 <= len(s.prompt) + s.new_tokens <= length
        assert s.prompt[0] == vocabulary.BOS
        assert vocabulary.BOS not in s.prompt[1:]
    assert len({len(tasks.sample(task, 512, i).prompt) for i in range(8)}) == 1, "samples of a length make a batch"


@pytest.mark.parametrize("task", ["single", "multikey", "multivalue", "multiquery"])
def test_recall_samples_have_one_answer_and_it_is_where_depth_says(task):
    for _, s in samples(task):
        found = records(s.prompt)
        at = s.prompt[-3] in (ASK, ALL)
        q = s.prompt[[i for i, t in enumerate(s.prompt) if t in (ASK, ALL, MANY)][-1] + 1 :]
        asked = [tuple(q[i : i + 2]) for i in range(0, len(q) - 1, 2)]
        assert at == (len(asked) == 1)
        if task == "multiquery":
            assert sorted(s.answers) == sorted((*key, *found[key][0]) for key in asked)
            assert all(len(found[key]) == 1 for key in asked)
        else:
            assert sorted(s.answers) == sorted(found[asked[0]])
        first = min(spots(s.prompt, [*key, *v])[0] for key in asked for v in found[key])
        assert s.depth == pytest.approx(first / len(s.prompt))


def test_distractors_share_a_word_with_what_is_asked():
    s = tasks.sample("multikey", 2048, 0)
    a, b = s.prompt[-2:]
    others = [k for k in records(s.prompt) if k != (a, b)]
    shared = [k for k in others if k[0] == a or k[1] == b]
    assert 7 * len(others) > 0.8 * 2048
    assert len(shared) > 0.9 * len(others)


def test_chains_lead_to_their_answers_in_the_order_of_the_text():
    for _, s in samples("chain"):
        found, name, reached = links(s.prompt), tuple(s.prompt[-2:]), []
        first = spots(s.prompt, [LINK, *name])[0]
        while name in found:
            name = found[name]
            reached.append(name)
        assert s.answers == tuple(reached)
        assert 2 <= len(reached) <= tasks.MAX_HOPS
        assert s.depth == pytest.approx(first / len(s.prompt))


def test_common_words_are_the_most_frequent_ones():
    for _, s in samples("common"):
        words, count = np.unique([t for t in s.prompt if t in TEXT], return_counts=True)
        order = np.argsort(-count)
        assert [a[0] for a in s.answers] == words[order[:3]].tolist()
        assert (np.diff(-count[order[:4]]) > 0).all()


def test_score():
    s = tasks.sample("multivalue", 512, 0)
    right = [t for a in s.answers for t in (*a, vocabulary.COMMA)][:-1]
    assert s.score([*right, END]) == 1
    assert s.score(right[::-1]) == 0
    assert s.score([*s.answers[1], vocabulary.COMMA] * 4) == 0.25, "one value again and again is one value"
    assert s.score([END, *right]) == 0, "nothing counts after the end"
    assert s.score([0] * s.new_tokens + right) == 0, "nor beyond the tokens that are allowed"
    assert s.score([t for a in s.answers for t in a[:3]]) == 0, "half a value is none"
    swapped = tasks.sample("multiquery", 512, 0)
    (a, b, *v), (c, d, *w) = swapped.answers[:2]
    assert swapped.score([a, b, *w, c, d, *v]) == 0, "a value counts for its own key only"


def test_samples_are_the_same_in_another_process():
    program = (
        "import json; from torchsparsekv_benchmarks.recall_model import tasks, journal\n"
        "s = [tasks.sample(t, 256, 3) for t in tasks.TASKS]; j = journal.journal(600, 1)\n"
        "print(json.dumps([[s.prompt, s.answers] for s in s] + [[j.prompt, j.plan.tolist()]]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    here, j = [tasks.sample(t, 256, 3) for t in tasks.TASKS], journal.journal(600, 1)
    assert json.loads(done.stdout) == json.loads(
        json.dumps([[s.prompt, s.answers] for s in here] + [[j.prompt, j.plan.tolist()]])
    )
    assert tasks.sample("single", 256, 4) != here[0]


@pytest.mark.parametrize(("task", "length", "says"), [("singel", 256, "single, multikey"), ("single", 64, "128")])
def test_bad_samples_are_refused(task, length, says):
    with pytest.raises(ValueError, match=says):
        tasks.sample(task, length, 0)
    with pytest.raises(ValueError, match="at least"):
        journal.journal(100, 0)


def told(ids: list[int], codes: np.ndarray) -> dict[int, list[tuple[list[int], list[int]]]]:
    """By code, (what stands before an answer, the answer); earlier answers are blanked, but for those about lists."""
    found: dict[int, list[tuple[list[int], list[int]]]] = {}
    edges = np.flatnonzero(np.diff(codes.astype(int), prepend=0, append=0)).tolist()
    said = [0 if code not in (0, tasks.CODES["top"]) else t for t, code in zip(ids, codes)]
    for begin, end in itertools.pairwise(edges):
        if codes[begin]:
            found.setdefault(int(codes[begin]), []).append((said[:begin], ids[begin:end]))
    return found


@pytest.mark.parametrize("length", [256, 1000])
def test_documents_mark_the_answers_and_these_follow_from_what_stands_before(length):
    code = tasks.CODES
    asked = dict.fromkeys(code, 0)
    for seed in range(40):
        ids, codes = documents.document(np.random.default_rng(seed), length)
        assert ids.shape == codes.shape == (length,)
        for kind, answers in told(ids.tolist(), codes).items():
            for before, answer in answers:
                assert answer[-1] == END
                check(next(k for k, c in code.items() if c == kind), before, answer[:-1])
                asked[next(k for k, c in code.items() if c == kind)] += 1
        cues = np.isin(ids, [ASK, ALL, MANY, TRACE, TOP]).sum()
        assert cues == sum(len(a) for a in told(ids.tolist(), codes).values()), "every question is answered"
    assert min(asked.values()) > 0


def check(kind: str, before: list[int], answer: list[int]) -> None:
    found = records(before)
    if kind == "ask":
        assert found[tuple(before[-2:])] == [tuple(answer)]
    elif kind == "all":
        assert sorted(found[tuple(before[-2:])]) == sorted(tuple(answer[i : i + 4]) for i in range(0, len(answer), 5))
    elif kind == "many":
        runs = [answer[i : i + 6] for i in range(0, len(answer), 6)]
        assert before[-1 - 2 * len(runs) : -1] == [t for r in runs for t in r[:2]]
        assert all(found[tuple(r[:2])] == [tuple(r[2:])] for r in runs)
    elif kind == "trace":
        name, reach = tuple(before[-2:]), links(before)
        for i in range(0, len(answer), 2):
            name = reach[name]
            assert name == tuple(answer[i : i + 2])
        assert name not in reach
    else:
        words, count = np.unique([t for t in before if t in TEXT], return_counts=True)
        assert {*answer} == {*words[np.argsort(-count)[:3]].tolist()}


def test_batches_follow_from_seed_and_step():
    first, again, other = (documents.batch(*job, 256, 4)[0] for job in ((0, 1), (0, 1), (0, 2)))
    assert (first == again).all()
    assert (first != other).any()


def tiny(**fields):
    torch.manual_seed(0)
    return model.build(hidden_size=64, intermediate_size=128, head_dim=16, num_hidden_layers=3, **fields)


def test_flat_forward_is_that_of_the_model():
    m = tiny()
    ids, codes = (torch.from_numpy(a) for a in documents.batch(0, 0, 128, 4))
    whole = flat.Flat(m, compiled=False)
    logits = m.lm_head(m.model.norm(whole.hidden(ids.long(), {}))).view(4, 128, -1)
    torch.testing.assert_close(logits, m(ids.long()).logits)
    wide, narrow = (whole.hidden(ids.long(), dict.fromkeys(range(3), w)) for w in (128, 8))
    torch.testing.assert_close(wide, whole.hidden(ids.long(), {}))
    assert not torch.allclose(narrow, wide)
    loss, seen = whole(ids.long(), codes, 0.0, {})
    own = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].long().flatten(), reduction="none")
    answers = codes[:, 1:].flatten() > 0
    torch.testing.assert_close(loss, own[answers].mean())
    assert seen[0].sum() == 4 * 127
    assert seen[0, 1:].sum() == answers.sum()


def test_journal_keeps_to_its_plan_and_is_scored_by_what_it_said():
    m, j = tiny(), journal.journal(600, 0)
    torch.manual_seed(0)
    ids = torch.tensor([j.prompt])
    out = m.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=None, max_new_tokens=j.new_tokens,
        logits_processor=[j.processor("cpu")],
    )[0, len(j.prompt) :].tolist()  # fmt: skip
    given = j.plan >= 0
    assert len(out) == j.new_tokens <= 600
    assert (np.array(out)[given] == j.plan[given]).all()
    assert all(t in VALUES for t in np.array(out)[j.plan == journal.ANY_VALUE])
    assert j.score(out) == 0, "a model without training recalls nothing"
    for said, asked in zip(j.said, j.asked):
        assert out[said - 2 : said] == out[asked - 2 : asked], "the key that is asked for"
        assert out[asked - 3] == ASK
        out[asked : asked + pages.VALUE] = out[said : said + pages.VALUE]
    assert j.score(out) == 1


def test_training_learns_and_its_folder_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train = "torchsparsekv_benchmarks.recall_model.train"
    command = [sys.executable, "-m", train, "--quick", "--steps", "40", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    first, *_, last = (line["by_length"]["128"] for line in lines if "128" in line["by_length"])
    assert last["loss"] < first["loss"] - 0.7
    assert last["other"] < first["other"]
    found = json.loads((tmp_path / "accuracy.json").read_text())
    assert found["greedy"][0]["task"] == "single"
    assert found["options"]["seed"] == 0
    assert "torch" in found["environment"]
    folder_works(AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path))


def folder_works(loaded, words) -> None:
    ids = tasks.sample("single", 128, 0).prompt
    assert words.decode(ids).split() == [vocabulary.names()[i] for i in ids]
    assert words(words.decode(ids)).input_ids == ids
    assert loaded(torch.tensor([ids])).logits.isfinite().all()


def test_shipped_weights():
    if not model.WEIGHTS.is_dir():
        pytest.skip("no weights are shipped yet")
    loaded, words = model.load(dtype=torch.float32)
    folder_works(loaded, words)
    for task in ("single", "multikey", "multiquery"):
        drawn = [tasks.sample(task, 512, i) for i in range(4)]
        ids = torch.tensor([s.prompt for s in drawn])
        out = loaded.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=drawn[0].new_tokens
        )
        assert np.mean([s.score(o) for s, o in zip(drawn, out[:, ids.shape[1] :].tolist())]) > 0.9


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        model.load(tmp_path)
