"""Tables of answers and of the distance from the dense model. One function per table."""
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchsparsekv_benchmarks.report.load import Result
from torchsparsekv_benchmarks.report.markdown import DENSE, Means, at, markdown, number, span, table, times
from torchsparsekv_benchmarks.report.style import tokens
from torchsparsekv_benchmarks.report.tables_speed import AT_5_PERCENT, LONG, traced

Row = dict[str, Any]
RECALL_TASKS = ("single", "multikey", "multivalue", "multiquery", "chain")
LENGTHS = (8192, 16384, 32768)
STEPS, TEXT = 200, 2048
CHOSEN_ONCE = ("snapkv", "prkv_static")  # hit always


def with_error(row: Row | None, name: str, digits: int) -> str:
    if row is None:
        return "-"
    return f"{row[name]:.{digits}f}" + (f" ± {row[f'{name}_se']:.{digits}f}" if f"{name}_se" in row else "")


def only(rows: list[Row], **wanted: object) -> Row | None:
    """The only row with these values, None where there is none."""
    found = [r for r in rows if all(r[k] == v for k, v in wanted.items())]
    if len(found) > 1:
        raise ValueError(f"{len(found)} rows have {wanted}")
    return found[0] if found else None


# ---------------------------------------------------------------- a real model


REAL = "Qwen2.5-Coder-1.5B-Instruct in bfloat16, on an H200"
REST, WITH_REST = "estimate_rest", " + rest"


def name_of(means: Means, row: Row) -> str:
    """A method, and whether it estimates the rest."""
    setting = means.settings[row["setting"]]
    acts = setting["hyper"] or setting["patch"] or {}
    return row["method"] + (WITH_REST if acts.get(REST) else "")


def shown(name: str) -> str:
    """A name as tables write it."""
    return f"`{name.removesuffix(WITH_REST)}`" + (WITH_REST if name.endswith(WITH_REST) else "")


def labelled(means: Means, row: Row) -> str:
    return shown(name_of(means, row))


Cells = dict[str, dict[tuple[str, int | None], Row]]  # of a label, by text and budget
TEXTS = ("sympy", "moby-dick")


def by_label(means: Means) -> Cells:
    cells: Cells = {}
    for r in means.rows:
        if r["method"] != "dense":
            cells.setdefault(labelled(means, r), {})[r["task"], r["budget"]] = r
    return cells


@table("kl-32k", "quality/kl_32k.json")
def kl_32k(means: Means) -> str:
    """Code and prose beside one another."""
    cells = by_label(means)
    budgets = sorted({b for by in cells.values() for _, b in by if b is not None})
    told = []
    for label, by in sorted(cells.items(), key=lambda x: min(r["kl"] for r in x[1].values())):
        if label == "`full`":
            continue
        line = [label, *(both(pairs(by, b)) for b in budgets)]
        best = [r["hit_rate"] for (_, b), r in by.items() if b == budgets[1] and r.get("hit_rate") is not None]
        told.append([*line, number(sum(best) / len(best) if best else None)])
    noise = [r["kl"] for r in cells["`full`"].values()]
    full = next(iter(cells["`full`"].values()))
    said = (
        f"{REAL}: KL to the dense model in nats a token, source code / prose; {full['samples']} stretches of "
        f"{tokens(full['length'])} tokens of each text, {full['tokens'] // full['samples']} teacher-forced steps a "
        f"stretch. Sink 64, window 256, two dense layers. `full`, which the table leaves out, attends to all tokens; "
        f"its KL of {min(noise):.4f} to {max(noise):.4f} is the noise of bfloat16. + rest: with `estimate_rest=32`. "
        "Hits: share of the selected blocks that are in a hot buffer of two budgets."
    )
    return markdown(said, ["method", *(f"budget {b}" for b in budgets), f"hits at {budgets[1]}"], told)


INT8, NATURAL = "quality/int8_32k.json", "quality/kl_32k.json"


def pairs(cells: dict[tuple[str, int | None], Row], budget: int | None) -> list[Row | None]:
    """Code and prose."""
    return [cells.get((text, budget)) for text in TEXTS]


def both(found: Sequence[Row | None]) -> str:
    return " / ".join("-" if r is None else f"{r['kl']:.3f}" for r in found)


@table("int8-32k", NATURAL, INT8)
def int8_32k(natural: Means, packed: Means) -> str:
    """The KL with a pool in 16 bits and in 8, on the same stretches."""
    usual, eight, told = by_label(natural), by_label(Means(packed.sources, packed.settings, packed.of("kl_int8"))), []
    for label, cells in eight.items():
        budget = None if label == "`full`" else 256
        mine, other = pairs(cells, budget), pairs(usual[label], budget)
        change = [a["kl"] - b["kl"] for a, b in zip(mine, other) if a and b]
        told.append([label, both(other), both(mine), " / ".join(f"{x:+.4f}" for x in change)])
    said = (
        f"{REAL}: KL to the dense model in nats a token, source code / prose, budget 256, with a pool in 16 bits and "
        "in 8 bits. Texts and settings are those of the KL at 32K in `answers.md`."
    )
    return markdown(said, ["method", "16 bits", "8 bits", "change"], told)


