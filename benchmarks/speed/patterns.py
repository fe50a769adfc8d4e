"""Time of LouisKV's three patterns of prompt and output, end to end, by method and batch.

Outputs are not generated in full. Compiled steps are timed at --points contexts, at equal distances from the first
token of an output to the last. Each point has 8 untimed steps, then --steps timed steps. The trapezoid rule makes the
time of an output from the mean times of a step. Between the points tokens enter the store as tokens of a prompt do.
There louiskv has clusters of 16 tokens on average, where an output would have segments of 4 to 32 tokens.

A prompt is one timed forward of all rows of the batch, up to --prompt-rows. For larger batches that time is scaled. One
step is compiled for each method and batch, on a cache with room for the longest pattern of that batch.
"""
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

import torchsparsekv
from torchsparsekv.patches._family import head_dim_of
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._options import Setup, at_least, different, option
from torchsparsekv_benchmarks._progress import now
from torchsparsekv_benchmarks.speed import _common, decode
from torchsparsekv_benchmarks.speed.prefill import prompt, time_prompt
from torchsparsekv_benchmarks.speed.throughput import largest_batch

NAME = "patterns"
LOADING = 4096  # tokens of an untimed prompt, in which kernels load
DENSE, RIVAL, OURS = "full", "arkvale", "louiskv"


class Pattern(NamedTuple):
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.prompt}+{self.output}"


# "Up to" so much faster than ArkVale is LouisKV in its paper (figure 7; one A6000, PCIe 4, an ArkVale of theirs).
PAPER = {Pattern(32768, 512): 1.9, Pattern(500, 16384): 2.9, Pattern(32768, 16384): 4.7}


@dataclass(frozen=True)
class Options(Setup):
    shape: str = "llama-3.1-8b"
    patterns: tuple[str, ...] = option(tuple(map(str, PAPER)), "Patterns in tokens, comma-separated PROMPT+OUTPUT.")
    methods: tuple[str, ...] = (DENSE, RIVAL, "quest", OURS)
    batches: tuple[int, ...] = option((1, 4, 0), "Rows of the batch, comma-separated; 0: the largest batch that fits.")
    most: int = option(32, "The largest batch to try.")
    prompt_rows: int = option(4, "Prompts in one timed forward, at most.")
    points: int = option(4, "Contexts of an output at which steps are timed.")
    steps: int = option(64, "Timed steps at each context.")
    locality: float = option(0.9, "Share of steps whose query stays on its topic; louiskv retrieves at the others.")

    @property
    def span(self) -> int:
        """Tokens that one point generates."""
        return decode.WARM + self.steps


def parse(text: str) -> Pattern:
    head, plus, tail = text.partition("+")
    if not (plus and head.isdecimal() and tail.isdecimal() and int(head) > 1 and int(tail) > 0):
        raise ValueError(f"a pattern is PROMPT+OUTPUT in tokens, at least 2+1; got {text!r}")
    return Pattern(int(head), int(tail))


def check(o: Options) -> None:
    at_least(o, most=1, prompt_rows=1, points=2, steps=1)
    different(o, "patterns", "methods", "batches")
    if min(o.batches) < 0:
        raise ValueError(f"batches must not be negative, got {min(o.batches)}")
    if o.offload not in ("host", "device"):
        raise ValueError(f"offload must be host or device, got {o.offload!r}")
    for p in map(parse, o.patterns):
        if p.output < o.points * o.span:
            raise ValueError(
                f"an output of {p.output} tokens has no room for {o.points} points of {o.span} steps ({decode.WARM} "
                "untimed)"
            )


class Cell(NamedTuple):
    """A row to measure: the requested batch (0: the largest), and the batch that runs (0: it does not fit)."""

    pattern: Pattern
    method: str
    asked: int
    batch: int

    @property
    def key(self) -> dict:
        return {"pattern": str(self.pattern), "method": self.method, "asked": str(self.asked or "largest")}


def cells(model, o: Options) -> list[Cell]:
    """All of a comparison: batch by batch, so that rows to compare are measured one soon after the other."""
    pairs = [(parse(p), m) for m in o.methods for p in o.patterns]
    gib = gpu_gib(model)
    most = {(p, m): min(o.most, largest_batch(model, m, sum(p), gib, o)) for p, m in pairs}
    fits = lambda asked, limit: (asked or limit) if asked <= limit else 0  # noqa: E731
    return [Cell(p, m, asked, fits(asked, most[p, m])) for asked in o.batches for p, m in pairs]


def gpu_gib(model) -> float:
    """What a cache and the model's weights may take together."""
    from torchsparsekv.patches._memory import free_device_bytes, weight_bytes

    return (free_device_bytes(model.device) + weight_bytes(model)) / 2**30


