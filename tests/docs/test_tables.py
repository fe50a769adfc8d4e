"""Tables and figures of the docs are those of the files of results."""
import json
import shutil

import pytest

from torchsparsekv_benchmarks.report import figure, tables
from torchsparsekv_benchmarks.report.markdown import RESULTS, ROOT, TABLES

MARKED = [p for p in tables.pages() if "<!-- table:" in p.read_text()]


@pytest.mark.parametrize("page", MARKED, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_of_a_page_are_current(page):
    text = page.read_text()
    assert tables.current(text) == text, "run `make docs`"


def test_every_result_file_is_in_a_table():
    used = {f for t in TABLES.values() for f in t.files} | {f for p in figure.PICTURES for f in p.files}
    files = {p.relative_to(RESULTS).as_posix() for p in RESULTS.rglob("*.json")}
    assert used == files


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_table_can_be_made_and_has_conditions(name):
    about, blank, head, rule, *rows = tables.made(name).splitlines()
    assert about.endswith(".")
    assert not blank
    assert rows
    assert {line.count("|") for line in (head, rule, *rows)} == {head.count("|")}


@pytest.mark.parametrize("picture", figure.PICTURES, ids=lambda p: p.out.name)
def test_a_figure_is_of_the_files(picture):
    assert picture.current(), "run `make docs`"


def test_a_changed_result_changes_the_page(tmp_path):
    results = copied(tmp_path, "h200_parallel.json", lambda head: head["rows"][2].update(tpot_ms=9.87))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: speed-two-gpus -->\nold\n<!-- end -->\nbehind\n")
    assert tables.write([page], results) == [page]
    text = page.read_text()
    assert "9.87" in text
    assert "old" not in text
    assert text.startswith("before\n<!-- table: speed-two-gpus -->\n")
    assert text.endswith("\n<!-- end -->\nbehind\n")
    assert tables.write([page], results) == [], "and is current then"


def copied(to, name: str, change=lambda head: None):
    head = json.loads((RESULTS / name).read_text())
    change(head)
    (to / name).write_text(json.dumps(head))
    return to


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- table: speed-two-gpus -->\n<!-- end -->\n", "needs h200_parallel.json, which is missing"),
        ("<!-- table: dense-kernels -->\n<!-- end -->\n", "results of 0.1 or later, h200_decode_dense.json is of 0.0"),
        ("<!-- table: weather -->\n<!-- end -->\n", "there is no table weather; there are: board-128k, "),
        ("<!-- table: kernels -->\n", "lacks its `<!-- end -->`"),
    ],
)
def test_what_cannot_be_made_is_named_and_nothing_is_written(tmp_path, text, says):
    copied(tmp_path, "h200_decode_dense.json", lambda head: head["environment"].update(torchsparsekv="0.0.9"))
    shutil.copy(RESULTS / "h200_kernels.json", tmp_path)
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("nothing marked\n")
    bad.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.md: ") as error:
        tables.write([good, bad], tmp_path)
    assert says in str(error.value)
    assert bad.read_text() == text
