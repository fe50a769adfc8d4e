"""What `segments.py` and `units.py` measure of LouisKV, held against the method and brute force; and their tables."""
import json
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean, harmonic_mean

import pytest
import torch
from test_cli import ROOT
from test_eval_text import folder  # noqa: F401
from test_methods import Layer
from test_results import rows_of, tables
from test_turns import run, said  # noqa: F401

from torchsparsekv._methods.louiskv import LouisKV
from torchsparsekv.method import make_method
from torchsparsekv.ops.store.rows import keys_of
from torchsparsekv_benchmarks.quality import segments, turn_mass, turns, units
from torchsparsekv_benchmarks.quality._recall import given
from torchsparsekv_benchmarks.quality.heads import Recorded
from torchsparsekv_benchmarks.quality.segments import Read
from torchsparsekv_benchmarks.report import segments as figures
from torchsparsekv_benchmarks.report import style
from torchsparsekv_benchmarks.report.load import load

RESULTS = ROOT / "benchmarks/results"
MODELS = ("smollm2", "recall")
FILES = tuple((kind, m) for kind in ("segments", "units") for m in MODELS)
COMMITTED = {(kind, m): RESULTS / f"cpu_{kind}_{m}.json" for kind, m in FILES}
IN_RING = dict(budget=32, sink=32, window=20, cluster_size=8)
PROMPT, STEPS = 100, 150


def drawn(seed: int = 0, tokens: int = PROMPT + STEPS):
    """Keys of two kv heads, and queries of four heads that turn now and then."""
    g = torch.Generator().manual_seed(seed)
    k, q = torch.randn(1, 2, tokens, 16, generator=g), torch.randn(1, 4, tokens, 16, generator=g)
    return k, q + 2 * torch.randn(1, 4, 1, 16, generator=g)


def fed(method, k, q) -> tuple[Layer, int, list[torch.Tensor]]:
    """After a prompt and steps: where the ring began behind the prompt, and what each step gave."""
    layer = Layer(method, heads=2, group=2, device=torch.device("cpu"))
    layer.feed(q[:, :, :PROMPT], k[:, :, :PROMPT], k[:, :, :PROMPT])
    begin, out = int(layer.state.lengths.ring_begin), []
    for t in range(PROMPT, k.shape[2]):
        out.append(layer.feed(*(x[:, :, t : t + 1] for x in (q, k, k))))
    return layer, begin, out


def steps_of(q) -> torch.Tensor:
    return q[0, :, PROMPT:].transpose(0, 1).unflatten(1, (2, 2))


# ---------------------------------------------------------------- boundaries


def test_segments_are_cut_as_the_method_cuts_them():
    k, q = drawn()
    for shortest, longest, tau in ((4, 8, 0.8), (2, 32, 0.75), (4, 16, 1.0)):
        layer, begin, _ = fed(make_method("louiskv", tau=tau, segment_min=shortest, segment_max=longest, **IN_RING), k, q)
        now = turn_mass.turns(steps_of(q), turns.Rule("", tau))[:, 0]
        ends = segments.cut(now, begin, PROMPT, shortest, longest)
        first, count = layer.state.units.first[0, 0].tolist(), int(layer.state.units.unit_count[0, 0])
        found = [x for x in first[: count + 1] if x > begin]
        assert len(found) > 3
        assert found == ends[: len(found)]
        assert tau == 1 or 0.05 < now.float().mean() < 0.9
        sizes = [j - i for i, j in pairwise(ends)]
        assert min(sizes) >= shortest
        assert max(sizes) <= longest


def test_lengths_are_from_one_retrieval_to_the_next_and_sum_to_the_steps():
    assert segments.lengths(torch.tensor([1, 0, 0, 1, 1, 0]).bool()) == [3, 1, 2]
    found = segments.Boundaries()
    for layer, now in ((0, [1, 1, 1, 1]), (2, [1, 0, 0, 0]), (3, [1, 0, 1, 0]), (2, [1, 1, 0, 1]), (3, [1, 0, 0, 0])):
        found.add(layer, torch.tensor(now).bool())
    row = found.length_row()
    assert row == {"mean": 16 / 7, "steps": 16, "histogram": [[1, 2], [2, 3], [4, 2]]}, "of sparse layers alone"
    layers = {r["layer"]: r for r in found.layer_rows()}
    assert [layers[i]["mean"] for i in (0, 2, 3)] == [1.0, 8 / 4, 8 / 3]
    assert layers[2]["jaccard"] == 0
    assert layers[0]["jaccard"] is layers[3]["jaccard"] is None


