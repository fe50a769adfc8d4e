"""What takes long says how far it is: a line every few seconds in a log, a bar on a terminal; and what is refused."""
import sys

import pytest
import torch
from cli import commands_of, refused
from models import tiny
from paths import ROOT
from world import DEVICE

from torchsparsekv_benchmarks import _progress
from torchsparsekv_benchmarks._progress import Progress, now, watched


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    at = [100.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: at[0])
    return at


def test_a_log_has_a_line_every_few_seconds(clock, capsys):
    done = []
    for x in watched(iter("abcdef"), 6, "sample"):
        done.append(x)
        clock[0] += 2.0  # what is done with an item counts
    assert "".join(done) == "abcdef"
    out, err = capsys.readouterr()
    assert err.splitlines() == ["3 of 6 samples in 6 s", "6 of 6 samples in 12 s"]
    assert out == ""


def test_what_is_quick_says_nothing(clock, capsys):
    with Progress(3, "step") as progress:
        for _ in range(3):
            progress.step()
            clock[0] += 1.0
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_bar(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(watched([1, 2], 2, "sample")) == [1, 2]
    assert "2/2" in capsys.readouterr().err


def test_the_first_of_several_ranks_says_what_comes(monkeypatch, capsys):
    now("quest at 1024 tokens")
    monkeypatch.setenv("LOCAL_RANK", "1")
    now("nothing of this")
    assert capsys.readouterr().err == "... quest at 1024 tokens\n"


def test_calibrate_says_every_step(monkeypatch, capsys):
    from torchsparsekv.commands.calibrate import calibrate

    monkeypatch.setattr(_progress, "SECONDS", 0.0)
    ids = torch.randint(97, (1, 18), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    calibrate(tiny(), ids, 14, 1.0, (0.5,), budget=8, sink=4, window=4, cluster_size=4, segment_max=4, skip_layers=1)
    lines = capsys.readouterr().err.splitlines()
    assert [x.split(" in ")[0] for x in lines] == [f"{i} of 8 steps" for i in range(1, 9)], "4 tokens at two thresholds"


def test_a_report_says_every_figure(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    from torchsparsekv_benchmarks.report import make

    monkeypatch.setattr(_progress, "SECONDS", 0.0)
    make.make([ROOT / "benchmarks/results/h200_prefill.json"], tmp_path / "r.html")
    count = len(make.FIGURES)
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"{count} of {count} figures in ")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["eval", "--lengths", "10"], "eval: a length of 10 tokens is below a budget of 512: longer --lengths, or"),
        (["eval-text", "--lengths", "10"], "eval-text: lengths must leave 2 tokens for the prompt beside 200 steps"),
        (["again", "--results", "nowhere"], "again: there is no folder nowhere of results"),
        (["report", "nowhere.json"], "report: there is no file nowhere.json"),
        (["report", "docs"], "report: docs is a folder, not a file"),
        (["eval", "--model", "./nowhere"], "eval: there is no model at ./nowhere"),
        (["eval-text", "--model", "./nowhere", "--texts", "README.md"], "eval-text: there is no model at ./nowhere"),
        (["eval-text", "--texts", "nowhere.txt"], "eval-text: there is no text nowhere.txt"),
        (["calibrate", "./nowhere", "README.md"], "calibrate: there is no model at ./nowhere"),
        (["calibrate", "./nowhere", "nowhere.txt"], "nowhere.txt"),
        (["plan", "./nowhere"], "plan: there is no model at ./nowhere"),
    ],
)
def test_paths_and_lengths_that_cannot_be(monkeypatch, args, says):
    monkeypatch.chdir(ROOT)
    assert says in " ".join(refused(*args).split())


def test_a_method_that_refuses_a_length_is_named():
    """Before the first sample, with its budget: `eval` has many of both."""
    from torchsparsekv_benchmarks.quality.options import Options, settings
    from torchsparsekv_benchmarks.quality.run import check_settings

    half = ("pariskv.beta=0.5", "pariskv.rho=0.5")
    o = Options(methods=("pariskv",), budgets=(512,), lengths=(1024,), hyper=half)
    with pytest.raises(ValueError, match=r"^pariskv 512 at a length of 1024: pariskv: budget 512 is above the 464"):
        check_settings(tiny(max_position_embeddings=1024), settings(o), o)


def test_the_demo_explains_its_budget():
    from torchsparsekv.commands import load

    (budget,) = [p for p in commands_of(load("demo"))["demo"].params if p.name == "budget"]
    for part in ("the first 32 and the latest 64 tokens", "A multiple of 32", "Dense attention reads the whole text"):
        assert part in budget.help
    assert budget.default == 64
