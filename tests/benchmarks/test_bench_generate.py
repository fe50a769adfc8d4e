"""`bench generate`: a real model through the stock generate(). On a CPU, with a tiny model."""
import json
from types import SimpleNamespace

import pytest
import torch
from byte_tokenizer import bytes_tokenizer
from cli import refused
from evaluating_text import folder as of_a_tiny_model
from timer import prepare

import torchsparsekv
from torchsparsekv_benchmarks.quality import texts
from torchsparsekv_benchmarks.quality.pretrained import Files
from torchsparsekv_benchmarks.report import tables
from torchsparsekv_benchmarks.report.markdown import RESULTS
from torchsparsekv_benchmarks.speed import _common, generate

folder = of_a_tiny_model  # the fixture
WRONG = {
    "--rows=0": "rows must be at least 1, got 0", "--rows=2,2": "rows must be one or more different values",
    "--places=disk": "places must be of auto, host, device, got disk", "--tokens=25": "tokens must be at least 26",
    "--methods=full": "full always runs", "--text=nowhere.txt": "there is no text nowhere.txt",
    "--hyper=arkvale.block_size=16": "hyper sets arkvale", "--places=host,host": "places must be one or more different",
    "--offload=device": "offload has no effect here, got device: name places",
}  # fmt: skip


@pytest.mark.parametrize("arg", WRONG)
def test_wrong_options_are_refused(arg):
    assert WRONG[arg] in refused("bench", "generate", arg)


def test_defaults_fit_the_default_model():
    assert generate.Options().context + generate.Options().tokens <= 32768, "positions of Qwen2.5-Coder-1.5B"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(rows=(99,)), "99 samples of 120 and a target each need 11979: name a longer text, or fewer or short"),
        (dict(context=385), "context 385 and tokens 128 are more than the 512 positions of .*: give a smaller context"),
    ],
    ids=["text", "positions"],
)
def test_prompts_longer_than_text_or_positions_are_refused_before_the_model_loads(folder, monkeypatch, given, says):
    monkeypatch.setattr(_common, "prepare", prepare)
    monkeypatch.setattr(Files, "load", lambda *_: pytest.fail("the model loads"))
    small = dict(model=str(folder), text=str(folder / "said.txt"), context=120, methods=("quest",))
    with pytest.raises(ValueError, match=says):
        generate.run(generate.Options(**small | given))


def test_time_of_a_step_is_the_median_between_the_first_and_the_profiled_steps():
    timed = [9000.0, 9000.004, 9000.007, 9000.107]
    clock = generate.Clock(generate.WARM + len(timed) + generate.PROFILED)
    clock.times = [100.0 * i for i in range(generate.WARM)] + timed + [9e4 * i for i in range(generate.PROFILED)]
    assert clock.step_ms() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("spans", "length"),
    [
        ([], 0), ([(5, 7)], 2), ([(0, 2), (5, 6)], 3), ([(0, 4), (3, 6)], 6), ([(0, 9), (2, 3), (4, 5)], 9),
        ([(0, 9), (2, 3), (8, 11)], 11), ([(6, 8), (0, 2), (1, 3)], 5), ([(0, 2), (2, 4)], 4), ([(1, 3), (1, 3)], 2),
    ],
    ids=["none", "one", "separate", "overlapping", "nested", "after a nested one", "unsorted", "touching", "equal"],
)  # fmt: skip
def test_time_under_several_intervals_counts_once(spans, length):
    assert generate.covered(spans) == length


class Profiler:
    """Stands in for torch.profiler.profile. Notes the number of steps at which the profiler starts and stops."""

    def __init__(self, clock: generate.Clock, spans: list[tuple[str, float, float]]):
        self.clock, self.spans, self.at = clock, spans, []

    def start(self):
        self.at.append(len(self.clock.times))

    stop = start

    def events(self):
        kinds = torch.autograd.DeviceType
        return [
            SimpleNamespace(device_type=getattr(kinds, d), time_range=SimpleNamespace(start=a, end=b))
            for d, a, b in self.spans
        ]


def profiled(monkeypatch, is_cuda: bool, *spans) -> tuple[generate.Clock, Profiler, list[int]]:
    """A clock after all of its steps, its profiler, and the numbers of steps at which the host waited for the GPU."""
    clock = generate.Clock(generate.WARM + 4 + generate.PROFILED)
    profiler, waits = Profiler(clock, list(spans)), []
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(clock.times)))
    for _ in range(clock.tokens):
        clock(SimpleNamespace(is_cuda=is_cuda), None)
    return clock, profiler, waits


def test_busy_time_is_of_the_last_steps_on_the_gpu(monkeypatch):
    clock, profiler, waits = profiled(monkeypatch, True, ("CUDA", 1e4, 1.8e4), ("CPU", 0, 9e9), ("CUDA", 1.6e4, 2.6e4))
    assert profiler.at == waits == [clock.tokens - generate.PROFILED, clock.tokens]
    assert clock.busy_ms() == pytest.approx(16 / generate.PROFILED)