def test_jaccard_is_that_of_the_sets_and_chance_that_of_steps_which_know_nothing_of_each_other():
    g = torch.Generator().manual_seed(0)
    for p, q in ((0.3, 0.6), (0.05, 0.9)):
        mine, others = ([torch.rand(20_000, generator=g) < x for _ in range(2)] for x in (p, q))
        for x in (*mine, *others):
            x[0] = True
        steps = lambda many: {(i, t) for i, x in enumerate(many) for t in x.nonzero()[:, 0].tolist() if t}  # noqa: E731
        a, b = steps(mine), steps(others)
        got, chance = segments.jaccard(mine, others)
        assert got == len(a & b) / len(a | b)
        assert got == pytest.approx(chance, abs=0.02)
        assert segments.jaccard(mine, mine)[0] == 1
    none = [torch.tensor([True, False, False])]
    assert segments.jaccard(none, none) == (None, None), "that all begin together says nothing"


# ---------------------------------------------------------------- units


def layer_of(keys: torch.Tensor, queries: torch.Tensor) -> Recorded:
    return Recorded(keys, queries, torch.Generator())


def kept(layer: Recorded, read: Read, tau: float, budget: int) -> dict[str, float]:
    q = layer.queries[read.prompt :].unflatten(1, (layer.heads, -1))
    now = {tau: turn_mass.turns(q, turns.Rule("", tau))[:, 0]}
    return {name: float(mass) for name, _, _, mass in segments.masses(layer, read, now, [budget])}


def by_hand(layer: Recorded, at: int, begin: int, ends: list[int], limit: int, budget: int) -> float:
    """Weight of a step on what runs of tokens keep, one after the other."""
    bounds = [(i, j) for i, j in zip([begin, *ends], ends) if j <= limit]
    frontier, total = bounds[-1][1], 0.0
    q = layer.queries[at].unflatten(0, (layer.heads, -1))
    for x, keys in zip(q, layer.keys):
        weight = (x @ keys[: at + 1].T * layer.d**-0.5).softmax(-1).mean(0)
        score = torch.stack([(x @ keys[i:j].mean(0)) * layer.d**-0.5 for i, j in bounds], 1).softmax(1).sum(0)
        near = [*range(begin), *range(frontier, at + 1)]
        left = budget - (limit - frontier)
        for u in score.argsort(descending=True).tolist():
            taken = list(range(*bounds[u]))[:left]
            near, left = near + taken, left - len(taken)
        assert len(near) == len(set(near)) == min(begin + budget + at + 1 - limit, at + 1), "all attend to as much"
        total += float(weight[near].sum())
    return total / layer.heads


def test_the_weight_of_runs_is_what_a_loop_finds():
    k, q = drawn(1)
    layer, read = layer_of(k[0], q[0].transpose(0, 1)), Read("own", torch.zeros(1), PROMPT, (171, 200))
    got = kept(layer, read, 0.8, 24)
    limits = [(t, t + 1 - read.window) for t in read.scored]
    now = turn_mass.turns(steps_of(q), turns.Rule("", 0.8))[:, 0]
    ends = {
        "segments": segments.cut(now, PROMPT, PROMPT, LouisKV.segment_min, LouisKV.segment_max),
        "pages of 16": [*range(116, PROMPT + STEPS + 1, 16)],
    }  # fmt: skip
    size = round((ends["segments"][-1] - PROMPT) / len(ends["segments"]))
    ends["pages as long"] = [*range(PROMPT + size, PROMPT + STEPS + 1, size)]
    for name, at in ends.items():
        want = fmean(by_hand(layer, t, PROMPT, at, limit, 24) for t, limit in limits)
        assert got[name] == pytest.approx(want, rel=1e-5)
    assert len({round(got[name], 6) for name in ends}) == 3, "told apart"
    assert got["single tokens"] > max(got[name] for name in ends)


def planted(runs: list[int], topics: int) -> Recorded:
    """One head, whose keys are of topics that last for so many tokens; every query looks for what is `topic` 0."""
    directions = 12 * torch.eye(topics, 16)
    at = torch.tensor([i % topics for i, n in enumerate(runs) for _ in range(n)])
    g = torch.Generator().manual_seed(0)
    keys = directions[at] + 0.1 * torch.randn(len(at), 16, generator=g)
    first = torch.tensor([i == 0 for n in runs for i in range(n)])  # where a topic begins the queries turn
    q = directions[0] + 9 * torch.where(first, 1.0, -1.0)[:, None] * torch.eye(16)[15]
    return layer_of(keys[None], q[:, None])


def test_clusters_find_what_is_scattered_and_pages_do_not():
    layer = planted([1] * 400, 8)
    got = kept(layer, Read("prompt", torch.zeros(400), 336, (399,)), 0.0, 64)
    assert got["clusters and segments"] > 0.9
    assert got["pages of 16"] < 0.6
    assert got["single tokens"] > 0.99