@table("int8-answers", INT8)
def int8_answers(packed: Means) -> str:
    """The same samples of the board, with a pool in 16 bits and in 8."""
    cells: dict[str, list[Row]] = {}
    for r in packed.rows:
        if "gain" in r and r["method"] != BASE:
            cells.setdefault(r["method"], []).append(r)
    told = []
    for method, mine in cells.items():
        mean = lambda name, mine=mine: statistics.fmean(r[name] for r in mine)  # noqa: E731
        error = error_of_mean([r["gain_se"] for r in mine])
        score, change = mean("score"), f"{mean('gain'):+.3f} ± {error:.3f}"
        told.append([f"`{method}`", f"{len(mine)}", f"{score - mean('gain'):.3f}", f"{score:.3f}", change])
    told.sort(key=lambda x: -float(x[2]))
    said = (
        f"{REAL}, 32K: mean score of 8 or 4 tasks, 12 samples of each, budget 256, with a pool in 16 bits and in 8 "
        "bits. Change: from 16 to 8 bits on the same samples, with its standard error."
    )
    return markdown(said, ["method", "tasks", "16 bits", "8 bits", "change"], told)


OF_ALL = ("sink", "window", "budget", "skip_layers", "full_threshold")  # arguments that every method of the run gets


@table("kl-defaults", NATURAL, "quality/kl_defaults.json")
def kl_defaults(natural: Means, changed: Means) -> str:
    """Other hyper-parameters than the defaults, on the same stretches."""
    usual = by_label(natural)
    cells: dict[tuple[str, str], dict[tuple[str, int | None], Row]] = {}
    for r in changed.rows:
        patch = changed.settings[r["setting"]]["patch"] or {}
        told = ", ".join(f"{k}={v}" for k, v in patch.items() if k not in OF_ALL)
        if told:
            cells.setdefault((f"`{r['method']}`", told), {})[r["task"], r["budget"]] = r
    order = list(usual)
    lines = [
        [label, f"`{told}`", *(x for b in (256, 1024) for x in (both(pairs(usual[label], b)), both(pairs(by, b))))]
        for (label, told), by in sorted(cells.items(), key=lambda x: (order.index(x[0][0]), x[0][1]))
    ]
    said = (
        f"{REAL}: KL to the dense model in nats a token, source code / prose, at budgets of 256 and 1024, with the "
        "defaults but without the rest, and with a change. Texts and settings are those of the KL at 32K. A dash: not "
        "measured."
    )
    head = ["method", "change", *(f"{b}: {what}" for b in (256, 1024) for what in ("default", "changed"))]
    return markdown(said, head, lines)


# ---------------------------------------------------------------- answers of a real model


BASE, TOO_HARD = "full", ("extraction",)  # tasks that the dense model cannot do
TASK_NAMES = {
    "niah_single_2": "single", "niah_multikey_2": "multikey", "niah_multivalue": "multivalue",
    "niah_multiquery": "multiquery", "vt": "chain", "code_constant": "constant", "code_function": "function",
}  # fmt: skip
SEEDS = ("0.jsonl", "1.jsonl")  # how the raw files of a seed end
BOARD, BOARD_LONG = "quality/board_32k.json", "quality/board_128k.json"
SECOND_LONG = "quality/board_128k_seed1.json"  # other prompts, of some methods at 1024 tokens
LONG_REST = "quality/board_rest_128k.json"  # methods with the rest, and more methods with other prompts
BOARD_REST = "quality/board_rest_32k.json"  # methods with the rest, on the samples of the first seed of BOARD
OTHERS = "quality/board_others_32k.json"  # the other methods, on the samples of the first seed of BOARD


@dataclass(frozen=True)
class Answers:
    """A method at a budget over all tasks of the board.

    score: the mean over tasks, by_seed: for each seed. loss: what the dense model scores above it on the same samples,
    error: its standard error.
    """

    score: float
    loss: float
    error: float
    read: float
    hits: float | None
    by_seed: tuple[float, ...]
    tasks: dict[str, float]


def over_tasks(
    means: Means, seeds: tuple[str, ...] = SEEDS, tasks: Sequence[str] = ()
) -> dict[tuple[str, int | None], Answers]:
    """Over these tasks, or over all that the dense model can do."""
    rows: dict[tuple[str, int | None], dict[tuple[str, str], Row]] = {}
    for seed in seeds:
        for r in means.of(seed):
            if r["task"] in tasks or (not tasks and r["task"] not in TOO_HARD):
                rows.setdefault((name_of(means, r), r["budget"]), {})[r["task"], seed] = r
    return {name: answered(cells, seeds) for name, cells in rows.items()}


def every_method(*means: Means) -> dict[tuple[str, int | None], Answers]:
    """All methods on the samples of the first seed; each as the last file has it, and the dense model as the first."""
    found = [over_tasks(m, SEEDS[:1]) for m in means]
    return {at: a for have in found for at, a in have.items()} | {(BASE, None): found[0][BASE, None]}