def test_busy_time_needs_a_gpu_and_a_kernel(monkeypatch):
    clock, profiler, waits = profiled(monkeypatch, False, ("CUDA", 0, 8e3))
    assert profiler.at == waits == []
    assert clock.busy_ms() is None
    assert profiled(monkeypatch, True, ("CPU", 0, 8e3))[0].busy_ms() is None


def test_table_has_the_busy_time_or_a_dash(tmp_path):
    """A dash also where a file has no run of that many prompts: `icecache` ran with 24 only."""
    for name in ("h200_generate.json", "h200_generate_24.json"):
        result = json.loads((RESULTS / name).read_text())
        for row in result["rows"]:
            row.pop("busy_ms", None)
            if row["method"] in ("quest", "icecache"):
                row["busy_ms"] = row["rows"] + (0.25 if row["place"] == "host" else 0.125)
            if row["method"] == "full":
                row["busy_ms"] = None
        (tmp_path / name).write_text(json.dumps(result))
    about, _, head, _, *rows = tables.made("generate", tmp_path).splitlines()
    assert "GPU ms a step: the time of a step in which at least one kernel or copy ran" in about
    at = head.split(" | ").index("GPU ms a step, 1")
    assert [row.split(" | ")[at : at + 3] for row in rows] == [
        *[["-", "-", "-"]] * 4, ["1.12", "14.12", "24.12"], ["1.25", "14.25", "24.25"], ["-", "-", "24.12"],
        ["-", "-", "24.25"],
    ]  # fmt: skip


def test_each_row_is_a_method_in_a_place_with_its_answers_compared(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(_common, "prepare", prepare)
    load = Files.load

    def with_end_tokens(files, device, dtype):
        model = load(files, device, torch.float32)
        model.generation_config.eos_token_id = list(range(8, model.config.vocab_size))  # an answer does not end there
        return model

    patch, offloads = torchsparsekv.patch, []

    def noted(model, method, **given):
        offloads.append(given["offload"])
        return patch(model, method, **given)

    monkeypatch.setattr(Files, "load", with_end_tokens)
    monkeypatch.setattr(torchsparsekv, "patch", noted)
    o = generate.Options(
        model=str(folder), text=str(folder / "said.txt"), context=120, rows=(2,), tokens=26, methods=("pariskv",),
        budget=16, sink=8, window=8, skip_layers=0, places=("device", "host"), hyper=("pariskv.full_threshold=0",),
    )  # fmt: skip
    out = tmp_path / "generate.json"
    generate.run(o, out)
    result = json.loads(out.read_text())
    assert result["options"]["acts"]["pariskv"]["estimate_rest"] is True
    stock, dense, device, host = result["rows"]
    assert [(r["method"], r["place"], r["rows"]) for r in (stock, dense, device, host)] == [
        ("stock", None, 2), ("full", None, 2), ("pariskv", "device", 2), ("pariskv", "host", 2),
    ]  # fmt: skip
    assert "hit_rate" not in stock
    assert dense["hit_rate"] is None
    assert 0 < device["hit_rate"] <= host["hit_rate"] <= 1
    assert offloads == ["device", "device", "host"]
    assert device["device_GiB"] > 0
    assert device["same"] == host["same"] == 1, "where keys are does not change an answer"
    assert all(r["busy_ms"] is None for r in result["rows"]), "a CPU has no busy time of a GPU"
    assert all(r["tokens_per_s"] == pytest.approx(2e3 / r["step_ms"]) for r in result["rows"])


def test_prompts_are_stretches_and_answers_that_differ_from_the_first_place_are_counted(monkeypatch, folder, tmp_path):
    said = iter([torch.zeros(2, 18)] * 3 + [torch.tensor([[0.0] * 18, [0.0] * 17 + [1.0]])])
    o = generate.Options(model=str(folder), text=str(folder / "said.txt"), context=384, rows=(2,), methods=("quest",))
    prompts, saved, out = [], [], tmp_path / "generate.json"

    def measure(model, ids, method, place, o):
        prompts.append(ids)
        saved.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
        return {"method": method}, next(said)

    monkeypatch.setattr(_common, "prepare", prepare)
    monkeypatch.setattr(generate, "measure", measure)
    monkeypatch.setattr(Files, "load", lambda *_: SimpleNamespace(eval=lambda: None))
    assert [r.get("same") for r in generate.run(o, out)["rows"]] == [None, None, 1, 0.5]
    assert saved == [0, 1, 2, 3], "a run that is stopped leaves its rows"
    stretches = texts.read_one(o.text, bytes_tokenizer()).rows(384, range(2))[:, :-1]
    assert all(torch.equal(ids, stretches) for ids in prompts)