class Bench:
    """One method at one batch: a cache and a compiled step, for all patterns in turn."""

    def __init__(self, model, handle, o: Options, batch: int):
        self.model, self.handle, self.o = model, handle, o
        self.cache = handle.make_cache(batch)
        shape = (decode.BANK, model.config.num_attention_heads, head_dim_of(model.config))
        self.bank = torch.zeros(shape, dtype=torch.bfloat16, device=model.device)
        decode.steer(self.cache, self.bank)
        self.step, self.graphs = decode.Step(model, self.cache, batch), 0

    def output(self, p: Pattern) -> dict:
        """The decode steps of one pattern; `recompiles` beyond the first graph of all."""
        o, device = self.o, self.model.device
        contexts = [p.prompt + round(i * (p.output - o.span) / (o.points - 1)) for i in range(o.points)]
        topics = decode.topics_of(self.model.config, sum(p), o.budget)
        self.bank.copy_(decode.bank_of(topics, o.locality, device))
        self.cache.reset()
        took, counted, have = [], torch.zeros_like(decode.counts(self.handle.report())), 0
        for context in contexts:
            decode.fill(self.cache, topics, have, context, device)
            self.step.warm_up(context)
            self.graphs = self.graphs or self.step.graphs
            before = decode.counts(self.handle.report())
            took.append(self.step.time(o.steps, 1))
            counted += decode.counts(self.handle.report()) - before
            have = context + o.span
        area = torch.trapezoid(*(torch.tensor(x, dtype=torch.float64) for x in (took, contexts)))
        mean = float(area) / (contexts[-1] - contexts[0])
        return {
            "contexts": contexts, "tpot_ms": took, "output_s": mean * (p.output - 1) / 1e3,
            **decode.rates(counted), "recompiles": self.step.graphs - self.graphs,
            "graph_skips": self.step.skips,
        }  # fmt: skip


def time_prompts(model, handle, cell: Cell, lengths: Sequence[int], o: Options, known: dict) -> None:
    """Into `known`, by (method, length, rows): seconds of one forward of `rows` prompts."""
    rows = min(cell.batch, o.prompt_rows)
    missing = [n for n in dict.fromkeys(lengths) if (cell.method, n, rows) not in known]
    if not missing:
        return
    cache = handle.make_cache(rows)
    for n in missing:
        ids = prompt(model, rows, n)
        for part in (ids[:, :LOADING], ids):
            cache.reset()
            ms = time_prompt(model, part, cache)
        known[cell.method, n, rows] = ms / 1e3


def measure(model, o: Options, group: list[Cell], length: int, known: dict) -> Iterator[dict]:
    """The rows of one method at one batch, each as soon as it is known, on caches of that length."""
    method, batch = group[0].method, group[0].batch
    patterns = list(dict.fromkeys(c.pattern for c in group))
    now(f"{method}, batch {batch}: {', '.join(map(str, patterns))}")
    with torchsparsekv.patch(model, method, max_length=length, **o.patch(method)) as handle:
        time_prompts(model, handle, group[0], [p.prompt for p in patterns], o, known)
        decode.collect()
        bench = Bench(model, handle, o, batch)
        for p in patterns:
            rows = min(batch, o.prompt_rows)
            seconds, out = known[method, p.prompt, rows] * batch / rows, bench.output(p)
            total = seconds + out["output_s"]
            row = {"batch": batch, "prompt_rows": rows, "prompt_s": seconds, **out, "total_s": total}
            row |= {"timed_steps": o.points * o.steps, "tokens_per_s": batch * p.output / total, **o.told(method)}
            yield from ({**c.key, **row} for c in group if c.pattern == p)
        del bench
    decode.collect()


def compare(rows: list[dict]) -> None:
    """Beside each row how much faster it is than dense attention and ArkVale, in tokens per second."""
    rows = [r for r in rows if r["batch"]]
    speed = {(r["pattern"], r["asked"], r["method"]): r["tokens_per_s"] for r in rows}
    for r in rows:
        for column, other in (("over_dense", DENSE), ("over_arkvale", RIVAL)):
            if base := speed.get((r["pattern"], r["asked"], other)):
                r[column] = r["tokens_per_s"] / base
        if r["method"] == OURS and parse(r["pattern"]) in PAPER:
            r["paper"] = PAPER[parse(r["pattern"])]


def measured(model, o: Options, rows: list[dict]) -> Iterator[dict]:
    """The rows that are not there yet."""
    known = {(r["method"], parse(r["pattern"]).prompt, r["prompt_rows"]): r["prompt_s"] * r["prompt_rows"] / r["batch"]
             for r in rows if r["batch"]}  # fmt: skip
    groups: dict[tuple[str, int], list[Cell]] = {}
    for c in cells(model, o):
        groups.setdefault((c.method, c.batch), []).append(c)
    for (_, batch), group in groups.items():
        todo = [c for c in group if not any(c.key.items() <= r.items() for r in rows)]
        if batch and todo:
            yield from measure(model, o, todo, max(sum(c.pattern) for c in group), known)
        else:
            yield from ({**c.key, "batch": 0} for c in todo)


def run(o: Options, out: Path | None = None) -> dict:
    check(o)
    device, options = _common.prepare(o.methods, o), o.recorded(o.methods)
    rows = _results.begun(NAME, options, out)
    for row in measured(_common.build(o.shape, device), o, list(rows)):
        rows.append(row)
        compare(rows)
        print(row, flush=True)
        _results.save(NAME, rows, options, out)
    return _results.finish(NAME, rows, options, out)