def test_segments_find_what_stands_together_and_pages_across_it_do_not():
    layer = planted([40, *([5, 11, 6, 9, 13, 7] * 9)], 6)
    total = layer.total
    got = kept(layer, Read("own", torch.zeros(total), 40, range(total - 20, total)), 0.5, 48)
    assert got["segments"] > got["pages as long"] + 0.03
    assert got["segments"] > got["pages of 16"] + 0.03


# ---------------------------------------------------------------- decoding through the method


def test_every_step_retrieves_and_segments_are_cut_all_the_same():
    k, q = drawn(2)
    method = units.EveryStep(tau=0.8, **IN_RING)
    layer, begin, out = fed(method, k, q)
    assert layer.state.trigger.retrievals.tolist() == [[STEPS, STEPS]]
    now = turn_mass.turns(steps_of(q), turns.Rule("", 0.8))[:, 0]
    ends = segments.cut(now, begin, PROMPT, LouisKV.segment_min, LouisKV.segment_max)
    count = int(layer.state.units.unit_count[0, 0])
    found = [x for x in layer.state.units.first[0, 0].tolist()[: count + 1] if x > begin]
    assert len(found) >= 2
    assert found == ends[: len(found)]
    _, _, same = fed(make_method("louiskv", tau=1.0, **IN_RING), k, q)
    _, _, always = fed(units.EveryStep(tau=1.0, **IN_RING), k, q)
    assert all(torch.equal(a, b) for a, b in zip(same, always)), "at tau 1 it is louiskv"
    assert not all(torch.equal(a, b) for a, b in zip(out, always)), "other segments are other choices"


def test_pages_of_prompt_and_output_stand_in_the_place_of_clusters_and_segments():
    k, q = drawn(3)
    layer, begin, _ = fed(units.EveryStep(paged=8, **IN_RING), k, q)
    assert layer.state.trigger.retrievals.tolist() == [[STEPS, STEPS]]
    first, centroid, count = (x[0, 0] for x in layer.state.units)
    bounds = first[: int(count) + 1].tolist()
    assert bounds[0] == IN_RING["sink"]
    assert bounds[-1] > PROMPT
    sizes = {j: j - i for i, j in pairwise(bounds)}
    assert {n for j, n in sizes.items() if j != begin} == {8}
    for u, (i, j) in enumerate(pairwise(bounds)):
        assert torch.allclose(centroid[u], k[0, 0, i:j].mean(0), atol=1e-6)
    rows = keys_of(layer.state.store.pool)[0, 0, IN_RING["sink"] : begin]
    assert torch.equal(rows, k[0, 0, IN_RING["sink"] : begin]), "no key has moved"


# ---------------------------------------------------------------- the scripts and the figures


SMALL = "--length 200 --steps 32 --own-prompt 40 --own 110 --every 8 --device cpu"


