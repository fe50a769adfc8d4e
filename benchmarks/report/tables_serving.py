"""Tables of throughput, memory, prompts, first calls, kernels and servers. One function per table."""

import statistics

from torchsparsekv_benchmarks.report.load import Result
from torchsparsekv_benchmarks.report.markdown import (
    DENSE,
    Means,
    at,
    gpu,
    hits,
    markdown,
    named,
    number,
    shape,
    span,
    table,
    times,
)
from torchsparsekv_benchmarks.report.style import tokens
from torchsparsekv_benchmarks.report.tables_quality import TASK_NAMES, shown
from torchsparsekv_benchmarks.report.tables_speed import (
    FILES,
    LONG,
    LONGEST,
    RUNS,
    budgeted,
    estimates,
    keyed,
    steps,
)

OLD_PARISKV = "Measured with version 0.1, whose `pariskv` had a budget of 100 and no rest; not measured since."
OLDER = ("32k", "32k_int8_2_budgets", "128k", "128k_int8_2_budgets", "pariskv_int8")  # of torchsparsekv 0.1


def _throughput(*names: str) -> list[str]:
    return [f"h200_throughput_{name}.json" for name in names]


def _of_dense(r: Result, pool: str | None = None) -> float:
    """Tokens a second of the fastest dense attention of a run whose pool has this type."""
    return max(x["tokens_per_s"] for x in r.rows if x["method"] in DENSE and x.get("pool") == pool)


def _held(x: dict) -> str:
    """The hot buffers of a row in budgets; empty for dense attention."""
    return next((t.partition("=")[2] for t in x.get("hyper", "").split(", ") if t.startswith("hot_budgets=")), "")


@table("throughput", *_throughput("32k_int8", "32k_int8_256", "128k_int8"))
def throughput(at_32k: Result, small: Result, at_128k: Result) -> str:
    o, every = at_128k.options, (at_32k, small, at_128k)
    share = [100 * int(_held(x)) * r.options["budget"] / x["context"] for r in every for x in r.rows if _held(x)]
    said = (
        f"{gpu(*every)}, {shape(*every)}, the largest batch that fits {o['caps_gib'][0]:g} GiB of GPU memory and "
        f"{o['host_share']:g} of the free host memory, {o['host_gib']:g} GiB at most. "
        "Dense attention is on the GPU. The pool of the methods is in host memory, that of their two dense layers on "
        f"the GPU; hot buffers, in budgets, hold {span(share, 0)} % of the tokens. Replay: each layer fetches the "
        "blocks that heads of Qwen2.5-Coder-1.5B selected after 32K or 120K of source code. Over dense: tokens a "
        "second, divided by those of the fastest dense attention in 16 bits of the same run. Over dense, int8: divided "
        "by those of our dense attention in 8 bits, for `pariskv` of another run."
    )
    rows: list[list[object]] = []
    for r, packed in ((at_32k, at_32k), (small, at_32k), (at_128k, at_128k)):
        dense = [x for x in r.rows if x["method"] in DENSE and r is packed]
        for x in (*dense, *(x for x in r.rows if x["method"] not in DENSE)):
            ours = x["method"] not in DENSE
            name = f"`{x['method']}`" + " + rest" * estimates(r, x) if ours else named(x)
            rows.append([
                tokens(x["context"]), name, r.options["budget"] if ours else "-",
                "int8" if ours or "pool" in x else "16 bits", x["batch"], _held(x) or "-", number(x.get("hit_rate")),
                number(x["tpot_ms"]), number(x["p99_ms"]), number(x["tokens_per_s"], 0),
                times(x["tokens_per_s"] / _of_dense(r)), times(x["tokens_per_s"] / _of_dense(packed, "int8")),
                number(x.get("device_GiB"), 0), number(x.get("host_GiB"), 0),
            ])  # fmt: skip
    head = ["context", "method", "budget", "pool", "batch", "hot buffer", "hits", "ms a step", "99th percentile",
            "tokens a second", "over dense", "over dense, int8", "GiB on the GPU", "GiB on the host"]  # fmt: skip
    return markdown(said, head, rows)