def answered(cells: dict[tuple[str, str], Row], seeds: tuple[str, ...]) -> Answers:
    mean = lambda name: statistics.fmean(r[name] for r in cells.values())  # noqa: E731
    hits = [r["hit_rate"] for r in cells.values() if r.get("hit_rate") is not None]
    errors = [r.get("loss_se", 0.0) for r in cells.values()]
    scores = [[r["score"] for (_, s), r in cells.items() if s == seed] for seed in seeds]
    by_seed = [statistics.fmean(x) for x in scores if x]
    tasks = {t: statistics.fmean(r["score"] for (u, _), r in cells.items() if u == t) for t, _ in cells}
    return Answers(
        mean("score"), mean("loss"), error_of_mean(errors), mean("attended"),
        statistics.fmean(hits) if hits else None, tuple(by_seed), tasks,
    )  # fmt: skip


def error_of_mean(errors: Sequence[float]) -> float:
    """The standard error of a mean of independent values with these standard errors."""
    return sum(e * e for e in errors) ** 0.5 / len(errors)


def all_of(means: Sequence[Means]) -> Means:
    """The rows of all files."""
    first, *others = means
    for m in others:
        first = first.beside(m)
    return first


def ranked(found: dict[tuple[str, int | None], Answers], budget: int) -> list[str]:
    """Methods beside the dense model, the best at this budget first."""
    return [m for m, _ in sorted(((m, a.score) for (m, b), a in found.items() if b == budget), key=lambda x: -x[1])]


def worst_error(found: Mapping[Any, Answers]) -> float:
    """Rounded up to two digits."""
    return math.ceil(100 * max(a.error for a in found.values())) / 100


@table("board-32k", BOARD, OTHERS, BOARD_REST)
def board_32k(board: Means, others: Means, rest: Means) -> str:
    found, budgets = every_method(board, others, rest), (64, 256, 1024)
    told = []
    for method in ranked(found, 1024):
        mine = [found[method, b] for b in budgets]
        told.append([
            shown(method), *(f"{a.score:.2f}" for a in mine), *(f"{a.read:.0f}" for a in mine), number(mine[-1].hits)
        ])  # fmt: skip
    dense, rows = found[BASE, None], board.of(SEEDS[0])
    said = (
        f"{REAL}, {tokens(rows[0]['length'])} tokens: mean score of {len(dense.tasks)} tasks, {rows[0]['samples']} "
        f"samples of each, the same for all methods. The dense model scores {dense.score:.2f}. A difference from the "
        f"dense score has a standard error of at most {worst_error(found):.2f}. Read: tokens that a step attends to. "
        "Hits: share of the selected blocks that are in a hot buffer of two budgets. Sink 64, window 256, two dense "
        "layers, pool on the GPU."
    )
    head = ["method", *(f"budget {b}" for b in budgets), *(f"read at {b}" for b in budgets), "hits at 1024"]
    return markdown(said, head, told)


@table("board-tasks", BOARD, OTHERS, BOARD_REST)
def board_tasks(*means: Means) -> str:
    found = every_method(*means)
    order = list(found[BASE, None].tasks)
    line = lambda label, a: [label, *(f"{a.tasks[t]:.2f}" for t in order)]  # noqa: E731
    told = [line("dense", found[BASE, None])]
    told += [line(shown(m), found[m, 1024]) for m in ranked(found, 1024) if m not in ("random", "streaming")]
    return markdown("The tasks of the table above at a budget of 1024: mean scores.",
                    ["method", *(TASK_NAMES.get(t, t) for t in order)], told)  # fmt: skip


OLD_DEFAULT = ("arkvale", "prkv")  # measured twice with the largest score of a head


@table("board-seeds", BOARD)
def board_seeds(means: Means) -> str:
    """What each seed says of the difference from the dense model."""
    found = over_tasks(means)
    dense, told = found[BASE, None].by_seed, []
    for method in (m for m in ranked(found, 1024) if m not in OLD_DEFAULT):
        mine = [found[method, b] for b in (64, 256, 1024)]
        lost = [" / ".join(f"{d - x:.3f}" for d, x in zip(dense, a.by_seed)) for a in mine]
        told.append([f"`{method}`", *lost, f"{mine[-1].error:.3f}"])
    said = (
        f"{REAL}, 32K: score of the dense model minus score of the method, first seed / second seed; "
        f"{len(found[BASE, None].tasks)} tasks, 12 samples of each. Below 0 the method scores more than dense. Last "
        "column: for the mean over both seeds at 1024."
    )
    last = "standard error at 1024"
    return markdown(said, ["method", "budget 64", "budget 256", "budget 1024", last], told)


LONG_SEEDS = ("l0.jsonl", "l1.jsonl")
SECOND_SEED = ("niah_multivalue", "niah_multiquery", "code_constant", "code_function", "form")


def lost_by_seed(means: Means, files: tuple[str, str], budget: int, tasks: Sequence[str] = ()) -> list[list[str]]:
    """How much lower than the dense model each method of the second file scores, with the standard error of each."""
    first, second = (over_tasks(means, (f,), tasks) for f in files)
    told = [(shown(m), first[m, b], a) for (m, b), a in second.items() if b == budget and (m, b) in first]
    told.sort(key=lambda x: x[1].loss)
    return [[name, *(f"{a.loss:.3f} ± {a.error:.3f}" for a in mine)] for name, *mine in told]


@table("board-seeds-256", OTHERS)
def board_seeds_256(means: Means) -> str:
    said = (
        f"{REAL}, 32K, budget 256: score of the dense model minus score of the method, with the standard error, for "
        f"the methods that the table above lacks; {names_of(SECOND_SEED)}, 12 samples of each."
    )
    return markdown(said, ["method", "first seed", "second seed"], lost_by_seed(means, SEEDS, 256, SECOND_SEED))


