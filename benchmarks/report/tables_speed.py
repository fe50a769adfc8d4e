"""Tables of time and memory. One function per table; its arguments are the files named above it, in their order."""

from typing import Any

from torchsparsekv_benchmarks.report.load import Result
from torchsparsekv_benchmarks.report.markdown import (
    DENSE,
    ONCE,
    at,
    floor,
    gpu,
    hits,
    markdown,
    named,
    number,
    queries,
    shape,
    span,
    table,
    times,
)
from torchsparsekv_benchmarks.report.style import tokens

SHORT, LONG, LONGEST = 8192, 131072, 524288
RUNS = {  # the files of each method; no two hold the same context of it
    "quest": ("h200_decode_short.json", "h200_decode.json"),
    "arkvale": ("h200_decode.json",),
    "pariskv": ("h200_decode_pariskv.json",),
    "icecache": ("h200_decode_icecache.json", "h200_decode_icecache_512k.json"),
    "prkv": ("h200_decode_prkv.json",),
    "clusterkv": ("h200_decode_p99.json",),
    "louiskv": ("h200_decode_clusters.json",),
    "snapkv": ("h200_decode_snapkv.json",),
    "h2o": ("h200_decode_h2o.json",),
    "raas": ("h200_decode_raas.json",),
}
FILES = tuple(dict.fromkeys(f for files in RUNS.values() for f in files))
COLUMNS = ("ms a token", "99th percentile", "times the floor", "speed-up", "hits", "GiB on the GPU", "GiB on the host")
SMALL_BUDGET = 100  # of `pariskv` in its paper, and in older files


def budgeted(row: dict[str, Any], budget: int) -> str:
    """The method of a row, with a budget that is not the usual one."""
    return named(row) + f", budget {budget}" * (row["method"] == "pariskv" and budget == SMALL_BUDGET)


def cells(row: dict[str, Any]) -> list[str]:
    return [
        number(row["tpot_ms"]), number(row.get("p99_ms")), number(row.get("over_floor")), times(row.get("speedup")),
        number(row.get("hit_rate")), number(row.get("device_GiB") or None, 1), number(row.get("host_GiB"), 1),
    ]  # fmt: skip


def steps(method: str, results: dict[str, Result]) -> list[dict[str, Any]]:
    """The rows of a method with its defaults, by context."""
    every = [
        x for f in RUNS[method] for x in results[f].rows
        if x["method"] == method and (method in ONCE or not x.get("hyper"))  # a larger buffer serves those nothing
    ]  # fmt: skip
    return [x for x in every if x["context"] >= SHORT]


def keyed(results: tuple[Result, ...]) -> dict[str, Result]:
    return {r.path.name: r for r in results}


# ---------------------------------------------------------------- time per token


RESIDENT = "h200_decode_auto_512k.json"


@table("speed-by-context", RESIDENT, *FILES)
def speed_by_context(resident: Result, *results: Result) -> str:
    files = keyed(results)
    rows = [x for f in RUNS["quest"] for x in files[f].rows if x["method"] in DENSE and x["context"] >= SHORT]
    rows += [x for method in RUNS for x in steps(method, files)]
    rows.sort(key=lambda x: (x["context"], x["method"] not in DENSE, x["tpot_ms"]))
    small = files[RUNS["pariskv"][0]].options["budget"]
    told = [[tokens(x["context"]), budgeted(x, small), *cells(x)] for x in rows]
    names = {"quest": "`quest`, `auto`", "pariskv": "`pariskv` + rest, budget 1024, `auto`"}
    told += [[tokens(x["context"]), names[x["method"]], *cells(x)] for x in resident.rows if x["method"] in names]
    said = (
        f"Budget 1024 unless a row says otherwise; {queries(rows, *results)}. `auto`: the cache takes up to half of "
        f"the free GPU memory, and hits are {hits(resident.rows)}. `snapkv`, `h2o`, `raas`: the hot buffer holds all "
        "that can be selected."
    )
    return markdown(said, ["context", "method", *COLUMNS], told)


def _dense_ms(results: tuple[Result, ...]) -> str:
    return span([x["tpot_ms"] for r in results for x in r.rows if x["method"] in DENSE])


