"""The figure of static shares: it draws the numbers of its file and says what they are of; and the committed files."""
import json
import shlex
import sys
from statistics import fmean

import pytest
from test_cli import ROOT

from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks.quality import static_codes, static_mass
from torchsparsekv_benchmarks.report import static, style
from torchsparsekv_benchmarks.report.load import load
from torchsparsekv_benchmarks.report.make import make

pytest.importorskip("matplotlib")
STATIC = ROOT / "benchmarks/results/quality/static"
COMMITTED = sorted(STATIC.glob("*.json"))
SNAPKV = STATIC.parent / "snapkv/mass_recall.json"
ENVIRONMENT = {"torchsparsekv": "0.1.0", "torch": "2.13.0", "cpu": "a cpu", "threads": 1}


@pytest.fixture
def file(tmp_path):
    near = {"every": 7, "block_size": 32, "update_every": 128, "sink": 32, "window": 64}
    of_all = {"prompt": 100, "steps": 50, "layers": [2, 3]}
    found = {"prkv 0.0": 0.5, "prkv 0.5": 0.7, "prkv 1.0": 0.6, "prkv auto": 0.65, "prkv 0.5 literal": 0.71}
    found["oracle"] = 0.9
    rows = [
        {**of_all, "budget": b, "setting": s, "mass": m + b / 10_000, "shares": [0.25, 0.5]}
        for b in (512, 1024) for s, m in found.items()
    ]  # fmt: skip
    head = {"benchmark": "static_mass", "command": "python x", "environment": ENVIRONMENT}
    path = tmp_path / "mass.json"
    path.write_text(json.dumps(head | {"options": {"model": "recall", **near}, "rows": rows}))
    return path


def test_it_draws_what_the_file_holds(file):
    with style.styled() as plt:
        (drawn,) = static.static(plt, load([file]))
        shade = style.colour("prkv")
        for ax, more in zip(drawn.figure.axes, (0.0512, 0.1024)):
            found = {x.get_marker() + x.get_markerfacecolor(): list(zip(*x.get_data())) for x in ax.lines}
            assert found["o" + shade] == [(s, pytest.approx(m + more)) for s, m in ((0, 0.5), (0.5, 0.7), (1, 0.6))]
            assert found["owhite"] == [(0.5, pytest.approx(0.71 + more))]
            assert found["*" + shade] == [(0.375, pytest.approx(0.65 + more))]
            (level,) = (x for x in ax.lines if x.get_color() == style.colour("oracle"))
            assert list(level.get_ydata()) == [pytest.approx(0.9 + more)] * 2
    for said in ("mean over 2 layers", "every 7th step", "pages of 32", "every 128 tokens", "32 sink and 64 latest"):
        assert said in drawn.caption
    assert drawn.tag == "recall, 100 tokens of prompt and 50 steps"


def test_shares_alone_are_no_curve(file):
    result = json.loads(file.read_text())
    result["rows"] = [r for r in result["rows"] if r["setting"] == "prkv auto"]
    file.write_text(json.dumps(result))
    with style.styled() as plt:
        assert static.static(plt, load([file])) == []


def test_it_is_on_the_page(file, tmp_path):
    written = make([file], tmp_path / "r.html")
    assert [p.name for p in written] == ["r.html", "r_static.png"]
    said = "the recall model, float32. a cpu; torchsparsekv 0.1.0, torch 2.13.0. From <code>mass.json</code>"
    assert said in written[0].read_text()


@pytest.mark.parametrize("path", [*COMMITTED, SNAPKV], ids=lambda p: p.name)
def test_the_command_asks_for_what_the_file_holds(monkeypatch, path):
    result = json.loads(path.read_text())
    module = {"static_mass": static_mass, "static_codes": static_codes}[result["benchmark"]]
    words, told = shlex.split(result["command"]), []
    assert words[:2] == ["python", f"benchmarks/quality/{result['benchmark']}.py"]
    monkeypatch.setattr(sys, "argv", words[1:])
    monkeypatch.setattr(module, "rows", lambda o: [o])
    monkeypatch.setattr(_results, "finish", lambda *a: told.append(a))
    module.main()
    ((_, (o,), options, out),) = told
    assert options == result["options"]
    assert str(out) == path.relative_to(ROOT).as_posix()
    if module is static_codes:
        assert [(r["at"], r["size"]) for r in result["rows"]] == [(a, s) for a in o.at for s in o.sizes]
    else:
        want = [(f"{r['prompt']}:{r['steps']}", r["budget"], r["setting"]) for r in result["rows"]]
        assert want == [(p, b, s) for p in o.parts for b in o.budgets for s in static_mass.settings(o, b)]


MASSES = {
    "mass_smollm2_prompt": "SmolLM2, 7680 + 256", "mass_recall_prompt": "recall model, 7680 + 256",
    "mass_smollm2_generation": "SmolLM2, 512 + 1536", "mass_recall_generation": "recall model, 512 + 1536",
}  # fmt: skip
COLUMNS = (*(f"prkv {s}" for s in static_mass.SHARES), "quest", "prkv_static", "oracle")


def masses(column: str):
    """(label, budget, value by setting) of every file and budget."""
    for path in COMMITTED:
        if path.stem in MASSES:
            rows = json.loads(path.read_text())["rows"]
            for budget in dict.fromkeys(r["budget"] for r in rows):
                yield MASSES[path.stem], budget, {r["setting"]: r[column] for r in rows if r["budget"] == budget}


def test_the_tables_of_the_page_are_those_of_the_files():
    said = (ROOT / "docs/methods/prkv.md").read_text()
    for label, budget, mass in masses("mass"):
        cells = " | ".join(f"{100 * mass[c]:.1f}" for c in COLUMNS)
        assert f"| {label} | {budget} | {cells} |" in said
        for setting in (s for s in mass if s.endswith(static.LITERAL)):
            own = setting.removesuffix(f" {static.LITERAL}")
            told = f"| {label} | {budget} | {own.split()[1]} | {100 * mass[own]:.2f} | {100 * mass[setting]:.2f} |"
            assert told in said
    rows = json.loads((STATIC / "orders_recall_prompt.json").read_text())["rows"]
    for budget, share in ((b, s) for b in (512, 1024) for s in ("0.25", "0.5")):
        mass = {r["setting"]: r["mass"] for r in rows if r["budget"] == budget}
        cells = " | ".join(f"{100 * mass[f'prkv {share}{order}']:.2f}" for order in ("", " literal", " literal anew"))
        assert f"| {budget} | {share} | {cells} |" in said
    rows = json.loads((STATIC / "shares_smollm2.json").read_text())["rows"]
    for budget in (512, 1024):
        cells = " | ".join(f"{fmean(r['shares']):.2f}" for r in rows if r["budget"] == budget)
        assert f"| {budget} | {cells} |" in said
    for path in (p for p in COMMITTED if p.name.startswith("codes")):
        for r in json.loads(path.read_text())["rows"]:
            cells = [r["at"], r["size"], *(f"{r[k]:.3f}" for k in ("overlap", "least_overlap", "held", "least_held"))]
            assert f"| {' | '.join(map(str, cells))} |" in said