@table("board-seeds-128k", BOARD_LONG, SECOND_LONG, LONG_REST)
def board_seeds_128k(*means: Means) -> str:
    every = all_of(means)
    dense = [over_tasks(every, (f,))[BASE, None].score for f in LONG_SEEDS]
    said = (
        f"{REAL}, 128K by YaRN: score of the dense model minus score of the method, with the standard error; 6 tasks, "
        f"4 samples of each. The dense model scores {dense[0]:.2f} with the first seed and {dense[1]:.2f} with the "
        "second."
    )
    by = {b: {line[0]: line[1:] for line in lost_by_seed(every, LONG_SEEDS, b)} for b in (256, 1024)}
    told = [[name, *by[256][name], *lost] for name, lost in by[1024].items()]
    return markdown(said, ["method", *(f"{b}, {s} seed" for b in by for s in ("first", "second"))], told)


@table("ledger", "quality/ledger_32k.json")
def ledger(means: Means) -> str:
    """One long answer over 32K."""
    dense, *others = sorted(means.rows, key=lambda r: (r["method"] != BASE, -r["score"]))
    told = [["dense", f"{dense['score']:.2f}", "-", f"{dense['attended']:.0f}"]]
    for r in others:
        lost = f"{r['loss']:.2f} ± {r['loss_se']:.2f}"
        told.append([f"`{r['method']}`", f"{r['score']:.2f}", lost, f"{r['attended']:.0f}"])
    said = (
        f"{REAL}, 32K, budget 1024, {dense['samples']} samples. An answer has 120 lines, about 2,000 tokens. Score: "
        "share of right lines. Lost: against dense, with the standard error."
    )
    return markdown(said, ["method", "score", "lost", "tokens read a step"], told)


SINKS = {
    "kl_sinks_s64_w256_k2.jsonl": "sink 64, window 256, two dense layers", "kl_sinks_s16_w256_k2.jsonl": "sink 16",
    "kl_sinks_s64_w64_k2.jsonl": "window 64", "kl_sinks_s64_w256_k0.jsonl": "no dense layer",
}  # fmt: skip


@table("kl-sinks", "quality/kl_sinks.json")
def kl_sinks(means: Means) -> str:
    """One thing changed at a time."""
    methods, told = ("pariskv", "icecache", "louiskv", "quest"), []
    for file, label in SINKS.items():
        rows = {(r["method"], r["task"]): r for r in means.of(file) if r["budget"] is not None}
        told.append([label, *(both([rows.get((m, text)) for text in TEXTS]) for m in methods)])
    said = (
        f"{REAL}: KL to the dense model in nats a token, source code / prose, budget 256, on the texts of the KL at "
        "32K in `answers.md`. The first row has the usual setting. Each other row changes one part of the first."
    )
    return markdown(said, ["setting", *(f"`{m}`" for m in methods)], told)


@table("board-128k", BOARD_LONG, LONG_REST)
def board_128k(board: Means, rest: Means) -> str:
    means = board.beside(rest)
    found = over_tasks(means, LONG_SEEDS[:1])
    told = []
    for method in ranked(found, 1024):
        mine = [found[method, b] for b in (256, 1024)]
        told.append([shown(method), *(f"{a.score:.2f}" for a in mine), *(number(a.hits) for a in mine)])
    rows, dense = board.of(LONG_SEEDS[0]), found[BASE, None]
    said = (
        f"{REAL}, {tokens(rows[0]['length'])} tokens by YaRN: mean score of {names_of(dense.tasks)}, "
        f"{rows[0]['samples']} samples of each. The dense model scores {dense.score:.2f}. A difference from the dense "
        f"score has a standard error of at most {worst_error(found):.2f}. Hits: share of the selected blocks that are "
        "in a hot buffer of two budgets, which is 2 % of the tokens at a budget of 1024. Sink 64, window 256, two "
        "dense layers, pool on the GPU."
    )
    return markdown(said, ["method", "budget 256", "budget 1024", "hits at 256", "hits at 1024"], told)


MORE = "quality/board_more_32k.json"  # on the samples of the first seed of BOARD
GROUP_RULES = {"max.jsonl": "largest score of a head", "mean.jsonl": "mean query"}


@table("board-pages", MORE)
def board_pages(means: Means) -> str:
    """Methods that choose pages, by how the query heads of a kv head choose together."""
    found = {rule: over_tasks(means, (file,)) for file, rule in GROUP_RULES.items()}
    dense, lines = found["mean query"][BASE, None], []
    for rule, by in found.items():
        for method in dict.fromkeys(m for m, _ in by if m in ("quest", "arkvale", "prkv", "pagemean")):
            mine = [by[method, b] for b in (64, 256, 1024)]
            lines.append([f"`{method}`", rule, *(f"{a.score:.2f}" for a in mine), number(mine[-1].hits)])
    own = over_tasks(means, ("more.jsonl",))
    scores = [f"{own['prkv', b].score:.2f}" if ("prkv", b) in own else "-" for b in (64, 256, 1024)]
    lines.append(['`prkv`, `volume="mean", block_size=16`', "mean query", *scores, number(own["prkv", 1024].hits)])
    lines.sort(key=lambda x: -float(x[4]))
    said = (
        f"{REAL}, 32K: mean score of {names_of(dense.tasks)}"
        f", 12 samples of each. The dense model scores {dense.score:.2f}. A difference from the dense score has a "
        f"standard error of at most {max(worst_error(x) for x in found.values()):.2f}. Rule: how the query heads of a "
        "kv head select together."
    )
    head = ["method", "rule", *(f"budget {b}" for b in (64, 256, 1024)), "hits at 1024"]
    return markdown(said, head, lines)


