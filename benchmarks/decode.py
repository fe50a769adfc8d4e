"""TPOT by context, batch and method, beside the dense baselines, all compiled the same way in one process."""
import contextlib
import dataclasses
import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

import torchsparsekv
from torchsparsekv.benchmarks import _common
from torchsparsekv.benchmarks.synthetic import Topics

FLOOR_CONTEXT = 256
BANK = 512  # steered queries, used in turn
CHUNK = 16384
HF_STATIC_LIMIT = 131072  # beyond it Hugging Face's compiled static cache takes hundreds of milliseconds a token
WARM = 8  # steps before the clock runs: compile, warm-up, record, a few replays


@dataclass(frozen=True)
class Options:
    """locality: how much a query is like the last; one step in 1 / (1 - locality) jumps to another topic. Methods that
    retrieve at boundaries do it there, so their retrieval rate is 1 - locality."""

    shape: str = "llama-3.1-8b"
    contexts: tuple[int, ...] = (131072,)
    batches: tuple[int, ...] = (1,)
    methods: tuple[str, ...] = ("quest",)
    budget: int = 1024
    sink: int = 64
    window: int = 256
    skip_layers: int = 2
    offload: str = "host"
    locality: float = 0.95
    steps: int = 100
    hf_static: bool = True
    through_generate: bool = False


class Steered:
    """A method whose queries come from a bank, so that the model's random weights do not decide what is retrieved."""

    def __init__(self, method, bank):
        self.method, self.bank = method, bank

    def __getattr__(self, name):
        return getattr(self.method, name)

    def decode(self, s, q, k, v, a):
        at = (s.clock.seq_len % BANK).view(1)
        steered = self.bank.index_select(0, at).unsqueeze(2) + 0 * q  # `0 * q`: the model's own work is still done
        return self.method.decode(s, steered.expand_as(q).contiguous(), k, v, a)


def fill(cache, topics: Topics, tokens: int, batch: int, device) -> None:
    """Put `tokens` structured tokens in the store of every layer, through the ops a prompt goes through."""
    chunk = max(1024, CHUNK // batch)
    for begin in range(0, tokens, chunk):
        end = min(begin + chunk, tokens)
        k = topics.keys(batch, begin, end, device, torch.bfloat16)
        for clock in cache.clocks.values():
            clock.advance(end - begin)
        for layer in cache.layers:
            layer.method.take_in(layer.state, k, k, join=layer.last)
    torch.cuda.synchronize()


def steer(cache, topics: Topics, group: int, locality: float, device) -> None:
    bank = topics.queries(BANK, group, locality, device, torch.bfloat16)
    torch._dynamo.mark_static_address(bank)
    for layer in cache.layers:
        if layer.method.retrieves:
            layer.method = Steered(layer.method, bank)


def bare_tpot(model, cache, batch: int, context: int, steps: int) -> dict:
    """Milliseconds per compiled step, and what the compiler and the allocator did meanwhile."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    ids = torch.full((batch, 1), 7, device=model.device)
    position = torch.full((batch, 1), context, device=model.device)

    def step(_):
        position.add_(1)
        return compiled(ids, position_ids=position, past_key_values=cache, logits_to_keep=1)

    with torch.no_grad():
        for i in range(WARM):
            step(i)
        graphs = counters["stats"]["unique_graphs"]
        memory = torch.cuda.memory_allocated()
        with _no_host_sync():
            ms = _common.time_loop(step, steps)
    ind = counters["inductor"]
    return {
        "tpot_ms": ms,
        "recompiles": counters["stats"]["unique_graphs"] - graphs,
        "graph_skips": ind.get("cudagraph_skips", 0) + ind.get("cudagraph_partitions", 0),
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


def run_method(model, name: str, o: Options, batch: int, context: int, *, skip_layers: int) -> dict:
    config, device = model.config, model.device
    group = config.num_attention_heads // config.num_key_value_heads
    topics = Topics(config.num_key_value_heads, head_dim(config), max(2, context // max(o.budget, 256)))
    rounds = 2 if o.through_generate else 1
    offload: Any = "device" if name == "full" else o.offload
    with torchsparsekv.patch(
        model, name, max_length=context + rounds * (WARM + 3 * o.steps) + 8, budget=o.budget, sink=o.sink,
        window=o.window, skip_layers=skip_layers, offload=offload,
    ) as handle:  # fmt: skip
        cache = handle.make_cache(batch)
        fill(cache, topics, context, batch, device)
        steer(cache, topics, group, o.locality, device)
        row = {"method": name, "context": context, "batch": batch}
        row |= bare_tpot(model, cache, batch, context, o.steps)
        if o.through_generate:
            row["generate_ms"] = generate_tpot(model, cache, batch, int(cache.get_seq_length()), o.steps)
        row |= summary(handle.report())
        del cache
    _collect()
    return row


def summary(report) -> dict:
    """Hit rate and traffic of the retrieving layers, memory of the cache."""
    out = {"host_GiB": report.host_bytes / 2**30, "device_GiB": report.device_bytes / 2**30}
    sparse = [r for r in report.layers if r.blocks_selected]
    if not sparse:
        return out
    hits = 1 - sum(r.blocks_fetched for r in sparse) / sum(r.blocks_selected for r in sparse)
    moved = sum(r.host_bytes_read for r in sparse) / sparse[0].steps / 1e6
    rate = sum(r.retrieval_rate for r in sparse) / len(sparse)
    return {"hit_rate": hits, "host_MB_per_step": moved, "retrieval_rate": rate, **out}


def head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def run_static(model, batch: int, context: int, o: Options) -> dict:
    """Hugging Face's StaticCache compiled as users have it; its content does not matter for its speed."""
    from transformers import StaticCache

    cache = StaticCache(model.config, max_cache_len=context)  # it attends to all its slots from the first step on
    steps = min(o.steps, (context - WARM) // 3)  # and must not be overrun
    heads = model.config.num_key_value_heads
    cache.early_initialization(batch, heads, head_dim(model.config), torch.bfloat16, model.device)
    row = {"method": "hf-static", "context": context, "batch": batch}
    row |= bare_tpot(model, cache, batch, context, steps)
    del cache
    _collect()
    return row


def _collect() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def run(o: Options, out: Path | None = None) -> dict:
    device = _common.prepare(o.methods)
    model = _common.build(o.shape, device)
    rows: list[dict] = []
    for batch in o.batches:
        floor = run_static(model, batch, FLOOR_CONTEXT, o)
        rows.append({**floor, "over_floor": 1.0})
        for context in o.contexts:
            group = [run_method(model, "full", o, batch, context, skip_layers=0)]
            if o.hf_static and context <= HF_STATIC_LIMIT:
                group.append(run_static(model, batch, context, o))
            for name in o.methods:
                group.append(run_method(model, name, o, batch, context, skip_layers=o.skip_layers))
            for r in group:
                r |= {"over_floor": r["tpot_ms"] / floor["tpot_ms"], "speedup": group[0]["tpot_ms"] / r["tpot_ms"]}
                print(r, flush=True)
            rows += group
    return _common.finish("decode", rows, dataclasses.asdict(o), out)
