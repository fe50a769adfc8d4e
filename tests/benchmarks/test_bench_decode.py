"""`bench decode`, `prefill` and `kernels`, as test_bench.py has it of the others."""
import dataclasses
import json
import weakref

import pytest
import torch
from cli import refused
from timer import BANK_OF, PROMPT_MS, SMALL
from timer import watch as on_a_cpu

from torchsparsekv.method import all_methods
from torchsparsekv_benchmarks._options import parse, said
from torchsparsekv_benchmarks.quality.options import METHODS
from torchsparsekv_benchmarks.speed import _common, _text_rates, decode, kernels, prefill
from torchsparsekv_benchmarks.speed._synthetic import SINKS, Topics

watch = on_a_cpu  # the fixture
# Not measured yet.
WITHOUT_RATE = {"h2o", "omnikv", "raas", "magicpig", "pagemean", "pqcache", "retroinfer", "shadowkv"}


WRONG_ELSEWHERE = {
    "decode --locality=1.5": "locality must be between 0 and 1, got 1.5", "decode --steps=0": "steps must be at",
    "decode --shape=nope": "unknown shape 'nope'; available: llama-3.1-8b", "decode --contexts=0": "contexts must",
    "decode --contexts=256,3000000": "contexts must be at most 2096732 (llama-3.1-8b has 2097152 positions",
    "decode --contexts=10": "a static cache needs contexts of at least 16, got 10",
    "decode --chunk=-1": "chunk must be 0 or at least 1024, got -1",
    "decode --chunk=1023": "chunk must be 0 or at least 1024, got 1023",
    "decode --batches=0": "batches must be at least 1, got", "decode --batches=": "batches must",
    "decode --batches=1,1": "batches must be one or more different",
    "decode --offload=disk": "offload must be one of auto, host, device, got 'disk'",
    "decode --skip-layers=32": "skip_layers must be from 0 to 31",
    "decode --methods=quest,quest": "methods must be different, got quest, quest",
    "decode --also=prkv.per_head=true": "also changes prkv, which is not measured; methods: quest",
    "decode --also=quest.block_size=3": "block_size must be", "decode --also=quest": "hyper must be METHOD.NAME=VALUE",
    "decode --also=quest.block_size=8,quest.block_size=8": "also must be different values, got quest",
    "decode --layers=33": "layers must be from 1 to 32 (llama-3.1-8b), or 0 for all layers, got 33",
    "decode --layers=2": "skip_layers must be from 0 to 1, got 2",
    "decode --inductor=nope=1": "inductor must be NAME=VALUE of torch._inductor.config, got 'nope=1'",
    "decode --inductor=combo_kernels=2": "inductor: combo_kernels must have the type of its default, False, got '2'",
    "decode --inductor=combo_kernels=true,combo_kernels=true": "inductor sets combo_kernels twice",
    "prefill --offload=disk": "offload must be one of",
    "prefill --contexts=3000000": "contexts must be at most 2097088",
    "prefill --shape=nope": "unknown shape 'nope'", "prefill --repeats=0": "repeats must be at least 1, got 0",
    "prefill --chunk=-1": "chunk must not be negative, got -1",
    "prefill --also=prkv.per_head=true": "also changes prkv, which is not measured; methods: quest, arkvale",
    "prefill --methods=icecache --also=icecache.reuse_every=0": "reuse_every must be at least 1, got 0",
    "prefill --also=quest.block_size=8,quest.block_size=8": "also must be different values",
    "first-call --step=eager": "step must be of auto, captured, compiled, got eager",
    "first-call --step=captured,captured": "step must be one or more different",
    "first-call --caches=kept,empty": "the first of caches must be 'empty', got kept, empty",
    "first-call --caches=warm": "caches must be of empty, kept, got warm",
    "first-call --shape=nope": "unknown shape 'nope'", "first-call --methods=nope": "unknown method 'nope'",
    "first-call --methods=": "methods must be one or more", "first-call --tokens=1": "tokens must be at least 2, got 1",
    "kernels --contexts=-1": "contexts must be at least 1",
    "kernels --methods=quest --hyper=pariskv.beta=0.1": "hyper sets pariskv, which is not measured; methods: quest",
    "kernels --hyper=pariskv.beta=2": "pariskv: beta must be",
    "kernels --methods=louiskv": "no kernels to time for louiskv; available: quest, arkvale, pariskv, prkv",
}  # fmt: skip


