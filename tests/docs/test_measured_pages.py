"""Tables in docs/methods that are of measurements of a real model: they are those of the files."""
import json
import statistics

from test_cli import ROOT
from test_results import rows_of, tables

from torchsparsekv_benchmarks.quality.text_summary import summarize
from torchsparsekv_benchmarks.report.load import load
from torchsparsekv_benchmarks.report.turns import RULES, verdict
from torchsparsekv_benchmarks.speed import _text_rates

PAGES, RESULTS = ROOT / "docs/methods", ROOT / "benchmarks/results"


def rules() -> list[list[str]]:
    """A line for every rule: at each threshold or stride, how often it retrieves and what it keeps."""
    out = []
    for rule in RULES:
        mine = [r for r in rows_of("cpu_turn_mass.json") if r["rule"] == rule]
        at = [f"{r['tau'] or r['stride']:g}: {r['retrieval_rate']:.0%} {r['mass']:.3f}" for r in mine]
        out.append([rule, "; ".join(at)])
    return out


def ideas() -> list[list[str]]:
    out = []
    for r in rows_of("cpu_ablate_pariskv.json"):
        if "coarse" in r:
            last = "" if r["estimate"] is None else f"{r['estimate']:.3f}"
            out.append([r["method"], f"{r['coarse']:.3f}", f"{r['exact']:.3f}", last])
    return out


def intervals() -> list[list[str]]:
    rows = [r for r in rows_of("cpu_ablate_pariskv.json") if "near" in r]
    return [[str(r["window"]), str(r["interval"]), f"{r['near']:.0f}", f"{r['mass']:.3f}"] for r in rows]


def hits() -> list[list[str]]:
    return [[m, *(f"{x:.3f}" for _, x in sorted(by.items()))] for m, by in sorted(_text_rates.measured().items())]


def test_the_hit_rates_of_text():
    assert hits() in tables(RESULTS / "README.md")


def test_prkv_and_icecache():
    floor, *rows = rows_of("h200_decode_prkv.json")
    page, found = ROOT / "docs/results.md", []
    assert f"the floor is {floor['tpot_ms']:.2f} ms" in " ".join(page.read_text().split())
    for context in (131072, 524288):
        here = {r["method"]: r for r in rows if r["context"] == context}
        assert not any(r[x] for r in here.values() for x in ("recompiles", "graph_skips", "memory_growth"))
        at = f"{context // 1024}K"
        dense = [", ".join(f"{here[m][x]:.2f}" for m in ("sdpa-cudnn", "full")) for x in ("tpot_ms", "over_floor")]
        found.append([at, "cuDNN, ours", *dense, "", "", f"{here['full']['device_GiB']:.1f}", ""])
        for m in ("prkv", "icecache"):
            r = here[m]
            times = [f"{r['tpot_ms']:.2f}", f"{r['over_floor']:.2f}", f"{r['speedup']:.2f}x", f"{r['hit_rate']:.2f}"]
            found.append([at, m, *times, *(f"{r[x]:.1f}" for x in ("device_GiB", "host_GiB"))])
    assert found in tables(page)


STAGES = {
    "quest": ("scores", "top blocks"), "pariskv": ("votes", "rank_by_votes", "rerank", "top of the candidates"),
}  # fmt: skip


def stages_of(name: str, method: str, context: int) -> dict[str, dict]:
    found = [r for r in rows_of(name) if r["method"] == method and r.get("context") in (context, None)]
    return {r["kernel"]: r for r in found}


def stages(method: str) -> list[list[str]]:
    """A line for every stage: microseconds before and now, and the least it could be, at both contexts."""
    now = "h200_kernels.json"
    rates = [stages_of(now, "torch", 0)[f"read {what}"]["GB_per_s"] for what in ("in HBM", "of pinned host memory")]
    ours = ("append", "index update (nothing leaves)", *STAGES[method], "fetch, all hits", "attention")
    out = []
    for stage in (*ours, "select, all of it (beside)", "fetch, nearly all misses"):
        out.append([method, stage])
        for context in (131072, 524288):
            old = stages_of("earlier/" + now, method, context).get(stage)
            r = stages_of(now, method, context)[stage]
            least = max(r["us"] * r.get("GB_per_s", 0) / rates[stage.startswith("fetch")], 1.2)
            limit = "-" if "beside" in stage else f"{least:.1f}"
            out[-1] += [f"{old['us']:.1f}" if old else "-", f"{r['us']:.1f}", limit]
    return out


