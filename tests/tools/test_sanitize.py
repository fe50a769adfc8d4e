"""The script for compute-sanitizer runs every op and separates explained reports."""
import pytest
import sanitize
import torch
from cases import OPS
from cases_packed import TAKING

from torchsparsekv.ops._machinery import registry

LOG = """========= COMPUTE-SANITIZER
ran append triton 18 times
========= Error: Race reported between Write access at _boundary+0x1230 in find_boundary.py:94
========= Error: Race reported between Write access at _append+0x40 in append.py:60
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def test_explained_reports_are_separated():
    wrong, known = sanitize.found(LOG, "racecheck")
    assert (len(wrong), len(known)) == (1, 1)
    assert "_append" in wrong[0]
    assert len(sanitize.found(LOG, "memcheck")[0]) == 2, "nothing of memcheck is explained"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels would run for real, unwatched")
def test_every_op_is_run(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr("kernels.on", lambda device, things: things)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(registry.Entry, "run", lambda self, kind, *things: ran.append(kind))
    sanitize.run_ops([])
    said = capsys.readouterr().out
    kind = {name: "triton" if "triton" in entry.chain.kinds else "torch" for name, entry in registry.OPS.items()}
    assert all(f"ran {name} {kind[name]} {48 if name in TAKING else 24} times" in said for name in OPS)
    assert "cuda" in ran
