"""Milliseconds a step of a real language model, through the stock generate() of transformers, over stretches of a text.

The rows are a model without a patch (`stock`), the method `full`, and each method with its pool in each place. Answers
are greedy. `same`, of the methods: the share of the answers that equal those with the pool in the first place.
`step_ms`: milliseconds of a step by the wall clock. `busy_ms`: milliseconds of a step in which at least one kernel or
copy ran.
"""
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

import torchsparsekv
from torchsparsekv.method import Offload
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._options import Setup, at_least, different, option
from torchsparsekv_benchmarks._progress import now
from torchsparsekv_benchmarks.quality import pretrained, texts
from torchsparsekv_benchmarks.quality.run import cost
from torchsparsekv_benchmarks.quality.text_options import check_text
from torchsparsekv_benchmarks.speed import _common
from torchsparsekv_benchmarks.speed.decode import collect

STOCK, DENSE = "stock", "full"
WARM = 16  # first steps, which compile, capture a graph and fill the hot buffer; their times do not count
# Last steps, which run under the profiler after the timed steps. The profiler can also slow the rows after the first,
# since CUPTI stays attached unless the environment has TEARDOWN_CUPTI=1 (pytorch#144455).
PROFILED = 8


@dataclass(frozen=True)
class Options(Setup):
    model: str = option("qwen-1.5b", "qwen-1.5b, qwen-0.5b or smollm2 (`make real-model`), or a Hugging Face path.")
    text: str = option("sympy", "A file of plain text; or moby-dick or sympy (`make real-model`).")
    context: int = option(32512, "Tokens of a prompt.")
    rows: tuple[int, ...] = option((1, 14), "Prompts at a time, comma-separated.")
    tokens: int = option(128, f"Tokens of an answer. The first {WARM} and the last {PROFILED} steps are not timed.")
    methods: tuple[str, ...] = ("quest", "pariskv")
    places: tuple[str, ...] = option(("device", "host"), "Values of patch(offload=...), comma-separated.")

    def check(self, methods: Sequence[str]) -> None:
        super().check(methods)
        different(self, "rows", "places")
        at_least(self, context=1, rows=1, tokens=WARM + 2 + PROFILED)
        if wrong := sorted(set(self.places) - set(get_args(Offload))):
            raise ValueError(f"places must be of {', '.join(get_args(Offload))}, got {', '.join(wrong)}")
        if self.offload != Setup.offload:
            raise ValueError(f"offload has no effect here, got {self.offload}: name places")
        if DENSE in methods:
            raise ValueError(f"{DENSE} always runs: name other methods")
        check_text(self.text)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals, each a start and an end."""
    length, until = 0.0, -math.inf
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, until))
        until = max(until, end)
    return length


class Clock:
    """A logits processor that notes the time of each step. generate() waits for each token, so these times are real.
    On a GPU the last steps run under the profiler."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.times: list[float] = []
        self.profiler: Any = None

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.times.append(time.perf_counter())
        if ids.is_cuda:
            self.profile()
        return scores

    def profile(self) -> None:
        left = self.tokens - len(self.times)
        if left == PROFILED:
            torch.cuda.synchronize()
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.start()
        elif left == 0:
            torch.cuda.synchronize()
            self.profiler.stop()

    def step_ms(self) -> float:
        at = self.times[WARM : self.tokens - PROFILED]
        return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(at))

    def busy_ms(self) -> float | None:
        """None without a GPU, or where the profiler saw no kernel."""
        events = self.profiler.events() if self.profiler else ()
        cuda = torch.autograd.DeviceType.CUDA
        spans = [(e.time_range.start, e.time_range.end) for e in events if e.device_type == cuda]
        return covered(spans) / 1e3 / PROFILED if spans else None


def answer(model, ids: Tensor, tokens: int) -> tuple[Tensor, Clock]:
    """The answers of one generate(), [rows, tokens], and the clock of its steps."""
    clock = Clock(tokens)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens,
        logits_processor=[clock],
    )  # fmt: skip
    return out[:, ids.shape[1] :].cpu(), clock


def settings(o: Options) -> Iterator[tuple[str, str | None]]:
    yield from ((STOCK, None), (DENSE, None))
    yield from ((method, place) for method in o.methods for place in o.places)


def measure(model, ids: Tensor, method: str, place: str | None, o: Options) -> tuple[dict, Tensor]:
    """A row, and the answers."""
    row: dict[str, Any] = {"method": method, "place": place, "rows": len(ids)}
    if method == STOCK:
        said, clock = answer(model, ids, o.tokens)
    else:
        told = o.patch(method) | ({} if place is None else {"offload": place})
        with torchsparsekv.patch(model, method, max_length=ids.shape[1] + o.tokens, **told) as handle:
            said, clock = answer(model, ids, o.tokens)
            report = handle.report()
        row |= {"hit_rate": cost(report, len(ids))["hit_rate"], "device_GiB": report.device_bytes / 2**30}
    ms = clock.step_ms()
    return row | {"step_ms": ms, "busy_ms": clock.busy_ms(), "tokens_per_s": 1e3 * len(ids) / ms}, said


def check_positions(config: Any, o: Options) -> None:
    positions = config.get_text_config(decoder=True).max_position_embeddings
    if o.context + o.tokens > positions:
        raise ValueError(
            f"context {o.context} and tokens {o.tokens} are more than the {positions} positions of {o.model}: "
            "give a smaller context"
        )


def run(o: Options, out: Path | None = None) -> dict:
    device = _common.prepare(o.methods, o)
    files = pretrained.opened(o.model, 1.0)
    check_positions(files.config, o)
    text = texts.read_one(o.text, files.tokenizer)
    texts.check_room(text, o.context, max(o.rows))
    model = files.load(device, torch.bfloat16).eval()
    found: list[dict] = []
    for rows in o.rows:
        ids = text.rows(o.context, range(rows))[:, :-1].to(device)
        first: dict[str, Tensor] = {}
        for method, place in settings(o):
            now(f"{rows} rows, {method}" + (f", {place}" if place else ""))
            row, said = measure(model, ids, method, place, o)
            if place is not None:
                row["same"] = (first.setdefault(method, said) == said).all(1).double().mean().item()
            found.append(row)
            print(row, flush=True)
            _results.save("generate", found, o.recorded(o.methods), out)
            collect()
    return _results.finish("generate", found, o.recorded(o.methods), out)