def names_of(tasks: Iterable[str]) -> str:
    names = [TASK_NAMES.get(t, t) for t in tasks]
    return f"{len(names)} tasks ({', '.join(names)})"


@table("board-rest", BOARD, MORE)
def board_rest(board: Means, more: Means) -> str:
    """The same samples with and without the rest."""
    have = {(m.removesuffix(WITH_REST), b): a for (m, b), a in over_tasks(more, ("rest.jsonl",)).items()}
    tasks = have[BASE, None].tasks
    without = over_tasks(more, ("mean.jsonl",)) | over_tasks(board, SEEDS[:1])  # pagemean is not on the board
    had = {k: sum(a.tasks[t] for t in tasks) / len(tasks) for k, a in without.items()}
    told = []
    for method in ranked(have, 1024):
        mine = [(had.get((method, b)), have[method, b].score) for b in (64, 256, 1024)]
        told.append([f"`{method}`", *(f"{'-' if a is None else f'{a:.2f}'} / {b:.2f}" for a, b in mine)])
    said = (
        f"{REAL}, 32K: mean score of {names_of(tasks)}, 12 samples of each; without the rest / with "
        f"`estimate_rest=32`. The dense model scores {have[BASE, None].score:.2f}. A difference from the dense score "
        f"has a standard error of at most {worst_error(have):.2f}."
    )
    return markdown(said, ["method", *(f"budget {b}" for b in (64, 256, 1024))], told)


KINDS = {"moby-dick": "prose", "sympy": "source code"}


@table("page-summaries", "quality/page_summaries.json")
def page_summaries(r: Result) -> str:
    texts = r.options["texts"].split(",")
    by = {((x["summary"], x["query"]), x["text"]): x["share"] for x in r.rows}
    rules = dict.fromkeys((x["summary"], x["query"]) for x in r.rows)
    o = r.options
    said = (
        f"Qwen2.5-Coder-0.5B in float32, {o['tokens']} tokens, {o['budget'] // o['page']} pages of {o['page']} tokens, "
        "every other layer, 32 queries. Values: the share of the attention weight outside sinks and window that the "
        "chosen pages hold."
    )
    told = [[*rule, *(number(by[rule, t]) for t in texts)] for rule in rules]
    return markdown(said, ["summary of a page", "query", *(KINDS[t] for t in texts)], told)


@table("packed-layers", "quality/packed_layers.json")
def packed_layers(r: Result) -> str:
    texts, o = r.options["texts"].split(","), r.options
    by = {(x["layers"], x["what"], x["text"]): x["kl"] for x in r.rows}
    said = (
        f"Qwen2.5-Coder-1.5B in float32, after {o['tokens']} tokens: KL in nats a token, over the next {o['read']}, to "
        "the model without rounding. Only these keys or values have 8 bits."
    )
    told = [
        [where, what, *(f"{by[where, what, t]:.6f}" for t in texts)]
        for where, what in dict.fromkeys(key[:2] for key in by)
    ]
    head = ["layers", "rounded to 8 bits", *(KINDS[t] for t in texts)]
    return markdown(said, head, told)


@table("drift-rules", "quality/drift_rules.json")
def drift_rules(r: Result) -> str:
    """What stale selections hold, by the rule that says when to select anew."""
    by = {(x["rule"], x["rate"], x["text"]): x["kept"] for x in r.rows}
    rules, rates = (list(dict.fromkeys(x[key] for x in r.rows)) for key in ("rule", "rate"))
    names = {"after RoPE": "cosine of queries after RoPE", "before RoPE": "cosine of queries before RoPE"}
    told = [
        [names.get(rule, rule), *(" / ".join(number(by[rule, rate, t], 3) for t in TEXTS) for rate in rates)]
        for rule in rules
    ]  # fmt: skip
    o = r.options
    said = (
        f"Qwen2.5-Coder-0.5B in float32, {o['tokens']} tokens of source code / of prose, every other layer, the last "
        f"{o['steps']} steps. A rule selects the exact best {o['budget']} tokens at some of the steps, and keeps them "
        "in between. Values: attention weight that they hold, divided by the weight if every step selects."
    )
    return markdown(said, ["rule", *(f"{rate:.0%} of the steps" for rate in rates)], told)