def test_where_the_time_of_a_layer_goes():
    page = ROOT / "docs/results.md"
    assert stages("quest") + stages("pariskv") in tables(page)
    rows = rows_of("h200_decode.json")
    step = next(r["tpot_ms"] for r in rows if (r["method"], r["context"]) == ("quest", 131072))
    parts = stages_of("h200_kernels.json", "quest", 131072)
    mine = 30 * sum(r["us"] for stage, r in parts.items() if "beside" not in stage and "misses" not in stage) / 1e3
    dense = 2 * stages_of("h200_kernels.json", "full", 131072)["dense attention"]["us"] / 1e3
    said = f"takes {step:.2f} ms. 30 sparse layers of the six stages are {mine:.2f} of it, two dense ones {dense:.2f}; "
    assert f"{said}the other {step - mine - dense:.1f} are" in " ".join(page.read_text().split())


def test_pariskv_by_batch():
    found = []
    for name, context, batch in (("_32k_batch8", 32768, 8), ("", 131072, 1), ("_batch4", 131072, 4)):
        rows = rows_of(f"h200_decode_pariskv{name}.json")
        at = {r["method"]: r["tpot_ms"] for r in rows if r["context"] == context}
        ms = [at["full"], at["pariskv"]]
        assert {r["batch"] for r in rows} == {batch}
        rate = [f"{batch / x * 1e3:.0f}" for x in ms]
        found.append([f"{context // 1024}K", str(batch), *(f"{x:.2f}" for x in ms), *rate, f"{ms[0] / ms[1]:.2f}x"])
    assert found in tables(ROOT / "docs/results.md")


def test_what_updates_of_prkv_cost():
    floor, dense, often, once = rows_of("h200_decode_prkv_updates.json")
    both = [often["tpot_ms"], once["tpot_ms"]]
    said = {p: " ".join((ROOT / p).read_text().split()) for p in ("docs/results.md", "docs/methods/prkv.md")}
    assert "it took {:.2f} ms with its updates and {:.2f} without".format(*both) in said["docs/results.md"]
    assert f"they cost {100 * (both[0] / both[1] - 1):.1f} % of a step" in said["docs/results.md"]
    page = said["docs/methods/prkv.md"]
    assert "{:.2f} ms with one every 128 tokens, {:.2f} with none after the first".format(*both) in page
    cost = f"{100 * (both[0] / both[1] - 1):.1f} % of a step"
    assert f"**Updates cost {cost}**" in page
    assert f"over which {both[0]:.2f} is {both[0] / floor['tpot_ms']:.2f})" in page
    assert "99th percentile {:.2f} and {:.2f}".format(*(r["p99_ms"] for r in (often, once))) in said["docs/results.md"]
    assert f"is {both[0] / floor['tpot_ms']:.2f}, and our dense {dense['tpot_ms']:.2f}" in said["docs/results.md"]
    before, (floor, often, once) = both[0], rows_of("h200_decode_prkv_launch.json")
    now = often["tpot_ms"]
    text = f"it took {now:.2f} ms and {once['tpot_ms']:.2f}, {now / floor['tpot_ms']:.2f} of that run's floor"
    assert f"{text}, the 99th percentile {often['p99_ms']:.2f} and {once['p99_ms']:.2f}" in said["docs/results.md"]
    assert f"the step at 128K {before:.2f} ms instead of {now:.2f}" in page


