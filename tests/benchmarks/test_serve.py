"""What `bench serve` does around vLLM; what it measures in it: test_vllm.py."""
import gc
import itertools
import sys
import weakref
from types import SimpleNamespace

import pytest

from torchsparsekv_benchmarks.speed import serve


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

    def rows_of(o, place, context):
        assert [x() for x in made] == [None] * len(made)
        made.append(weakref.ref(Engine()))
        yield {"place": place}

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
    found = serve.measure(served([*begin, *[both] * (serve.WARM + 5 + 1)]), o, 2, 40)
    assert found == {"tpot_ms": pytest.approx(1), "tokens_per_s": pytest.approx(2000), "fetched_blocks": 0.0}
    for last in ([], ["0"]):
        with pytest.raises(RuntimeError, match=f"2 requests were to decode together, {len(last)} did: raise grows"):
            serve.measure(served([*begin, *[both] * (serve.WARM + 4), last]), o, 2, 40)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(places=("triton", "disk")), "places must be of triton, flash, flash-fp8, device, host, got disk"),
        (dict(places=("flash-fp8", "device", "flash")), "places flash-fp8, flash need native"),
        (dict(batches=(-1,)), "batches"),
        (dict(grows=70), "grows"),
        (dict(contexts=(64, 64)), "contexts"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        serve.Options(**options).check()


def test_every_place_is_the_same_engine_with_another_attention():
    """Same sizes, same kernels around; fp8 keys and values where the name says so."""
    o = serve.Options(places=tuple(serve.BACKENDS), native=True)
    o.check()
    found = {place: serve.engine_options(o, place, 4096) for place in o.places}
    assert {place for place in found if found[place].pop("ours")} == {"device", "host"}
    assert {place for place in found if found[place].pop("kv_cache_dtype", None)} == {"flash-fp8"}
    assert all(x == found["triton"] for x in found.values())
    assert found["triton"]["native"] is True