@table("throughput-older", *_throughput(*OLDER))
def throughput_older(*results: Result) -> str:
    of_methods = [x for r in results for x in r.rows if x["method"] not in DENSE]
    said = (
        "The largest batches of torchsparsekv 0.1, with 0.85 of the host memory, hot buffers of two budgets (6 % of "
        "the tokens at 32K, 2 % at 128K) and synthetic queries of locality "
        f"{span({r.options['locality'] for r in results})}; hits {hits(of_methods)}; budget 1024 unless a row says "
        "otherwise. With `pariskv` no more than 8 sequences were tried."
    )
    rows = [
        [tokens(x["context"]), budgeted(x, r.options["budget"]),
         "int8" if r.options.get("pool_dtype") == "int8" else "16 bits", x["batch"],
         number(x["tpot_ms"]), number(x.get("p99_ms")), number(x["tokens_per_s"], 0),
         times(x["tokens_per_s"] / _of_dense(r))]
        for r in results for x in r.rows if x["method"] not in DENSE
    ]  # fmt: skip
    head = ["context", "method", "pool", "batch", "ms a step", "99th percentile", "tokens a second", "over dense"]
    return markdown(said, head, rows)


@table("memory", *FILES, "h200_decode_int8.json")
def memory(*results: Result) -> str:
    *usual, packed = results
    files = keyed(tuple(usual))
    said = (
        f"S{shape(*results)[1:]} in bf16, batch 1, two dense layers. Sizes in GiB of the cache with index and "
        "hot buffers of two budgets, without weights. Pool in host memory, that of dense on the GPU. Budget 1024. "
        "`pariskv` has 100, as in its paper, except in the int8 column. A dash: not measured."
    )
    small = {x["method"]: x["host_GiB"] for x in packed.rows if x["method"] not in DENSE and "host_GiB" in x}
    rows = [["dense", *(number(at(files["h200_decode.json"], "full", c)["device_GiB"], 1) if i == 0 else "0.0"
             for c in (LONG, LONGEST) for i in (0, 1)), "-"]]  # fmt: skip
    for method in RUNS:
        by_context = {x["context"]: x for x in steps(method, files)}
        told = [number(by_context[c][f"{where}_GiB"], 1) if c in by_context else "-"
                for c in (LONG, LONGEST) for where in ("device", "host")]  # fmt: skip
        rows.append([f"`{method}`", *told, number(small.get(method), 1)])
    head = [
        "method",
        *(f"{tokens(c)}, {w}" for c in (LONG, LONGEST) for w in ("GPU", "host")),
        f"{tokens(LONG)}, host, int8 pool",
    ]
    return markdown(said, head, rows)


@table("first-call", "h200_first_call_quest.json", "h200_first_call_pariskv.json")
def first_call(*results: Result) -> str:
    o = results[0].options
    said = (
        f"{gpu(*results)}, {shape(*results)}, `generate()` of {o['tokens']} tokens after a prompt of "
        f"{tokens(o['context'])}. A call includes the prompt; the first call also compiles Triton kernels, or loads "
        f"them from a cache of an earlier process. Steps are one CUDA graph, without `torch.compile`. {OLD_PARISKV}"
    )
    names = {"empty": "empty", "kept": "filled by an earlier process"}
    rows = [
        [
            f"`{x['method']}`",
            names[x["caches"]],
            *(number(x[s], 1) for s in ("first_s", "second_s")),
            number(x["tpot_ms"]),
        ]
        for r in results
        for x in r.rows
    ]
    return markdown(said, ["method", "kernel caches", "first call, s", "second call, s", "ms a token"], rows)