@pytest.mark.parametrize("args", WRONG_ELSEWHERE)
def test_wrong_options_are_refused_before_anything_is_built(args):
    assert WRONG_ELSEWHERE[args] in refused("bench", *args.split())


def test_keys_have_topics_sinks_and_outliers_from_any_chunk():
    topics = Topics(heads=2, dim=64, topics=8)
    keys = topics.keys(1, 0, 512, "cpu", torch.float32)[0]  # [heads, tokens, dim]
    q = topics.queries(64, 0.5, "cpu", torch.float32)
    scores = torch.einsum("shd,htd->sht", q, keys - topics.outliers("cpu")[:, None])
    sinks, others = scores[..., :SINKS].mean(-1), scores[..., SINKS:]
    assert float((sinks[..., None] > others).float().mean()) > 0.8, "most queries want the sinks more than most tokens"
    best = others.argmax(-1) // topics.run * 2_654_435_761 % 4_294_967_291 % topics.topics
    assert len(best.unique()) > 4, "and beside them tokens of a topic"
    later = topics.keys(1, 2, 512, "cpu", torch.float32)[0]
    assert float((later[:, :2] - keys[:, 2:4]).norm() / keys[:, 2:4].norm()) < 0.8, "but for the noise"


def test_contexts_shorter_than_the_budget(watch, capsys):
    o = decode.Options(**SMALL | {"budget": 64}, contexts=(40, 100), steps=2, hf_static=False, dense=())
    rows = {(r["method"], r["context"]): r.get("budget") for r in decode.run(o)["rows"]}
    assert rows == {
        ("hf-static", 256): None, ("full", 40): None, ("full", 100): None, ("quest", 40): 32, ("quest", 100): None,
    }  # fmt: skip
    said = [("hf-static", 256), *((m, n) for n in (40, 100) for m in ("full", "quest"))]
    assert capsys.readouterr().err.splitlines() == [f"... {m} at {n} tokens, batch 1" for m, n in said], "before each"


@pytest.mark.parametrize(("chunk", "pieces"), [(0, [(0, 2500)]), (2048, [(0, 1024), (1024, 2048), (2048, 2500)])])
def test_a_prompt_comes_so_many_tokens_at_a_time(watch, monkeypatch, chunk, pieces):
    """Of both rows together."""
    came, keys = [], Topics.keys
    monkeypatch.setattr(Topics, "keys", lambda self, rows, *at: came.append(at[:2]) or keys(self, rows, *at))
    o = decode.Options(**SMALL, contexts=(2500,), batches=(2,), steps=2, hf_static=False, ours=False, dense=())
    decode.run(dataclasses.replace(o, chunk=chunk))
    assert came == pieces
    assert o.chunk == 16384


def test_decode_takes_hyper_parameters(watch):
    o = decode.Options(
        **SMALL, contexts=(200,), methods=("louiskv", "clusterkv"), steps=4, hf_static=False, dense=(), locality=0.9,
        hyper=("clusterkv.every=16",),
    )
    rate = lambda o: {r["method"]: r.get("retrieval_rate") for r in decode.run(o)["rows"]}  # noqa: E731
    default = rate(o)
    assert default["louiskv"] < 0.8 < default["clusterkv"] == 1
    rows = decode.run(dataclasses.replace(o, hyper=(*o.hyper, "louiskv.tau=1.0")))["rows"]
    found = {r["method"]: (r.get("retrieval_rate"), r.get("hyper")) for r in rows}
    assert [found[m] for m in ("full", "louiskv", "clusterkv")] == [(None, None), (1, "tau=1.0"), (1, "every=16")]


def test_a_method_changed_in_one_thing_is_a_row_of_its_own(watch):
    o = decode.Options(
        **SMALL, contexts=(200,), methods=("louiskv", "clusterkv"), steps=4, hf_static=False, dense=(), locality=0.9,
        hyper=("louiskv.cluster_size=4",), also=("louiskv.tau=1.0", "clusterkv.every=16"),
    )
    rows = [(r["method"], r.get("hyper"), r.get("retrieval_rate")) for r in decode.run(o)["rows"]][2:]
    kept = [(name, hyper) for name, hyper, _ in rows]
    assert kept == [
        ("louiskv", "cluster_size=4"), ("clusterkv", None), ("louiskv", "cluster_size=4, tau=1.0"),
        ("clusterkv", "every=16"),
    ]  # fmt: skip
    assert rows[0][2] < 0.8 < rows[2][2] == 1, "as it says, it acts"


