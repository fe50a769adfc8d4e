"""Time per output token by context, batch and method, beside dense attention.

One process compiles all steps, with the same options.
"""
import contextlib
import dataclasses
import gc
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import counters

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.patches._family import head_dim_of
from torchsparsekv.state import LayerState
from torchsparsekv_benchmarks import _results, _traces
from torchsparsekv_benchmarks._options import Rows, at_least, check_also, different, option, repeats
from torchsparsekv_benchmarks._progress import now
from torchsparsekv_benchmarks.speed import _common, _dense, _inductor
from torchsparsekv_benchmarks.speed._replay import Replay, replay_in_cache
from torchsparsekv_benchmarks.speed._synthetic import Topics
from torchsparsekv_benchmarks.speed._text_rates import nearest

FLOOR_CONTEXT = 256
BANK = 512  # steered queries, used in turn
CHUNK = 16384  # tokens of a prompt that come at a time, which bounds the memory that its queries take
LEAST = 1024  # of one row
HF_STATIC_LIMIT = 131072  # beyond it Hugging Face's compiled static cache takes hundreds of milliseconds a token
BLOCK = 16  # what a budget for short contexts is a multiple of
WARM = 8  # steps before the clock runs: compile, warm-up, record, a few replays
HF_STATIC = "hf-static"
PASSES = 4  # over the timed steps: three for the mean, one for each by itself
UNTIMED = WARM + _common.AHEAD
SHORTEST_STATIC = UNTIMED + PASSES  # it must not be overrun


@dataclass(frozen=True)
class Options(Rows):
    """locality: how much a query is like the last; one step in 1 / (1 - locality) jumps to another topic. Methods that
    retrieve at boundaries do it there, so their retrieval rate is 1 - locality. A jump replaces what was chosen, so hit
    rates come out near the locality. With locality_of_text it is the rate of real text, and the row says so; there
    louiskv retrieves at nearly every step, which `--hyper louiskv.tau=1` asks for."""

    shape: str = "llama-3.1-8b"
    layers: int = option(0, "Layers of the model; 0: all layers of the shape.")
    contexts: tuple[int, ...] = (131072,)
    batches: tuple[int, ...] = (1,)
    localities: tuple[float, ...] = option(
        (), "More values of --locality, comma-separated. Each adds a row of the table, with the same compiled step."
    )
    locality_of_text: bool = option(
        False, "Set the locality of each method to the hit rate that eval-text measured, at the nearest budget."
    )
    turning: float | None = option(
        None, "Give synthetic queries a common part, which changes at this share of the jumps to another topic. "
        "Default: no common part."
    )
    chunk: int = option(
        CHUNK, f"Prompt tokens that are stored at once, all rows together, at least {LEAST} a row; 0: whole prompts."
    )
    steps: int = 100
    hf_static: bool = True
    ours: bool = option(True, "Also time our dense attention, whose pool is on the GPU.")
    dense: tuple[str, ...] = option(("sdpa-cudnn",), f"Other dense attention: any of {', '.join(_dense.KERNELS)}.")
    through_generate: bool = option(False, "Also time generate().")
    inductor: tuple[str, ...] = option(
        (), "Options of torch._inductor.config for all rows, comma-separated NAME=VALUE."
    )

    @property
    def grows(self) -> int:
        """Tokens that a run adds to a context."""
        runs = 1 + self.through_generate + len(self.localities)
        return runs * (UNTIMED + PASSES * self.steps) + 8

    def check(self, methods: Sequence[str]) -> None:
        super().check(methods)
        different(self, "contexts", "batches")
        if self.chunk and self.chunk < LEAST:
            raise ValueError(f"chunk must be 0 or at least {LEAST}, got {self.chunk}")
        at_least(self, batches=1)
        _dense.check(self.dense, self.contexts)
        _inductor.settings(self.inductor)
        for name in methods:
            self.near(name)
        check_also(self.also, methods)
        if self.trace and (self.localities or self.locality_of_text or self.through_generate):
            raise ValueError(
                "trace replaces locality, in bare steps: leave out --localities, --locality-of-text, --through-generate"
            )
        for name in methods if self.trace else ():
            if make_method(name).traits.attends == "selected":
                _traces.read(Path(self.trace), name, self.method(name).budget)
        if self.localities and self.locality_of_text:
            raise ValueError("--locality-of-text replaces locality: leave out --localities")
        if repeats((self.locality, *self.localities)) or not all(0 <= x <= 1 for x in self.localities):
            wrong = ",".join(map(str, self.localities))
            raise ValueError(f"localities must be from 0 to 1, different, and not {self.locality} again, got {wrong}")
        if self.turning is not None and not 0 <= self.turning <= 1:
            raise ValueError(f"turning must be between 0 and 1, got {self.turning}")
        for name, changed in self.asked():
            changed.method(name)
        if (self.dense or self.hf_static) and min(self.contexts) < SHORTEST_STATIC:
            raise ValueError(f"a static cache needs contexts of at least {SHORTEST_STATIC}, got {min(self.contexts)}")

    def near(self, name: str) -> dict[str, float]:
        """The locality of a method's queries where it is not the option; with the budget that it was measured at."""
        if not self.locality_of_text or make_method(name).traits.attends != "selected":
            return {}
        rate, budget = nearest(name, self.method(name).budget)
        return {"locality": round(rate, 3), "of_text_at": budget}