@table("generate", "h200_generate.json", "h200_generate_24.json")
def generate(*results: Result) -> str:
    """A real model through the stock generate()."""
    o, runs = results[0].options, [x for r in results for x in r.rows]
    counts = sorted({x["rows"] for x in runs})
    names = {"stock": "transformers without a patch, not compiled", "full": "dense, ours"}
    told = []
    for name, place in dict.fromkeys((x["method"], x["place"]) for x in runs):
        by = {x["rows"]: x for x in runs if (x["method"], x["place"]) == (name, place)}
        each = [by.get(n, {}) for n in counts]
        told.append([
            names.get(name, f"`{name}`"), {"device": "GPU", "host": "host"}.get(place, "GPU"),
            *(number(x.get("step_ms")) for x in each), *(number(x.get("busy_ms")) for x in each),
            number(each[-1]["tokens_per_s"], 0), number(each[-1].get("hit_rate")),
        ])  # fmt: skip
    said = (
        f"{gpu(*results)}, Qwen2.5-Coder-1.5B in bf16, stock `generate()` of {o['tokens']} tokens after {o['context']} "
        f"tokens of source code, budget {o['budget']}, hot buffer `\"auto\"`. Columns {', '.join(map(str, counts))}: "
        "prompts at a time. GPU ms a step: the time of a step in which at least one kernel or copy ran, from a profile "
        "of steps after the timed ones."
    )
    one, *more = map(str, counts)
    head = ["method", "pool", f"ms a step, {one}", *more, f"GPU ms a step, {one}", *more, f"tokens/s, {more[-1]}",
            f"hits, {more[-1]}"]  # fmt: skip
    return markdown(said, head, told)


PREFILL = (
    ("h200_prefill.json", ("quest", "pariskv", "clusterkv")), ("h200_prefill_louiskv.json", ("louiskv",)),
    ("h200_prefill_prkv.json", ("prkv", "arkvale", "snapkv")), ("h200_prefill_icecache.json", ("icecache",)),
)  # fmt: skip


@table("prefill", *(f for f, _ in PREFILL))
def prefill(*results: Result) -> str:
    contexts = (32768, 65536)
    dense = [[x for r in results for x in r.rows if x["method"] == "dense" and x["context"] == c] for c in contexts]
    seconds = [span(x["ttft_ms"] / 1e3 for x in of) for of in dense]
    said = (
        f"{gpu(*results)}, {shape(*results)}, bf16: time to the first token, divided by that of the unpatched model "
        f"(dense), which takes {seconds[0]} s at 32K and {seconds[1]} s at 64K. Peak: of GPU memory, weights included; "
        f"methods have the pool in host memory. {OLD_PARISKV}"
    )
    rows = [["dense", "1.000", "1.000", *(number(of[0]["peak_GiB"], 1) for of in dense)]]
    for r, (_, methods) in zip(results, PREFILL):
        for method, hyper in dict.fromkeys((x["method"], x.get("hyper")) for x in r.rows if x["method"] in methods):
            found = [
                next(x for x in r.rows if (x["method"], x.get("hyper"), x["context"]) == (method, hyper, c))
                for c in contexts
            ]
            rows.append(
                [
                    named(found[0]),
                    *(number(x["over_dense"], 3) for x in found),
                    *(number(x["peak_GiB"], 1) for x in found),
                ]
            )
    return markdown(said, ["method", "32K", "64K", "peak GiB, 32K", "peak GiB, 64K"], rows)


STAGES = {  # by column, the kernels of a layer as the files name them
    "append": "append",
    "index update": "index update (nothing leaves)",
    "select": "select, all of it (beside)",
    "fetch, hits": "fetch, all hits",
    "attention": "attention",
    "fetch, misses": "fetch, nearly all misses",
}