def test_at_the_hit_rates_of_a_text():
    floor, dense, *rows = rows_of("h200_decode_text.json")
    page, found = ROOT / "docs/results.md", []
    for r in rows:
        ms = [f"{r[x]:.2f}" for x in ("tpot_ms", "p99_ms", "over_floor")]
        found.append([r["method"], f"{r['locality']:.3f}", f"{r['hit_rate']:.3f}", *ms, f"{r['speedup']:.2f}x"])
        rate, budget = _text_rates.nearest(r["method"], 1024)
        assert (r["locality"], r["of_text_at"]) == (round(rate, 3), budget)
    assert sorted(found, key=lambda row: float(row[3])) in tables(page)
    words = " ".join(page.read_text().split())
    assert f"floor {floor['tpot_ms']:.2f} ms, our dense {dense['tpot_ms']:.2f}, all with 1024 tokens" in words
    assert {r["of_text_at"] for r in rows} == {256}


def test_a_step_without_the_compiler():
    rows = {r["what"]: r for r in rows_of("earlier/h200_captured.json")}
    found = []
    for m in ("quest", "pariskv"):
        both = [rows[f"{m}, {how}"] for how in ("eager step captured", "compiled")]
        ms, first = ([r[x] for r in both] for x in ("tpot_ms", "seconds_to_first_replay"))
        found.append([m, *(f"{x:.2f}" for x in ms), *(f"{x:.1f}" for x in first)])
        pays = (first[1] - first[0]) / (ms[0] - ms[1]) * 1e3  # tokens
        assert abs(pays - 20_000) < 2_000
        assert round(ms[0] / ms[1], 1) == 1.3
    assert found in tables(ROOT / "docs/results.md")


def test_the_first_call_of_a_process():
    rows = rows_of("earlier/h200_first_call.json")
    by = {(r["method"], r["step"], r["caches"] == "empty"): r for r in rows}
    found = []
    for m, step in (("quest", "compiled"), ("quest", "captured"), ("pariskv", "captured")):
        rows = [by[m, step, empty] for empty in (True, False) if (m, step, empty) in by]
        first = [f"{r['first_s']:.1f}" for r in rows] + [""] * (2 - len(rows))
        ms = dict.fromkeys(f"{r['tpot_ms']:.2f}" for r in sorted(rows, key=lambda r: r["tpot_ms"]))
        found.append([f"{m}, {step}", *first, f"{rows[0]['second_s']:.1f}", " to ".join(ms)])
        if step == "captured":
            assert {r["agrees_with_eager"] for r in rows} == {64}
    page = tables(ROOT / "docs/results.md")
    assert found in page
    found = []
    for m in ("quest", "pariskv"):
        rows = rows_of(f"h200_first_call_{m}.json")
        assert {(r["method"], r["step"]) for r in rows} == {(m, "captured")}
        first = [f"{r['first_s']:.1f}" for r in rows] + ["-"] * (2 - len(rows))
        ms = " to ".join(f"{r['tpot_ms']:.2f}" for r in rows)
        found.append([m, *first, f"{rows[0]['second_s']:.1f}", ms])
    assert found in page


def test_fetch_and_attention_in_one():
    found = []
    for m in ("quest", "arkvale", "pariskv"):
        us = {k: r["us"] for k, r in stages_of("earlier/h200_kernels_brings.json", m, 131072).items()}
        apart = [us[f"fetch, {what}"] + us["attention"] for what in ("all hits", "nearly all misses")]
        both = [us[f"fetch and attention, {what}"] for what in ("all hits", "nearly all misses")]
        found.append([m, *(f"{x:.1f}" for pair in zip(apart, both) for x in pair)])
    assert found in tables(ROOT / "docs/results.md")


