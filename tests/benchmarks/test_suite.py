"""The tasks beside RULER's: the answers stand in the text, and what is wrong costs."""
import random
import re

import pytest
from byte_tokenizer import bytes_tokenizer

from torchsparsekv_benchmarks.quality import real_model, suite
from torchsparsekv_benchmarks.quality.ruler import Ruler
from torchsparsekv_benchmarks.quality.ruler.fit import found

SOURCE = "\n".join(
    f'def compute_{a}{b}(x):\n    """Return the {a}{b} part of an expression."""\n    return x + 1\n\n'
    for a in "abcdefghijklmnopqrst"
    for b in "abcdefghijklmnopqrst"
)


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    (tmp_path / "sympy.txt").write_text(SOURCE)
    monkeypatch.setattr(real_model, "FOLDER", tmp_path)
    suite.code.cache_clear()
    yield Ruler(bytes_tokenizer(), suite.TASKS)
    suite.code.cache_clear()


def text(prompts, sample) -> str:
    return prompts.tokenizer.decode(sample.prompt, skip_special_tokens=True)


@pytest.mark.parametrize("task", suite.TASKS)
def test_prompts_fill_their_length_and_hold_their_answers(prompts, task):
    for index in range(3):
        s = prompts.sample(task, 7000, index)
        assert 0.9 * 7000 < len(s.prompt) + s.new_tokens <= 7000
        said = text(prompts, s)
        if task in ("form", "ledger"):
            for answer in s.answers:
                name, value = answer.split(": ") if ": " in answer else reversed(answer.split(" belongs to "))
                assert f"The code of department {name} is {value}." in said
        else:
            assert all(a in said for a in s.answers)
        assert prompts.sample(task, 7000, index).prompt == s.prompt


def test_a_ledger_asks_for_its_form_and_for_the_same_from_its_end(prompts):
    s = prompts.sample("ledger", 7000, 0)
    assert suite.AGAIN.strip() in text(prompts, s)
    answers = s.answers
    first, again = answers[: suite.LEDGER_FIELDS], answers[suite.LEDGER_FIELDS :]
    assert len(set(first)) == len(again) == 60
    assert [f"{v} belongs to {k}" for k, v in (a.split(": ") for a in first)][::-1] == list(again)
    written = "\n".join(first) + "\n\n" + "\n".join(again)
    assert found(written, answers) == 1
    assert found("\n".join(first), answers) == 0.5


def test_the_constant_asked_for_is_the_one_in_the_text(prompts):
    s = prompts.sample("code_constant", 7000, 0)
    name = re.search(r"value of the constant (\w+)", text(prompts, s))[1]
    assert f"{name} = {s.answers[0]}" in text(prompts, s)


def test_the_records_asked_for_are_all_that_have_the_property(prompts):
    s = prompts.sample("extraction", 7000, 0)
    said = text(prompts, s)
    colour = re.search(r"that are (\w+)\.", said)[1]
    named = re.findall(rf"Parcel (\w+) weighs \d+ kilograms and is {colour}\.", said)
    assert sorted(named) == sorted(s.answers)
    everything = re.findall(r"Parcel (\w+) weighs", said)
    assert sorted(everything) == sorted(s.answers + s.wrong)
    assert not any(a != b and a in b for a in everything for b in everything), "else one name would count for another"


def test_no_word_is_a_part_of_another(monkeypatch):
    monkeypatch.setattr(suite, "vocabulary", lambda *_: ("ab", "abc", "cab", "de", "xdex", "fg") * 200)
    for seed in range(20):
        found = suite.words(random.Random(seed), 3, "salt")
        assert not any(a != b and a in b for a in found for b in found), found


def test_wrong_names_cost_what_right_ones_bring():
    assert found("alpha and beta", ("alpha", "beta"), ("gamma",)) == 1
    assert found("alpha, beta, gamma", ("alpha", "beta"), ("gamma",)) == 0.5
    assert found("gamma", ("alpha", "beta"), ("gamma",)) == 0


def test_code_needs_its_text(tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "FOLDER", tmp_path)
    suite.code.cache_clear()
    with pytest.raises(ValueError, match="run `make real-model ONLY=sympy`"):
        Ruler(bytes_tokenizer(), suite.TASKS).sample("code_constant", 4000, 0)