@table("token-choices", "quality/token_choices.json")
def token_choices(r: Result) -> str:
    """Means over the texts; the method that holds most at 256 tokens first."""
    texts, budgets = r.options["texts"].split(","), sorted({x["budget"] for x in r.rows})
    mean = lambda rows, key: sum(x[key] for x in rows) / len(rows)  # noqa: E731
    told = []
    for method, hyper in dict.fromkeys((x["method"], tuple(x["hyper"].items())) for x in r.rows):
        own = [x for x in r.rows if (x["method"], tuple(x["hyper"].items())) == (method, hyper)]
        by = [[x for x in own if x["budget"] == b] for b in budgets]
        name = ", ".join([f"`{method}`", *(f"`{k}={v}`" for k, v in hyper if k != "block_size")])
        shares, errors = ([number(mean(rows, key)) for rows in by] for key in ("share", "error"))
        told.append((-mean(by[1], "share"), [name, *shares, *errors, f"{mean(by[-1], 'read'):.0f}"]))
    o = r.options
    said = (
        f"Qwen2.5-Coder-0.5B in float32, {o['tokens']} tokens of {' and of '.join(KINDS[t] for t in texts)}, sink "
        f"{o['sink']}, window {o['window']} for all methods, four layers, 16 queries. Read: the tokens outside sinks "
        "and window that a kv head attends to, including tokens that wait in the ring. Share: the attention weight of "
        "these tokens, divided by that of all tokens outside sinks and window. Error: of the attention output, "
        "relative to dense attention. Columns: by budget."
    )
    head = ["method", *(f"share at {b}" for b in budgets), *(f"error at {b}" for b in budgets)]
    return markdown(said, [*head, f"read at {budgets[-1]}"], [row for _, row in sorted(told)])


README_ROWS = ("pariskv + rest", "retroinfer", "oracle", "icecache", "pagemean + rest", "louiskv", "quest")


@table("readme", BOARD_LONG, SECOND_LONG, LONG_REST, "h200_decode.json", *AT_5_PERCENT)
def readme(board: Means, second: Means, rest: Means, dense_cache: Result, *speed: Result) -> str:
    """Answers and speed at one setting."""
    every = over_tasks(all_of((board, second, rest)), LONG_SEEDS)
    dense, found = every[BASE, None], {(m, 1024): every[m, 1024] for m in README_ROWS}
    samples = sum(m.rows[0]["samples"] for m in (board, second))
    fastest = [min((x for x in r.rows if x["method"] in DENSE), key=lambda x: x["tpot_ms"]) for r in speed]
    quickest, quick = fastest[0], [x["tpot_ms"] for x in fastest]
    replayed = {name: x for (name, budget, buffer), x in traced(*speed) if (budget, buffer) == ("1024", "5 %")}
    told = [[
        "dense", f"{dense.score:.2f}", f"{dense.read:.0f}", "-", number(at(dense_cache, "full", LONG)["device_GiB"], 1),
        number(quickest["tpot_ms"]), times(quickest["speedup"]),
    ]]  # fmt: skip
    for method in README_ROWS:
        one = found[method, 1024]
        row = replayed.get(shown(method), {})
        told.append([
            shown(method), f"{one.score:.2f}", f"{one.read:.0f}", number(row.get("hit_rate")),
            number(row.get("device_GiB"), 1), number(row.get("tpot_ms")), times(row.get("speedup")),
        ])  # fmt: skip
    head = ["method", "score", "tokens read a step", "hits", "GiB of cache on the GPU", "ms a token", "speed-up"]
    said = (
        f"{tokens(LONG)} tokens, budget 1024, batch 1, one H200. Score: mean of {len(dense.tasks)} tasks (1: all "
        f"correct), {samples} samples of each, by Qwen2.5-Coder-1.5B with YaRN; a difference from dense has a standard "
        f"error of at most {worst_error(found):.2f}. Last four columns: compiled steps with the shape of Llama-3.1-8B "
        "and random weights, which attend to the tokens that Qwen2.5-Coder-1.5B selected on source code (replay). The "
        "cache of a method is in host memory, with a hot buffer of 5 % of the tokens. Dense attention is on the GPU "
        f"(cuDNN, {span(quick)} ms). + rest: the default of these two methods, see below. A dash: does not apply, or "
        "not measured at this setting."
    )
    return markdown(said, head, told)


# ---------------------------------------------------------------- next tokens of a real text


def of_text(means: Means) -> list[Row]:
    """A row a method and budget. `icecache` below 1024 tokens and `snapkv` are of later runs on a CPU."""
    later = means.of("text_2048_always") + means.of("snapkv/text_2048")
    later = [r for r in later if r["method"] != "dense"]
    have = {(r["method"], r["budget"]) for r in later}
    return [r for r in means.of("text/text_2048_h200") if (r["method"], r["budget"]) not in have] + later


def read_a_step(row: Row) -> int:
    """Tokens that a scored step reads, in the mean."""
    return round(row["density"] * (TEXT - (STEPS - 1) / 2))


@table("kl-text", "quality/text.json")
def kl_text(means: Means) -> str:
    rows, budgets = of_text(means), (64, 256, 1024)
    order = sorted((r["kl"], r["method"]) for r in rows if r["budget"] == 64)
    told = []
    for _, method in order:
        mine = [only(rows, method=method, budget=b) for b in budgets]
        reads = [str(read_a_step(r)) if r else "-" for r in mine[:2]]
        same = [number(r["agrees"]) if r else "-" for r in mine[:2]]
        told.append([f"`{method}`", *(with_error(r, "kl", 4) for r in mine), *same, *reads])
    dense = only(rows, method="dense", budget=None)
    assert dense is not None
    said = (
        "SmolLM2-135M in float32, eight stretches of 2K tokens of a novel, 200 teacher-forced steps each (1,600 "
        "tokens), sink 32, window 64 (`snapkv`: sink 0, window 232). Columns: by budget. KL: to the dense model in "
        "nats a token, ± its standard error over stretches. Same: share of the steps whose likeliest token is that of "
        "the dense model. Read: "
        f"tokens that a step attends to. The loss of the dense model is {dense['nats']:.2f} nats a token."
    )
    head = ["method", *(f"KL at {b}" for b in budgets), "same at 64", "same at 256", "read at 64", "read at 256"]
    return markdown(said, head, told)