def test_families_with_experts_windows_and_linear_layers():
    found = []
    for shape in ("gpt-oss-20b", "qwen3-30b-a3b", "qwen3-next-12", "gemma3-12b"):
        dense, ours = rows_of(f"h200_shapes_{shape}.json")
        assert (dense["method"], ours["method"]) == ("full", "quest")
        for r in (dense, ours):
            assert not r["recompiles"] + r["graph_skips"] + r["memory_growth"]
            assert r["found"] == r["found_compiled"]
        ms = [f"{r['tpot_ms']:.2f}" for r in (dense, ours)]
        rest = f"{ours['speedup']:.2f}x", f"{ours['hit_rate']:.2f}", f"{ours['host_GiB']:.1f}"
        found.append([shape, *ms, *rest, dense["found"], ours["found"]])
    assert found in tables(ROOT / "docs/results.md")


def test_pariskv_searches_as_its_authors_do():
    search = stages_of("h200_kernels_authors.json", "pariskv", 131072)["select, all of it (beside)"]["us"]
    words = " ".join((ROOT / "docs/results.md").read_text().split())
    assert f"twice as many candidates are reranked, and it takes {search:.1f} at 128K" in words


def first_tokens(kind: str) -> dict[tuple[str, int], float]:
    """Over the unpatched model's, by method, with reuse or without, and context."""
    said = lambda r: r["method"] + ("`, `reuse_every=3" if "reuse_every=3" in r.get("hyper", "") else "")  # noqa: E731
    return {(said(r), r["context"]): r["over_dense"] for r in rows_of(f"h200_prefill{kind}.json")}


def test_time_to_the_first_token():
    for method, kind in (("prkv", "_prkv"), ("icecache", "_icecache"), ("icecache", "_prkv"), ("snapkv", "_prkv")):
        over = first_tokens(kind)
        words = " ".join((PAGES / f"{method}.md").read_text().split())
        assert all(f"{over[method, n]:.3f}" in words for n in (32768, 65536)), method
    found = []
    for method, kind in (
        ("quest", "_pages"), ("pariskv", ""), ("clusterkv", ""), ("louiskv", "_louiskv"),
        *((m, "_prkv") for m in ("prkv", "arkvale")), ("icecache", "_icecache"),
        ("icecache`, `reuse_every=3", "_icecache"), ("snapkv", "_prkv"),
    ):  # fmt: skip
        over = first_tokens(kind)
        found.append([method, *(f"{over[method, n]:.3f}" for n in (32768, 65536)), f"h200_prefill{kind}"])
    assert found in tables(ROOT / "docs/results.md")


def test_when_every_block_is_new():
    words = " ".join((ROOT / "docs/results.md").read_text().split())
    for file, said in {
        "h200_decode_worst_tokens.json": "`pariskv` {pariskv:.2f} ms, `louiskv` {louiskv:.2f}",
        "h200_decode_int8_worst.json": "`quest` takes {quest:.2f} ms and `arkvale` {arkvale:.2f}",
    }.items():
        rows = rows_of(file)
        assert said.format(**{r["method"].replace("-", "_"): r["tpot_ms"] for r in rows}) in words
        assert all(r["hit_rate"] < 0.01 for r in rows if "hit_rate" in r)


def test_a_pool_in_8_bits():
    kl: dict[tuple, dict] = {}
    for name in ("text_2048", "text_2048_more"):
        for i, pool in enumerate(("", "_int8")):
            for r in map(json.loads, (RESULTS / f"quality/int8/{name}{pool}_cpu.jsonl").read_text().splitlines()):
                if r.get("budget"):
                    kl.setdefault((r["method"], r["budget"], i), {})[r["index"]] = statistics.fmean(r["kl"])
    found = []
    for m in ("quest", "arkvale", "pariskv", "louiskv", "icecache", "clusterkv", "prkv", "snapkv"):
        each = [kl[m, budget, i] for budget in (64, 256) for i in (0, 1)]
        assert all(set(x) == {0, 1} for x in each)
        means = [statistics.fmean(x.values()) for x in each]
        assert max(means[1] - means[0], means[3] - means[2]) <= 0.005, "our goal"
        found.append([m, *(f"{x:.4f}" for x in means)])
    assert found in tables(ROOT / "docs/quality.md")


def kl_of(name: str, method: str, budget: int) -> float:
    (result,) = load([RESULTS / "quality" / name])
    return next(r["kl"] for r in summarize(result.rows) if (r["method"], r["budget"]) == (method, budget))


