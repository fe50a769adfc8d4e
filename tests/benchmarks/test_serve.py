"""What `bench serve` does around vLLM; what it measures in it: test_vllm.py."""
import contextlib
import dataclasses
import gc
import itertools
import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchsparsekv_benchmarks import _traces
from torchsparsekv_benchmarks.speed import serve

TRACE = str(Path(__file__).parents[2] / "benchmarks" / "results" / "traces" / "qwen_32k.npz")


def test_admitted_are_requests_that_are_whole_and_have_grown():
    """vLLM keeps one block to itself."""
    def admitted(blocks: int) -> int:
        config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=blocks))
        llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
        return serve.admitted(llm, serve.Options(grows=100), 1000)

    each = 69  # blocks of 16 for 1,100 tokens
    assert [admitted(n) for n in (each, each + 1, 3 * each, 3 * each + 1)] == [0, 1, 2, 3]


def test_an_engine_is_gone_before_the_next_is_made(monkeypatch, tmp_path):
    """It asks for most of the GPU; engines hold themselves, and go when someone looks."""
    made: list[weakref.ref] = []

    class Engine:
        def __init__(self):
            self.itself = self

    def rows_of(o, of):
        assert [x() for x in made] == [None] * len(made)
        made.append(weakref.ref(Engine()))
        yield of.named

    monkeypatch.setattr(serve, "rows_of", rows_of)
    monkeypatch.setattr(serve._common, "prepare", lambda *_: None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # run sets it, for good
    gc.disable()
    try:
        serve.run(serve.Options(contexts=(64,)), tmp_path / "serve.json")
    finally:
        gc.enable()
    assert len(made) == 3


def served(steps) -> SimpleNamespace:
    """A vLLM whose steps are done when these are: who gets a token in each."""
    got = lambda i: SimpleNamespace(request_id=i, outputs=[SimpleNamespace(token_ids=[7])], finished=False)  # noqa: E731
    each = ([got(i) for i in ids] for ids in steps)
    engine = SimpleNamespace(add_request=lambda *_: None, abort_request=lambda ids: None, step=lambda: next(each))
    return SimpleNamespace(llm_engine=engine, apply_model=lambda look: None)


def test_steps_are_timed_in_which_all_requests_decode(monkeypatch):
    """The first of them are not, nor those before the last request has begun."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    clock = itertools.count()
    monkeypatch.setattr(serve.time, "perf_counter", lambda: next(clock) / 1000)
    o, both = serve.Options(steps=5), ["0", "1"]
    begin = [[], ["0"], ["0"], both]
    found = serve.measure(served([*begin, *[both] * (serve.WARM + 5 + 1)]), None, o, 2, 40)
    assert found == {"tpot_ms": pytest.approx(1), "tokens_per_s": pytest.approx(2000), "fetched_blocks": 0.0}
    for last in ([], ["0"]):
        with pytest.raises(RuntimeError, match=f"2 requests were to decode together, {len(last)} did: raise grows"):
            serve.measure(served([*begin, *[both] * (serve.WARM + 4), last]), None, o, 2, 40)


def test_every_step_has_blocks_of_the_trace(monkeypatch):
    """A replay begins when all requests decode, and goes on to the step that counts fetched blocks."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    put: list[int] = []
    o, both = serve.Options(steps=5, trace=TRACE), ["0", "1"]
    engine = served([["0"], both, *[both] * (serve.WARM_REPLAY + 5 + 1)])
    step = engine.llm_engine.step
    engine.llm_engine.step = lambda: put.append(-1) or step()
    serve.measure(engine, lambda: put.append(1), o, 2, 40)
    assert put == [-1, -1, *[1, -1] * (serve.WARM_REPLAY + 5 + 1)]


def test_a_method_is_given_what_it_selected_in_the_trace():
    o = serve.Options(methods=("pariskv",), budget=256, block=64, trace=TRACE, contexts=(32768,))
    o.check()
    assert o.selected("pariskv").shape == (8, 256, 256)
    assert torch.equal(o.selected("pariskv"), _traces.read(Path(TRACE), "pariskv", 256))
    assert o.told("pariskv") == {"rest": 64, "trace": "qwen_32k.npz"}


def test_rows_say_what_a_method_is_told_and_its_groups_of_the_rest():
    o = serve.Options(methods=("pariskv", "quest"), block=32, budget=256, hyper=("pariskv.rho=0.9",))
    assert o.told("pariskv") == {"hyper": "rho=0.9", "rest": 32}
    assert o.told("quest") == o.told("") == {}
    ours = serve.engine_options(o, serve.Engine("device", "pariskv", (1000,)))
    assert (ours["ours"], ours["block_size"]) == (dict(method="pariskv", kv="device", budget=256, rho=0.9), 32)
    off = dataclasses.replace(o, hyper=("pariskv.estimate_rest=false",))
    assert off.told("pariskv") == {"hyper": "estimate_rest=False"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(hyper=("pagemean.group=mean",)), "hyper sets pagemean, which is not measured; methods: quest"),
        (dict(block=48), "block_size of the engine must be a power of two, got 48"),
        (dict(places=("triton", "disk")), "places must be of triton, flash, flash-fp8, device, host, auto, got disk"),
        (dict(places=("flash-fp8", "device", "flash")), "places flash-fp8, flash need native"),
        (dict(compiled=True), "compiled needs native"),
        (dict(methods=()), "methods"),
        (dict(batches=(-1,)), "batches"),
        (dict(grows=70), "grows"),
        (dict(contexts=(64, 64)), "contexts"),
        (dict(trace=TRACE, contexts=(32000,)), "qwen_32k.npz needs contexts of at least 32256, got 32000"),
        (dict(trace=TRACE, contexts=(32768,), budget=512), "qwen_32k.npz has no trace of quest=512"),
        (dict(trace=TRACE, contexts=(32768,), grows=120), "grows"),  # a replay has more steps before those timed
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        serve.Options(**options).check()


def test_every_place_is_the_same_engine_with_another_attention():
    """Same sizes, same kernels around; fp8 keys and values where the name says so."""
    o = serve.Options(places=tuple(serve.BACKENDS), contexts=(4096,), native=True, host_gib=2.0, device_gib=1.0)
    o.check()
    found = {of.place: serve.engine_options(o, of) for of in serve.engines(o)}
    told = {place: options.pop("ours") for place, options in found.items()}
    ours = {"method": "quest", "budget": 1024}
    assert {place: x for place, x in told.items() if x} == {
        "device": {**ours, "kv": "device"},
        "host": {**ours, "kv": "host", "host_gib": 2.0},
        "auto": {**ours, "kv": "auto", "host_gib": 2.0, "device_gib": 1.0},
    }
    assert {place for place in found if found[place].pop("kv_cache_dtype", None)} == {"flash-fp8"}
    assert all(x == found["triton"] for x in found.values())
    assert found["triton"]["native"] is True


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (6, [1, 6]), (8, [1, 8]), (27, [1, 8, 16, 24, 27])])
def test_steps_of_all_requests_are_captured(most, sizes):
    assert serve.graph_sizes(most) == sizes


