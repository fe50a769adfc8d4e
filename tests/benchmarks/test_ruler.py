"""The text tasks follow RULER: each answer stands once in the text, at the place that the sample names."""
import hashlib
import re
import subprocess
import sys

import pytest
from byte_tokenizer import bytes_tokenizer
from paths import ROOT

from torchsparsekv_benchmarks.quality.ruler import TASKS, Ruler
from torchsparsekv_benchmarks.quality.ruler.fit import found

CHAT = "{{ bos_token }}{% for m in messages %}[USER]{{ m.content }}{% endfor %}[ME]"


@pytest.fixture(scope="module")
def ruler():
    return Ruler(bytes_tokenizer())


def text(ruler, sample) -> str:
    return ruler.tokenizer.decode(sample.prompt, skip_special_tokens=True)


AMONG_NEEDLES = ("niah_multikey_2", "niah_multikey_3")
LENGTHS = {"cwe": 9000, "niah_multivalue": 6000, "niah_multiquery": 6000}


@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_their_length_and_hold_their_answers(ruler, task):
    length = LENGTHS.get(task, 5000)
    for index in range(3):
        s = ruler.sample(task, length, index)
        assert len(s.prompt) + s.new_tokens <= length
        assert len(s.prompt) + s.new_tokens > 0.9 * length, "as much haystack as fits"
        said = text(ruler, s)
        assert all(a in said for a in s.answers)
        assert s.prompt[0] == ruler.tokenizer.bos_token_id
        assert s.prompt.count(ruler.tokenizer.bos_token_id) == 1
        assert s.score(ruler.tokenizer(" ".join(s.answers), add_special_tokens=False)["input_ids"]) == 1
        assert s.score([]) == 0


@pytest.mark.parametrize("task", [t for t in TASKS if t.startswith("niah")])
def test_needles_are_where_the_sample_says(ruler, task):
    depths = set()
    for index in range(4):
        s = ruler.sample(task, LENGTHS.get(task, 5000), index)
        said = text(ruler, s)
        context, question = said.rsplit("\nWhat", 1)
        asked = re.search(r" for (.+) mentioned in the provided text\?", question)[1]
        keys = re.split(r", and |, ", asked)
        facts = re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", context)
        assert sorted(v for _, k, v in facts if k in keys) == sorted(s.answers)
        others = {k for _, k, _ in facts} - set(keys)
        expected = {"niah_multikey_1": 3}.get(task, 0)
        assert len(others) > 10 if task in AMONG_NEEDLES else len(others) == expected
        at = min(context.index(f"for {k} is: ") for k in keys)
        assert s.depth == pytest.approx(at / len(said), abs=0.02)
        depths.add(s.depth)
        assert ("are" in question) == (len(s.answers) > 1)
    assert len(depths) > 1


def test_values_are_what_they_are_called(ruler):
    for task, shape in (
        ("niah_multikey_2", r"[1-9]\d{6}"),
        ("niah_multikey_3", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
    ):
        assert re.fullmatch(shape, ruler.sample(task, 5000, 1).answers[0])


def test_the_chain_leads_to_every_name(ruler):
    s = ruler.sample("vt", 5000, 2)
    solved, asked = text(ruler, s).split("\n\nMemorize and track")
    value = re.search(r"assigned the value (\d{5}) in the text above", asked)[1]
    names = re.findall(rf"VAR (\w+) = {value}", asked)
    for _ in range(4):
        names += re.findall(rf"VAR (\w+) = VAR {names[-1]} ", asked)
    assert tuple(names) == s.answers
    assert len(set(names)) == 5
    assert value not in solved, "the example has a value of its own"


def test_the_most_common_words_are_the_most_common(ruler):
    s = ruler.sample("cwe", 9000, 0)
    listed = text(ruler, s).rsplit("Below is a numbered list", 1)[1]
    counts: dict[str, int] = {}
    for word in re.findall(r"\d+\. (\w+)", listed):
        counts[word] = counts.get(word, 0) + 1
    assert sorted(counts, key=lambda w: -counts[w])[:10] == sorted(s.answers, key=lambda w: list(counts).index(w))
    assert {counts[w] for w in s.answers} == {30}
    assert {n for w, n in counts.items() if w not in s.answers} == {3}


def test_the_coded_words_follow_zipf(ruler):
    s = ruler.sample("fwe", 9000, 0)
    coded = text(ruler, s).split("coded words. ")[-1].split("\nQuestion")[0].split()
    counts = {w: coded.count(w) for w in set(coded)}
    ranked = sorted(counts, key=lambda w: -counts[w])
    assert ranked[0] == "..."
    assert tuple(ranked[1:4]) == s.answers
    assert counts["..."] / counts[s.answers[0]] == pytest.approx(4, rel=0.1)


def test_samples_are_the_same_in_every_process(ruler):
    program = (
        "import sys; sys.path[:0] = ['tests/benchmarks', 'tests/support']\n"
        "from test_ruler import *\n"
        "r = Ruler(bytes_tokenizer())\n"
        "r.sample('vt', 4500, 7)\n"
        "print(digest(r))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest(ruler)


def digest(ruler) -> str:
    ids = [ruler.sample(task, 9000, index).prompt for task in ("niah_multikey_2", "fwe", "cwe") for index in (0, 5)]
    return hashlib.sha256(str(ids).encode()).hexdigest()


def test_in_a_chat_the_prefix_begins_the_answer():
    ruler = Ruler(bytes_tokenizer(chat=CHAT))
    s = ruler.sample("niah_multikey_2", 5000, 0)
    assert s.prompt.count(ruler.tokenizer.bos_token_id) == 1
    assert re.search(r"mentioned in the provided text\?\[ME\] The special magic number for \S+ ment", text(ruler, s))


def test_two_bos_are_refused():
    tokenizer = bytes_tokenizer(chat="{{ bos_token }}" + CHAT)
    with pytest.raises(ValueError, match="begins a prompt with '<s>' twice"):
        Ruler(tokenizer).sample("niah_multikey_2", 5000, 0)


def test_what_does_not_fit_or_exist_is_refused(ruler):
    with pytest.raises(ValueError, match="vt does not fit 500 tokens"):
        ruler.sample("vt", 500, 0)
    with pytest.raises(ValueError, match="unknown task 'nope'; available: niah_multikey_2"):
        ruler.sample("nope", 5000, 0)


def test_the_score_is_that_of_ruler():
    assert found("The answers are ABC,\x01 and def.", ("abc", "DEF")) == 1
    assert found("abc", ("abc", "def")) == 0.5
    assert found("ab c", ("abc",)) == 0