def test_rows_at_other_localities(watch):
    """Of methods that retrieve, by the same compiled step; what was fetched is of that row alone."""
    methods, told = ("quest", "streaming"), dict(contexts=(320,), steps=16, hf_static=False, dense=())
    o = decode.Options(**SMALL, **told, methods=methods, locality=1.0, localities=(0.0, 0.5))
    rows = decode.run(o)["rows"][1:]
    found = [(r["method"], r.get("locality")) for r in rows]
    assert found == [("full", None), ("quest", 1.0), ("quest", 0.0), ("quest", 0.5), ("streaming", None)]
    still, never, half = (r["hit_rate"] for r in rows[1:4])
    assert never < half < still == 1
    assert all(r["recompiles"] == 0 for r in rows)


def test_some_jumps_turn_the_query_and_some_do_not(watch):
    """By --turning, where a method that fetches late waits."""
    told = dict(contexts=(320,), steps=8, hf_static=False, dense=(), ours=False, hyper=("quest.prefetch_async=0.8",))
    rows = {}
    for turning in (0.0, 1.0):
        o = decode.Options(**SMALL, **told, methods=("quest",), locality=0.5, turning=turning)
        rows[turning] = decode.run(o)["rows"][-1]
    assert rows[0.0]["fetched_late"] == 1
    assert rows[1.0].get("fetched_late", 0) < 0.3
    topics = Topics(heads=2, dim=128, topics=64, group=2)
    alike = []
    for turning in (None, 0.0, 0.4):
        q = topics.queries(512, 0.5, "cpu", torch.float32, turning)
        cosine = torch.nn.functional.cosine_similarity(q[1:], q[:-1], dim=-1)
        alike.append(float((cosine.unflatten(1, (2, 2)).mean(-1) >= 0.8).float().mean()))
    assert alike[0] == pytest.approx(0.5, abs=0.08)
    assert alike[1] == 1
    assert alike[2] == pytest.approx(0.8, abs=0.05)


def test_a_share_of_jumps_that_turn_is_one():
    with pytest.raises(ValueError, match=r"turning must be between 0 and 1, got 1.5"):
        decode.Options(turning=1.5).check(("quest",))


def test_localities_are_not_beside_those_of_text():
    with pytest.raises(ValueError, match="--locality-of-text replaces locality: leave out --localities"):
        decode.Options(localities=(0.5,), locality_of_text=True).check(("quest",))


def test_what_the_compiler_is_told_is_for_all_rows_and_no_longer(monkeypatch):
    tuned = lambda *_: torch._inductor.config.coordinate_descent_tuning  # noqa: E731
    monkeypatch.setattr(decode, "_run", tuned)
    assert decode.run(decode.Options(inductor=("coordinate_descent_tuning=true",))) is True
    assert tuned() is False


def test_a_model_of_fewer_layers(watch):
    o = decode.Options(**SMALL, contexts=(320,), steps=2, hf_static=False, dense=(), layers=2)
    assert [r["method"] for r in decode.run(o)["rows"]] == ["hf-static", "full", "quest"]
    assert _common.build("tiny", torch.device("cpu"), layers=2).config.num_hidden_layers == 2


def test_a_context_at_which_nothing_dense_fits(watch):
    o = decode.Options(**SMALL, contexts=(320,), steps=2, hf_static=False, dense=(), ours=False)
    rows = decode.run(o)["rows"]
    assert [r["method"] for r in rows] == ["hf-static", "quest"]
    assert "speedup" not in rows[1]
    assert rows[1]["over_floor"] == rows[1]["tpot_ms"] / rows[0]["tpot_ms"]


def test_two_million_tokens_of_the_model_that_is_to_hold_them():
    o = decode.Options(shape="qwen2.5-7b-1m", contexts=(1 << 21,), pool_dtype="int8", hf_static=False, dense=())
    _common.check(("quest",), o)


@pytest.mark.parametrize("wrong", [(0.5, 0.5), (0.95,), (1.5,)])
def test_wrong_localities_are_refused(wrong):
    with pytest.raises(ValueError, match=r"localities must be from 0 to 1, different, and not 0.95 again, got "):
        decode.Options(localities=wrong).check(("quest",))