def test_engines_are_made_for_each_method_of_ours_and_each_context():
    o = serve.Options(places=("triton", "auto"), contexts=(64, 32), methods=("quest", "pariskv"))
    kinds = [("triton", ""), ("auto", "quest"), ("auto", "pariskv")]
    assert serve.engines(o) == [serve.Engine(*kind, (context,)) for context in (64, 32) for kind in kinds]
    o = dataclasses.replace(o, shared=True)
    assert serve.engines(o) == [serve.Engine(*kind, (64, 32)) for kind in kinds]
    assert {serve.engine_options(o, of)["max_model_len"] for of in serve.engines(o)} == {64 + o.grows}


@pytest.fixture
def pretended(monkeypatch):
    """Engines that admit four requests, without a GPU."""
    monkeypatch.setattr(serve, "serving", lambda o, of: contextlib.nullcontext((None, None)))
    monkeypatch.setattr(serve, "admitted", lambda *_: 4)
    monkeypatch.setattr(serve._common, "prepare", lambda *_: None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # run sets it, for good


def test_failed_measurements_and_engines_get_rows_that_say_so(pretended, monkeypatch, tmp_path):
    """The other rows are measured."""
    def measure(llm, replay, o, batch, context):
        if batch == 4:
            raise RuntimeError("no memory\nand more")
        return {"tpot_ms": 1.0}

    def serving(o, of):
        if of.place == "triton":
            raise ValueError("no such backend")
        return contextlib.nullcontext((None, None))

    monkeypatch.setattr(serve, "measure", measure)
    monkeypatch.setattr(serve, "serving", serving)
    o = serve.Options(contexts=(64,), places=("triton", "device"), batches=(1, 0, 8))
    rows = serve.run(o, tmp_path / "serve.json")["rows"]
    device = {"place": "device", "method": "quest", "context": 64, "admitted": 4}
    assert rows == [
        {"place": "triton", "context": 64, "failed": "ValueError: no such backend"},
        {**device, "batch": 1, "tpot_ms": 1.0},
        {**device, "batch": 4, "failed": "RuntimeError: no memory"},
        {**device, "batch": 8},
    ]
    assert json.loads((tmp_path / "serve.json").read_text())["rows"] == rows
    with pytest.raises(RuntimeError, match="nothing was measured: ValueError: no such backend"):
        serve.run(dataclasses.replace(o, places=("triton",)))


class Pipe:
    """A process that sends these: a row, the end (None), an exception as the pipe has it, or nothing for a while."""

    def __init__(self, *sent):
        self.sent = [*sent]

    def send(self, _):
        pass

    def poll(self, _):
        return bool(self.sent)

    def recv(self):
        if isinstance(x := self.sent.pop(0), Exception):
            raise x
        return x


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (({"batch": 1}, None), ""),
        (({"batch": 1}, EOFError()), "its process ended with -9"),
        (({"batch": 1},), "was given up after 5 s"),
    ],
)
def test_rows_of_a_process_come_as_they_are_measured(sent, why):
    """If the process dies or takes too long, it is gone before the next begins, and a row says so."""
    calls: list[str] = []
    process = SimpleNamespace(kill=lambda: calls.append("kill"), join=lambda *_: calls.append("join"), exitcode=-9)
    rows = serve._rows_of_process(process, Pipe(*sent), serve.Engine("host", "quest", (64,)), 5)
    failed = [{"place": "host", "method": "quest", "context": 64, "failed": why}] if why else []
    assert list(rows) == [{"batch": 1}, *failed]
    assert calls[-2:] == ["kill", "join"]


def test_isolated_engines_are_begun_one_ahead(pretended, monkeypatch):
    begun: list[str] = []

    def begin(o, of):
        begun.append(of.place)
        process = SimpleNamespace(kill=lambda: None, join=lambda *_: None)
        return process, Pipe({"of": of.place, "begun": len(begun)}, None)

    monkeypatch.setattr(serve, "_begun", begin)
    rows = serve.run(serve.Options(contexts=(64,), places=("device", "host", "auto"), isolated=True))["rows"]
    assert rows == [{"of": "device", "begun": 1}, {"of": "host", "begun": 2}, {"of": "auto", "begun": 3}]
    assert begun == ["device", "host", "auto"]