def test_the_pages_of_icecache():
    """What its default for 256 tokens stands on."""
    all_of_it = "text/text_2048_h200.jsonl"
    now, then = (kl_of(name, "icecache", 256) for name in ("pages/text_2048_icecache_cpu.jsonl", all_of_it))
    clusters = kl_of(all_of_it, "clusterkv", 256)
    quality = " ".join((ROOT / "docs/quality.md").read_text().split())
    assert f"has a KL of {now:.4f}," in quality
    assert f"{now / clusters:.2f} times that of `clusterkv`" in quality
    assert now / clusters < 1.1 < then / clusters
    said = " ".join((PAGES / "icecache.md").read_text().split())
    assert f"is {now:.3f} with 8 and {then:.3f} with 16, where `clusterkv` has {clusters:.3f}" in said
    each = [kl_of(f"pages/text_2048_icecache{n}_short_cpu.jsonl", "icecache", 256) for n in (4, 8, 16)]
    assert "it was {:.3f} with 4, {:.3f} with 8 and {:.3f} with 16".format(*each) in said


def test_what_reuse_costs_icecache():
    want = []
    for n, name in (
        ("1", "nodes8"), ("2", "reuse2"), ("3", "reuse3"), ("2, same heads", "reuse2_same"),
        ("3, same heads", "reuse3_same"), ("selecting_layers", "selecting_layers"),
    ):  # fmt: skip
        (result,) = load([RESULTS / f"quality/icecache/text_2048_{name}_cpu.jsonl"])
        at = {r["budget"]: r for r in summarize(result.rows) if r["method"] == "icecache"}
        cells = [(f"{r['kl']:.4f}", f"{r['kl_p95']:.3f}", f"{r['agrees']:.3f}") for r in (at[64], at[256])]
        want.append([n, *cells[0], *cells[1]])
    assert want in tables(PAGES / "icecache.md")


def test_what_snapkv_loses_on_a_text():
    """Beside methods that were asked for the same stretches and steps on a GPU."""
    own, others = "snapkv/text_2048_snapkv_cpu.jsonl", "text/text_2048_h200.jsonl"
    said = " ".join((PAGES / "snapkv.md").read_text().split())
    wide = lambda file, method: [f"{kl_of(file, method, b):.{d}f}" for b, d in ((64, 3), (256, 3), (1024, 4))]  # noqa: E731
    assert "is {} at 64 tokens, {} at 256 and {} at 1024".format(*wide(own, "snapkv")) in said
    for method in ("prkv_static", "streaming"):
        assert "{:.3f}, {:.3f} and {:.3f}".format(*(kl_of(others, method, b) for b in (64, 256, 1024))) in said
    means = [f"{kl_of(own, 'snapkv', b):.4f}" for b in (64, 256, 1024)]
    quality = " ".join((ROOT / "docs/quality.md").read_text().split())
    assert "a KL of {}, {} and {} at the three budgets".format(*means) in quality


def test_two_gpus():
    found = []
    for context in (131072, 524288):
        rows = {r["method"]: r for r in rows_of("h200_parallel.json") if r["context"] == context}
        dense, quest = rows["full"], rows["quest"]
        assert quest["ranks"] == 2
        assert not any(r[x] for r in (dense, quest) for x in ("recompiles", "graph_skips", "memory_growth"))
        assert quest["logits_error"] < 6.05e-7
        line = [f"{context // 1024}K", *(f"{x:.2f}" for x in (dense["tpot_ms"], quest["tpot_ms"], quest["over_floor"]))]
        found.append([*line, f"{quest['speedup']:.2f}x", *(f"{quest[x][0]:.1f}" for x in ("host_GiB", "device_GiB"))])
    assert found in tables(ROOT / "docs/results.md")


