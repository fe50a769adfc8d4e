"""Examples of the guide run as pasted, and pages stay short enough to be read."""
import re

import pytest
import torch
from models import prompts, tiny
from paths import ROOT

import torchsparsekv
from torchsparsekv.method import all_methods, hyper_parameters

GUIDE, METHODS = ROOT / "docs/guide", ROOT / "docs/methods"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
FIELD = re.compile(r"^\| `(\w+)` \| `(.*?)` \| ", re.M)
SECTIONS = ("## Hyper-parameters", "## Cost", "## When not to use it")


def test_quickstart_answers_from_a_sparse_cache(capsys):
    (block,) = (b for b in BLOCK.findall((GUIDE / "quickstart.md").read_text()) if "recall" in b)
    names: dict = {}
    exec(compile(block, "quickstart.md", "exec"), names)
    said = capsys.readouterr().out
    assert said.startswith("v187 v052 v134 v248 .\ntorchsparsekv: pariskv\n")
    assert "!!" not in said
    assert all(r.density < 0.25 for r in names["handle"].report().layers[2:])
    assert not hasattr(names["model"], "_torchsparsekv"), "the model is restored"


def test_chat_turns_and_forks_answer_as_the_unpatched_model():
    """With a budget that holds everything; a fork does not see other questions."""
    turns, edits, alone, forks = BLOCK.findall((GUIDE / "chat.md").read_text())
    model = tiny(max_position_embeddings=4096)
    ids = prompts(1, 40, ragged=False)[0]
    questions = [prompts(1, 5, seed=seed, ragged=False)[0] for seed in (2, 3)]
    small = lambda block: block.replace("32768", "256").replace("200", "6").replace("100", "6")  # noqa: E731
    want, whole = [], ids
    for q in questions:
        whole = model.generate(torch.cat([whole, q], 1), max_new_tokens=6, do_sample=False)
        want.append(model.generate(torch.cat([ids, q], 1), max_new_tokens=6, do_sample=False))
    model.generation_config.do_sample = False
    with torchsparsekv.patch(model, "quest", budget=256, sink=16, window=8) as handle:
        names = dict(torch=torch, model=model, handle=handle, prompt=ids, questions=questions)
        exec(compile(small(turns), "chat.md", "exec"), names)
        assert names["ids"].tolist() == whole.tolist()
        names["edited"], names["length"] = torch.cat([ids, questions[1]], 1), 40
        exec(compile(small(edits), "chat.md", "exec"), names)
        assert names["again"].tolist() == want[1].tolist(), "the first question became the second"
        answered = []
        answer = lambda *a, **k: answered.append(names["made"](*a, **k)) or answered[-1]  # noqa: E731
        names["made"], names["model"] = model.generate, Answering(model, answer)
        exec(compile(small(forks), "chat.md", "exec"), names)
    assert [a.tolist() for a in answered] == [w.tolist() for w in want]
    names = dict(torchsparsekv=torchsparsekv, model=model, ids=ids)
    exec(compile(small(alone), "chat.md", "exec"), names)
    assert int(names["cache"].get_seq_length()) == 45
    assert not hasattr(model, "_torchsparsekv")


class Answering:
    """A model whose answers are kept."""

    def __init__(self, model, generate):
        self.forward, self.generate = model, generate

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_page_is_short(page):
    """A table or trace that is generated counts as well."""
    most = 80 if page.parent == METHODS else 250
    assert len(page.read_text().splitlines()) <= most


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_decode_step_needs_few_concepts():
    page = (ROOT / "docs/concepts/decode-step.md").read_text()
    concepts = re.findall(r"^\| \*\*(.+?)\*\* \|", page, re.M)
    assert f"{len(concepts)} concepts" in page
    assert len(concepts) <= 20


def test_glossary_defines_a_word_once():
    page = (ROOT / "docs/concepts/glossary.md").read_text()
    tables = [re.findall(r"^\| (?!word|---)(.+?) \|", part, re.M) for part in page.split("## ")[1:3]]
    for words in tables:
        assert words == sorted(words, key=lambda w: re.sub(r"\W", "", w).lower())
    assert len(set().union(*tables)) == sum(map(len, tables)) > 60


@pytest.mark.parametrize("name", sorted(all_methods()))
def test_method_page_has_every_hyper_parameter_with_its_default(name):
    common = dict(FIELD.findall((METHODS / "index.md").read_text()))
    page = (METHODS / f"{name}.md").read_text()
    given = hyper_parameters(all_methods()[name])
    fields = {k: repr(getattr(v, "default", v)) for k, v in given.items()}
    assert common | dict(FIELD.findall(page)) == fields
    assert f"(`{name}`)" in page.splitlines()[0]
    assert [s for s in SECTIONS if s not in page] == []


def test_index_of_methods_links_every_method():
    linked = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\)", (METHODS / "index.md").read_text(), re.M)
    assert sorted(linked) == [(name, name) for name in sorted(all_methods())]


OTHERS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/results/README.md")]


@pytest.mark.parametrize("page", [*OTHERS, *PAGES], ids=lambda p: str(p.relative_to(ROOT)))
def test_anchors_of_links_exist(page):
    """`page.md#heading` names a heading of that page. Whether the page exists is checked with all links."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text):
        other = (page.parent / target) if target else page
        assert anchor in anchors(other.read_text()), f"{page.name}: {target}#{anchor}"


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}
