"""The benchmarks that build models, at a tiny shape and without a GPU: what they run, not how long it takes."""
import dataclasses
import json

import pytest
import torch
from cli import refused
from timer import COMPILE, PROMPT_MS, SMALL, SPAN, WARM, Watch, watch_on
from timer import watch as on_a_cpu

from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks.speed import _common, patterns
from torchsparsekv_benchmarks.speed.throughput import SPARE_GIB

watch = on_a_cpu  # the fixture
PATTERNS = patterns.Options(
    **SMALL, patterns=("220+30", "120+50"), methods=("full", "arkvale", "louiskv"), batches=(1, 3, 0), most=2,
    prompt_rows=1, points=3, steps=3, locality=0.5, hyper=("louiskv.tau=0.7",),
)  # fmt: skip


# ---------------------------------------------------------------- patterns


@pytest.fixture(scope="module")
def whole() -> tuple[list[dict], Watch]:
    """The rows of one run, and what was watched in it."""
    with pytest.MonkeyPatch.context() as m:
        watch = watch_on(m)
        rows = patterns.run(PATTERNS)["rows"]
    return rows, watch


def test_each_cell_has_a_row(whole):
    rows, _ = whole
    found = [(r["pattern"], r["method"], r["asked"], r["batch"]) for r in rows]
    fits = {"1": 1, "3": 0, "largest": 2}
    want = [(p, m, a, n) for p in PATTERNS.patterns for m in PATTERNS.methods for a, n in fits.items()]
    assert sorted(found) == sorted(want)


def test_one_step_is_compiled_for_all_patterns_of_a_method_and_batch(whole):
    _, watch = whole
    assert watch.compiled == 3 * 2
    assert watch.prompts == 3 * 2 * 2  # one row of each length, after one untimed; larger batches are scaled