def test_every_method_is_timed(watch, monkeypatch, tmp_path):
    """Each row is on file as soon as it is known: a method that fails does not cost those before it."""
    out, names, run = tmp_path / "decode.json", [n for n in all_methods() if n != "full"], decode.rows_of_method
    o = decode.Options(**SMALL, contexts=(320,), methods=tuple(names), steps=2, hf_static=False, dense=())
    timed = lambda: [r["method"] for r in json.loads(out.read_text())["rows"]]  # noqa: E731
    decode.run(o, out)
    assert timed() == ["hf-static", "full", *names]
    monkeypatch.setattr(decode, "rows_of_method", lambda m, name, *rest: 1 / (name != "quest") and run(m, name, *rest))
    with pytest.raises(ZeroDivisionError):
        decode.run(dataclasses.replace(o, methods=("streaming", "quest")), out)
    assert timed() == ["hf-static", "full", "streaming"]


def test_every_block_new_with_tokens_and_clusters_too(watch):
    """`--locality 0`, the worst case: what one step fetched serves the next hardly ever."""
    methods, hyper = ("quest", "pariskv", "louiskv"), ("pariskv.full_threshold=0", "louiskv.cluster_size=4")
    o = decode.Options(**SMALL, contexts=(320,), methods=methods, steps=4, hf_static=False, dense=(), hyper=hyper)
    hits = {}
    for locality in (0.0, 1.0):
        rows = {r["method"]: r for r in decode.run(dataclasses.replace(o, locality=locality))["rows"]}
        assert locality or rows["louiskv"]["retrieval_rate"] > 0.9
        hits[locality] = {m: rows[m]["hit_rate"] for m in methods}
    assert all(hits[0.0][m] < 0.65 < hits[1.0][m] for m in methods), hits


def test_the_locality_of_text(watch, monkeypatch, tmp_path):
    """The mean at the budget closest by ratio, of the run that had all methods; the row says which budget."""
    measured = ((0, 16, 0.75), (0, 128, 0.9), (0, 129, 0.99), (1, 32, 0.5))  # more than an eighth of it; another run
    rows = [{"source": 0, "method": "dense", "budget": None, "length": 1024}]
    rows += [
        {"source": source, "method": "quest", "budget": budget, "hit_rate": rate, "length": 1024}
        for source, budget, rate in measured
    ]
    file = tmp_path / "text.json"
    file.write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(_text_rates, "FILE", file)
    assert _text_rates.nearest("quest", 32) == (0.75, 16)
    assert _text_rates.nearest("quest", 1000)[1] == 128
    asked = []
    bank = lambda t, locality, d, turning: asked.append(locality) or BANK_OF(t, locality, d, turning)  # noqa: E731
    monkeypatch.setattr(decode, "bank_of", bank)
    o = decode.Options(
        **SMALL, contexts=(200,), methods=("quest", "streaming"), steps=2, hf_static=False, dense=(),
        locality_of_text=True,
    )  # fmt: skip
    found = {r["method"]: (r.get("locality"), r.get("of_text_at")) for r in decode.run(o)["rows"]}
    assert found == {"hf-static": (None, None), "full": (None, None), "quest": (0.75, 16), "streaming": (None, None)}
    assert 0.75 in asked
    with pytest.raises(ValueError, match=r"text.json has no hit rate of pariskv; it has: quest"):
        decode.run(dataclasses.replace(o, methods=("pariskv",)))


def test_the_committed_file_has_a_rate_of_every_method_that_retrieves():
    rates = _text_rates.measured()
    known = all_methods()
    retrieving = {m for m in METHODS if known[m]().traits.attends == "selected"}
    assert retrieving - {"random", "prkv_static", *WITHOUT_RATE} <= set(rates)
    assert all(0 < x < 1 for by in rates.values() for x in by.values())


def test_prompts_of_every_kind_of_index_are_timed(watch, capsys):
    o = prefill.Options(shape="tiny", contexts=(1024,), methods=("louiskv", "clusterkv", "pariskv"), repeats=1)
    rows = prefill.run(o)["rows"]
    assert [(r["method"], r["ttft_ms"]) for r in rows] == [(m, PROMPT_MS) for m in ("dense", *o.methods)]
    assert watch.prompts == 2 * 4
    assert "... prompts of 1024 tokens: dense, louiskv, clusterkv, pariskv" in capsys.readouterr().err