@table("kernels", "h200_kernels.json", "h200_kernels_icecache.json")
def kernels(*results: Result) -> str:
    o = results[0].options
    said = (
        f"{gpu(*results)}, microseconds of each stage of one layer: {o['q_heads']} query heads, {o['kv_heads']} kv "
        f"heads of head_dim {o['head_dim']}, batch 1, budget {o['budget']} unless a row says "
        "otherwise. The caches of the GPU do not hold the inputs. Fetch of a layer takes between `fetch, hits` "
        "(all blocks hit) and `fetch, misses` (nearly all miss)."
    )
    timed = [x for r in reversed(results) for x in r.rows if "context" in x]
    us = {(x["context"], x["method"], x["kernel"]): x["us"] for x in timed}
    rows = []
    for context in (LONG, LONGEST):
        for method in ("quest", "arkvale", "pariskv", "icecache"):
            told = [number(us[context, method, kernel], 1) for kernel in STAGES.values()]
            budget = f", budget {o['tokens']}" if method == "pariskv" else ""
            rows.append([tokens(context), f"`{method}`{budget}", *told])
        dense = number(us[context, "full", "dense attention"], 1)
        rows.append([tokens(context), "dense, ours", *(dense if column == "attention" else "-" for column in STAGES)])
    return markdown(said, ["context", "method", *STAGES], rows)


PLACES = {"flash": "FlashAttention", "flash-fp8": "FlashAttention, fp8", "device": "`kv=device`", "auto": "`kv=auto`",
          "host": "`kv=host`"}  # fmt: skip


SERVE = ("short", "32k_most", "32k", "32k_host", "32k_more", "128k")


@table("serve", *(f"h200_serve_native_{name}.json" for name in SERVE))
def serve(*results: Result) -> str:
    """One row per context, method and place; a run of its own may have the largest batch. A later file counts."""
    o = results[0].options
    said = (
        f"Budget {o['budget']} and blocks of 16 tokens, without the rest. Fit: how many requests fit. `kv=host` and "
        f"`kv=auto` had {o['host_gib']:g} GiB of host memory, or what the row says. Tokens/s: with as many requests as "
        "fit. Ratio: over FlashAttention in 16 bits at its best number of requests. A dash: not measured. The tokens "
        "are sampled from random weights, so the selected blocks change from step to step."
    )
    found: dict[tuple, dict[int, dict]] = {}
    for r in results:
        for x in (x for x in r.rows if "failed" not in x):
            more = x["place"] in ("host", "auto") and r.options["host_gib"] != o["host_gib"]
            place = f"{x['place']}, {r.options['host_gib']:g} GiB" if more else x["place"]
            found.setdefault((x["context"], _served_method(x, r.options, o), place), {})[x["batch"]] = x
    places = [p for place in PLACES for p in dict.fromkeys(k[2] for k in found) if p.partition(",")[0] == place]
    first = ["", *o["methods"]]  # then what differs from the usual, as it comes
    methods = sorted(dict.fromkeys(k[1] for k in found), key=lambda name: first.index(name[1:].partition("`")[0]))
    order = [(c, m, p) for c in dict.fromkeys(k[0] for k in found) for m in methods for p in places]
    best = {c: max(x["tokens_per_s"] for x in found[c, "", "flash"].values())
            for c in dict.fromkeys(k[0] for k in found)}  # fmt: skip
    rows = []
    for context, method, place in (k for k in order if k in found):
        by = found[context, method, place]
        most = by[max(by)]
        told = [number(by.get(b, {}).get("tpot_ms"), 2 if b == 1 else 1) for b in (1, 4, 8)]
        several = [str(most["batch"]), number(most["tokens_per_s"], 0), times(most["tokens_per_s"] / best[context])]
        where, comma, size = place.partition(",")
        name = f"{method}, {PLACES[where]}{comma}{size}" if method else PLACES[where]
        rows.append([tokens(context), name, *told, *(several if most["batch"] > 1 else ["-"] * 3)])
    head = ["context", "attention", "ms a step, 1 request", "4 requests", "8 requests", "fit", "tokens/s", "ratio"]
    return markdown(said, head, rows)