@table("speed-512k-int8", *(f"h200_decode_512k_int8{name}.json" for name in ("_256", "")))
def speed_512k_int8(*results: Result) -> str:
    """The longest context with a pool in 8 bits. A later file counts."""
    found = {
        (x["method"], r.options["budget"]): x
        for r in results for x in r.rows if x["method"] not in (*DENSE, "hf-static")
    }  # fmt: skip
    told = [[f"`{method}`", budget, *cells(x)] for (method, budget), x in found.items()]
    said = (
        f"{tokens(LONGEST)}, pool and dense layers in 8 bits, hot buffers of `auto`; synthetic queries of locality "
        f"{results[0].options['locality']}. Speed-up: over cuDNN's dense attention in 16 bits, {_dense_ms(results)} "
        "ms. Dense attention in 8 bits was not measured here."
    )
    return markdown(said, ["method", "budget", *COLUMNS], told)


def _of_method(method: str) -> None:
    @table(f"method-speed:{method}", *RUNS[method])
    def method_speed(*results: Result) -> str:
        rows = steps(method, keyed(results))
        told = [[tokens(x["context"]), *cells(x)] for x in rows]
        said = (
            f"{gpu(*results)}, {shape(*results)}, random weights in bf16, batch 1, budget "
            f"{span({r.options['budget'] for r in results}, 0)}, two dense layers, pool in host memory, dense "
            f"attention on the GPU; {queries(rows, *results)}. [Speed](../results/speed.md) explains the columns."
        )
        return markdown(said, ["context", *COLUMNS], told)


for _method in RUNS:
    _of_method(_method)


AT_256 = "h200_decode_trace_256.json"
REPLAY = "h200_decode_trace_5.json"
AT_5_PERCENT = (REPLAY, "h200_decode_trace_retroinfer.json")
TRACED = ("h200_decode_trace_auto.json", AT_256, *AT_5_PERCENT, "h200_decode_trace_more.json")
FIVE_PERCENT = "hot_budgets=6"  # of 128K tokens, at a budget of 1024
BUFFERS = {"": "auto", FIVE_PERCENT: "5 %", "hot_budgets=25": "5 %"}  # the last one at a budget of 256
WITH_REST, WITHOUT = "estimate_rest=True", "estimate_rest=False"
LAYERS = {"llama-3.1-8b": 32}


def estimates(r: Result, x: dict[str, Any]) -> bool:
    """Whether a row is of a method with the rest: by its own hyper-parameters, else by those of its run."""
    own, acts = (x.get("hyper") or "").split(", "), r.options.get("acts", {}).get(x["method"], {})
    return WITH_REST in own or bool(acts.get("estimate_rest") and WITHOUT not in own)


def _hyper_without_rest(x: dict[str, Any]) -> str:
    """The hyper-parameters of a row without `estimate_rest`."""
    return ", ".join(t for t in (x.get("hyper") or "").split(", ") if t not in (WITH_REST, WITHOUT))


