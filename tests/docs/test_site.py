"""The site has every page of docs/, and pages written from the code; none of this needs the generator."""

import inspect
import re

import docs_site
import pytest
from paths import ROOT

import torchsparsekv
from torchsparsekv import extension
from torchsparsekv.ops._machinery.registry import load_all

PAGES = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
WRITTEN = {*docs_site.MADE, *docs_site.MOVED.values()} - {docs_site.HOME}


def test_the_navigation_has_every_page_once():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    found = re.findall(r"([\w/]+[\w.-]*\.md)(?: #.*)?$", nav, re.M)
    assert sorted([*found, *docs_site.method_pages().values()]) == sorted(PAGES | WRITTEN)


def test_every_page_is_linked_from_another():
    linked = set()
    for file in ["README.md", *(f"docs/{p}" for p in PAGES)]:
        path = ROOT / file
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        found = {(path.parent / x).resolve() for x in re.findall(r"\]\(([^)#\s:]+\.md)[^)]*\)", text)}
        linked |= found - {path}
    assert [p for p in sorted(PAGES) if (ROOT / "docs" / p).resolve() not in linked] == []


@pytest.mark.parametrize(
    ("origin", "page", "text", "moved"),
    [
        ("README.md", "index.md", "[a](docs/guide/chat.md#b)", "[a](guide/chat.md#b)"),
        ("README.md", "index.md", "![a](docs/x.png)", "![a](x.png)"),
        ("docs/methods/quest.md", "methods/quest.md", "[a](../guide/chat.md)", "[a](../guide/chat.md)"),
        ("docs/results/speed.md", "results/speed.md", "[a](../../CHANGELOG.md)", "[a](../develop/changes.md)"),
        ("CONTRIBUTING.md", "develop/contributing.md", "[a](docs/develop/op.md)", "[a](op.md)"),
        ("docs/methods/quest.md", "methods/quest.md", "[`a`](../../ops/a.py)", "`a`"),
        ("docs/a.md", "a.md", "[a](https://example.org/b) [c](#d)", "[a](https://example.org/b) [c](#d)"),
        ("docs/a.md", "a.md", "```\n[a](../ops/b.py)\n```", "```\n[a](../ops/b.py)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(origin, page, text, moved):
    assert docs_site.relinked(text, origin, page) == moved


def test_links_to_code_lead_to_the_repository_if_there_is_one():
    found = docs_site.relinked("[a](../../ops/a.py#L3)", "docs/x/y.md", "x/y.md", "https://example.org/me/it/")
    assert found == "[a](https://example.org/me/it/blob/main/ops/a.py#L3)"


def test_links_of_the_first_page_are_alive():
    text = re.sub(r"```.*?```", "", docs_site.home(), flags=re.S)
    links = [x for x in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in x]
    assert len(links) > 20
    assert [x for x in links if x not in PAGES | WRITTEN and not (ROOT / "docs" / x).exists()] == []


def test_public_names_have_a_docstring_page():
    assert set(torchsparsekv.__all__) - {"Method"} <= set(docs_site.PUBLIC), "Method is a name for extensions"
    for path, members in docs_site.PUBLIC.values():
        thing = found(path)
        for member in members:
            assert inspect.getdoc(getattr(thing, member)), f"{path}.{member} has no docstring"


def found(path: str):
    from importlib import import_module

    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def test_arguments_of_public_functions_are_described():
    """In the docstring and, those of patch, in the table of the page too."""
    page = (ROOT / "docs/reference/api.md").read_text()
    given = [p for p in inspect.signature(torchsparsekv.patch).parameters if p != "hyper"]
    assert [p for p in given if f"| `{p}` |" not in page] == []
    for path, members in docs_site.PUBLIC.values():
        thing = found(path)
        for function in [thing] if inspect.isfunction(thing) else [getattr(thing, m) for m in members]:
            if inspect.isfunction(function):
                names = set(inspect.signature(function).parameters) - {"self"}
                missing = [p for p in names if not re.search(rf"^\s+{p}: ", inspect.getdoc(function) or "", re.M)]
                assert missing == [], f"{path}: {missing}"


def test_every_name_for_extensions_is_on_its_page():
    page = docs_site.extension()
    missing = [n for n in extension.__all__ if f"## {n}\n" not in page and f"`{n}`" not in page]
    assert [n for n in missing if f"heading: {n}\n" not in page] == []


def test_every_op_is_on_the_page_of_ops():
    page = docs_site.ops()
    assert re.findall(r"^### (\w+)$", page, re.M) != []
    assert sorted(re.findall(r"^### (\w+)$", page, re.M)) == sorted(load_all())


def test_a_docstring_becomes_lists_and_code():
    text = """First line.

        y = x + 1

    After it:
        indented

    Args:
        x [batch]: a number that
            goes on.
        k, v [batch, dim]
    Returns: y.
    Launches: one kernel
        that goes on.
    """
    assert docs_site.as_markdown(text).split("\n") == [
        "First line.", "", "```text", "y = x + 1", "```", "", "After it:", "", "```text", "indented", "```", "",
        "**Args**", "", "- `x` [batch]: a number that goes on.", "- `k, v` [batch, dim]", "",
        "**Returns:** y.", "", "**Launches:** one kernel", "that goes on.", "",
    ]  # fmt: skip


def test_every_command_and_option_is_on_its_page():
    page = docs_site.commands()
    for said in ("## torchsparsekv plan", "### torchsparsekv bench decode", "| `model` | required |", "`--pool-dtype`"):
        assert said in page
    assert "choosers" not in page, "an old name"


def test_every_option_of_a_command_has_a_meaning():
    rows = re.findall(r"^\| (`.*`) \| .* \| (.*) \|$", docs_site.commands(), re.M)
    assert len(rows) > 150
    assert [name for name, meaning in rows if len(meaning) < 8] == []