@table("hit-rates", "quality/text.json")
def hit_rates(means: Means) -> str:
    rows = [r for r in of_text(means) if r.get("hit_rate") is not None and r["method"] not in CHOSEN_ONCE]
    by_method: dict[str, dict[int, float]] = {}
    for r in rows:
        by_method.setdefault(r["method"], {})[r["budget"]] = r["hit_rate"]
    said = (
        "SmolLM2-135M over eight stretches of 2K tokens of a novel, 200 steps each: share of the chosen blocks that "
        "are in a hot buffer of two budgets."
    )
    told = [[f"`{m}`", *(number(by[b]) for b in (64, 256))] for m, by in sorted(by_method.items())]
    return markdown(said, ["method", "hits at 64 tokens", "hits at 256"], told)


@table("hot-buffer", "quality/text_8192.json")
def hot_buffer(means: Means) -> str:
    two, four = means.of("text_8192_hot2"), means.of("text_8192_hot4")
    told = []
    for r in two:
        other = only(four, method=r["method"], budget=r["budget"])
        if other is not None and r["budget"]:
            told.append([f"`{r['method']}`", r["budget"], number(r["hit_rate"], 3), number(other["hit_rate"], 3)])
    said = (
        "SmolLM2-135M, two stretches of 8K tokens of a novel, 200 steps each: share of the chosen blocks that are in "
        "the hot buffer. The size of the hot buffer does not change what a step selects."
    )
    return markdown(said, ["method", "budget", "hits with `hot_budgets=2`", "with 4"], told)


@table("prefetch-async-kl", "quality/text_8192.json")
def prefetch_async_kl(means: Means) -> str:
    usual = means.of("late/text_8192_none") + means.of("text_8192_hot2")
    told = []
    for r in sorted(means.of("late/text_8192_0.8"), key=lambda r: (r["method"], r["budget"] or 0)):
        if r["method"] == "dense":
            continue
        least, without = (
            next((x for x in rows if (x["method"], x["budget"]) == (r["method"], r["budget"])), None)
            for rows in (means.of("late/text_8192_-1"), usual)
        )
        if least and without:
            found = [without["kl"], r["kl"], least["kl"]]
            told.append([f"`{r['method']}`", r["budget"], *(number(x, 4) for x in found),
                         *(times(x / found[0]) for x in found[1:])])  # fmt: skip
    said = (
        "SmolLM2-135M, two stretches of 8K tokens of a novel, 200 steps each: KL to the dense model in nats a token "
        "without `prefetch_async` (off), with 0.8 and with -1. Ratios: to the KL without."
    )
    return markdown(said, ["method", "budget", "off", "0.8", "-1", "ratio, 0.8", "ratio, -1"], told)


# ---------------------------------------------------------------- answers of the recall model

RECALL = {  # the raw files of each method
    "dense": ("recall_8192_", "recall_16384_", "recall_32768_"),
    "quest": ("recall_8192_", "recall_16384_", "recall_32768_"),
    "arkvale": ("arkvale_",),
    "pariskv": ("quality/pariskv_",),
    "icecache": ("icecache/recall_",),
    "louiskv": ("clusters_", "quality/recall_8192_", "quality/recall_16384_", "quality/recall_32768_"),
    "clusterkv": ("clusterkv/recall_", "recall_cpu/clusterkv_"),
    "prkv": ("recall_cpu/prkv_",),
    "oracle": ("quality/recall_8192_", "quality/recall_16384_", "quality/recall_32768_"),
    "streaming": ("quality/recall_8192_", "quality/recall_16384_", "quality/recall_32768_"),
    "random": ("quality/recall_8192_", "quality/recall_16384_", "quality/recall_32768_"),
}


def recalled(means: Means, method: str, length: int, budget: int | None) -> tuple[float, int] | None:
    """(mean score over the five tasks, samples), None where a task is missing."""
    found: dict[str, Row] = {}
    for name in RECALL[method]:
        for r in means.of(name if "/" in name else f"quality/{name}"):
            if (r["method"], r["length"], r["budget"]) == (method, length, budget) and r["task"] in RECALL_TASKS:
                found[r["task"]] = r
    if len(found) < len(RECALL_TASKS):
        return None
    n = sum(r["samples"] for r in found.values())
    return sum(r["score"] * r["samples"] for r in found.values()) / n, n