def rules_by_kl() -> list[list[str]]:
    found: dict[str, dict[str, list[str]]] = {}
    for r in rows_of("cpu_turns.json"):
        at = str(r["stride"]) if r["tau"] is None else f"{r['tau']:g}"
        of = found.setdefault(r["rule"], {}).setdefault(r["text"], [])
        of.append(f"{at}: {r['retrieval_rate']:.0%} {r['kl']:.4f}")
    return [[rule, *("; ".join(found[rule][text]) for text in ("prompt", "own"))] for rule in RULES if rule in found]


def test_the_rules_of_louiskv():
    page = PAGES / "louiskv.md"
    assert rules() in tables(page)
    assert rules_by_kl() in tables(page)
    said = " ".join(page.read_text().split())
    assert verdict([r for r in rows_of("cpu_turn_mass.json") if r["text"] == "prompt"]) in said


def test_the_ideas_and_intervals_of_pariskv():
    found = tables(PAGES / "pariskv.md")
    assert ideas() in found
    assert intervals() in found


def test_the_clusters_of_clusterkv():
    mass = {r["rule"]: f"{r['mass']:.3f}" for r in rows_of("cpu_turn_mass.json")}
    said = " ".join((PAGES / "clusterkv.md").read_text().split())
    of = lambda size: [mass[f"clusters of {size} by {how}"] for how in ("distance", "cosine")]  # noqa: E731
    want = "clusters of 16 keep {} by distance and {} by cosine, clusters of 80 {} and {}"
    assert want.format(*of(16), *of(80)) in said


def test_throughput_with_the_whole_gpu():
    """A file's first row names it; what a method takes is beside the best dense of the same run."""
    found = []
    for name in ("32k", "32k_int8", "128k", "128k_int8", "pariskv_int8"):
        head = json.loads((RESULTS / f"h200_throughput_{name}.json").read_text())
        o, link = head["options"], f"[{name}](../benchmarks/results/h200_throughput_{name}.json)"
        best = max(r["tokens_per_s"] for r in head["rows"] if r["method"] in ("full", "sdpa-cudnn"))
        for r in head["rows"]:
            dense = {"full": "dense: ours", "sdpa-cudnn": "dense: cuDNN"}.get(r["method"])
            pool = "16 bits" if dense or o["pool_dtype"] == "auto" else o["pool_dtype"]
            what = dense or (f"`{r['method']}`" if o["budget"] == 1024 else f"`{r['method']}`, budget {o['budget']}")
            found.append([
                f"{r['context'] // 1024}K", what.strip("`"), pool, str(r["batch"]), f"{r['tpot_ms']:.2f}",
                f"{r['tokens_per_s']:.0f}", f"{r['tokens_per_s'] / best:.2f}x", link,
            ])  # fmt: skip
            link = ""
    assert found in tables(ROOT / "docs/results.md")
    p99 = {r["method"]: r["p99_ms"] for r in rows_of("h200_throughput_32k_int8.json")}
    words = " ".join((ROOT / "docs/results.md").read_text().split())
    assert "{quest:.1f} ms for `quest` and {arkvale:.1f} for `arkvale`".format(**p99) in words


def test_a_pool_in_8_bits_by_what_is_found():
    floor, *rows = rows_of("h200_decode_int8_localities.json")
    rows.sort(key=lambda r: -r["locality"])
    found = [
        [
            f"{r['locality']:g}", f"{r['hit_rate']:.3f}", f"{r['host_MB_per_step']:.1f}", f"{r['tpot_ms']:.2f}",
            f"{r['tpot_ms'] / floor['tpot_ms']:.2f}", f"{r['tpot_ms'] / rows[0]['tpot_ms']:.2f}",
        ]
        for r in rows
    ]  # fmt: skip
    assert found in tables(ROOT / "docs/results.md")
    half, whole = rows[2], rows[0]["tpot_ms"]
    link = half["host_MB_per_step"] / 55  # GB/s
    words = " ".join((ROOT / "docs/results.md").read_text().split())
    assert f"needs {link:.2f} ms ({half['host_MB_per_step']:.1f} MB at 55 GB/s), so {1 + link / whole:.2f} is" in words