@table("serve-trace", *(f"h200_serve_native_32k_trace{name}.json" for name in ("", "_256", "_auto", "_auto_256")))
def serve_trace(*results: Result) -> str:
    """The most requests of each place, with the blocks that a real model selects."""
    said = (
        f"{tokens(results[0].options['contexts'][0])}, as many requests as fit. Replay: each layer chooses, but "
        "fetches and attends to the blocks that heads of Qwen2.5-Coder-1.5B selected, step by step, after 32K of "
        f"source code. `kv=auto` has {results[2].options['host_gib']:g} GiB of host memory. Over FlashAttention: "
        "tokens a second, divided by those of FlashAttention in 16 bits."
    )
    rows = [(r.options, x) for r in results for x in r.rows]
    most = {(x.get("method", ""), x["place"]): (o, x) for o, x in rows if x["batch"] == x["admitted"]}
    flash = most["", "flash"][1]["tokens_per_s"]
    told = []
    for (method, place), (o, x) in most.items():
        chosen = o["budget"] // (1 if method == "pariskv" else o["block"])  # blocks of a kv head
        hit = number(1 - x["fetched_blocks"] / (x["batch"] * chosen)) if place == "auto" else "-"
        name = _served_method(x, o, results[0].options)
        told.append([
            f"{name}, {PLACES[place]}" if method else PLACES[place], str(x["batch"]), number(x["tpot_ms"], 1),
            number(x["tokens_per_s"], 0), times(x["tokens_per_s"] / flash), hit,
        ])  # fmt: skip
    head = ["attention", "requests", "ms a step", "tokens/s", "over FlashAttention", "hits"]
    return markdown(said, head, told)


def _served_method(row: dict, options: dict, usual: dict) -> str:
    """A method with what differs from the usual; nothing for vLLM's own attention."""
    if "method" not in row:
        return ""
    budget = f", budget {options['budget']}" if options["budget"] != usual["budget"] else ""
    blocks = f", blocks of {options['block']}" if options.get("block", 16) != 16 else ""
    hyper = f", {row['hyper']}" if "hyper" in row else ""
    return f"`{row['method']}`" + (" + rest" if "rest" in row else "") + budget + blocks + hyper


SERVED = {"dense": "quality/served_32k_dense.json", "pariskv": "quality/served_32k.json",
          "pariskv + rest": "quality/served_32k_rest.json", "quest": "quality/served_32k_quest.json"}  # fmt: skip


@table("served", "quality/patched_32k.json", *SERVED.values())
def served(patched: Means, *results: Result) -> str:
    """Each method by `eval` and through a server."""
    o = results[0].options
    said = (
        f"{gpu(*results)}, Qwen2.5-Coder-1.5B, prompts of {tokens(o['lengths'][0])}, budget 1024, all layers sparse, "
        f"mean score of {o['samples']} samples, or of as many as the brackets say. Served: by `vllm serve` (0.26, "
        f"native code; `kv=device`, dense: FlashAttention), {o['requests']} requests at a time. `eval`: with `patch`, "
        "without the rest. + rest: in eager steps, blocks of 64 tokens."
    )
    runs: dict[tuple[str, str], list[dict]] = {}
    for x in patched.rows:
        runs.setdefault((x["task"], x["method"]), []).append(x)
    by = {key: of[0] | {"score": statistics.fmean(x["score"] for x in of)} for key, of in runs.items()}
    tried = {x["method"] for x in patched.rows}
    rows = []
    for task in o["tasks"]:
        told = []
        for method, r in zip(SERVED, results):
            x = by.get((task, method), {})
            some = f" ({x['samples']})" if x.get("samples", o["samples"]) != o["samples"] else ""
            scores = statistics.fmean(y["score"] for y in r.rows if y["task"] == task)
            told += [number(x.get("score")) + some] * (method in tried) + [number(scores)]
        rows.append([TASK_NAMES.get(task, task), *told])
    names = {m: "dense" if m == "dense" else shown(m) for m in SERVED}
    head = [f"{names[m]}, {how}" for m in SERVED for how in (["`eval`", "served"] if m in tried else ["served"])]
    return markdown(said, ["task", *head], rows)
