"""The list of slow tests is right, and `make test` leaves them out."""
import re

import slow
from paths import ROOT

LOG = """\
12.00s call     tests/test_a.py::test_one[two words]
1.00s setup    tests/test_a.py::test_two
0.90s call     tests/test_a.py::test_two
0.90s call     tests/test_a.py::test_three
99.00s call     tests/methods/test_icecache.py::test_four
(3 durations < 0.005s hidden.)
"""


def test_slow_tests_are_listed_except_kept_ones():
    other = "1.10s call     tests/test_b.py::test_one\n"
    long = ["tests/test_a.py::test_one[two words]", "tests/test_a.py::test_two", "tests/test_b.py::test_one"]
    assert slow.slow_of([LOG, other]) == long


def test_listed_and_kept_tests_exist():
    listed = slow.FILE.read_text().splitlines()
    assert listed == sorted({*listed})
    assert not any(name.startswith(tuple(f"tests/{x}" for x in slow.KEPT)) for name in listed)
    for name in (*listed, *(f"tests/{x}" for x in (*slow.FIRST, *slow.KEPT, *slow.FIXTURES))):
        file, _, test = name.partition("::")
        begins = re.match(r"\w*", test)[0]
        assert re.search(rf"\b{begins}", (ROOT / file).read_text()), name


def test_listed_tests_are_marked(request):
    """`make test` collects none of them beside this test, `make full` all of them."""
    items = request.session.items
    assert [x for x in items if "slow" in x.keywords] == slow.are_slow(items)


def test_tests_with_a_slow_fixture_are_slow():
    class Test:
        nodeid, fixturenames = "tests/commands/test_demo.py::test_new", ["shown", "capsys"]

    class Other(Test):
        nodeid = "tests/test_other.py::test_new"

    test = Test()
    assert slow.are_slow([test, Other()]) == [test]