@pytest.fixture(scope="module")
def measured(folder, said, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("segments")
    with pytest.MonkeyPatch.context() as m:
        m.setattr(segments, "DENSE", 1)
        words = f"--model {folder} {SMALL}"
        one = run(segments, f"{words} --samples 2 --budgets 32 64 --out {out / 'segments.json'}")
        two = run(units, f"{words} --samples 1 --budgets 32 --out {out / 'units.json'}")
        return one, two, out / "segments.json"


def test_all_that_was_asked_for_is_measured(measured):
    rows = measured[0]["rows"]
    layers = len({r["layer"] for r in rows if r["figure"] == "layers"})
    for figure, many in (("units", 2 * (6 + 8)), ("lengths", 2 * 3), ("layers", 2 * 3 * layers)):
        assert len([r for r in rows if r["figure"] == figure]) == many
    for r in rows:
        if r["figure"] == "units":
            assert r["mass"] == pytest.approx(fmean(r["by_sample"]), abs=1e-4)
            assert 0 < r["mass"] <= 1.0001
        if r["figure"] == "lengths":
            steps = 2 * (layers - 1) * (32 if r["text"] == "prompt" else 110)
            assert r["steps"] == sum(n * c for n, c in r["histogram"]) == steps
    for r in measured[1]["rows"]:
        assert r["kl"] == pytest.approx(fmean(r["by_sample"]), abs=1e-5)
        assert r["attended"] > 32
    names = [(r["text"], r["units"], r["tau"]) for r in measured[1]["rows"]]
    assert names == [(text, *x) for text in ("prompt", "own") for x in units.schemes(Read(text, torch.zeros(1), 0, ()))]


def test_the_figures_draw_what_the_file_holds(measured):
    pytest.importorskip("matplotlib")
    rows = measured[0]["rows"]
    with style.styled() as plt:
        one, two, three = (f.draw(plt, load([measured[2]]))[0] for f in figures.FIGURES)
        pages = [r["mass"] for r in rows if (r.get("units"), r["text"]) == ("pages of 16", "prompt")]
        (line,) = (x for x in one.figure.axes[0].lines if x.get_color() == figures.OTHERS["pages of 16"])
        assert list(line.get_ydata()) == pages
        own = [r for r in rows if (r["figure"], r["text"], r["tau"]) == ("lengths", "own", 0.7)]
        x, y = two.figure.axes[1].lines[0].get_data()
        assert (list(x), list(y)) == figures.shares(own[0])
        assert y[-1] == 1
        means = [r["mean"] for r in rows if (r["figure"], r["text"], r["tau"]) == ("layers", "prompt", 0.85)]
        assert list(three.figure.axes[0].lines[1].get_ydata()) == means
    assert "Budget: tokens retrieved per kv head" in one.caption
    assert all("2 samples" in d.caption for d in (one, two, three))
    assert "a budget plays no part" in two.caption.lower()


# ---------------------------------------------------------------- the committed files


@pytest.mark.parametrize(("kind", "model"), COMMITTED)
def test_the_command_asks_for_what_the_file_holds(kind, model):
    result = json.loads(COMMITTED[kind, model].read_text())
    python, script, *words = shlex.split(result["command"])
    assert (python, script) == ("python", f"benchmarks/quality/{kind}.py")
    assert Path(words[-1]).name == COMMITTED[kind, model].name
    of = segments.options(None) if kind == "segments" else units.options_of(None)
    asked = given(of.parse_args([*words, "--device", "cpu"]))
    assert asked == result["options"]
    assert asked["model"] == model
    budgets = {(r["text"], r["budget"]) for r in result["rows"] if "budget" in r}
    read = dict.fromkeys(asked.get("kinds", ("prompt", "own")), asked["budgets"])
    if kind == "units" and "own" in read:
        read["own"] = read["own"][:1]
    assert budgets == {(text, b) for text, mine in read.items() for b in mine}
    assert {r["samples"] for r in result["rows"]} == {asked["samples"]}


def of_both(figure: str) -> dict[tuple, list[dict]]:
    """Rows of both models by text, units and tau, in the order of the files."""
    out: dict[tuple, list[dict]] = {}
    for model in MODELS:
        for r in rows_of(COMMITTED["segments", model].name):
            if r["figure"] == figure:
                out.setdefault((r["text"], r.get("units"), r["tau"]), []).append(r)
    return out


def name_of(units_: str, tau: float | None) -> str:
    return units_ if tau is None else f"{units_}, {tau:g}"


def masses() -> list[list[str]]:
    found = []
    for (text, what, tau), rows in of_both("units").items():
        line = [text, name_of(what, tau)]
        for part in (rows[:3], rows[3:]):
            line += [f"{part[0]['unit_tokens']:.1f}", *(f"{r['mass']:.3f}" for r in part)]
        found.append(line)
    return found


SHORT = {"smollm2": "SmolLM2", "recall": "recall"}


def losses() -> list[list[str]]:
    """By decoding."""
    found = []
    for model in ("smollm2", "recall"):
        for r in rows_of(COMMITTED["units", model].name):
            cells = [f"{r['unit_tokens']:.1f}", f"{r['kl']:.3f}", f"{r['agrees']:.3f}", f"{r['attended']:.0f}"]
            found.append([SHORT[model], r["text"], str(r["budget"]), name_of(r["units"], r["tau"]), *cells])
    return found


def long_ones() -> list[list[str]]:
    found = []
    for (text, _, tau), rows in of_both("lengths").items():
        line = [text, f"{tau:g}"]
        for r in rows:
            line += [f"{r['mean']:.2f}", f"{figures.in_long_ones(r):.0%}", str(r["histogram"][-1][0])]
        found.append(line)
    return found


def by_layers() -> list[list[str]]:
    """Of SmolLM2 in thirds: the mean of all segments of these layers, and the means of Jaccard and chance."""
    rows, found = [r for r in rows_of(COMMITTED["segments", "smollm2"].name) if r["figure"] == "layers"], []
    for tau in segments.TAUS:
        for begin in (0, 10, 20):
            line = [f"{tau:g}", f"{begin} to {begin + 9}"]
            for text in ("prompt", "own"):
                mine = [r for r in rows if (r["text"], r["tau"], r["layer"] // 10 * 10) == (text, tau, begin)]
                line.append(f"{harmonic_mean([r['mean'] for r in mine]):.2f}")
                for column in ("jaccard", "chance"):
                    line.append(f"{fmean(r[column] for r in mine if r['jaccard'] is not None):.2f}")
            found.append(line)
    return found


def test_the_page_has_what_was_measured():
    said = tables(ROOT / "docs/methods/louiskv.md")  # noqa: F811
    for table in (masses, losses, long_ones, by_layers):
        assert table() in said, table.__name__


def main() -> None:
    """The tables, to be put on the page."""
    for table in (masses, losses, long_ones, by_layers):
        print(*("| " + " | ".join(line) + " |" for line in table()), "", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