def test_a_gpu_that_is_too_old_for_a_method_is_refused(monkeypatch):
    """Before anything is built, and by what the method is told."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")
    monkeypatch.setattr(_common, "build", lambda *_: pytest.fail("built"))
    for bench in ("kernels", "decode", "prefill"):
        assert "quest needs compute capability 8.9, an A100 has 8.0" in refused("bench", bench, "--methods=quest")
    o = decode.Options(hyper=("quest.digest=bfloat16",))
    assert _common.prepare(o.methods, o) == torch.device("cuda")
    o = kernels.Options(methods=("quest",), hyper=("quest.digest=bfloat16",))
    monkeypatch.setattr(kernels, "pinning", lambda device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kernels.run(o)


def test_kernels_are_of_the_methods_that_were_asked_for(monkeypatch):
    """What their states, which are made on a GPU, are made for."""
    made = []
    monkeypatch.setattr(kernels.Layers, "__init__", lambda self, method, *rest: made.append(method) or 1 / 0)
    o = kernels.Options(methods=("pariskv", "quest"), hyper=("pariskv.beta=0.2", "pariskv.rho=0.3"))
    for name in o.methods:
        with pytest.raises(ZeroDivisionError):
            kernels.Bench(name, o, 2048, "cuda")
    assert [(m.name, m.budget) for m in made] == [("pariskv", 100), ("quest", 1024)]
    assert (made[0].beta, made[0].rho) == (0.2, 0.3)


def test_kernels_are_told_against_the_ceilings_of_the_run():
    rows = [
        {"kernel": kernels.READ, "GB_per_s": 4000.0}, {"kernel": kernels.LINK, "GB_per_s": 50.0},
        {"kernel": "scores", "context": 8, "GB_per_s": 3000.0}, {"kernel": "top blocks", "context": 8},
        {"kernel": "fetch, nearly all misses", "context": 8, "GB_per_s": 45.0},
    ]  # fmt: skip
    kernels.against_ceilings(rows)
    assert [r.get("of_ceiling") for r in rows] == [None, None, 0.75, None, 0.9]


def test_pinning_is_timed_before_the_ceilings_and_nothing_of_it_stays(monkeypatch):
    told, at, gone = [], [0.0], "gone"

    def pin(what: str, seconds: float):
        def make(n, **_):
            at[0] += seconds
            told.append((what, *(n if isinstance(n, tuple) else (n,))))
            out = torch.zeros(1)
            weakref.finalize(out, told.append, gone)
            return out

        return make

    monkeypatch.setattr(kernels.host, "available", lambda: 80 << 30)
    monkeypatch.setattr(kernels.host, "pinned", lambda shape, dtype, device: pin("ours", 0.5)(shape))
    monkeypatch.setattr(torch, "empty", pin("torch", 2.0))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: told.append("emptied"), raising=False)
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: at[0])
    rows = kernels.pinning("cuda")
    per_row = lambda what, n: [(what, 1), gone, *[(what, n << 30), gone, "emptied"] * 3]  # noqa: E731
    assert told == per_row("ours", 16) + per_row("torch", 4)
    beside = "torch.empty(pin_memory=True), 4 GiB (beside)"
    assert [(r["method"], r["kernel"], r["us"]) for r in rows] == [
        ("torchsparsekv", "pin host memory (16 GiB)", 5e5), ("torch", beside, 2e6),
    ]  # fmt: skip
    assert [r["GB_per_s"] for r in rows] == pytest.approx([34.36, 2.147], rel=1e-3)
    ceilings = [{"kernel": kernels.READ, "GB_per_s": 4.0}, {"kernel": kernels.LINK, "GB_per_s": 5.0}]
    kernels.against_ceilings(rows + ceilings)
    assert not any("of_ceiling" in r for r in rows)
    monkeypatch.setattr(kernels.host, "available", lambda: 9 << 30)
    assert ["2 GiB" in r["kernel"] for r in kernels.pinning("cuda")] == [True, True], "no more than a quarter"


def test_prompts_go_in_chunks(watch):
    lengths: list[int] = []
    model = lambda ids, **_: lengths.append(ids.shape[1])  # noqa: E731
    assert prefill.time_prompt(model, torch.zeros(1, 100), None, chunk=48) == PROMPT_MS
    assert prefill.time_prompt(model, torch.zeros(1, 100), None) == PROMPT_MS
    assert lengths == [48, 48, 4, 100]


def test_a_file_is_said_without_its_folder():
    assert said({"selecting_layers": "a/b/found.json", "rank_from": "keys", "r": 0.5}) == {
        "hyper": "selecting_layers=found.json, rank_from=keys, r=0.5"
    }


def test_old_names_of_hyper_parameters_are_taken_with_a_warning():
    with pytest.warns(FutureWarning, match="choosers is now selecting_layers"):
        assert parse(["icecache.choosers=found.json"]) == {"icecache": {"selecting_layers": "found.json"}}
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match=r"hyper sets quest\.prefetch_async twice"):
        parse(["quest.fetch_late=0.5", "quest.prefetch_async=0.5"])
