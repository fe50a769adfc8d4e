"""What `make test` leaves out."""
import re

import slow
from test_cli import ROOT

LOG = """\
12.00s call     tests/test_a.py::test_one[two words]
1.00s setup    tests/test_a.py::test_two
0.90s call     tests/test_a.py::test_two
0.90s call     tests/test_a.py::test_three
99.00s call     tests/test_icecache.py::test_four
(3 durations < 0.005s hidden.)
"""


def test_what_is_long_is_listed_but_for_what_is_kept():
    assert slow.slow_of(LOG) == ["tests/test_a.py::test_one[two words]", "tests/test_a.py::test_two"]


def test_what_is_listed_or_kept_is_there():
    listed = slow.FILE.read_text().splitlines()
    assert listed == sorted({*listed})
    assert not any(name.startswith(tuple(f"tests/{x}" for x in slow.KEPT)) for name in listed)
    for name in (*listed, *(f"tests/{x}" for x in slow.KEPT)):
        file, _, test = name.partition("::")
        begins = re.match(r"\w*", test)[0]
        assert re.search(rf"\b{begins}", (ROOT / file).read_text()), name


def test_they_are_marked(request):
    """None of them runs beside this one in `make test`, all in `make full`."""
    items = {item.nodeid: "slow" in item.keywords for item in request.session.items}
    assert {name for name, marked in items.items() if marked} == {*slow.FILE.read_text().splitlines()} & {*items}