class Steering:
    """Queries from a bank in the place of the model's, so that its random weights do not decide what is retrieved.

    Every row of a batch is elsewhere in it: as in independent sequences, they do not all turn at the same step.
    """

    def __init__(self, bank: Tensor):
        self.bank = bank

    def __call__(self, s: LayerState, q: Tensor) -> Tensor:
        rows = torch.arange(q.shape[0], device=q.device) * BANK // q.shape[0]
        at = (s.row_lengths.seq_len + rows) % BANK
        steered = self.bank.index_select(0, at).unsqueeze(2) + 0 * q  # `0 * q`: the model's own work is still done
        return steered.contiguous()


def topics_of(config, context: int, budget: int) -> Topics:
    heads, topics = config.num_key_value_heads, max(2, context // max(budget, 256))
    return Topics(heads, head_dim_of(config), topics, config.num_attention_heads // heads)


def fill(cache, topics: Topics, begin: int, end: int, device, tokens: int = CHUNK) -> None:
    """Put structured tokens at these positions in the store of every layer, through the ops a prompt goes through, so
    many of all rows at a time; 0: all."""
    chunk = max(LEAST, tokens // cache.batch) if tokens else end - begin
    for at in range(begin, end, chunk):
        stop = min(at + chunk, end)
        k = topics.keys(cache.batch, at, stop, device, torch.bfloat16)
        q = k.repeat_interleave(topics.group, 1)  # a token asks for tokens of its topic
        for lengths in cache.row_lengths.values():
            lengths.advance(stop - at)
        for layer in cache.stored.values():
            layer.method.ingest(layer.state, q, k, k, Attention(topics.dim**-0.5), join=layer.last)
    torch.cuda.synchronize()


def bank_of(topics: Topics, locality: float, device, turning: float | None = None) -> Tensor:
    """Queries to steer by, [BANK, heads, head_dim]."""
    return topics.queries(BANK, locality, device, torch.bfloat16, turning)


def steer(cache, bank: Tensor) -> None:
    torch._dynamo.mark_static_address(bank)
    for layer in cache.stored.values():
        if layer.method.traits.attends == "selected":
            layer.state.override_query = Steering(bank)


class Step:
    """The compiled decode step of a model on one cache. `replay`, if there is one, runs before each step."""

    def __init__(self, model, cache, batch: int, replay: Replay | None = None):
        torch._dynamo.reset()
        counters.clear()
        self.cache, self.replay = cache, replay
        self.compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        self.ids = torch.full((batch, 1), 7, device=model.device)
        self.position = torch.zeros_like(self.ids)

    def __call__(self, _=None):
        if self.replay is not None:
            self.replay()
        self.position.add_(1)
        return self.compiled(self.ids, position_ids=self.position, past_key_values=self.cache, logits_to_keep=1)

    @torch.no_grad()
    def warm_up(self, context: int) -> None:
        """The first steps after `context` tokens: compile, or only settle the hot buffer."""
        self.position.fill_(context)
        for _ in range(WARM):
            self()

    @torch.no_grad()
    def time(self, steps: int, repeats: int = 3) -> float:
        """Milliseconds per step; a host sync raises."""
        with _no_host_sync():
            return _common.time_loop(self, steps, repeats)

    @torch.no_grad()
    def each(self, steps: int) -> Tensor:
        """Milliseconds of `steps` steps, one by one."""
        with _no_host_sync():
            return torch.tensor(_common.time_each(self, steps))

    @property
    def graphs(self) -> int:
        """So many were compiled."""
        return counters["stats"]["unique_graphs"]

    @property
    def skips(self) -> int:
        """So often the step, or a part of it, was not made a CUDA graph."""
        return counters["inductor"].get("cudagraph_skips", 0) + counters["inductor"].get("cudagraph_partitions", 0)


def bare_tpot(model, cache, batch: int, context: int, steps: int) -> dict:
    """Milliseconds per compiled step, in the mean and of the slowest, and what compiler and allocator did meanwhile."""
    step = Step(model, cache, batch)
    step.warm_up(context)
    return timed(step, steps)


def timed(step: Step, steps: int) -> dict:
    """The same of a step that is warm."""
    graphs, memory = step.graphs, torch.cuda.memory_allocated()
    return {
        "tpot_ms": step.time(steps, PASSES - 1),
        "p99_ms": float((each := step.each(steps)).quantile(0.99)),
        "worst_ms": float(each.max()),
        "recompiles": step.graphs - graphs,
        "graph_skips": step.skips,
        "memory_growth": torch.cuda.memory_allocated() - memory,
    }


@contextlib.contextmanager
def _no_host_sync():
    """An operation that waits for the device raises in here (the timer's own, explicit waits do not count)."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def generate_tpot(model, cache, batch: int, context: int, steps: int) -> float:
    """Milliseconds per token of stock `generate()` on the filled cache: the difference of two runs."""
    torch._dynamo.reset()
    ids = torch.full((batch, context + 1), 7, device=model.device)
    took = []
    for new in (WARM, steps, 2 * steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        ids = model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=new, do_sample=False)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return (took[2] - took[1]) / steps * 1e3


def run_method(model, name: str, o: Options, batch: int, context: int) -> dict:
    """Its row at the locality of the options."""
    (row,) = rows_of_method(model, name, dataclasses.replace(o, localities=()), batch, context)
    return row


def rows_of_method(model, name: str, o: Options, batch: int, context: int) -> Iterator[dict]:
    """Its row at the locality of the options, and where it retrieves, those at the others."""
    config, device = model.config, model.device
    now(f"{name} at {context} tokens, batch {batch}")
    topics = topics_of(config, context, o.budget)
    length = context + o.grows
    told = o.patch(name)
    # In contexts shorter than the budget all of them, as far as blocks go; the row says so.
    small = {"budget": max(BLOCK, context // BLOCK * BLOCK)} if name != "full" and context < o.budget else {}
    with torchsparsekv.patch(model, name, max_length=length, step="compiled", **told | small) as handle:
        cache = handle.make_cache(batch)
        fill(cache, topics, 0, context, device, o.chunk)
        near = o.near(name)
        bank = bank_of(topics, near.get("locality", o.locality), device, o.turning)
        steer(cache, bank)
        if o.trace and handle.planned.method.traits.attends == "selected":
            replay = replay_in_cache(cache, _traces.read(Path(o.trace), name, handle.planned.method.budget))
            steered: dict = {"trace": Path(o.trace).name}
        else:
            replay, steered = None, dict(near)
        others = o.localities if handle.planned.method.traits.attends == "selected" else ()
        row = {"method": name, **o.told(name), **steered, **small, "context": context, "batch": batch}
        if others:
            row |= {"locality": o.locality}
        step = Step(model, cache, batch, replay)
        step.warm_up(context)
        yield row | measured(step, handle, o.steps) | through_generate(model, cache, batch, o)
        for locality in others:
            bank.copy_(bank_of(topics, locality, device, o.turning))
            step.warm_up(int(cache.get_seq_length()))
            yield row | {"locality": locality} | measured(step, handle, o.steps)
        del cache, step, replay
    collect()


def measured(step: Step, handle, steps: int) -> dict:
    """Times of a warm step, and what these steps fetched."""
    before = counts(handle.report())
    row = timed(step, steps)
    report = handle.report()
    return row | rates(counts(report) - before) | memory_of(report)


def through_generate(model, cache, batch: int, o: Options) -> dict:
    if not o.through_generate:
        return {}
    return {"generate_ms": generate_tpot(model, cache, batch, int(cache.get_seq_length()), o.steps)}


def counts(report) -> Tensor:
    """Of the retrieving layers: steps and those with a retrieval (means), blocks selected, blocks fetched, blocks
    fetched late and bytes read from the host (sums)."""
    sparse = [r for r in report.layers if r.method != "full"]
    rows = [(r.steps, r.retrieval_rate * r.steps) for r in sparse]
    total = [(r.blocks_selected, r.blocks_fetched, r.fetched_late, r.host_bytes_read) for r in sparse]
    mean = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2).sum(0) / max(1, len(sparse))
    return torch.cat([mean, torch.tensor(total, dtype=torch.float64).reshape(-1, 4).sum(0)])


def rates(counted: Tensor) -> dict:
    """Hit rate and traffic; nothing where nothing was selected."""
    steps, retrieved, selected, fetched, late, moved = counted.tolist()
    if not selected:
        return {}
    hits = 1 - fetched / selected
    behind = {"fetched_late": late / fetched} if late else {}
    return {"hit_rate": hits, **behind, "host_MB_per_step": moved / steps / 1e6, "retrieval_rate": retrieved / steps}


def memory_of(report) -> dict:
    return {"host_GiB": report.host_bytes / 2**30, "device_GiB": report.device_bytes / 2**30}


def run_static(model, batch: int, context: int, o: Options, name: str = HF_STATIC) -> dict:
    """Hugging Face's StaticCache compiled as users have it, or with dense attention of another name. What it holds does
    not matter for its speed."""
    from transformers import StaticCache

    now(f"{name} at {context} tokens, batch {batch}")
    cache = StaticCache(model.config, max_cache_len=context)  # it attends to all its slots from the first step on
    steps = min(o.steps, (context - UNTIMED) // PASSES)  # and must not be overrun
    heads = model.config.num_key_value_heads
    cache.early_initialization(batch, heads, head_dim_of(model.config), torch.bfloat16, model.device)
    row = {"method": name, **_dense.told(name), "context": context, "batch": batch}
    with contextlib.nullcontext() if name == HF_STATIC else _dense.attending_by(name, model, batch, context):
        row |= bare_tpot(model, cache, batch, context, steps)
    del cache
    collect()
    return row


def run_dense(model, batch: int, context: int, o: Options) -> list[dict]:
    """Ours, and those of others that are asked for. The fastest is what methods are measured against."""
    hf_static = o.hf_static and context <= HF_STATIC_LIMIT
    names = (HF_STATIC,) * hf_static + o.dense
    ours = [run_method(model, "full", o, batch, context)] if o.ours else []
    return [*ours, *(run_static(model, batch, context, o, n) for n in names)]


def told_against(floor: dict, dense: list[dict], methods: Iterable[dict]) -> Iterator[dict]:
    """All of one context, each as soon as it is known: its time over the floor, and the best dense time over its, if
    there is any."""
    best = min((r["tpot_ms"] for r in dense), default=None)
    for r in itertools.chain(dense, methods):
        speedup = {} if best is None else {"speedup": best / r["tpot_ms"]}
        yield r | {"over_floor": r["tpot_ms"] / floor["tpot_ms"]} | speedup


def collect() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def run(o: Options, out: Path | None = None) -> dict:
    """Saved whenever a row is done, so that one too many does not cost the others; but not gone on with, since the
    ratios are of one run."""
    with torch._inductor.config.patch(_inductor.settings(o.inductor)):
        return _run(o, out)


def _run(o: Options, out: Path | None) -> dict:
    device, options = _common.prepare(o.methods, o), o.recorded(o.methods)
    _dense.try_out(o.dense, device)
    model = _common.build(o.shape, device, layers=o.layers)
    rows: list[dict] = []
    for batch in o.batches:
        floor = run_static(model, batch, FLOOR_CONTEXT, o)
        rows.append({**floor, "over_floor": 1.0})
        for context in o.contexts:
            methods = (r for name, own in o.asked() for r in rows_of_method(model, name, own, batch, context))
            for row in told_against(floor, run_dense(model, batch, context, o), methods):
                rows.append(row)
                print(row, flush=True)
                _results.save("decode", rows, options, out)
    return _results.finish("decode", rows, options, out)