@table("recall-answers", "quality/recall.json")
def recall_answers(means: Means) -> str:
    told = []
    for method in RECALL:
        cells = [recalled(means, method, n, None if method == "dense" else b) for n in LENGTHS for b in (64, 256)]
        counts = sorted({c[1] for c in cells if c})
        samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        name = method if method == "dense" else f"`{method}`"
        told.append([name, *(number(c[0]) if c else "-" for c in cells), samples])
    said = (
        "The recall model: 7.2M parameters, trained to recall, sink 32, window 64. Mean score over five tasks: one "
        "key, one of many similar keys, several values, several keys, chains of variables. Columns: length, budget. A "
        "standard error is at most 0.11 with 20 samples and 0.06 with 80. A dash: not measured on all five tasks."
    )
    head = ["method", *(f"{tokens(n)}, {b}" for n in LENGTHS for b in (64, 256)), "samples of each score"]
    return markdown(said, head, told)


def _scores(
    means: Means, source: str, methods: list[str], budgets: tuple[int, ...], tasks: tuple[str, ...] = ()
) -> list[list[str]]:
    """A row a method: the mean score at each budget, over the tasks."""
    rows = [r for r in means.of(source) if not tasks or r["task"] in tasks]
    out = []
    for method in methods:
        cells = []
        for b in budgets:
            mine = [
                r for r in rows if r["method"] == method and r["budget"] in ((None,) if method == "dense" else (b,))
            ]
            n = sum(r["samples"] for r in mine)
            cells.append(number(sum(r["score"] * r["samples"] for r in mine) / n) if n else "-")
        out.append([method if method == "dense" else f"`{method}`", *cells])
    return out


def _methods(means: Means, source: str) -> list[str]:
    return list(dict.fromkeys(r["method"] for r in means.of(source)))


@table("readout", "quality/readout.json")
def readout(means: Means) -> str:
    names, told = _methods(means, "readout_8192"), []
    by_length = [{r[0]: r[1:] for r in _scores(means, f"readout_{n}", names, (64, 256))} for n in LENGTHS]
    for name in by_length[0]:
        told.append([name, *(c for rows in by_length for c in rows[name])])
    said = (
        "The recall model lists 64 records of a prompt in one answer: share of right records, two prompts of each "
        "length. Columns: length, budget."
    )
    return markdown(said, ["method", *(f"{tokens(n)}, {b}" for n in LENGTHS for b in (64, 256))], told)


@table("journal", "quality/journal.json")
def journal(means: Means) -> str:
    told = []
    for source, names in (("journal_tokens", ["dense", "pariskv"]), ("journal_always_h200_float32_64", ["icecache"]),
                          ("journal_clusters", ["louiskv", "clusterkv", "quest"]),
                          ("journal_tokens", ["streaming", "random"])):  # fmt: skip
        told += _scores(means, source, names, (64,))
    said = (
        "The recall model writes a journal of 4K tokens, then answers 16 questions about it. Budget 64; two journals, "
        "for `icecache` eight. `clusterkv` and `louiskv` have clusters of 4 tokens, so that the budget holds 16."
    )
    return markdown(said, ["method", "share of right answers"], told)


@table("needles", "quality/needles.json")
def needles(means: Means) -> str:
    source = "needles/needles_2048"
    said = (
        "SmolLM2-135M in float32, two of RULER's needle tasks at 2K, four samples each, sink 32, window 64: mean score."
    )
    told = _scores(means, source, _methods(means, source), (64, 256))
    return markdown(said, ["method", "budget 64", "budget 256"], told)


@table("reuse-answers", "quality/needles.json")
def reuse_answers(means: Means) -> str:
    told = _scores(means, "needles_2048_h200_reuse1", ["dense"], (64, 256))
    for source, name in (
        ("reuse1", "every layer selects"),
        ("reuse3", "`reuse_every=3`"),
        ("choosers", "`selecting_layers` from a file"),
    ):
        (row,) = _scores(means, f"needles_2048_h200_{source}", ["icecache"], (64, 256))
        told.append([f"`icecache`, {name}", *row[1:]])
    said = "SmolLM2-135M in float32, six of RULER's needle tasks at 2K, 24 samples each: mean score."
    return markdown(said, ["method", "budget 64", "budget 256"], told)


# ---------------------------------------------------------------- both sides

def _of_method(method: str) -> None:
    @table(f"method-quality:{method}", "quality/text.json", "quality/recall.json")
    def method_quality(text: Means, recall: Means) -> str:
        rows, told = of_text(text), []
        for budget in (64, 256, 1024):
            kl = only(rows, method=method, budget=budget)
            scores = [recalled(recall, method, n, budget) if method in RECALL else None for n in LENGTHS]
            same, found = (kl["agrees"], kl.get("hit_rate")) if kl else (None, None)
            cells = [with_error(kl, "kl", 4), number(same), number(found)]
            told.append([budget, *cells, *(number(s[0]) if s else "-" for s in scores)])
        said = (
            "KL (nats a token), share of equal likeliest tokens, and hits were measured with SmolLM2-135M on 2K tokens "
            "of a novel. Recall was measured on five tasks with a model of 7.2M parameters. Sink 32, window 64."
            + " On the novel: sink 0, window 232." * (method == "snapkv")
        )
        return markdown(said, ["budget", "KL", "same token", "hits", *(f"recall, {tokens(n)}" for n in LENGTHS)], told)


for _method in ("quest", "arkvale", "pariskv", "icecache", "prkv", "prkv_static", "clusterkv", "louiskv", "snapkv",
                "streaming", "oracle", "random"):  # fmt: skip
    _of_method(_method)
