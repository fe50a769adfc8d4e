"""Tables and figures of the docs are those of the files of results."""
import dataclasses
import json
import re
import shutil

import pytest

from torchsparsekv_benchmarks.report import pictures, style, tables
from torchsparsekv_benchmarks.report.markdown import RESULTS, ROOT, TABLES

MARKED = [p for p in tables.pages() if "<!-- table:" in p.read_text()]


@pytest.mark.parametrize("page", MARKED, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_of_a_page_are_current(page):
    text = page.read_text()
    assert tables.current(text) == text, "run `make docs`"


def test_every_result_file_is_in_a_table():
    used = {f for t in TABLES.values() for f in t.files} | {f for p in pictures.PICTURES for f in p.files}
    files = {p.relative_to(RESULTS).as_posix() for p in RESULTS.rglob("*.json")}
    assert used == files


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_table_can_be_made_and_has_conditions(name):
    about, blank, head, rule, *rows = tables.made(name).splitlines()
    assert about.endswith(".")
    assert not blank
    assert rows
    assert {line.count("|") for line in (head, rule, *rows)} == {head.count("|")}


@pytest.mark.parametrize("picture", pictures.PICTURES, ids=lambda p: p.out.name)
def test_a_figure_is_of_the_files(picture):
    assert picture.current(), "run `make docs`"


@pytest.mark.parametrize("picture", pictures.PICTURES, ids=lambda p: p.name)
def test_a_picture_says_which_file_is_missing_or_too_old(picture, tmp_path):
    for name in picture.files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(RESULTS / name, tmp_path / name)
    assert picture.held(tmp_path) == picture.held()
    last = tmp_path / picture.files[-1]
    head = json.loads(last.read_text())
    for part in head.get("sources", [head]):
        part["environment"]["torchsparsekv"] = "0.0.9"
    last.write_text(json.dumps(head))
    said = rf"{picture.name} needs results of torchsparsekv 0\.1 or later, {last.name} is of 0\.0"
    with pytest.raises(ValueError, match=said):
        picture.held(tmp_path)
    last.unlink()
    with pytest.raises(ValueError, match=rf"picture {picture.name} needs {last.name}, which is missing in "):
        picture.held(tmp_path)


def test_make_docs_writes_nothing_if_a_picture_cannot_be_made(tmp_path, monkeypatch, capsys):
    absent = dataclasses.replace(pictures.PICTURES[0], files=("nothing.json",))
    page = tmp_path / "page.md"
    page.write_text("<!-- table: speed-two-gpus -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(pictures, "PICTURES", (absent,))
    monkeypatch.setattr(tables, "pages", lambda: [page])
    monkeypatch.setattr("sys.argv", ["tables"])
    assert tables.main() == 1
    assert "tables: picture board needs nothing.json, which is missing in " in capsys.readouterr().err
    assert "old" in page.read_text()


@pytest.fixture(scope="module")
def drawn():
    pytest.importorskip("matplotlib")
    with style.styled() as plt:
        yield {p.name: p.draw(plt, json.loads(p.held())) for p in pictures.PICTURES}


def test_axes_of_pictures_begin_at_zero(drawn):
    for name, figure in drawn.items():
        for axes in figure.axes:
            assert axes.get_xlim()[0] == 0, name
            assert axes.get_ylim()[0] == 0 or name == "stages", "its bars are on a list of methods"


@pytest.mark.parametrize("picture", pictures.PICTURES, ids=lambda p: p.name)
def test_a_picture_is_small_and_its_letters_can_be_read_on_a_phone(picture):
    data = picture.out.read_bytes()
    assert len(data) < 30_000
    width, phone = int.from_bytes(data[16:20], "big"), 350
    assert 9 * style.DPI / 72 * phone / width > 8, "pixels of the smallest letters, on a page 350 pixels wide"


def test_pictures_hold_what_the_tables_hold():
    points = {p.name: json.loads(p.held()) for p in pictures.PICTURES}
    board = dict(row.split(" | ")[:2] for row in tables.made("board-128k").replace("| `", "").splitlines()[4:])
    assert {f"{at[0][1]:.2f}" for name, _, at in points["board"][2] if name == "quest"} == {board["quest`"]}
    by_context = tables.made("speed-by-context")
    dense, quest, pariskv = (at for _, _, at in points["tpot"][0])
    for name, at in (("dense", dense), ("`quest`", quest), ("`pariskv`", pariskv)):
        for context, ms in at:
            assert re.search(rf"^\| {style.tokens(context)} \| {name}.* \| {ms:.2f} \|", by_context, re.M), (name, ms)
    for _, _, at in points["batch"]:
        assert f" {at[-1][1]} |" in tables.made("serve")  # that of most requests; the table has milliseconds of fewer
    for name, parts, _ in points["stages"][0]:
        row = next(x for x in tables.made("kernels").splitlines() if f"128K | `{name.split()[0]}`" in x)
        assert f" {parts[1]} |" in row


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
        ("<!-- table: dense-kernels -->\n<!-- end -->\n", "0.1 or later, h200_decode_dense.json is of 0.0"),
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
