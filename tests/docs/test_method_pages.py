"""docs/methods: a page for every method, with all its fields, and figures that are those of the code and the files."""
import json
import re
from pathlib import Path

import pytest
import torch

from torchsparsekv.method import all_methods, hyper_parameters, make_method
from torchsparsekv.state import Geometry, total_bytes

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs/methods"


def test_every_method_has_a_page_and_every_page_a_method():
    assert sorted(p.stem for p in PAGES.glob("*.md")) == sorted(all_methods())


@pytest.mark.parametrize("name", all_methods())
def test_the_page(name):
    text = (PAGES / f"{name}.md").read_text()
    assert f"(`{name}`)" in text.splitlines()[0]
    fields = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \| ", text, re.MULTILINE))
    assert fields == {k: repr(v.default) for k, v in hyper_parameters(all_methods()[name]).items()}
    host, device = total_bytes(
        make_method(name).buffers(Geometry(1, 8, 128, 131072, torch.bfloat16, 4)), pool_on_host=True
    )
    assert f"{host / 2**20:.1f} MiB of pool and {device / 2**20:.1f} MiB on the device" in text
    for part in ("## Fields", "## Costs", "## When not"):
        assert part in text


@pytest.mark.parametrize("name", all_methods())
def test_a_time_on_a_page_is_that_of_its_file(name):
    text = (PAGES / f"{name}.md").read_text()
    told = re.findall(r"took ([\d.]+) ms, ([\d.]+) of", text)
    sourced = re.findall(r"took ([\d.]+) ms, ([\d.]+) of[^\[]*\[[^\]]*\]\(../../(benchmarks/results/\S+json)\)", text)
    assert len(told) == len(sourced)
    for ms, over, file in sourced:
        rows = json.loads((ROOT / file).read_text())["rows"]
        row = next(r for r in rows if r["method"] == name and r["context"] == 131072)
        assert (ms, over) == (f"{row['tpot_ms']:.2f}", f"{row['over_floor']:.2f}")