def test_the_step_is_never_compiled_again(watch, monkeypatch):
    """Not at another context, nor for another pattern; a guard on what changes there would be seen."""
    monkeypatch.setattr(torch, "compile", lambda f, **_: COMPILE(f, backend="eager", fullgraph=True))
    o = dataclasses.replace(PATTERNS, methods=("louiskv",), batches=(1,), points=2, steps=1)
    assert [r["recompiles"] for r in patterns.run(o)["rows"]] == [0, 0]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_steps_are_timed_where_the_row_says(whole):
    rows, watch = whole
    measured = [r for r in rows if r["batch"]]
    assert [x for r in measured for x in r["contexts"]] == [at - WARM for _, at in watch.steps]
    assert [r["batch"] for r in measured for _ in r["contexts"]] == [n for n, _ in watch.steps]
    for r in measured:
        prompt, output = map(int, r["pattern"].split("+"))
        assert r["contexts"] == [prompt, prompt + (output - SPAN) // 2, prompt + output - SPAN]


def test_an_output_is_the_integral_of_its_steps(whole):
    """Time here is linear in the tokens, so the mean over an output is that of its ends."""
    for r in (r for r in whole[0] if r["batch"]):
        output = int(r["pattern"].split("+")[1])
        assert r["prompt_s"] == pytest.approx(r["batch"] * PROMPT_MS / 1e3)
        assert r["output_s"] == pytest.approx((r["tpot_ms"][0] + r["tpot_ms"][-1]) / 2e3 * (output - 1), rel=1e-5)
        assert r["total_s"] == r["prompt_s"] + r["output_s"]
        assert r["tokens_per_s"] == pytest.approx(r["batch"] * output / r["total_s"])


def test_rates_are_of_the_timed_steps(whole):
    rates = {m: [r for r in whole[0] if r["method"] == m and r["batch"]] for m in PATTERNS.methods}
    assert all("retrieval_rate" not in r for r in rates["full"])
    assert all(r["retrieval_rate"] == 1 and 0 < r["hit_rate"] <= 1 for r in rates["arkvale"])
    assert all(0 < r["retrieval_rate"] < 1 for r in rates["louiskv"])


def test_ratios_are_of_tokens_per_second():
    row = lambda method, asked, batch, speed: {  # noqa: E731
        "pattern": "32768+512", "method": method, "asked": asked, "batch": batch, "tokens_per_s": speed,
    }  # fmt: skip
    rows = [row("full", "1", 1, 50.0), row("arkvale", "1", 1, 80.0), row("louiskv", "1", 1, 100.0),
            {"pattern": "32768+512", "method": "full", "asked": "largest", "batch": 0},
            row("arkvale", "largest", 7, 300.0), row("louiskv", "largest", 8, 900.0)]  # fmt: skip
    patterns.compare(rows)
    found = [(r.get("over_dense"), r.get("over_arkvale"), r.get("paper")) for r in rows]
    assert found == [(1, 0.625, None), (1.6, 1, None), (2, 1.25, 1.9), (None,) * 3, (None, 1, None), (None, 3, 1.9)]


def test_a_run_that_was_stopped_goes_on(whole, watch, tmp_path):
    o = dataclasses.replace(PATTERNS, methods=("full", "arkvale"), batches=(1, 0), hyper=())
    out = tmp_path / "patterns.json"
    watch.stop_after = 3 * o.points + 1
    with pytest.raises(KeyboardInterrupt):
        patterns.run(o, out)
    assert len(json.loads(out.read_text())["rows"]) == 3
    watch.stop_after = None
    rows = patterns.run(o, out)["rows"]
    assert rows == json.loads(out.read_text())["rows"]
    assert rows == [r for r in whole[0] if r["method"] in o.methods and r["asked"] in ("1", "largest")]
    assert len(watch.steps) == 8 * o.points + 1  # the row that was being measured was begun anew
    before = len(watch.steps), watch.prompts
    assert patterns.run(o, out)["rows"] == rows
    assert (len(watch.steps), watch.prompts) == before


def test_a_file_that_something_else_made_is_refused(watch, tmp_path):
    out = tmp_path / "patterns.json"
    _results.save("patterns", [], dataclasses.asdict(PATTERNS), out)
    with pytest.raises(ValueError, match=r"was made with .*'points': 3.* choose another"):
        patterns.run(dataclasses.replace(PATTERNS, points=4), out)
    out.write_text("[]")
    with pytest.raises(ValueError, match="not a file of results"):
        patterns.run(PATTERNS, out)
    assert out.read_text() == "[]"
    assert not watch.steps


def test_the_largest_batch_is_what_fits(watch, monkeypatch):
    """Of GPU memory for two and a half rows of dense cache, dense attention gets two; ArkVale's is in host memory."""
    model = _common.build("tiny", torch.device("cpu"))
    dense = 4 * 2 * 220 * 2 * 64 * 2  # layers, kv heads, tokens, key and value, head_dim, bf16
    weights = sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr(patterns, "gpu_gib", lambda model: (weights + 2.5 * dense) / 2**30 + SPARE_GIB)
    o = dataclasses.replace(PATTERNS, patterns=("200+20",), methods=("full", "arkvale"), batches=(0, 2, 3), most=3)
    found = {(c.method, c.key["asked"]): c.batch for c in patterns.cells(model, o)}
    assert [found["full", asked] for asked in ("largest", "2", "3")] == [2, 2, 0]
    assert [found["arkvale", asked] for asked in ("largest", "2", "3")] == [3, 2, 3]


WRONG = {
    "--patterns=500": "a pattern is PROMPT+OUTPUT", "--patterns=1+500": "in tokens, at least 2+1; got '1+500'",
    "--patterns=500+100": "an output of 100 tokens has no room for 4 points of 72 steps (8 untimed)",
    "--points=1": "points must be at least 2, got 1", "--batches=1,1": "batches must be one or more different values",
    "--batches=-1": "batches must not be negative", "--offload=auto": "offload must be host or device, got 'auto'",
    "--methods=nope": "unknown method 'nope'", "--budget=33": "budget must be a multiple of block_size",
    "--hyper=clusterkv.run=8": "hyper sets clusterkv, which is not measured", "--most=0": "most must be at least 1",
}  # fmt: skip


@pytest.mark.parametrize("arg", WRONG)
def test_wrong_options_are_refused(arg):
    assert WRONG[arg] in refused("bench", "patterns", arg)
