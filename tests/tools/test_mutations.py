"""Every mutation of tests/tools/mutate.py fits the code, and the test it names exists."""
from pathlib import Path

import pytest
from mutate import MUTATIONS, ROOT, Mutation, mutated


@pytest.mark.parametrize("m", MUTATIONS, ids=lambda m: m.name)
def test_replaced_text_occurs_once(m):
    assert (ROOT / m.file).read_text().count(m.old) == 1
    assert m.new != m.old
    path, _, name = m.test.split(" ")[0].partition("::")
    assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text()


def test_mutation_is_made_and_an_outdated_one_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("one two")
    mutated(Mutation("x", "a.py", "two", "three", "t"), tmp_path)
    assert Path(tmp_path / "a.py").read_text() == "one three"
    with pytest.raises(ValueError, match=r"x: a.py has 'two' 0 times"):
        mutated(Mutation("x", "a.py", "two", "three", "t"), tmp_path)