def traced(*results: Result) -> list[tuple[list[str], dict[str, Any]]]:
    """Each method by its trace: method, budget and hot buffer, and the row. Of a setting that was run twice it is the
    run that stands first."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for r in results:
        for x in (x for x in r.rows if x.get("trace")):
            name, buffer = f"`{x['method']}`" + " + rest" * estimates(r, x), BUFFERS[_hyper_without_rest(x)]
            rows.setdefault((name, str(r.options["budget"]), buffer), x)
    found = sorted(rows.items(), key=lambda x: (-int(x[0][1]), x[0][2] != "auto", x[1]["tpot_ms"]))
    return [([*names], x) for names, x in found]


@table("speed-trace", *TRACED)
def speed_trace(*results: Result) -> str:
    said = (
        f"{tokens(LONG)}. Replay: each layer fetches the blocks that heads of Qwen2.5-Coder-1.5B selected, step by "
        f"step, after 120K of source code. Dense attention, cuDNN's, took {_dense_ms(results)} ms in these runs."
    )
    told = [[*names, *cells(x)[:-1]] for names, x in traced(*results)]
    return markdown(said, ["method", "budget", "hot buffer", *COLUMNS[:-1]], told)


@table("speed-rest", REPLAY, AT_256, "h200_decode_rest_512k.json")
def speed_rest(*results: Result) -> str:
    """What the rest costs: the same steps without and with it."""
    told = []
    for r in results:
        sparse = (r.options["layers"] or LAYERS[r.options["shape"]]) - r.options["skip_layers"]
        pairs: dict[tuple[str, str], dict[bool, dict[str, Any]]] = {}
        for x in (x for x in r.rows if x["method"] in r.options["methods"]):
            pairs.setdefault((x["method"], _hyper_without_rest(x)), {})[estimates(r, x)] = x
        for (method, _), pair in pairs.items():
            if len(pair) == 2:
                was, x = pair[False], pair[True]
                more = x["tpot_ms"] - was["tpot_ms"]
                told.append([
                    tokens(x["context"]), f"`{method}`", r.options["budget"], number(was["hit_rate"]),
                    number(was["tpot_ms"]), number(x["tpot_ms"]), f"{1000 * more / sparse:.1f}",
                    f"{100 * more / was['tpot_ms']:.1f} %", number(x["device_GiB"] - was["device_GiB"]),
                ])  # fmt: skip
    said = (
        f"At {tokens(LONG)}: replay as in the table above, "
        f"with a hot buffer of 5 % at a budget of 1024, and of `auto` at 256. At {tokens(LONGEST)}: synthetic queries "
        f"of locality {results[-1].options['locality']}. Both steps of a row are of one run."
    )
    head = ["context", "method", "budget", "hits", "ms a token", "with the rest", "us more a sparse layer", "more",
            "GiB more on the GPU"]  # fmt: skip
    return markdown(said, head, told)


@table("speed-reuse", "h200_decode_icecache.json")
def speed_reuse(r: Result) -> str:
    """IceCache where some layers choose for others."""
    rows = [x for x in r.rows if x["method"] == "icecache"]
    told = [[x.get("hyper", "").split("=")[0] or "every layer chooses", *cells(x)] for x in rows]
    names = {"reuse_every": "`reuse_every=3`", "choosers": "`selecting_layers`, read from a file"}
    told = [[names.get(x[0], x[0]), *x[1:]] for x in told]
    said = f"{tokens(LONG)}, budget {r.options['budget']}; {queries(rows, r)}."
    return markdown(said, ["`icecache`", *COLUMNS], told)


@table("speed-text", "h200_decode_text.json")
def speed_text(r: Result) -> str:
    rows = sorted((x for x in r.rows if "locality" in x), key=lambda x: x["tpot_ms"])
    said = (
        f"{tokens(LONG)}, budget {r.options['budget']}; synthetic queries that miss about as often as the method did "
        "with SmolLM2-135M on 2K tokens of a novel, at a budget of 256. `louiskv` retrieves at every step."
    )
    dense = [at(r, "full", LONG)]
    return markdown(
        said, ["method", *COLUMNS], [[f"`{x['method']}`" if x in rows else named(x), *cells(x)] for x in dense + rows]
    )


@table(
    "speed-worst", "h200_decode_worst.json", "h200_decode_worst_arkvale.json", "h200_decode_worst_tokens.json",
    "h200_decode_int8_localities.json",
)  # fmt: skip
def speed_worst(quest: Result, arkvale: Result, others: Result, packed: Result) -> str:
    picked = [
        at(quest, "quest", LONG),
        at(arkvale, "arkvale", LONG),
        at(others, "pariskv", LONG),
        at(others, "louiskv", LONG),
    ]
    rows = [(x, "16 bits") for x in picked] + [(x, "int8") for x in packed.rows if x.get("locality") == 0]
    said = (
        f"{tokens(LONG)}, budget 1024; synthetic queries that move to another topic at every step (locality 0), hits "
        f"{hits(x for x, _ in rows)}. The floors of these runs are "
        f"{span([x['tpot_ms'] / x['over_floor'] for x, _ in rows])} ms."
    )
    head = ["method", "pool", "ms a token", "times its floor", "speed-up", "MB a step from host memory"]
    told = [
        [f"`{x['method']}`", pool, number(x["tpot_ms"]), number(x.get("over_floor")), times(x.get("speedup")),
         number(x["host_MB_per_step"], 0)]
        for x, pool in rows
    ]  # fmt: skip
    return markdown(said, head, told)


@table("speed-by-hits", "h200_decode_int8_localities.json")
def speed_by_hits(r: Result) -> str:
    rows = sorted((x for x in r.rows if "locality" in x), key=lambda x: -x["locality"])
    said = (
        f"{tokens(LONG)}, `quest`, budget {r.options['budget']}, pool in 8 bits; synthetic queries, with the locality "
        "of each row."
    )
    head = ["locality", "hits", "MB a step from host memory", "ms a token", "times the floor"]
    return markdown(said, head, [
        [f"{x['locality']:g}", number(x["hit_rate"]), number(x["host_MB_per_step"], 1), number(x["tpot_ms"]),
         number(x["over_floor"])] for x in rows
    ])  # fmt: skip


@table("prefetch-async-speed", "h100/decode_late.json")
def prefetch_async_speed(r: Result) -> str:
    rows, turning = [x for x in r.rows if "locality" in x], f"{100 * r.options['turning']:.0f} %"
    said = (
        f"{gpu(r)}, {shape(r)}, {tokens(LONG)}, batch 1, `quest`, budget {r.options['budget']}, pool in host memory; "
        f"synthetic queries with the locality of each row; of the jumps to another topic {turning} "
        "change the query much, the others little. Late: fetched blocks that arrived while later layers computed."
    )
    head = ["`prefetch_async`", "locality", "hits", "late", *COLUMNS[:4]]
    return markdown(said, head, [
        [x.get("hyper", "=none").split("=")[1], f"{x['locality']:g}", number(x["hit_rate"]),
         number(x.get("fetched_late")), *cells(x)[:4]] for x in rows
    ])  # fmt: skip


@table("dense-kernels", "h200_decode_dense.json")
def dense_kernels(r: Result) -> str:
    names = [x["method"] for x in r.rows if x["context"] == LONG]
    said = f"{gpu(r)}, {shape(r)}, batch 1, dense attention, all keys and values on the GPU."
    contexts = (LONG, LONGEST)
    rows = [[NAMES_OF_DENSE[n], *(number(at(r, n, c)["tpot_ms"]) for c in contexts)] for n in names]
    return markdown(said, ["kernel", *(f"{tokens(c)}, ms a token" for c in contexts)], rows)


NAMES_OF_DENSE = {"full": "ours (`full`)", "sdpa-cudnn": "cuDNN", "sdpa-flash": "flash", "flashinfer": "FlashInfer"}


@table("compiler-option", "h100/decode_untuned.json", "h100/decode_tuned.json")
def compiler_option(*results: Result) -> str:
    quest = [at(r, "quest", LONG) for r in results]
    said = (
        f"{gpu(*results)}, {shape(*results)}, {tokens(LONG)}, batch 1, budget 1024, pool in host memory; "
        f"{queries(quest, *results)}."
    )
    head = [
        "`coordinate_descent_tuning`",
        "floor, ms",
        "dense, ours, ms",
        "`quest`, ms",
        "times the floor",
        "speed-up",
    ]
    rows = []
    for r, x, option in zip(results, quest, ("off", "on")):
        rows.append([option, number(floor(r)), number(at(r, "full", LONG)["tpot_ms"]), number(x["tpot_ms"]),
                     number(x["over_floor"]), times(x["speedup"])])  # fmt: skip
    return markdown(said, head, rows)


# ---------------------------------------------------------------- other shapes, GPUs and batches


SHAPES = ("gpt-oss-20b", "qwen3-30b-a3b", "qwen3-next-12", "gemma3-12b")


@table("speed-shapes", *(f"h200_shapes_{name}.json" for name in SHAPES), "h200_decode_1m.json")
def speed_shapes(*results: Result) -> str:
    *shapes, million = results
    said = (
        f"{gpu(*results)}, real shapes with random weights in bf16, batch 1, `quest` with budget 1024, pool in host "
        "memory. Queries are the model's own, and 95 % of the steps repeat the token of the step before; at 1M they "
        "are synthetic, of locality 0.95. `qwen3-next-12`: 12 of the 48 layers of Qwen3-Next-80B, with all experts."
    )
    rows = []
    for name, r in [*zip(SHAPES, shapes), ("qwen2.5-7b-1m", million)]:
        x = next(x for x in r.rows if x["method"] == "quest")
        dense = min(y["tpot_ms"] for y in r.rows if y["method"] in DENSE)
        rows.append([name, tokens(x["context"]), number(dense), number(x["tpot_ms"]), times(x["speedup"]),
                     number(x["hit_rate"]), number(x["host_GiB"], 1)])  # fmt: skip
    return markdown(said, ["shape", "context", "dense, ms", "`quest`, ms", "speed-up", "hits", "GiB on the host"], rows)


@table("speed-two-gpus", "h200_parallel.json")
def speed_two_gpus(r: Result) -> str:
    quest = {context: at(r, "quest", context) for context in (LONG, LONGEST)}
    said = (
        f"Two H200, {shape(r)}, batch 1, budget 1024, pool in host memory. Each GPU has half of the heads, and so half "
        "of each cache; "
        f"{queries(quest.values(), r)}."
    )
    rows = []
    for context, x in quest.items():
        rows.append([tokens(context), number(at(r, "full", context)["tpot_ms"]), number(x["tpot_ms"]),
                     number(x["over_floor"]), times(x["speedup"]), number(x["device_GiB"][0], 1),
                     number(x["host_GiB"][0], 1)])  # fmt: skip
    head = [
        "context",
        "dense, ms",
        "`quest`, ms",
        "times the floor",
        "speed-up",
        "cache, GiB on each GPU",
        "GiB of host memory for each GPU",
    ]
    return markdown(said, head, rows)
